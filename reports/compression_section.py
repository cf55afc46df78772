"""Bytes that exist: what of a cache are codes, norms and padding, for a run and for a comparison."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from kvbench.reports import charts
from kvbench.reports.scores import Contender, bits_by_use, code_bits, contenders, number
from kvbench.reports.section import ReportSection
from kvbench.reports.table import Cell, Column, Table

if TYPE_CHECKING:
    from kvbench.results import Compression, Result

TITLES = (
    "tokens",
    "code bits",
    "norms",
    "padding",
    "effective bits",
    "bytes allocated",
    "bytes analytical",
    "bytes fp16",
    "ratio",
)


def compression_table(rows: Iterable[tuple[Contender, str, Cell | None]]) -> Table:
    """A line for each contender with its row's key ("" for none) and, in a comparison, the link to its run."""
    rows = list(rows)
    linked = any(link is not None for _, _, link in rows)
    lines: list[list[Cell | str]] = []
    for row, _, link in rows:
        size = row.measurement.compression
        told = [Cell("not measured", bad=True), *["–"] * (len(TITLES) - 1)] if size is None else _sizes(row, size)
        lines.append([row.label, *told, *([link] if link is not None else [])])
    columns = (Column("quantizer", numeric=False), *map(Column, TITLES))
    return Table(
        "Bits per element, and bytes of a cache of so many tokens, all layers.",
        (*columns, *([Column("run", numeric=False)] if linked else [])),
        lines,
        [{"row": key} if key else {} for _, key, _ in rows],
    )


def _sizes(row: Contender, size: "Compression") -> list[Cell | str]:
    use = bits_by_use(size)
    return [
        f"{size.tokens:,}",
        code_bits(row.measurement) or "–",
        number(use.norms),
        number(use.padding),
        number(use.total),
        f"{size.bytes_allocated:,}",
        f"{size.bytes_analytical:,.0f}",
        f"{size.bytes_fp16:,}",
        f"{size.ratio:.2f}×",
    ]


class CompressionSection(ReportSection):
    """Bytes that exist: codes, norms, padding."""

    name: ClassVar[str] = "compression"
    title: ClassVar[str] = "Compression"

    def html(self, result: "Result") -> str:
        uses = {
            row.label: bits_by_use(row.measurement.compression)
            for row in contenders(result)
            if row.measurement.compression
        }
        return charts.bits_by_quantizer(uses).html() + self._table(result).html() if uses else ""

    def markdown(self, result: "Result") -> str:
        return self._table(result).markdown() if any(row.measurement.compression for row in contenders(result)) else ""

    def _table(self, result: "Result") -> Table:
        return compression_table((row, "", None) for row in contenders(result))
