"""A report section: where the bits of a run of ``hadamard`` went."""

from html import escape
from typing import TYPE_CHECKING, ClassVar

from kvbench.api import ReportSection

if TYPE_CHECKING:
    from kvbench.api import Result


class WhereBitsWent(ReportSection):
    """Code bits and all other bits of keys and values, where the run's quantizer is ``hadamard``."""

    name: ClassVar[str] = "hadamard-bits"
    title: ClassVar[str] = "Where hadamard's bits went"

    def html(self, result: "Result") -> str:
        return "".join(f"<p>{escape(line)}</p>" for line in self._lines(result))

    def markdown(self, result: "Result") -> str:
        return "\n".join(f"- {line}" for line in self._lines(result))

    def _lines(self, result: "Result") -> list[str]:
        size = result.compression
        if result.quantizer.name != "hadamard" or size is None:
            return []
        parts = (
            ("Keys", size.code_bits_k, size.effective_bits_k),
            ("Values", size.code_bits_v, size.effective_bits_v),
        )
        return [
            f"{what}: {codes:.2f} bits of codes and {effective - codes:.2f} bits of scales and spare room an element."
            for what, codes, effective in parts
        ]
