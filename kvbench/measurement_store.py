"""Measurements kept in the cache folder, so that a sweep measures its baselines once and a rerun continues.

A record is addressed by the hash of everything that determines its numbers (model, texts, quantizer's options and code,
task's options and code, cache options, kvbench's code, versions), so a changed quantizer is never served an old score.
"""

import logging
from pathlib import Path

from pydantic import ValidationError

from kvbench.cache_dir import cache_dir
from kvbench.errors import ResultError
from kvbench.results import Compression, LayerEngagement, Record, TaskRecord, write_text_atomically

log = logging.getLogger(__name__)


class StoredTask(Record):
    """One task on one quantizer: what it measured, and the proof and size of the caches it used."""

    task: TaskRecord
    engagement: list[LayerEngagement]
    compression: Compression | None


def _path(key: str) -> Path:
    return cache_dir() / "measurements" / key[:2] / f"{key}.json"


def recall(key: str) -> StoredTask | None:
    """The record of ``key``, marked as reused; None where there is none or it is damaged."""
    try:
        stored = StoredTask.model_validate_json(_path(key).read_text(encoding="utf-8"))
    except (OSError, ValidationError, UnicodeDecodeError):
        return None
    stored.task.reused = True
    return stored


def remember(key: str, stored: StoredTask) -> None:
    """Keep a record. A cache folder that cannot be written costs time later, not the run now."""
    try:
        write_text_atomically(_path(key), stored.model_dump_json())
    except ResultError as error:
        log.warning("the measurement is not kept: %s", error)
