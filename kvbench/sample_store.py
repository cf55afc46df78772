"""Samples kept as they finish, so that an interrupted task loses at most the one in flight.

A task's samples are lines of JSON in the cache folder, under the same key as its measurement: a rerun, in whatever
folder, continues after the last whole line. The run's own folder gets a readable ``samples.jsonl`` beside it.
"""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from kvbench.cache_dir import cache_dir
from kvbench.results import Compression, LayerEngagement, Record

log = logging.getLogger(__name__)


class KeptSamples(Record):
    """Samples that were measured together (a batch, mostly of one), with the proof and size of the cache they used."""

    names: list[str]
    records: list[dict[str, Any]]
    engagement: list[LayerEngagement] = Field(default_factory=list)
    compression: Compression | None = None


def samples_path(key: str) -> Path:
    """Where the samples of the measurement ``key`` are kept."""
    return cache_dir() / "samples" / key[:2] / f"{key}.jsonl"


@dataclass
class SampleStore:
    """The samples of one task on one quantizer, by name. Without paths they live as long as the object.

    ``kept`` is the file that a rerun continues from; ``report`` the run's ``samples.jsonl``, whose lines begin with
    ``origin`` (which quantizer, which task).
    """

    kept: Path | None = None
    report: Path | None = None
    origin: Mapping[str, Any] = field(default_factory=dict)
    _known: dict[tuple[str, ...], KeptSamples] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        for samples in _read(self.kept) if self.kept else ():
            self._known[tuple(samples.names)] = samples

    def recall(self, names: Sequence[str]) -> KeptSamples | None:
        """The samples that were measured together under ``names``, or None."""
        found = self._known.get(tuple(names))
        if found is not None:
            self._tell(found)
        return found

    def remember(self, samples: KeptSamples) -> None:
        """Keep samples; they are on file when this returns. Raises ValueError where they are not plain JSON data."""
        line = json.dumps(samples.model_dump(mode="json"), allow_nan=False)
        self._known[tuple(samples.names)] = samples
        if self.kept:
            _append(self.kept, line)
        self._tell(samples)

    def recount(self) -> None:
        """Write all that is known to the run's file: for a task that is not measured again."""
        for samples in self._known.values():
            self._tell(samples)

    def _tell(self, samples: KeptSamples) -> None:
        if self.report:
            for name, record in zip(samples.names, samples.records, strict=True):
                _append(self.report, json.dumps({**self.origin, "sample": name, **record}, ensure_ascii=False))


def _read(path: Path) -> list[KeptSamples]:
    """The whole lines of ``path``. A line that a kill or a full disk left incomplete is not one."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            found.append(KeptSamples.model_validate_json(line))
        except ValidationError:
            continue
    return found


def _append(path: Path, line: str) -> None:
    """Append ``line`` in one write, on a line of its own. An unwritable file costs time later, not the run."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            if end:
                file.seek(end - 1)
            torn = end > 0 and file.read(1) != b"\n"
            file.write((("\n" if torn else "") + line + "\n").encode())
    except OSError as error:
        log.warning("a sample is not kept in %s: %s", path, error.strerror or error)
