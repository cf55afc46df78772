"""The conformance kit: a sound plugin passes, and each way of breaking the contract fails its own check by name."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is first imported

from kvbench.conformance import CHECKS, NonConformance, NotApplicable, Specimen
from kvbench.conformance_runs import RUNS
from kvbench.kernels.formats import CacheFormat, RotatedCodebook
from kvbench.kernels.rotated_codebook import RotatedCodebookCodec
from kvbench.quantizers.tqmse import TQMSE
from kvbench.testing import check_refusal, model_geometry, quantizer_conformance

from .faulty_quantizer import Faulty

test_sound_plugin = quantizer_conformance(Faulty, head_dims=(64, 80))

ALL: dict[str, Callable[[Specimen], None]] = {**CHECKS, **RUNS}


@pytest.mark.parametrize(
    ("fault", "check", "message"),
    [
        ("returns a list", "format", r"faulty: fit\(\) must return a CacheFormat, not list"),
        ("one layer", "format", "gave formats for 1 layers; the model has 2"),
        ("another head_dim", "format", "layer 0, key format: is for 2 KV heads of 128 dims; the model has 2 of 64"),
        ("not data", "format", r"describe\(\) must be plain JSON data"),
        ("random", "deterministic_fit", "another format every time; seed what is random"),
        ("hash", "other_process", "another format in another process; do not depend on the order of sets"),
        ("wrong shape", "planes", r"encodes plane 'codes' as torch.int8 \[2, 1\]; it declares torch.int8 \[2, 128\]"),
        ("wrong dtype", "planes", r"plane 'codes' as torch.int16 .* it declares torch.int8"),
        ("missing plane", "planes", "encodes into 1 tensors but declares 2 planes"),
        ("changes its input", "planes", r"changes the tensor that encode\(\) is given"),
        ("double", "planes", "decodes to torch.float64 .* expected torch.float32"),
        ("noise", "round_trip", "of its energy as error; at most 90% is expected"),
        ("wrong space", "space", r"between to_space\(q\) . decode"),
        ("divides by zero", "zeros", "decodes zero vectors to NaN or infinity"),
        ("half-precision scale", "huge", "to NaN or infinity; saturate, or raise ValueError"),
        ("stores NaN", "nan", r"stores nan; encode\(\) must raise ValueError"),
        ("hides scales", "bytes", "stores 1088 bits a token but declares 1024"),
        ("claims too much", "bytes", "declares 2304 bits a token but stores 1088"),
        ("keeps the tensor", "bytes", "does not hold all it needs in its planes"),
        ("global", "other_process", "cannot be decoded in another process from its planes alone"),
        ("scale of the batch", "batch_invariance", "of the vectors differently when batched"),
        ("scale of the call", "pieces", "of the vectors differently when appended in pieces"),
        ("NaN in long caches", "model", "a tiny model does not run: layer 0, keys: .* decodes finite input to NaN"),
    ],
)
def test_each_fault_fails_its_check_with_its_own_sentence(fault: str, check: str, message: str) -> None:
    with pytest.raises(NonConformance, match=message):
        ALL[check](Specimen.of(Faulty(fault), model_geometry(64)))


class SkewedCodec(RotatedCodebookCodec):
    def decode(self, planes: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return 1.1 * super().decode(planes)


class Skewed(RotatedCodebook):
    def codec(self, device: torch.device | str = "cpu") -> RotatedCodebookCodec:
        return SkewedCodec(self, device)


class SkewedTQMSE(TQMSE):
    def fit(self, calibration, geometry):  # type: ignore[no-untyped-def]
        skew = lambda formats: tuple(  # noqa: E731
            Skewed(**{field.name: getattr(each, field.name) for field in dataclasses.fields(each)}) for each in formats
        )
        format = super().fit(calibration, geometry)
        return CacheFormat(skew(format.key), skew(format.value))


def test_a_codec_that_disagrees_with_the_kernel_is_told() -> None:
    pytest.importorskip("triton")
    RUNS["kernel"](Specimen.of(TQMSE(), model_geometry(128)))
    with pytest.raises(NonConformance, match=r"the kernel's attention differs by 0\."):
        RUNS["kernel"](Specimen.of(SkewedTQMSE(), model_geometry(128)))


def test_formats_without_a_kernel_are_not_held_to_one() -> None:
    with pytest.raises(NotApplicable, match="no kernel reads formats of kind 'bytes'"):
        RUNS["kernel"](Specimen.of(Faulty(), model_geometry(128)))


def test_a_head_dim_that_is_not_claimed_must_be_refused_politely() -> None:
    check_refusal(Specimen.of(Faulty(), model_geometry(80)))
    with pytest.raises(NonConformance, match="fails on head_dim 80 with IndexError; raise ConfigurationError"):
        check_refusal(Specimen.of(Faulty("crashes at 80"), model_geometry(80)))


def test_one_line_in_a_plugins_tests_is_enough(tmp_path: Path) -> None:
    source = Path(__file__).with_name("faulty_quantizer.py").read_text()
    (tmp_path / "my_quantizer.py").write_text(source)
    (tmp_path / "test_mine.py").write_text(
        "from kvbench.testing import quantizer_conformance\n"
        "from my_quantizer import Faulty\n"
        'test_mine = quantizer_conformance(Faulty("noise"), head_dims=(64,))\n'
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "round_trip or nan-"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "FAILED test_mine.py::test_mine[round_trip-head_dim 64]" in done.stdout
    assert "faulty: key format 'bytes' gives back its input with" in done.stdout
    assert "6 failed, 6 passed" in done.stdout
