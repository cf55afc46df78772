"""What a run has loaded before it measures anything: texts, model, calibration, and the options of its cache."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import DictConfig, OmegaConf

from kvbench.calibrate import calibrate
from kvbench.calibration import Calibration
from kvbench.configuration import CacheConfig
from kvbench.corpora import Corpus, load_corpus
from kvbench.errors import ConfigurationError
from kvbench.identity import code_version
from kvbench.models import LoadedModel, load_model
from kvbench.progress import announce
from kvbench.quantizer import Quantizer
from kvbench.task import Task

if TYPE_CHECKING:
    from kvbench.registry import Registry

BACKENDS = ("auto", "reference", "triton")


@dataclass
class Job:
    """Everything a run has loaded; ``memo`` is shared by the sessions of all its quantizers.

    ``samples_file`` gets a line for every sample as it finishes.
    """

    config: DictConfig
    registry: "Registry"
    tasks: list[Task]
    loaded: LoadedModel
    corpus: Corpus
    cache: CacheConfig
    backend: str
    calibration: Calibration | None
    memo: dict[str, Any] = field(default_factory=dict)
    samples_file: Path | None = None

    def identity(self) -> dict[str, Any]:
        """What determines every number of this run, apart from quantizer and task."""
        return {
            "model": self.loaded.fingerprint,
            "dtype": self.loaded.geometry.dtype,
            "device": self.loaded.model.device.type,
            "corpus": self.corpus.digests,
            "calibration": self.calibration.source if self.calibration else None,
            "cache": dataclasses.asdict(self.cache),
            "backend": self.backend,
            "code": code_version(),
        }


def load(config: DictConfig, registry: "Registry", quantizers: list[Quantizer], tasks: list[Task]) -> Job:
    """Texts, model and calibration, in the order in which mistakes are cheap to find."""
    if config.threads:
        torch.set_num_threads(config.threads)
    backend = check_backend(config.backend)
    cache = _plain_cache(config)
    corpus = load_corpus(config.corpus)
    announce(f"loading {config.model.name}")
    loaded = load_model(config.model, config.device)
    calibration = None
    if any(quantizer.needs_calibration for quantizer in quantizers):
        announce(f"calibrating on {config.calibration.tokens} tokens of {corpus.name}")
        calibration = calibrate(loaded, corpus, config.calibration.tokens, config.calibration.window)
    return Job(config, registry, tasks, loaded, corpus, cache, backend, calibration)


def check_backend(asked: str) -> str:
    """``backend=asked``, if there is such a one. Raises ConfigurationError."""
    if asked not in BACKENDS:
        raise ConfigurationError(f"backend={asked} is not available: choose {', '.join(BACKENDS)}.")
    return asked


def _plain_cache(config: DictConfig) -> CacheConfig:
    cache = OmegaConf.to_object(config.cache)
    assert isinstance(cache, CacheConfig)
    if cache.prefill not in ("quantized", "exact"):
        raise ConfigurationError(f"cache.prefill={cache.prefill} is not allowed: choose quantized or exact.")
    for name in ("n_sink", "recent_window", "prefill_chunk"):
        if getattr(cache, name) < 0:
            raise ConfigurationError(f"cache.{name}={getattr(cache, name)} is not allowed: give 0 or more tokens.")
    return cache
