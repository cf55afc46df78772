"""Kept measurements: given back marked as reused, or not at all."""

import json
from pathlib import Path

import pytest

from kvbench.measurement_store import StoredTask, recall, remember
from kvbench.results import LayerEngagement, TaskRecord

KEY = "ab" + 62 * "0"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path))
    return tmp_path / "measurements" / "ab"


def stored() -> StoredTask:
    task = TaskRecord(status="ok", path="packed", metrics={"mean": 0.1 + 0.2, "per_layer": [1.5]}, n=3, unit="tokens")
    layer = LayerEngagement(layer=0, key_format="dense", value_format="dense", packed_tokens_read=7, backend="torch")
    return StoredTask(task=task, engagement=[layer], compression=None)


def test_measurement_comes_back_exactly_and_marked_as_reused() -> None:
    remember(KEY, stored())
    found = recall(KEY)
    assert found is not None
    assert found.task.reused
    assert found.task.model_copy(update={"reused": False}) == stored().task
    assert found.engagement == stored().engagement


def test_other_keys_have_nothing() -> None:
    remember(KEY, stored())
    assert recall("ab" + 62 * "1") is None


@pytest.mark.parametrize("text", ["", "{", "null", '{"task": {"status": "ok"}}', "\xff"])
def test_damaged_record_is_ignored_and_replaced(folder: Path, text: str) -> None:
    remember(KEY, stored())
    (folder / f"{KEY}.json").write_text(text, encoding="latin-1")
    assert recall(KEY) is None
    remember(KEY, stored())
    assert recall(KEY) is not None


def test_record_cut_short_is_ignored(folder: Path) -> None:
    remember(KEY, stored())
    path = folder / f"{KEY}.json"
    path.write_text(path.read_text()[:-20])
    assert recall(KEY) is None


def test_record_with_unknown_keys_is_ignored(folder: Path) -> None:
    remember(KEY, stored())
    path = folder / f"{KEY}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "newer": 1}))
    assert recall(KEY) is None


def test_cache_folder_that_cannot_be_written_only_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "file"))
    remember(KEY, stored())
    assert "the measurement is not kept" in caplog.text
    assert recall(KEY) is None
