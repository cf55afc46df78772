"""The README's numbers are those of the gallery, which is made by a command."""

from pathlib import Path

ROOT = Path(__file__).parents[1]


def tables(path: Path, first_column: str) -> list[list[str]]:
    """The cells of a Markdown file's first table whose first column has that name, heading first."""
    rows: list[list[str]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if rows and not cells:
            break
        if cells and (rows or cells[0] == first_column):
            rows.append(cells)
    return [row for row in rows if not set("".join(row)) <= set(":- ")]


def test_the_readme_quotes_the_gallery() -> None:
    quoted, gallery = (tables(ROOT / name, "quantizer") for name in ("README.md", "docs/gallery/smollm2.md"))
    measured = {row[0]: dict(zip(gallery[0], row, strict=True)) for row in gallery[1:]}
    assert len(quoted) == 11
    for row in quoted[1:]:
        for column, value in zip(quoted[0], row, strict=True):
            assert measured[row[0]][column] == value, f"{row[0]}: {column}"
