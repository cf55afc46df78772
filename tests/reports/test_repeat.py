"""A stranger who has nothing but a report repeats a row and gets its numbers to the last bit."""

import csv
import html
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kvbench.cli import main

RUN = (
    "quantizer=blockgtq",
    "model=random",
    "calibration.tokens=128",
    "calibration.window=64",
    "task=[logit_error,perplexity]",
    "task.logit_error.tokens=128",
    "task.logit_error.window=64",
    "task.perplexity.windows=1",
    "task.perplexity.window=64",
    "threads=1",
)
QUALITY = ("logit_error.mean", "perplexity.perplexity", "compression.bytes_allocated")


def kvbench(arguments: list[str], cache: Path, out: Path) -> None:
    """Runs the command in a process of its own, with nothing remembered of earlier runs."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("KVBENCH_", "HYDRA_"))}
    command = [sys.executable, "-P", "-m", "kvbench", *arguments, f"hydra.run.dir={out}"]
    subprocess.run(command, env={**kept, "KVBENCH_CACHE": str(cache)}, check=True, capture_output=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("repeat")
    kvbench(list(RUN), place / "cache", place / "runs" / "first")
    main(["report", str(place / "runs"), "--out", str(place / "report"), "--format", "html,csv"])
    return place


def numbers(path: Path) -> dict[str, dict[str, float]]:
    rows = csv.DictReader(path.open(newline=""))
    return {row["label"]: {name: float(row[name]) for name in QUALITY} for row in rows}


def test_the_command_on_the_page_gives_the_same_numbers_again(folder: Path) -> None:
    command = re.search(r'aria-label="Command">([^<]*)</pre>', (folder / "report.html").read_text())
    assert command is not None
    program, *arguments = shlex.split(html.unescape(command.group(1)))
    assert program == "kvbench"
    kvbench(arguments, folder / "other-cache", folder / "again")
    main(["report", str(folder / "again"), "--out", str(folder / "again.csv")])
    assert numbers(folder / "again.csv") == numbers(folder / "report.csv")
    assert set(numbers(folder / "again.csv")) == {"fp16", "blockgtq K3 V3", "tqmse K3 V3"}


def test_every_number_of_the_table_is_in_the_run_it_leads_to(folder: Path) -> None:
    result = json.loads((folder / "runs" / "first" / "result.json").read_text())
    found = numbers(folder / "report.csv")
    assert found["blockgtq K3 V3"]["logit_error.mean"] == result["tasks"]["logit_error"]["metrics"]["mean"]
    baseline = result["baselines"]["tqmse"]
    assert found["tqmse K3 V3"]["perplexity.perplexity"] == baseline["tasks"]["perplexity"]["metrics"]["perplexity"]
