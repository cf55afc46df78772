"""Sweeps: how cells are named, that a failing one stops no other, and what the summary says."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from kvbench.cells import MAX_NAME, name_cells
from kvbench.results import read_result
from kvbench.sweep import quoted

from .small_run import SMALL_RUN, command_environment

Command = Callable[..., "subprocess.CompletedProcess[str]"]
Distribution = Callable[..., Path]

PLUGIN = """
import os, signal

@dataclass(frozen=True)
class Moody(DenseFit, Quantizer):
    name: ClassVar[str] = "moody"
    needs_calibration: ClassVar[bool] = False
    mood: str = "calm"
    fifo: str = ""

    def __post_init__(self):
        if self.mood == "sulky":
            raise ConfigurationError("quantizer.mood=sulky is not allowed: choose another.")

    def fit(self, calibration, geometry):
        if self.mood == "angry":
            raise RuntimeError("a defect")
        if self.mood == "doomed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.mood in ("talking", "stuck"):
            open(self.fifo, "w").close()  # waits for a reader
        if self.mood == "listening":
            open(self.fifo).close()  # waits for a writer
        if self.mood == "stuck":
            signal.pause()
        return super().fit(calibration, geometry)

@hookimpl
def kvbench_quantizers():
    return [Moody]
"""
SWEEP = ("-m", *SMALL_RUN, "quantizer=moody", "hydra.sweep.dir=sweep")


def summary(folder: Path) -> dict[str, dict[str, object]]:
    cells = json.loads((folder / "sweep" / "summary.json").read_text())["cells"]
    return {cell["name"].removeprefix("quantizer.mood="): cell for cell in cells}


def test_cells_are_named_by_the_overrides_that_differ() -> None:
    cells = name_cells([["model=random", "quantizer=tqmse"], ["model=random", "quantizer=fp16"]])
    assert [cell.name for cell in cells] == ["quantizer=tqmse", "quantizer=fp16"]
    assert cells[0].overrides == ("model=random", "quantizer=tqmse")


def test_a_single_cell_is_named_by_all_its_overrides() -> None:
    assert name_cells([["a=1", "b=2"]])[0].name == "a=1,b=2"
    assert name_cells([[]])[0].name == "defaults"


@pytest.mark.parametrize("value", ["../../etc/passwd", "a/b", "x" * 500, "ü🙂", 'a"b\\c', "a:b*c?d", "."])
def test_names_are_safe_on_file_systems(value: str) -> None:
    (name,) = [cell.name for cell in name_cells([[f"key={value}"]])]
    assert re.fullmatch(r"[A-Za-z0-9_=][A-Za-z0-9._=,+\[\]-]*", name)
    assert len(name) <= MAX_NAME


def test_names_differ_where_overrides_do() -> None:
    cells = name_cells([["path=a/b"], ["path=a:b"], ["path=a_b"], ["path=" + "x" * 300], ["path=" + "x" * 301]])
    assert len({cell.name for cell in cells}) == 5


@pytest.mark.parametrize("text", ["plain", "it's", "back\\slash", "quote\\'d", "end\\", "${not.resolved}", "a=b,c [d]"])
def test_quoted_values_survive_hydra_s_grammar(text: str) -> None:
    value = OverridesParser.create().parse_override(f"key={quoted(text)}").value()
    assert str(value).replace("\\${", "${") == text


def test_failing_cells_are_named_and_stop_no_other(
    command: Command, distribution: Distribution, tmp_path: Path
) -> None:
    done = command([*SWEEP, "quantizer.mood=angry,sulky,doomed,calm"], distribution(PLUGIN))
    assert done.returncode == 1
    cells = summary(tmp_path)
    assert {mood: cell["status"] for mood, cell in cells.items()} == {
        "angry": "failed",
        "sulky": "failed",
        "doomed": "failed",
        "calm": "ok",
    }
    assert "RuntimeError: a defect" in str(cells["angry"]["error"])
    assert "quantizer.mood=sulky is not allowed" in str(cells["sulky"]["error"])
    assert "SIGKILL" in str(cells["doomed"]["error"])
    for mood in ("angry", "sulky", "doomed"):
        assert re.search(rf"quantizer.mood={mood}: failed: ", done.stderr)
    assert read_result(tmp_path / "sweep" / "quantizer.mood=calm" / "result.json").status == "ok"
    assert "Traceback" in (tmp_path / "sweep" / "quantizer.mood=angry" / "cell.log").read_text()


@pytest.mark.timeout(300)
def test_an_experiment_brings_values_to_sweep_and_the_command_line_goes_first(
    command: Command, distribution: Distribution, tmp_path: Path
) -> None:
    experiments = tmp_path / "conf" / "experiment"
    experiments.mkdir(parents=True)
    swept = "{quantizer.mood: 'calm,merry', cache.n_sink: '0,4', cache.recent_window: '${cache.n_sink}'}"
    (experiments / "mine.yaml").write_text(f"# @package _global_\nhydra:\n  sweeper:\n    params: {swept}\n")
    chosen = ["--config-dir", str(tmp_path / "conf"), "experiment=mine", "cache.n_sink=2"]
    done = command([*SWEEP, *chosen], distribution(PLUGIN))
    assert (done.returncode, done.stderr) == (0, "")
    assert summary(tmp_path).keys() == {"calm", "merry"}
    for mood in ("calm", "merry"):
        cache = read_result(tmp_path / "sweep" / f"quantizer.mood={mood}" / "result.json").config["cache"]
        assert (cache["n_sink"], cache["recent_window"]) == (2, 2)


@pytest.mark.timeout(300)
def test_jobs_run_side_by_side_and_the_summary_holds_their_figures(
    command: Command, distribution: Distribution, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "fifo")  # each cell waits there for the other
    fifo = f"quantizer.fifo={tmp_path / 'fifo'}"
    done = command([*SWEEP, "quantizer.mood=talking,listening", fifo, "hydra.launcher.jobs=2"], distribution(PLUGIN))
    assert (done.returncode, done.stderr) == (0, "")
    for mood, cell in summary(tmp_path).items():
        result = read_result(tmp_path / "sweep" / f"quantizer.mood={mood}" / "result.json")
        assert cell["perplexity"] == result.tasks["perplexity"].metrics["perplexity"]
        assert result.compression is not None
        assert cell["ratio"] == result.compression.ratio
        row = f"| quantizer.mood={mood} | ok | {result.compression.ratio:.2f}x |"
        assert row in (tmp_path / "sweep" / "summary.md").read_text()
        assert f"quantizer.mood={mood}: ok" in done.stdout
        assert result.quantizer.parameters["mood"] == mood


def test_the_joblib_launcher_gives_the_same_summary(
    command: Command, distribution: Distribution, tmp_path: Path
) -> None:
    done = command([*SWEEP, "quantizer.mood=angry,sulky,calm", "hydra/launcher=joblib"], distribution(PLUGIN))
    assert done.returncode == 1
    cells = summary(tmp_path)
    assert {mood: cell["status"] for mood, cell in cells.items()} == {
        "angry": "failed",
        "sulky": "failed",
        "calm": "ok",
    }
    assert "RuntimeError: a defect" in str(cells["angry"]["error"])
    assert re.search("cell quantizer.mood=angry failed: .*RuntimeError: a defect", done.stderr)
    assert (tmp_path / "sweep" / "quantizer.mood=calm" / "report.html").exists()


def test_a_sweep_in_which_no_cell_can_run_is_bad_input(command: Command, tmp_path: Path) -> None:
    done = command(["-m", "quantizer.k_bits=9,10", "hydra.sweep.dir=sweep"])
    assert done.returncode == 2
    assert done.stderr.startswith("kvbench: quantizer.k_bits=9 is not allowed")
    assert not (tmp_path / "sweep").exists()


@pytest.mark.timeout(300)
def test_an_interrupted_sweep_leaves_its_summary(tmp_path: Path, distribution: Distribution) -> None:
    os.mkfifo(tmp_path / "fifo")
    site = distribution(PLUGIN)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "kvbench", *SWEEP, "quantizer.mood=stuck,calm", f"quantizer.fifo={tmp_path}/fifo"],
        cwd=tmp_path,
        env={**command_environment(tmp_path), "PYTHONPATH": str(site)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    (tmp_path / "fifo").read_text()  # returns when the first cell got there
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == 130
    assert {mood: cell["status"] for mood, cell in summary(tmp_path).items()} == {"stuck": "not run", "calm": "not run"}
