"""A report's HTML as a reader's tools see it: elements in order, tables as rows of text."""

from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "br", "img", "link", "input", "hr"}


@dataclass
class ParsedPage(HTMLParser):
    """Parses ``source``; ``unbalanced`` lists end tags that closed nothing or the wrong element."""

    source: str
    elements: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    tables: dict[str, list[list[str]]] = field(default_factory=dict)
    unbalanced: list[str] = field(default_factory=list)
    text: str = ""

    def __post_init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.caption = ""
        self.feed(self.source)
        self.close()
        self.unbalanced += self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "caption":
            self.caption = ""
        if tag == "tr":
            self.tables.setdefault(self.caption, []).append([])
        if tag in ("td", "th"):
            self.tables[self.caption][-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.unbalanced.append(tag)

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            return
        self.text += data
        if "caption" in self.open:
            self.caption += data
        elif "td" in self.open or "th" in self.open:
            self.tables[self.caption][-1][-1] += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)

    def attributes(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def row(self, caption_start: str, heading: str) -> dict[str, str]:
        """The row headed ``heading`` of the table whose caption begins so, by column title."""
        columns, *rows = next(rows for caption, rows in self.tables.items() if caption.startswith(caption_start))
        return dict(zip(columns, next(row for row in rows if row[0] == heading), strict=True))
