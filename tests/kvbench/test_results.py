"""result.json: checked against the schema both ways, and whole or absent whatever happens while it is written."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvbench.errors import ResultError
from kvbench.results import Result, read_result, write_result, write_text_atomically

from ..reports.example_results import result

# What the children below do first: a whole result is there, and a larger one is to replace it.
BEFORE = """
import os, resource, signal, sys
from pathlib import Path
from kvbench.results import read_result, write_result
folder = Path(sys.argv[1])
result = read_result(folder / "result.json")
result.command = "second" + 100_000 * "."
"""


def child(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BEFORE + program, str(folder)], capture_output=True, text=True, check=False
    )


def test_result_comes_back_as_it_was_written(tmp_path: Path) -> None:
    written = result()
    assert read_result(write_result(written, tmp_path)) == written


def test_file_is_indented_json_of_this_schema(tmp_path: Path) -> None:
    text = write_result(result(), tmp_path).read_text()
    assert json.loads(text)["schema_version"] == 1
    assert text.count("\n") > 50


@pytest.mark.parametrize(
    "change",
    [
        {"surprise": 1},
        {"schema_version": 2},
        {"status": "fine"},
        {"run_id": None},
        {"tasks": {"perplexity": {"status": "ok", "score": 1.0}}},
        {"compression": {"ratio": 4.0}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_file_that_does_not_satisfy_the_schema_is_refused_by_name(tmp_path: Path, change: dict[str, Any]) -> None:
    path = write_result(result(), tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ResultError, match=r"result\.json is not a kvbench result of schema 1") as refusal:
        read_result(path)
    assert next(iter(change)) in str(refusal.value)
    assert len(str(refusal.value).splitlines()) <= 2


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff\xfe"])
def test_file_that_is_no_result_at_all_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ResultError, match="is not a kvbench result"):
        read_result(path)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match=r"cannot read .*absent\.json: No such file"):
        read_result(tmp_path / "absent.json")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), [1.0, float("nan")]], ids=str)
def test_metric_that_is_not_finite_is_refused_not_written_as_null(tmp_path: Path, bad: Any) -> None:
    broken = result()
    broken.tasks["perplexity"].metrics["perplexity"] = bad
    with pytest.raises(ResultError, match="does not satisfy the schema"):
        write_result(broken, tmp_path)
    assert not list(tmp_path.iterdir())


def test_metric_that_is_no_json_data_is_refused(tmp_path: Path) -> None:
    broken = result()
    broken.tasks["perplexity"].metrics["perplexity"] = object()
    with pytest.raises(ResultError, match="does not satisfy the schema"):
        write_result(broken, tmp_path)


@pytest.mark.parametrize("step", ["fsync", "chmod", "replace"])
def test_kill_while_writing_leaves_the_earlier_result_whole(tmp_path: Path, step: str) -> None:
    before = result()
    write_result(before, tmp_path)
    program = f"os.{step} = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)\nwrite_result(result, folder)"
    assert child(program, tmp_path).returncode == -signal.SIGKILL
    assert read_result(tmp_path / "result.json") == before


def test_kill_at_any_moment_leaves_a_whole_result(tmp_path: Path) -> None:
    write_result(result(), tmp_path)
    program = "while True:\n    write_result(result, folder)\n    print('written', flush=True)\n"
    with subprocess.Popen(
        [sys.executable, "-c", BEFORE + program, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        for _ in range(10):
            assert writer.stdout.readline() == "written\n"
        writer.kill()
    assert read_result(tmp_path / "result.json").command.startswith("second")


def test_full_disk_leaves_the_earlier_result_and_nothing_else(tmp_path: Path) -> None:
    before = result()
    write_result(before, tmp_path)
    program = """
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
from kvbench.errors import ResultError
try:
    write_result(result, folder)
except ResultError as error:
    print(error)
"""
    assert child(program, tmp_path).stdout.startswith(f"cannot write {tmp_path / 'result.json'}: File too large.")
    assert read_result(tmp_path / "result.json") == before
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultError, match=r"cannot write .*file/results/result\.json.*hydra\.run\.dir"):
        write_result(result(), tmp_path / "file" / "results")


def test_folder_in_the_files_place_is_not_harmed(tmp_path: Path) -> None:
    (tmp_path / "result.json" / "kept").mkdir(parents=True)
    with pytest.raises(ResultError, match="cannot write"):
        write_result(result(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_text_is_readable_by_others(tmp_path: Path) -> None:
    write_text_atomically(tmp_path / "new" / "report.md", "text")
    assert (tmp_path / "new" / "report.md").stat().st_mode & 0o777 == 0o644


def test_measurements_list_the_quantizer_before_its_baselines() -> None:
    example: Result = result()
    assert list(example.measurements()) == [example.quantizer.name, *example.baselines]


def test_a_baseline_of_the_same_name_does_not_hide_the_run_itself() -> None:
    example: Result = result()
    name = example.quantizer.name
    example.baselines[name] = example.baselines["tqmse"]
    measured = example.measurements()
    assert measured[name] is example
    assert measured[f"{name} (baseline)"] is example.baselines["tqmse"]
