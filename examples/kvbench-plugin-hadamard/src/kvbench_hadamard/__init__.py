"""Random Hadamard rotation and integers per token, as a kvbench plugin."""

from kvbench.api import hookimpl

kvbench_api_version = "1"


@hookimpl
def kvbench_quantizers():
    from kvbench_hadamard.quantizer import Hadamard

    return [Hadamard]


@hookimpl
def kvbench_report_sections():
    from kvbench_hadamard.section import WhereBitsWent

    return [WhereBitsWent]
