"""The built-in plugin: kvbench's own quantizers, tasks and report sections, registered through the public hooks."""

from typing import TYPE_CHECKING

from kvbench.hookspecs import hookimpl

if TYPE_CHECKING:
    from kvbench.quantizer import Quantizer
    from kvbench.reports.section import ReportSection
    from kvbench.task import Task


@hookimpl
def kvbench_quantizers() -> "list[type[Quantizer]]":
    from kvbench.peers import HQQ, Quanto
    from kvbench.quantizers.blockgtq import BlockGTQ
    from kvbench.quantizers.cblockgtq import CenteredBlockGTQ
    from kvbench.quantizers.fp4 import MXFP4, NVFP4
    from kvbench.quantizers.fp8 import Fp8
    from kvbench.quantizers.fp16 import Fp16
    from kvbench.quantizers.integer import Integer
    from kvbench.quantizers.kivi import Kivi
    from kvbench.quantizers.kvquant import KVQuant
    from kvbench.quantizers.quarot import QuaRot
    from kvbench.quantizers.tqmse import TQMSE
    from kvbench.quantizers.turboquant_prod import TurboQuantInnerProduct

    return [
        Fp16,
        TQMSE,
        BlockGTQ,
        CenteredBlockGTQ,
        TurboQuantInnerProduct,
        Integer,
        Fp8,
        MXFP4,
        NVFP4,
        QuaRot,
        Kivi,
        KVQuant,
        HQQ,
        Quanto,
    ]


@hookimpl
def kvbench_tasks() -> "list[type[Task]]":
    from kvbench.tasks.agreement import Agreement
    from kvbench.tasks.fidelity import Fidelity
    from kvbench.tasks.latency import Latency
    from kvbench.tasks.lm_eval import LmEval
    from kvbench.tasks.logit_error import LogitError
    from kvbench.tasks.longbench import LongBench
    from kvbench.tasks.niah import Niah
    from kvbench.tasks.perplexity import Perplexity

    return [LogitError, Perplexity, Fidelity, Agreement, Niah, LongBench, Latency, LmEval]


@hookimpl
def kvbench_report_sections() -> "list[type[ReportSection]]":
    from kvbench.reports.sections import SECTIONS

    return list(SECTIONS)
