"""The benchmark of compiling: a first decode step, and that what it compiles does not grow with the model."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from kvbench.bench_cold import decode_once, run_cold
from kvbench.cli import main


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a CUDA device")
def test_without_a_gpu_it_says_so_and_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "cold", "--out", str(tmp_path)]) == 2
    assert "CUDA device" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about Triton's interpreter")
def test_a_step_goes_through_every_layer() -> None:
    found = decode_once(1, "cpu")
    assert (found["layers"], found["kernels"]) == (1, [])
    assert found["seconds"] > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_models_of_any_depth_compile_the_same_kernels(tmp_path: Path) -> None:
    few, many = run_cold(tmp_path, layers=(2, 8))["models"]
    assert few["kernels"]
    assert few["kernels"] == many["kernels"]
