"""Options in sweeps over quantizers that do not all have them."""

import subprocess
from collections.abc import Callable
from pathlib import Path

from kvbench.sweep_options import leave_out_foreign_options

from .small_run import SMALL_RUN

OPTIONS = {"int": ["k_bits", "group"], "tqmse": ["k_bits", "seed"], "mxfp4": []}


def test_a_quantizer_without_an_option_of_the_others_gets_one_cell() -> None:
    combinations = [[f"quantizer={name}", f"quantizer.k_bits={bits}"] for name in ("int", "mxfp4") for bits in (2, 4)]
    assert leave_out_foreign_options(combinations, OPTIONS) == [
        ["quantizer=int", "quantizer.k_bits=2"],
        ["quantizer=int", "quantizer.k_bits=4"],
        ["quantizer=mxfp4"],
    ]


def test_an_option_that_none_has_is_left_to_be_refused() -> None:
    combinations = [["quantizer=int", "quantizer.kbits=2"], ["quantizer=mxfp4", "quantizer.kbits=2"]]
    assert leave_out_foreign_options(combinations, OPTIONS) == combinations


def test_a_sweep_of_one_quantizer_keeps_every_option() -> None:
    combinations = [["quantizer=mxfp4", "quantizer.k_bits=2"], ["quantizer=mxfp4", "quantizer.k_bits=4"]]
    assert leave_out_foreign_options(combinations, OPTIONS) == combinations


def test_other_overrides_and_unknown_quantizers_stay_as_they_are() -> None:
    combinations = [
        ["quantizer=int", "model=random", "+quantizer.seed=3"],
        ["quantizer=tqmse", "model=random", "+quantizer.seed=3"],
        ["quantizer=tqmze", "model=random", "+quantizer.seed=3"],
    ]
    assert leave_out_foreign_options(combinations, OPTIONS) == [["quantizer=int", "model=random"], *combinations[1:]]


def test_a_sweep_over_integers_and_floats_runs_every_cell(
    command: Callable[..., "subprocess.CompletedProcess[str]"], tmp_path: Path
) -> None:
    done = command(["-m", *SMALL_RUN, "quantizer=int,mxfp4", "quantizer.k_bits=2", "hydra.sweep.dir=sweep"])
    assert done.returncode == 0, done.stderr
    cells = sorted(folder.name for folder in (tmp_path / "sweep").iterdir() if folder.is_dir())
    assert cells == ["quantizer=int,quantizer.k_bits=2", "quantizer=mxfp4"]
