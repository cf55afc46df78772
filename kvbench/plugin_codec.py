"""Watching over plugins' codecs: what breaks the contract while a model runs is told by layer, role and plugin."""

import torch
from torch import Tensor

from kvbench.errors import PluginError
from kvbench.kernels.codec import Codec
from kvbench.kernels.formats import TensorFormat

OWN = "kvbench."
PROBE_TOKENS = 2


def layer_codec(format: TensorFormat, device: torch.device | str, layer: int, role: str) -> Codec:
    """The codec of a layer's ``role`` ("keys", "values") on ``device``; a plugin's is watched over.

    kvbench's own formats are held to the contract by tests, a plugin's when it is used.
    """
    codec = format.codec(device)
    if type(format).__module__.startswith(OWN):
        return codec
    where = f"layer {layer}, {role}: format '{format.kind}' ({type(format).__module__}.{type(format).__qualname__})"
    return WatchedCodec(codec, where)


class WatchedCodec(Codec):
    """A plugin's codec; raises PluginError where it does not do what it declares. ``where`` begins every message."""

    def __init__(self, codec: Codec, where: str) -> None:
        if not isinstance(codec, Codec):
            raise PluginError(f"{where} must give a kvbench.api.Codec from codec(), not {type(codec).__name__}.")
        self._codec, self.where = codec, where
        self.kv_heads, self.head_dim, self.planes = codec.kv_heads, codec.head_dim, codec.planes
        self.block_tokens = codec.block_tokens

    def encode(self, x: Tensor, positions: Tensor | None = None) -> tuple[Tensor, ...]:
        encoded = self._codec.encode(x, positions)
        if len(encoded) != len(self.planes):
            raise PluginError(f"{self.where} encodes {len(encoded)} planes but declares {len(self.planes)}.")
        for plane, tensor in zip(self.planes, encoded, strict=True):
            if tensor.dtype != plane.dtype or tensor.shape[-1:] != (plane.width,) or tensor.dim() != x.dim() - 1:
                raise PluginError(
                    f"{self.where} encodes plane '{plane.name}' as {tensor.dtype} {list(tensor.shape)}; it declares "
                    f"{plane.dtype} of width {plane.width}."
                )
        return encoded

    def decode(self, planes: tuple[Tensor, ...]) -> Tensor:
        decoded = self._codec.decode(planes)
        expected = (self.kv_heads, self.head_dim)
        if decoded.dtype != torch.float32 or decoded.shape[-2:] != expected:
            raise PluginError(
                f"{self.where} decodes to {decoded.dtype} {list(decoded.shape)}; expected torch.float32 "
                f"[..., {expected[0]}, {expected[1]}]."
            )
        if not torch.isfinite(decoded).all():
            raise PluginError(f"{self.where} decodes finite input to NaN or infinity.")
        return decoded

    @property
    def constant_bytes(self) -> int:
        return self._codec.constant_bytes

    def to_space(self, q: Tensor) -> Tensor:
        return self._codec.to_space(q)

    def from_space(self, out: Tensor) -> Tensor:
        return self._codec.from_space(out)

    def centre(self, positions: Tensor) -> Tensor | None:
        return self._codec.centre(positions)

    def centred(self, planes: tuple[Tensor, ...]) -> Tensor | None:
        return self._codec.centred(planes)

    def centre_logits(self, queries: Tensor, first: Tensor, count: int) -> Tensor | None:
        return self._codec.centre_logits(queries, first, count)


def probe(format: TensorFormat, layer: int, role: str) -> None:
    """Encode and decode a few numbers in a plugin's format, so that what is wrong with it is told before a model runs.

    Raises PluginError, also where it stores more bytes than it declares bits for, or fewer.
    """
    if type(format).__module__.startswith(OWN):
        return
    codec = layer_codec(format, "cpu", layer, role)
    assert isinstance(codec, WatchedCodec)
    where = codec.where
    x = torch.randn(
        PROBE_TOKENS * codec.block_tokens, format.kv_heads, format.head_dim, generator=torch.Generator().manual_seed(0)
    )
    try:
        codec.decode(codec.encode(x))
    except PluginError:
        raise
    except Exception as error:
        raise PluginError(f"{where} fails on ordinary numbers with {type(error).__name__}: {error}.") from error
    stored, declared = 8 * codec.bytes_per_token, format.bits_per_token
    padding = 8 * format.kv_heads * sum(plane.dtype == torch.uint8 for plane in codec.planes)
    if not declared <= stored <= declared + padding:
        raise PluginError(f"{where} stores {stored:g} bits a token but declares bits_per_token={declared:g}.")
