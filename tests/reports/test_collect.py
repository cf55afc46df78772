"""Which runs a comparison takes, and what it says of everything that it leaves out."""

import json
import shutil
from pathlib import Path

import pytest

from kvbench.errors import ResultError
from kvbench.reports.collect import collect
from kvbench.results import write_result

from .example_runs import run, write_sweep


def reasons(folder: Path) -> dict[str, str]:
    return {str(each.path.relative_to(folder)): each.reason for each in collect([folder]).left_out}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one sound run."""
    write_result(run("tqmse", 3), tmp_path / "sound")
    return tmp_path


def spoilt(folder: Path, **changes: object) -> None:
    data = json.loads((folder / "sound" / "result.json").read_text()) | changes
    (folder / "spoilt").mkdir()
    (folder / "spoilt" / "result.json").write_text(json.dumps(data))


def test_every_cell_of_a_multirun_tree_is_found(tmp_path: Path) -> None:
    found = collect([write_sweep(tmp_path)])
    assert len(found.runs) == 9
    assert not found.left_out


def test_a_result_file_may_be_named_itself(folder: Path) -> None:
    assert len(collect([folder / "sound" / "result.json"]).runs) == 1


def test_overlapping_places_count_once(folder: Path) -> None:
    found = collect([folder, folder / "sound", folder / "sound" / "result.json"])
    assert len(found.runs) == 1
    assert not found.left_out


def test_a_file_cut_off_in_the_middle_is_left_out_as_damaged(folder: Path) -> None:
    text = (folder / "sound" / "result.json").read_bytes()
    (folder / "cut").mkdir()
    (folder / "cut" / "result.json").write_bytes(text[: len(text) // 2])
    assert reasons(folder)["cut/result.json"].startswith("damaged: not JSON")


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"[" * 100_000, b'{"a": NaN'])
def test_bytes_that_are_no_text_are_left_out(folder: Path, content: bytes) -> None:
    (folder / "noise").mkdir()
    (folder / "noise" / "result.json").write_bytes(content)
    assert reasons(folder)["noise/result.json"].startswith("damaged")


def test_an_empty_file_is_left_out_as_empty(folder: Path) -> None:
    (folder / "empty").mkdir()
    (folder / "empty" / "result.json").touch()
    assert reasons(folder) == {"empty/result.json": "empty"}


def test_another_schema_is_left_out_with_both_versions(folder: Path) -> None:
    spoilt(folder, schema_version=0)
    assert reasons(folder)["spoilt/result.json"] == "schema version 0; this kvbench reads 1: repeat the run"


def test_a_field_of_the_wrong_type_is_named(folder: Path) -> None:
    spoilt(folder, duration_s="long")
    assert reasons(folder)["spoilt/result.json"].startswith("does not satisfy the schema: duration_s: ")


@pytest.mark.parametrize("content", ['{"accuracy": 1}', "[]", "3"])
def test_a_result_of_something_else_is_left_out_as_foreign(folder: Path, content: str) -> None:
    (folder / "other").mkdir()
    (folder / "other" / "result.json").write_text(content)
    assert reasons(folder) == {"other/result.json": "not a result of kvbench"}


def test_a_job_that_left_no_result_is_listed(folder: Path) -> None:
    (folder / "dead" / ".hydra").mkdir(parents=True)
    assert "left no result.json" in reasons(folder)["dead"]


def test_of_a_run_found_twice_the_finished_record_counts(folder: Path) -> None:
    partial = run("tqmse", 3, run_id="same", status="partial")
    finished = run("tqmse", 3, run_id="same")
    write_result(partial, folder / "a")
    write_result(finished, folder / "b")
    found = collect([folder])
    assert [each.result.status for each in found.runs if each.result.run_id == "same"] == ["ok"]
    assert [each.path.parent.name for each in found.left_out] == ["a"]
    assert found.left_out[0].reason.startswith("the same run as")


def test_a_loop_of_links_ends(folder: Path) -> None:
    (folder / "sound" / "loop").symlink_to(folder)
    assert len(collect([folder]).runs) == 1


def test_nothing_to_compare_is_an_error_that_says_why(folder: Path) -> None:
    (folder / "sound" / "result.json").write_text("")
    with pytest.raises(ResultError, match=r"no result to compare in .*: empty"):
        collect([folder])
    shutil.rmtree(folder / "sound")
    with pytest.raises(ResultError, match="no result to compare"):
        collect([folder])


def test_a_place_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match="does not exist"):
        collect([tmp_path / "absent"])
