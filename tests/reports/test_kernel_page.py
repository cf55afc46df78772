"""The page of kernel measurements, made from the results that are in the repository."""

import json
from pathlib import Path

import pytest

from kvbench.reports.kernel_page import kernel_curves, kernel_page, main, read_kernels

from .parsed_page import ParsedPage

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200-2026-11-30.json"


@pytest.fixture(scope="module")
def page() -> ParsedPage:
    return ParsedPage(kernel_page(read_kernels(RESULTS), RESULTS.name))


def test_every_time_of_the_file_is_on_the_page(page: ParsedPage) -> None:
    data = read_kernels(RESULTS)
    for geometry in ("qwen2.5-3b", "llama3.1-8b"):
        rows = page.tables[f"All that was timed of {geometry}."][1:]
        shapes = [row for row in data["decode"] if row["geometry"] == geometry]
        assert len(rows) == sum(len(shape["fp16"]["times"]) + len(shape["packed"]) for shape in shapes)
        assert sum("(fastest)" in row[1] for row in rows) == len(shapes)


def test_the_speed_up_in_the_picture_is_the_files_own(page: ParsedPage) -> None:
    cell = next(row for row in read_kernels(RESULTS)["decode"] if (row["batch"], row["context"]) == (8, 524288))
    packed = next(each for each in cell["packed"] if each["allocation"] == "tqmse-k3v3")
    told = f"tqmse-k3v3, batch 8, 524,288 tokens: {packed['speedup_best_fp16']:.2f}× as fast as fp16"
    assert told in page.text


def test_the_floor_is_the_bytes_at_the_measured_bandwidth() -> None:
    data = read_kernels(RESULTS)
    points = [point for curve in kernel_curves(data, "llama3.1-8b") for point in curve.points]
    for point in points:
        assert point["floor_ms"] == pytest.approx(point["cache_bytes"] / (data["ceilings"]["read_gb_s"] * 1e9) * 1e3)
    largest = max(points, key=lambda point: point["cache_bytes"])
    assert largest["decode_ms_median"] > 0.97 * largest["floor_ms"]


def test_the_page_is_whole(page: ParsedPage) -> None:
    assert page.unbalanced == []
    assert "could not be rendered" not in page.text
    assert page.count("figure") == page.count("figcaption") == 2 * 2 * 3  # geometries, batches, kinds
    assert page.count("script") == 0


def test_a_file_of_something_else_ends_with_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"schema_version": 99, "decode": [1]}))
    assert main([str(other), "--out", str(tmp_path / "page.html")]) == 2
    assert "holds no kernel results of schema 1" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()
