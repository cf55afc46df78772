"""What every quantizer owes its users, as checks: each takes a fitted quantizer and raises NonConformance.

:mod:`kvbench.testing` turns them into tests. The checks know only the public contracts: formats, codecs, planes.
"""

import json
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from kvbench.calibration import Calibration, LayerCalibration, Rotary, TensorStatistics
from kvbench.geometry import LayerGeometry, ModelGeometry
from kvbench.kernels.codec import Codec
from kvbench.kernels.formats import CacheFormat, TensorFormat
from kvbench.quantizer import Quantizer

TOKENS = 48
ENOUGH_ERROR = 0.9  # relative squared error; storing zeros has 1, 2-bit integers over a 256-dim head 0.7
SAME_VECTOR = 1e-3  # relative; beyond it a vector counts as decoded differently
# A product summed in another order may move a coordinate that lies on a threshold to the next code: rare, not never.
MOVED_SHARE = 0.02
PADDING_BITS = 7  # spare bits a head and plane of packed bytes: rows are padded to a byte


class NonConformance(AssertionError):
    """A quantizer breaks the contract; the message says which part, where, and what is expected."""


class NotApplicable(Exception):
    """A check has nothing to check on this quantizer; the message says why."""


@dataclass(frozen=True)
class Specimen:
    """A quantizer on one geometry, with statistics to fit it to."""

    quantizer: Quantizer
    geometry: ModelGeometry
    calibration: Calibration

    @staticmethod
    def of(quantizer: Quantizer, geometry: ModelGeometry) -> "Specimen":
        return Specimen(quantizer, geometry, synthetic_calibration(geometry))

    def fit(self) -> CacheFormat:
        """A fresh fit."""
        return self.quantizer.fit(self.calibration if self.quantizer.needs_calibration else None, self.geometry)

    @cached_property
    def format(self) -> CacheFormat:
        return self.fit()

    def tensors(self) -> Iterator["Stream"]:
        """The first layer's keys and values; all layers of a specimen have one geometry."""
        layer = self.calibration.layers[0]
        for role, format, statistics in (
            ("key", self.format.key[0], layer.k),
            ("value", self.format.value[0], layer.v),
        ):
            yield Stream(f"{self.quantizer.name}: {role} format '{format.kind}'", format, statistics)


@dataclass(frozen=True)
class Stream:
    """Keys or values: their format, and data like those it was fitted to. ``name`` begins every complaint."""

    name: str
    format: TensorFormat
    statistics: TensorStatistics

    @property
    def codec(self) -> Codec:
        """A fresh codec."""
        return self.format.codec()

    @property
    def block(self) -> int:
        """Tokens that are encoded together; token counts of the data are multiples of it."""
        return self.codec.block_tokens

    @property
    def tokens(self) -> int:
        return max(TOKENS // self.block, 2) * self.block

    def sample(self, *lead: int, seed: int = 0) -> Tensor:
        """Vectors float32 ``[*lead, kv_heads, head_dim]`` with the means and variances of the calibration."""
        lead = lead or (self.tokens,)
        mean = torch.from_numpy(self.statistics.mean).float()
        spread = torch.from_numpy(np.maximum(self.statistics.energy - self.statistics.mean**2, 0.0)).sqrt().float()
        return mean + spread * torch.randn(*lead, *mean.shape, generator=torch.Generator().manual_seed(seed))

    def demand(self, condition: bool, complaint: str) -> None:
        if not condition:
            raise NonConformance(f"{self.name} {complaint}")


def synthetic_calibration(geometry: ModelGeometry, seed: int = 0, tokens: int = 64) -> Calibration:
    """Statistics of random queries, keys and values: dims of uneven energy, and keys with a mean, as models have."""
    generator = np.random.default_rng(seed)

    def statistics(layer: LayerGeometry, offset: float) -> TensorStatistics:
        shape = (layer.kv_heads, layer.head_dim)
        scale = np.exp(0.5 * generator.standard_normal(shape))
        x = scale * (generator.standard_normal((tokens, *shape)) + offset * generator.standard_normal(shape))
        moment = np.einsum("thd,the->hde", x, x) / tokens
        return TensorStatistics(x.mean(0), moment, x.min(0), x.max(0), x.astype(np.float32))

    layers = tuple(
        LayerCalibration(statistics(layer, 0.0), statistics(layer, 1.0), statistics(layer, 0.0), _rotary(layer))
        for layer in geometry.layers
    )
    return Calibration(layers, {"model": "synthetic", "seed": seed})


def _rotary(layer: LayerGeometry) -> Rotary:
    """RoPE with the usual base of 10000."""
    return Rotary(tuple(10000.0 ** (-2 * block / layer.rotary_dim) for block in range(layer.rotary_dim // 2)))


def moved(found: Tensor, expected: Tensor) -> float:
    """Share of vectors ``[..., head_dim]`` that differ by more than rounding."""
    difference = (found - expected).norm(dim=-1)
    return float((~(difference <= SAME_VECTOR * expected.norm(dim=-1) + 1e-30)).float().mean())


def check_format(specimen: Specimen) -> None:
    """``fit`` returns a CacheFormat of the model's shape, in plain data."""
    name, format, layers = specimen.quantizer.name, specimen.format, specimen.geometry.layers
    if not isinstance(format, CacheFormat):
        raise NonConformance(f"{name}: fit() must return a CacheFormat, not {type(format).__name__}")
    if format.layers != len(layers):
        raise NonConformance(f"{name}: fit() gave formats for {format.layers} layers; the model has {len(layers)}")
    for index, shape in enumerate(layers):
        for role, tensor in (("key", format.key[index]), ("value", format.value[index])):
            where = f"{name}: layer {index}, {role} format"
            if (tensor.kv_heads, tensor.head_dim) != (shape.kv_heads, shape.head_dim):
                raise NonConformance(
                    f"{where}: is for {tensor.kv_heads} KV heads of {tensor.head_dim} dims; the model has "
                    f"{shape.kv_heads} of {shape.head_dim}"
                )
            try:
                json.dumps(tensor.describe(), allow_nan=False)
            except (TypeError, ValueError) as error:
                raise NonConformance(f"{where}: describe() must be plain JSON data: {error}") from error
            if pickle.loads(pickle.dumps(tensor)).digest() != tensor.digest():
                raise NonConformance(f"{where}: is another format after pickling")


def check_deterministic_fit(specimen: Specimen) -> None:
    """Two fits give the same format."""
    if specimen.fit().digest() != specimen.fit().digest():
        raise NonConformance(f"{specimen.quantizer.name}: fit() gives another format every time; seed what is random")


def check_planes(specimen: Specimen) -> None:
    """``encode`` fills the declared planes from any leading shape and float dtype, and leaves its input alone."""
    for stream in specimen.tensors():
        codec, block = stream.codec, stream.block
        stream.demand(
            (codec.kv_heads, codec.head_dim) == (stream.format.kv_heads, stream.format.head_dim),
            f"has a codec for {codec.kv_heads} KV heads of {codec.head_dim} dims",
        )
        for lead in ((2 * block,), (3, block), (0,)):
            for dtype in (torch.float32, torch.float16, torch.bfloat16):
                x = stream.sample(*lead).to(dtype)
                given = x.clone()
                encoded = codec.encode(x)
                stream.demand(torch.equal(x, given), "changes the tensor that encode() is given")
                _check_encoded(stream, codec, encoded, (*lead[:-1], lead[-1] // block))
                decoded = codec.decode(encoded)
                stream.demand(
                    decoded.dtype == torch.float32 and decoded.shape == x.shape,
                    f"decodes to {decoded.dtype} {list(decoded.shape)}; expected torch.float32 {list(x.shape)}",
                )


def _check_encoded(stream: Stream, codec: Codec, encoded: tuple[Tensor, ...], lead: tuple[int, ...]) -> None:
    stream.demand(
        len(encoded) == len(codec.planes),
        f"encodes into {len(encoded)} tensors but declares {len(codec.planes)} planes",
    )
    for plane, tensor in zip(codec.planes, encoded, strict=True):
        expected = (*lead, plane.width)
        stream.demand(
            tensor.dtype == plane.dtype and tuple(tensor.shape) == expected,
            f"encodes plane '{plane.name}' as {tensor.dtype} {list(tensor.shape)}; "
            f"it declares {plane.dtype} {list(expected)}",
        )


def check_round_trip(specimen: Specimen) -> None:
    """What decoding gives back resembles what was stored."""
    for stream in specimen.tensors():
        x = stream.sample()
        error = float((stream.codec.reconstruct(x) - x).square().sum() / x.square().sum())
        stream.demand(
            error <= ENOUGH_ERROR,
            f"gives back its input with {error:.0%} of its energy as error; at most {ENOUGH_ERROR:.0%} is expected",
        )


def check_space(specimen: Specimen) -> None:
    """Attention in the codec's space equals attention on what decoding gives back."""
    for stream in specimen.tensors():
        codec = stream.codec
        coordinates = codec.decode(codec.encode(stream.sample()))
        vectors = codec.from_space(coordinates.unsqueeze(-2)).squeeze(-2)
        queries = torch.randn(codec.kv_heads, 3, codec.head_dim, generator=torch.Generator().manual_seed(1))
        expected = torch.einsum("hgd,thd->hgt", queries, vectors)
        found = torch.einsum("hgd,thd->hgt", codec.to_space(queries), coordinates)
        error = float((found - expected).norm() / expected.norm().clamp_min(1e-30))
        stream.demand(
            error < 1e-3,
            f"has logits that differ by {error:.2g} (relative) between to_space(q) . decode(...) and "
            "q . from_space(decode(...))",
        )


def check_zeros(specimen: Specimen) -> None:
    """Zero vectors, among others and alone, decode to something small and finite."""
    for stream in specimen.tensors():
        x = stream.sample()
        usual = float(x.norm(dim=-1).mean())
        x[: stream.block] = 0
        for given in (x, torch.zeros_like(x)):
            found = stream.codec.reconstruct(given)
            stream.demand(bool(torch.isfinite(found).all()), "decodes zero vectors to NaN or infinity")
        largest = float(found.norm(dim=-1).max())
        stream.demand(
            largest <= usual, f"decodes a zero vector to one of norm {largest:.3g}; usual norms are {usual:.3g}"
        )


def check_huge(specimen: Specimen) -> None:
    """Finite input, however large or small, decodes to finite output, or is refused with ValueError."""
    for stream in specimen.tensors():
        channel = stream.sample()
        channel[..., 0] *= 1000
        inputs = {"an outlier channel of 1000 times the usual": channel}
        inputs |= {f"values of {scale:g} times the usual": stream.sample() * scale for scale in (1e4, 1e30, 1e-30)}
        for what, x in inputs.items():
            try:
                found = stream.codec.reconstruct(x)
            except ValueError:
                continue
            stream.demand(
                bool(torch.isfinite(found).all()),
                f"decodes {what} to NaN or infinity; saturate, or raise ValueError in encode()",
            )


def check_nan(specimen: Specimen) -> None:
    """NaN and infinity are refused, never stored."""
    for stream in specimen.tensors():
        for bad in (float("nan"), float("inf"), float("-inf")):
            x = stream.sample()
            x[1, -1, -1] = bad
            try:
                stream.codec.encode(x)
            except ValueError:
                continue
            stream.demand(False, f"stores {bad}; encode() must raise ValueError on NaN and infinity")


def check_bytes(specimen: Specimen) -> None:
    """Declared bits are those stored, and the planes hold everything that decoding needs."""
    for stream in specimen.tensors():
        codec, format = stream.codec, stream.format
        stored, declared = 8 * codec.bytes_per_token, format.bits_per_token
        spare = PADDING_BITS * codec.kv_heads * sum(plane.dtype == torch.uint8 for plane in codec.planes)
        stream.demand(
            stored >= declared - 1e-6,
            f"declares {declared:g} bits a token but stores {stored:g}; bits_per_token counts codes, norms and scales",
        )
        stream.demand(
            stored <= declared + spare,
            f"stores {stored:g} bits a token but declares {declared:g}; bits_per_token counts codes, norms and scales",
        )
        codes = format.code_bits * format.kv_heads * format.head_dim
        stream.demand(codes <= declared + 1e-6, f"declares {codes:g} bits of codes a token of {declared:g} bits in all")
        planes = codec.encode(stream.sample())
        expected = codec.decode(planes)
        other = stream.codec
        other.encode(stream.sample(seed=1))
        share = moved(other.decode(planes), expected)
        stream.demand(
            share == 0,
            f"does not hold all it needs in its planes: another codec decodes {share:.0%} of them differently",
        )


def check_batch_invariance(specimen: Specimen) -> None:
    """A sequence is stored the same alone and in a batch."""
    for stream in specimen.tensors():
        x = stream.sample(3, stream.tokens)
        together = stream.codec.reconstruct(x)
        alone = torch.stack([stream.codec.reconstruct(row) for row in x])
        share = moved(together, alone)
        stream.demand(share <= MOVED_SHARE, f"decodes {share:.0%} of the vectors differently when batched")


def check_pieces(specimen: Specimen) -> None:
    """A cache filled in pieces holds what one filled at once holds."""
    from kvbench.cache_options import CacheOptions
    from kvbench.packed_cache import PackedLayer

    key, value = specimen.tensors()
    count = max(key.tokens, value.tokens) + 5
    keys, values = (stream.sample(2, count).transpose(1, 2) for stream in (key, value))
    contents = []
    for piece in (count, 1, 7):
        layer = PackedLayer(0, key.format, value.format, CacheOptions())
        for start in range(0, count, piece):
            layer.update(keys[:, :, start : start + piece], values[:, :, start : start + piece])
        contents.append(layer.decode())
        for stream, stored in zip((key, value), contents[-1], strict=True):
            stream.demand(stored.shape[1] == count, f"gives back {stored.shape[1]} of {count} tokens")
    for whole, *parts in zip(*contents, strict=True):
        stream = key if whole is contents[0][0] else value
        for part in parts:
            share = moved(part, whole)
            stream.demand(
                share <= MOVED_SHARE, f"decodes {share:.0%} of the vectors differently when appended in pieces"
            )


Check = Callable[[Specimen], None]

CHECKS: dict[str, Check] = {
    "format": check_format,
    "deterministic_fit": check_deterministic_fit,
    "planes": check_planes,
    "round_trip": check_round_trip,
    "space": check_space,
    "zeros": check_zeros,
    "huge": check_huge,
    "nan": check_nan,
    "bytes": check_bytes,
    "batch_invariance": check_batch_invariance,
    "pieces": check_pieces,
}
"""Checks of one geometry. Those of processes, kernels and a whole model are in :mod:`kvbench.conformance_runs`."""
