"""The table after a run, on a terminal and in a pipe."""

import io
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from kvbench.reports.terminal import print_summary
from kvbench.results import Result, TaskRecord

from .example_results import HOSTILE_NAMES, measurement, renamed, result


def piped(run: Result, directory: Path | None = None, encoding: str = "utf-8") -> str:
    buffer = io.BytesIO()
    file = io.TextIOWrapper(buffer, encoding=encoding, newline="\n")
    print_summary(run, Console(file=file), directory)
    file.flush()
    return buffer.getvalue().decode(encoding)


def on_terminal(run: Result, width: int) -> str:
    file = io.StringIO()
    print_summary(
        run, Console(file=file, force_terminal=True, color_system="standard", width=width, legacy_windows=False)
    )
    return file.getvalue()


def test_a_row_has_size_quality_and_what_it_is_compared_with() -> None:
    header, asked, fp16, tqmse = piped(result()).splitlines()[:4]
    assert header.split("  ")[0] == "quantizer"
    assert asked.split() == [
        "blockgtq",
        "4.41x",
        "3.62/3.62",
        "2.406",
        "simulated",
        "-43.6%",
        "27.43",
        "simulated",
        "+10.0%",
    ]
    assert fp16.split()[:3] == ["fp16", "1.00x", "16.0/16.0"]
    assert tqmse.split()[-3:] == ["32.58", "simulated", "+30.6%"]


def test_model_corpus_and_report_are_named_below(tmp_path: Path) -> None:
    text = piped(result(), tmp_path)
    assert "model smollm2-135m, corpus pydoc" in text
    assert f"report {tmp_path / 'report.html'}\n" in text


def test_a_pipe_gets_no_colour_codes_and_no_wrapped_rows() -> None:
    deep = Path("/" + "deep/" * 300)
    text = piped(result(), deep)
    assert "\x1b" not in text
    assert str(deep / "report.html") in text
    assert len(text.splitlines()) == 4 + 3


def test_a_terminal_of_80_columns_shows_every_number_whole() -> None:
    text = on_terminal(result(), 80)
    assert "\x1b[" in text
    assert "…" not in text
    for number in ("4.41x", "3.62/3.62", "2.406", "-43.6%", "27.43", "+10.0%", "16.0/16.0", "32.58"):
        assert number in text


def test_fidelity_has_columns_where_it_was_measured() -> None:
    fidelity = TaskRecord(status="ok", path="packed", metrics={"kl": 0.0412, "top1_agreement": 0.913}, n=100)
    text = piped(result(tasks={"fidelity": fidelity}))
    assert text.splitlines()[1].split()[-2:] == ["0.04120", "0.9130"]
    assert "top-1" in text.splitlines()[0]


@pytest.mark.parametrize("status", ["failed", "oom"])
def test_a_task_that_did_not_end_well_is_a_word_and_a_reason(status: str) -> None:
    record = TaskRecord(status=status, error="out of reach")  # type: ignore[arg-type]
    text = piped(result(tasks={"perplexity": record}))
    assert status in text.splitlines()[1]
    assert "27.43" not in text
    assert f"blockgtq, task perplexity: {status}. out of reach" in text


def test_a_baseline_that_failed_is_a_row() -> None:
    lost = measurement("tqmse", 3, 0, 0, status="failed", error="boom", compression=None, cache=None, tasks={})
    text = piped(result(baselines={"tqmse": lost}))
    assert text.splitlines()[2].split() == ["tqmse", "-", "-", "failed", "-", "failed", "-"]
    assert "tqmse: failed. boom" in text


@pytest.mark.parametrize("name", HOSTILE_NAMES.values(), ids=HOSTILE_NAMES)
def test_a_hostile_name_neither_drives_the_terminal_nor_breaks_the_columns(name: str) -> None:
    text = piped(renamed(name))
    assert "\x1b" not in text
    assert "\x07" not in text
    table = text.splitlines()[:5]
    assert len({cell_len(line[: line.index("4.41x")]) for line in table if "4.41x" in line}) == 1
    assert table[1].split()[-1] == "+10.0%"
    assert max(map(cell_len, table)) < 140


def test_an_ascii_pipe_gets_names_in_escapes() -> None:
    assert "\\U0001f680" in piped(renamed(HOSTILE_NAMES["emoji"]), encoding="ascii")
