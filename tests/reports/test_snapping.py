"""What the page on kernels says of snapped widths is what the committed measurements say."""

from pathlib import Path

import pytest

from kvbench.errors import ResultError
from kvbench.reports.centered_page import ERROR, WIKITEXT, of_texts
from kvbench.reports.evidence import find, read_evidence
from kvbench.reports.snapping import DATA, PAGE, filled, snapping_table

ROOT = Path(__file__).parents[2]


def test_the_page_says_what_the_data_say() -> None:
    text = (ROOT / "docs" / PAGE).read_text(encoding="utf-8")
    assert filled(text, read_evidence(ROOT / DATA)) == text


def test_the_centre_makes_up_for_snapping() -> None:
    rows = of_texts(read_evidence(ROOT / DATA), WIKITEXT)
    snapped, exact = (find(rows, name, k_bits=3, align=a) for name, a in (("cblockgtq", 16), ("blockgtq", 1)))
    assert snapped.metrics[ERROR] < exact.metrics[ERROR]
    assert snapped.bits_k < exact.bits_k


def test_a_missing_alignment_is_named() -> None:
    data = read_evidence(ROOT / DATA)
    rest = [row for row in data.rows if (row.quantizer, row.parameters["align"]) != ("blockgtq", 8)]
    with pytest.raises(ResultError, match=r"blockgtq with k_bits=3, align=8"):
        snapping_table(data.model_copy(update={"rows": rest}))
