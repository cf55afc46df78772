"""``kvbench report``: its formats, its exit codes, and the numbers in its files."""

import csv
import io
import sys
from pathlib import Path
from typing import Any

import pytest

from kvbench.cli import main
from kvbench.results import Result, write_result

from .example_runs import run, write_sweep, write_sweep_of

SIZE_LIMIT = 20 * 1024 * 1024  # bytes, for 500 runs


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sweep(tmp_path_factory.mktemp("sweep"))


def report(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    code = main(["report", *map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_without_out_it_prints_one_row_a_quantizer(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = report(capsys, sweep)
    assert code == 0
    assert [line.split("  ")[0] for line in out.splitlines()[1:4]] == ["fp16", "blockgtq K2 V2", "cblockgtq K2 V2"]
    assert "-45.0%" in out


def test_the_ending_of_out_tells_the_format(sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(capsys, sweep, "--out", tmp_path / "c.html")[0] == 0
    assert (tmp_path / "c.html").read_text().startswith("<!doctype html>")


def test_several_formats_make_several_files(sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(capsys, sweep, "--out", tmp_path / "c", "--format", "html,md,csv")[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.csv", "c.html", "c.md"]


def test_every_figure_becomes_a_file_of_each_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_result(run("blockgtq", 3), tmp_path / "run")
    code, _, err = report(capsys, tmp_path / "run", "--out", tmp_path / "fig", "--format", "svg,png,pdf")
    assert code == 0
    assert f"wrote {tmp_path / 'fig'}-*.png" in err
    starts = {"svg": b"<?xml", "png": b"\x89PNG", "pdf": b"%PDF"}
    for form, start in starts.items():
        files = {path.name.removesuffix(f".{form}"): path.read_bytes() for path in tmp_path.glob(f"fig-*.{form}")}
        assert {
            "fig-pareto-1",
            "fig-compression-1",
            "fig-layers-1",
            "fig-allocation-1",
            "fig-energy-1",
            "fig-needles-1",
            "fig-latency-1",
        } <= files.keys()
        assert all(content.startswith(start) for content in files.values())


def test_long_reports_show_progress_on_a_terminal(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    _, out, err = report(capsys, sweep, "--out", tmp_path / "c.md")
    assert out == ""
    assert "reading runs" in err
    assert "rendering sections" in err


def test_csv_holds_every_row_with_numbers_a_notebook_reads(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = report(capsys, sweep, "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 0
    row = next(row for row in rows if row["label"] == "cblockgtq K2 V2")
    assert len(rows) == 10
    assert float(row["logit_error.mean"]) == pytest.approx(1.2)
    assert float(row["compression.effective_bits"]) == pytest.approx(2.625, abs=1e-4)
    assert float(row["perplexity.nll - fp16.low"]) == pytest.approx(0.05)
    assert row["command"] == "kvbench quantizer=cblockgtq quantizer.k_bits=2 quantizer.v_bits=2"


def test_parquet_holds_what_csv_holds(sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    assert report(capsys, sweep, "--out", tmp_path / "c", "--format", "csv,parquet")[0] == 0
    table = parquet.read_table(tmp_path / "c.parquet").to_pylist()
    rows = list(csv.DictReader((tmp_path / "c.csv").open(newline="")))
    assert [row["label"] for row in table] == [row["label"] for row in rows]
    assert [row["perplexity.perplexity"] for row in table] == [float(row["perplexity.perplexity"]) for row in rows]


def test_parquet_without_pyarrow_says_what_to_install(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    code, _, err = report(capsys, sweep, "--out", tmp_path / "c.parquet")
    assert code == 2
    assert "pip install 'kvbench[report]'" in err


def test_a_text_that_a_spreadsheet_would_run_is_made_inert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made: Result = run("tqmse", 3)
    formula = '=HYPERLINK("http://evil.example")'
    write_result(made.model_copy(update={"model": made.model.model_copy(update={"name": formula})}), tmp_path)
    row = next(csv.DictReader(io.StringIO(report(capsys, tmp_path, "--format", "csv")[1])))
    assert row["model"] == "'" + formula


def test_markdown_gives_the_command_of_every_run(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = report(capsys, sweep, "--format", "md")[1]
    assert out.count("```sh") == 9
    assert "| blockgtq K4 V4 |" in out


def test_what_is_left_out_is_said_and_stops_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_result(run("tqmse", 3), tmp_path / "sound")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "result.json").write_text("{")
    code, _, err = report(capsys, tmp_path, "--out", tmp_path / "c.html")
    assert code == 0
    assert f"left out {tmp_path / 'damaged' / 'result.json'}: damaged" in err
    assert "damaged: not JSON" in (tmp_path / "c.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "the following arguments are required: DIR"),
        (["absent"], "absent does not exist"),
        ([".", "--out", "c.docx"], "--out c.docx does not tell the format"),
        ([".", "--format", "htm"], "Did you mean 'html'?"),
        ([".", "--format", "html"], "--format html needs --out FILE"),
        ([".", "--wide"], "unrecognized arguments: --wide"),
    ],
)
def test_bad_input_ends_with_code_2_and_two_lines_at_most(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = report(capsys, *arguments)
    assert code == 2
    assert said in err
    assert len(err.strip().splitlines()) <= 2


def test_five_hundred_runs_stay_under_twenty_megabytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_sweep_of(500, tmp_path / "runs")
    assert report(capsys, tmp_path / "runs", "--out", tmp_path / "c.html")[0] == 0
    assert (tmp_path / "c.html").stat().st_size < SIZE_LIMIT
