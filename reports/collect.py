"""Finds the runs under some folders, and says of everything that looks like one and is not why it was left out."""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kvbench.errors import ResultError
from kvbench.progress import track
from kvbench.results import SCHEMA_VERSION, Result

RESULT_FILE = "result.json"
HYDRA_FOLDER = ".hydra"  # Hydra makes one in the folder of every job that it starts


@dataclass(frozen=True)
class Run:
    """One result and the file it was read from."""

    path: Path
    result: Result


@dataclass(frozen=True)
class LeftOut:
    """A file or folder that is not in the comparison, and why."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Collection:
    """What was found: runs in the order of their paths, and what was left out."""

    runs: Sequence[Run]
    left_out: Sequence[LeftOut]


def collect(places: Iterable[Path]) -> Collection:
    """All runs at or under ``places``, which are folders or ``result.json`` files.

    The same run found twice counts once. Raises ResultError where a place does not exist, or holds nothing at all that
    could be compared.
    """
    places = list(places)
    runs: dict[str, Run] = {}
    left_out: list[LeftOut] = []
    for path in track(list(_candidates(places)), "reading runs"):
        if isinstance(path, LeftOut):
            left_out.append(path)
            continue
        read = _read(path)
        if isinstance(read, LeftOut):
            left_out.append(read)
        elif (known := runs.get(read.result.run_id)) is None:
            runs[read.result.run_id] = read
        else:
            kept, dropped = (read, known) if _better(read, known) else (known, read)
            runs[read.result.run_id] = kept
            left_out.append(LeftOut(dropped.path, f"the same run as {kept.path}"))
    if not runs:
        reason = f" {left_out[0].path}: {left_out[0].reason}." if left_out else ""
        raise ResultError(
            f"no result to compare in {', '.join(map(str, places))}.{reason}\n"
            f"Give folders in which 'kvbench' left a {RESULT_FILE}; {len(left_out)} found were unreadable."
        )
    return Collection(sorted(runs.values(), key=lambda run: run.path), sorted(left_out, key=lambda each: each.path))


def _better(read: Run, known: Run) -> bool:
    """Of two records of one run, the finished and then the later one."""
    return _rank(read) > _rank(known)


def _rank(run: Run) -> tuple[bool, float]:
    return run.result.status == "ok", run.result.created.timestamp()


def _candidates(places: Iterable[Path]) -> Iterator[Path | LeftOut]:
    """Result files, each once, and folders of jobs that left none."""
    seen: set[Path] = set()
    for place in places:
        if not place.exists():
            raise ResultError(f"{place} does not exist. Give folders with results, such as 'outputs' or 'multirun'.")
        if place.is_file():
            found: Iterable[Path | LeftOut] = [place]
        else:
            found = _walk(place)
        for each in found:
            path = (each.path if isinstance(each, LeftOut) else each).resolve()
            if path not in seen:
                seen.add(path)
                yield each


def _walk(folder: Path) -> Iterator[Path | LeftOut]:
    unreadable: list[LeftOut] = []

    def keep(error: OSError) -> None:
        unreadable.append(LeftOut(Path(error.filename), f"cannot be read: {error.strerror}"))

    for name, folders, files in os.walk(folder, onerror=keep):
        folders.sort()
        if RESULT_FILE in files:
            yield Path(name) / RESULT_FILE
        elif HYDRA_FOLDER in folders:
            yield LeftOut(Path(name), f"a job that left no {RESULT_FILE}: it failed before it measured anything")
        if HYDRA_FOLDER in folders:
            folders.remove(HYDRA_FOLDER)
    yield from unreadable


def _read(path: Path) -> Run | LeftOut:
    try:
        text = path.read_bytes()
    except OSError as error:
        return LeftOut(path, f"cannot be read: {error.strerror or error}")
    try:
        return Run(path, Result.model_validate_json(text))
    except ValidationError as error:
        return LeftOut(path, _why_invalid(text, error))


def _why_invalid(text: bytes, error: ValidationError) -> str:
    """One line for a file that is not a result of this schema: damaged, of another schema, or something else."""
    if not text.strip():
        return "empty"
    try:
        data: Any = json.loads(text)
    except (ValueError, RecursionError):
        return f"damaged: not JSON ({len(text):,} bytes; cut off or overwritten?)"
    if not isinstance(data, dict) or not {"schema_version", "run_id"} & data.keys():
        return "not a result of kvbench"
    version = data.get("schema_version", "none")
    if version != SCHEMA_VERSION:
        return f"schema version {str(version)[:20]}; this kvbench reads {SCHEMA_VERSION}: repeat the run"
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"]))
    return f"does not satisfy the schema: {where[:100]}: {first['msg'][:200]}"
