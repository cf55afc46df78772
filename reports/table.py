"""One table, written as HTML and as Markdown, so that the two reports cannot disagree."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvbench.reports.escaping import NAME_LIMIT, html_name, html_text, markdown_text, shorten

LONGEST_WORD = 24

MARKDOWN_CELL = 80
"""Characters of a cell's text in Markdown, where a column cannot wrap; HTML shows the whole."""


@dataclass(frozen=True)
class Cell:
    """One cell: its text, and words that qualify it, such as ``("simulated",)``.

    ``value`` is what a numeric column is sorted by; ``link`` is the anchor in the page that the text leads to.
    """

    text: str
    marks: tuple[str, ...] = ()
    bad: bool = False
    strong: bool = False
    value: float | None = None
    link: str | None = None

    def plain(self) -> str:
        """The cell in one line of text, marks in brackets."""
        return f"{self.text} ({', '.join(self.marks)})" if self.marks else self.text


@dataclass(frozen=True)
class Column:
    """A heading; ``numeric`` columns are aligned right."""

    title: str
    numeric: bool = True


@dataclass(frozen=True)
class Table:
    """Columns and rows of equal length; the first cell of a row is its heading.

    ``row_data`` become ``data-*`` attributes of the rows. The headings of a ``sortable`` table are buttons, for which
    the page needs the script of a comparison.
    """

    caption: str
    columns: tuple[Column, ...]
    rows: Sequence[Sequence[Cell | str]]
    row_data: Sequence[Mapping[str, str]] = ()
    sortable: bool = False

    def html(self) -> str:
        """The table in a container that scrolls sideways where the page is too narrow for it."""
        head = "".join(self._heading(column) for column in self.columns)
        body = "".join(
            self._row_start(number)
            + "".join(_html_cell(cell, column, i == 0) for i, (cell, column) in self._cells(row))
            + "</tr>\n"
            for number, row in enumerate(self.rows)
        )
        label = html_text(self.caption)
        opening = "<table data-sortable>" if self.sortable else "<table>"
        return (
            f'<div class="scroll" role="group" tabindex="0" aria-label="{label}">'
            f"{opening}<caption>{label}</caption>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>"
        )

    def markdown(self) -> str:
        """A GitHub-flavoured table under its caption."""
        rule = "|".join(" ---: " if column.numeric else " :--- " for column in self.columns)
        lines = [f"*{markdown_text(self.caption)}*", ""]
        lines += [_markdown_row([column.title for column in self.columns]), f"|{rule}|"]
        lines += [_markdown_row([_as_cell(cell).plain() for cell in row]) for row in self.rows]
        return "\n".join(lines)

    def _heading(self, column: Column) -> str:
        title = html_name(column.title, NAME_LIMIT)
        if self.sortable:
            title = f'<button type="button">{title}</button>'
        return f'<th scope="col"{_align(column)}>{title}</th>'

    def _row_start(self, number: int) -> str:
        data = self.row_data[number] if self.row_data else {}
        return "<tr" + "".join(f' data-{name}="{html_text(value)}"' for name, value in data.items()) + ">"

    def _cells(self, row: Sequence[Cell | str]) -> "enumerate[tuple[Cell, Column]]":
        return enumerate(zip(map(_as_cell, row), self.columns, strict=True))


def _as_cell(cell: Cell | str) -> Cell:
    return Cell(cell) if isinstance(cell, str) else cell


def _align(column: Column) -> str:
    return ' class="number"' if column.numeric else ""


def _html_cell(cell: Cell, column: Column, heading: bool) -> str:
    text = html_text(cell.text) if column.numeric else html_name(cell.text, NAME_LIMIT if heading else None)
    styles = (("bad", cell.bad), ("strong", cell.strong), ("long", _has_long_word(cell.text)))
    style = " ".join(name for name, holds in styles if holds)
    if style:
        text = f'<span class="{style}">{text}</span>'
    if cell.link is not None:
        text = f'<a href="#{html_text(cell.link)}">{text}</a>'
    marks = "".join(f' <span class="mark">{html_text(mark)}</span>' for mark in cell.marks)
    tag, scope = ("th", ' scope="row"') if heading else ("td", "")
    value = f' data-value="{cell.value!r}"' if cell.value is not None else ""
    return f"<{tag}{scope}{_align(column)}{value}>{text}{marks}</{tag}>"


def _has_long_word(text: str) -> bool:
    """Whether the browser must be allowed to break inside a word, a digest for instance."""
    return any(len(word) > LONGEST_WORD for word in text.split())


def _markdown_row(texts: Sequence[str]) -> str:
    return "| " + " | ".join(markdown_text(shorten(text, MARKDOWN_CELL)) for text in texts) + " |"
