"""The calibration pass: statistics of q, k, v from a model's own forward, computed once and kept in the cache."""

import dataclasses
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kvbench.cache_dir import cache_dir as default_cache_dir
from kvbench.calibration import Calibration, LayerCalibration, TensorStatistics
from kvbench.capture import CAPTURE_VERSION, QKV, check_geometry, output_metrics, stream_qkv
from kvbench.corpora import Corpus, token_windows
from kvbench.errors import NonFiniteError
from kvbench.geometry import LayerGeometry
from kvbench.progress import track
from kvbench.rope import layer_rotary

if TYPE_CHECKING:
    from kvbench.models import LoadedModel

log = logging.getLogger(__name__)
SAMPLE_TOKENS = 256  # of each layer: enough for a quantizer to fit a curve to, small enough to store for 80 layers
FORWARD_TOKENS = 2048  # in one forward; bounds the memory of activations
CHECKED_TOKENS = 8  # that the geometry is checked on
TENSORS = {"q": "queries", "k": "keys", "v": "values"}
ARRAYS = ("mean", "second_moment", "minimum", "maximum", "sample")


def calibrate(
    loaded: "LoadedModel", corpus: Corpus, tokens: int, window: int, cache_dir: Path | None = None
) -> Calibration:
    """Statistics over the first ``tokens`` tokens of the corpus's calibration text, in windows of ``window``.

    Positions restart in each window. Reused from ``cache_dir`` (default: kvbench's cache folder) where model, text,
    amounts and capture code are the same. Raises CorpusError where the text is too short, ModelError where the
    model's attention is not what its configuration says, NonFiniteError where q, k or v has NaN or infinity.
    """
    windows = token_windows(corpus.calibration, loaded.tokenizer, tokens, window)
    source = calibration_source(loaded, corpus, windows)
    path = _stored_path(source, cache_dir or default_cache_dir())
    if (stored := _read(path, source, len(loaded.geometry.layers))) is not None:
        return with_model_facts(stored, loaded)
    check_geometry(loaded.model, loaded.geometry, windows[:1, :CHECKED_TOKENS])
    calibration = Calibration(accumulate(loaded, windows), source)
    _write(path, calibration)
    return with_model_facts(calibration, loaded)


def with_model_facts(calibration: Calibration, loaded: "LoadedModel") -> Calibration:
    """The calibration with each layer's RoPE and output metric, which are the model's and not measured."""
    token = torch.zeros(1, 1, dtype=torch.long)
    metrics = output_metrics(loaded.model, loaded.geometry, token)
    layers = tuple(
        dataclasses.replace(layer, rotary=layer_rotary(loaded.model, index, shape), output=metric)
        for index, (layer, shape, metric) in enumerate(
            zip(calibration.layers, loaded.geometry.layers, metrics, strict=True)
        )
    )
    return dataclasses.replace(calibration, layers=layers)


def calibration_source(loaded: "LoadedModel", corpus: Corpus, windows: Tensor) -> dict[str, str | int]:
    """What a calibration is computed from; two with the same source are the same."""
    return {
        "model": loaded.fingerprint,
        "corpus": corpus.digests["calibration"],
        "token_ids": hashlib.sha256(windows.numpy().tobytes()).hexdigest(),  # the tokenizer's part in it
        "tokens": windows.numel(),
        "window": windows.shape[1],
        "capture": CAPTURE_VERSION,
    }


def accumulate(loaded: "LoadedModel", windows: Tensor) -> tuple[LayerCalibration, ...]:
    """Statistics of every layer over int64 ``windows [n, window]``, in float64, layer by layer as the pass goes."""
    chosen = sample_positions(windows.numel())
    layers = [
        {name: _Accumulator(name, i, shape, chosen) for name in TENSORS}
        for i, shape in enumerate(loaded.geometry.layers)
    ]

    def consume(layer: int, qkv: QKV) -> None:
        for name, tensor in qkv._asdict().items():
            layers[layer][name].add(tensor)

    for batch in track(windows.split(max(1, FORWARD_TOKENS // windows.shape[1])), "calibrating"):
        stream_qkv(loaded.model, batch, consume)
    return tuple(
        LayerCalibration(layer["q"].statistics(), layer["k"].statistics(), layer["v"].statistics()) for layer in layers
    )


def sample_positions(tokens: int) -> list[int]:
    """Up to SAMPLE_TOKENS evenly spaced token numbers below ``tokens``."""
    count = min(SAMPLE_TOKENS, tokens)
    return [i * tokens // count for i in range(count)]


class _Accumulator:
    """Sums over tokens of one tensor of one layer; query heads of a KV head's group are samples of their own."""

    def __init__(self, name: str, layer: int, geometry: LayerGeometry, chosen: Sequence[int]) -> None:
        self.name, self.layer, self.geometry, self.chosen = name, layer, geometry, chosen
        self.group = geometry.group_size if name == "q" else 1
        self.tokens = 0
        self.sums: dict[str, Tensor] = {}
        self.samples: list[Tensor] = []

    def add(self, tensor: Tensor) -> None:
        """Add ``[batch, tokens, heads, head_dim]``. Raises NonFiniteError."""
        shape = self.geometry
        x = tensor.reshape(-1, shape.kv_heads, self.group, shape.head_dim)
        if not torch.isfinite(x).all():
            raise NonFiniteError(
                f"{TENSORS[self.name]} of layer {self.layer} have NaN or infinity during calibration. "
                "Try model.dtype=float32 or bfloat16; if that does not help, the weights are broken."
            )
        samples = x.double().permute(1, 0, 2, 3).flatten(1, 2)  # [kv_heads, tokens * group, head_dim]
        self._merge("sum", samples.sum(1), torch.add)
        self._merge("square", samples.mT @ samples, torch.add)
        self._merge("minimum", samples.amin(1), torch.minimum)
        self._merge("maximum", samples.amax(1), torch.maximum)
        for number, position in enumerate(self.chosen):
            if self.tokens <= position < self.tokens + len(x):
                self.samples.append(x[position - self.tokens, :, number % self.group].float().cpu())
        self.tokens += len(x)

    def _merge(self, key: str, value: Tensor, operation: object) -> None:
        assert callable(operation)
        self.sums[key] = operation(self.sums[key], value) if key in self.sums else value

    def statistics(self) -> TensorStatistics:
        arrays = {key: value.cpu().numpy() for key, value in self.sums.items()}
        count = self.tokens * self.group
        return TensorStatistics(
            mean=arrays["sum"] / count,
            second_moment=arrays["square"] / count,
            minimum=arrays["minimum"],
            maximum=arrays["maximum"],
            sample=torch.stack(self.samples).numpy(),
        )


def _stored_path(source: dict[str, str | int], folder: Path) -> Path:
    key = hashlib.sha256(json.dumps(source, sort_keys=True).encode()).hexdigest()
    return folder / "calibrations" / f"{key[:32]}.safetensors"


def _arrays_digest(arrays: dict[str, np.ndarray]) -> str:
    total = hashlib.sha256()
    for name in sorted(arrays):
        total.update(f"{name} {arrays[name].shape} {arrays[name].dtype} ".encode())
        total.update(np.ascontiguousarray(arrays[name]).tobytes())
    return total.hexdigest()


def _write(path: Path, calibration: Calibration) -> None:
    """Store atomically. A cache that cannot be written costs time later, not the run now."""
    from safetensors.numpy import save

    arrays = {
        f"{i}.{name}.{array}": np.ascontiguousarray(getattr(getattr(layer, name), array))
        for i, layer in enumerate(calibration.layers)
        for name in TENSORS
        for array in ARRAYS
    }
    # safetensors has no checksum of its own
    metadata = {"source": json.dumps(calibration.source, sort_keys=True), "sha256": _arrays_digest(arrays)}
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(descriptor, "wb") as file:
            file.write(save(arrays, metadata))
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        log.warning("the calibration is not kept: cannot write %s: %s", path, error.strerror or error)


def _read(path: Path, source: dict[str, str | int], layers: int) -> Calibration | None:
    """The calibration stored at ``path``, or None where there is none, it is damaged, or it is of another source."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np") as file:
            metadata = file.metadata() or {}
            if json.loads(metadata.get("source", "null")) != source:
                return None
            arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, ValueError, SafetensorError):
        return None
    expected = {f"{i}.{name}.{array}" for i in range(layers) for name in TENSORS for array in ARRAYS}
    if set(arrays) != expected or metadata.get("sha256") != _arrays_digest(arrays):
        return None

    def statistics(layer: int, name: str) -> TensorStatistics:
        return TensorStatistics(*(arrays[f"{layer}.{name}.{array}"] for array in ARRAYS))

    stored = (LayerCalibration(statistics(i, "q"), statistics(i, "k"), statistics(i, "v")) for i in range(layers))
    return Calibration(tuple(stored), source)
