"""The hooks a kvbench plugin may implement. A plugin is any object registered under the entry-point group ``kvbench``.

    [project.entry-points.kvbench]
    myquant = "kvbench_myquant"

    # kvbench_myquant/__init__.py
    from kvbench.api import hookimpl

    @hookimpl
    def kvbench_quantizers():
        return [MyQuant]

Hooks run at start-up, before ``--help`` is answered: import torch and other heavy packages inside methods.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from kvbench.configuration import ModelConfig
    from kvbench.quantizer import Quantizer
    from kvbench.reports.section import ReportSection
    from kvbench.task import Task

PROJECT = "kvbench"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def kvbench_quantizers() -> "Sequence[type[Quantizer]]":  # type: ignore[empty-body]
    """Quantizer classes; each becomes ``quantizer=<name>``."""


@hookspec
def kvbench_tasks() -> "Sequence[type[Task]]":  # type: ignore[empty-body]
    """Task classes; each becomes a choice of ``task=[...]`` with options ``task.<name>.*``."""


@hookspec
def kvbench_models() -> "Sequence[ModelConfig]":  # type: ignore[empty-body]
    """Model configurations; each becomes ``model=<name>``."""


@hookspec
def kvbench_report_sections() -> "Sequence[type[ReportSection]]":  # type: ignore[empty-body]
    """Report sections, rendered in every HTML and Markdown report they apply to."""
