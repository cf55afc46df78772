"""A run that is killed in the middle of a task, by the signal that cannot be caught, and repeated."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .small_run import command_environment

NEEDLES = (
    "model=random",
    "quantizer=tqmse",
    "quantizer.k_bits=2",
    "calibration.tokens=128",
    "calibration.window=64",
    "task=[niah]",
    "task.niah.tasks=[single]",
    "task.niah.lengths=[300]",
    "task.niah.depths=[0,0.3,0.6,0.9]",
    "task.niah.batch_size=1",
    "task.niah.max_new_tokens=3",
    "baselines=[fp16]",
    "cache.prefill_chunk=64",
    "threads=1",
)
# kvbench, killed while it writes its sixth sample: two samples into the baseline.
KILLED = """
import os, signal, sys
from kvbench import cli, sample_store

append, kept = sample_store._append, []

def dying(path, line):
    if path.name != "samples.jsonl":
        kept.append(line)
        if len(kept) == 6:
            with path.open("a") as file:
                file.write(line[: len(line) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
    append(path, line)

sample_store._append = dying
sys.exit(cli.main())
"""


def run(folder: Path, cache: str, killed: bool = False) -> int:
    """Run kvbench with results in ``folder``; the exit code."""
    program = ["-c", KILLED] if killed else ["-m", "kvbench"]
    environment = {**command_environment(folder.parent), "KVBENCH_CACHE": str(folder.parent / cache)}
    command = [sys.executable, "-P", *program, *NEEDLES, f"hydra.run.dir={folder}"]
    return subprocess.run(command, env=environment, cwd=folder.parent, capture_output=True, check=False).returncode


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def measured(folder: Path) -> Any:
    """All of a result but when, where and how long."""
    result = json.loads((folder / "result.json").read_text())
    for part in ("created", "command", "duration_s", "config", "environment"):
        del result[part]
    for measurement in (result, *result["baselines"].values()):
        for task in measurement["tasks"].values():
            del task["duration_s"], task["reused"], task["prefill_peak_bytes"]
    return result


@pytest.mark.slow
def test_a_killed_run_loses_one_sample_and_ends_with_the_same_numbers_when_it_is_repeated(tmp_path: Path) -> None:
    assert run(tmp_path / "whole", "one-cache") == 0
    assert run(tmp_path / "killed", "another-cache", killed=True) == -signal.SIGKILL
    assert json.loads((tmp_path / "killed" / "result.json").read_text())["status"] == "partial"
    assert len(lines(tmp_path / "killed")) == 5
    assert run(tmp_path / "repeated", "another-cache") == 0

    kept = list((tmp_path / "another-cache" / "samples").rglob("*.jsonl"))
    assert sum(len(file.read_text().splitlines()) for file in kept) == 8 + 1  # one torn line; no sample twice
    assert lines(tmp_path / "repeated") == lines(tmp_path / "whole")
    assert measured(tmp_path / "repeated") == measured(tmp_path / "whole")
