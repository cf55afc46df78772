"""What ``kvbench plugins`` says of a quantizer is what fitting it shows."""

import importlib.util
from dataclasses import dataclass
from typing import ClassVar

import pytest

from kvbench.calibration import Calibration
from kvbench.geometry import ModelGeometry
from kvbench.kernels.formats import CacheFormat
from kvbench.peers import HQQ
from kvbench.plugin_probe import Served, probe_quantizer
from kvbench.quantizer import Quantizer
from kvbench.quantizers.kivi import Kivi
from kvbench.quantizers.tqmse import TQMSE


@dataclass(frozen=True)
class Crashing(Quantizer):
    """Fails when it is fitted."""

    name: ClassVar[str] = "crashing"

    def fit(self, calibration: Calibration | None, geometry: ModelGeometry) -> CacheFormat:
        raise RuntimeError("no luck\ntoday" + "!" * 200)


@dataclass(frozen=True)
class Demanding(Quantizer):
    """Has an option without a default."""

    name: ClassVar[str] = "demanding"

    rank: int

    def fit(self, calibration: Calibration | None, geometry: ModelGeometry) -> CacheFormat:
        raise AssertionError("is not fitted without it")


def test_formats_of_keys_and_values_are_named_once_each() -> None:
    assert probe_quantizer(Kivi) == Served("channel_affine + token_blocks", "reference", "enabled")
    assert probe_quantizer(TQMSE).formats == "rotated_codebook"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_a_format_that_a_kernel_serves_names_the_kernel() -> None:
    assert probe_quantizer(TQMSE).backends == "reference, triton (tiles)"


def test_a_quantizer_that_fails_has_its_reason_in_one_short_line() -> None:
    served = probe_quantizer(Crashing)
    assert served.status.startswith("no luck today!")
    assert len(served.status) == 100
    assert (served.formats, served.backends) == ("?", "?")


def test_a_quantizer_with_a_needed_option_names_it() -> None:
    assert probe_quantizer(Demanding) == Served(status="needs quantizer.rank")


def test_a_peer_whose_library_is_missing_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'kvbench[peers]'" in probe_quantizer(HQQ).status


def test_a_peer_names_its_library_as_backend() -> None:
    pytest.importorskip("hqq")
    served = probe_quantizer(HQQ)
    assert served.formats == "peer"
    assert served.backends.startswith("hqq ")
