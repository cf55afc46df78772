"""Decode attention over the reference codec's planes for every ``RotatedCodebook`` format, in Triton."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvbench.kernels.attention import Partial
from kvbench.kernels.formats import Fp16Norm, RotatedCodebook
from kvbench.kernels.rotated_codebook import head_segments

BLOCK = 32  # tokens a step
BLOCKS_PER_MULTIPROCESSOR = 4
MAX_GROUP = 16  # query heads a KV head: the smallest matrix product Triton has
MAX_DIM = 256


@dataclass(frozen=True)
class _Tables:
    """Where each coordinate's code and norm are and what they mean, ``[kv_heads, head_dim, ...]``."""

    ints: Tensor
    floats: Tensor
    levels: Tensor


def _tables(format: RotatedCodebook, device: torch.device) -> _Tables:
    heads, dim = format.kv_heads, format.head_dim
    segments = [head_segments(head) for head in format.heads]
    longest = max(len(segment.codebook.levels) for row in segments for segment in row)
    ints, floats = np.zeros((heads, dim, 4), np.int32), np.zeros((heads, dim, 2), np.float32)
    levels = np.zeros((heads, dim, longest), np.float32)
    start, norms, norm_bit = 0, 0, 0
    for head, row in enumerate(segments):
        bit = 8 * start
        groups = [(index, group) for index, group in enumerate(format.heads[head].groups) for _ in group.dims]
        for coordinate, (segment, (index, group)) in enumerate(zip(row, groups, strict=True)):
            values = np.float32(segment.codebook.scale) * np.array(segment.codebook.levels, np.float32)
            levels[head, coordinate, : len(values)] = values
            if isinstance(group.norm, Fp16Norm):
                place, floats[head, coordinate, 0] = norms + index, group.norm.scale
            else:
                place, floats[head, coordinate] = norm_bit + index * group.norm.bits, (group.norm.low, group.norm.step)
            ints[head, coordinate] = (bit, segment.bits, place, group.norm.bits)
            bit += segment.bits
        start += format.heads[head].row_bytes
        norms += len(format.heads[head].groups)
        norm_bit += sum(group.norm.bits for group in format.heads[head].groups)
    return _Tables(*(torch.from_numpy(array).to(device) for array in (ints, floats, levels)))


class RowAttention:
    """Attention of one query token a sequence over one layer's rows, as the reference codec packs them.

    Raises ValueError for formats with a centre, whose logits have a term of their own, and past head_dim 256.
    """

    def __init__(
        self, key: RotatedCodebook, value: RotatedCodebook, device: torch.device | str, splits: int | None = None
    ) -> None:
        if key.centre or value.centre:
            raise ValueError("the row kernel has no centre term")
        if key.head_dim > MAX_DIM:
            raise ValueError(f"the row kernel serves head_dim up to {MAX_DIM}, not {key.head_dim}")
        self.device, self.splits = torch.device(device), splits
        self.key_codec, self.value_codec = key.codec(self.device), value.codec(self.device)
        self._key, self._value = _tables(key, self.device), _tables(value, self.device)

    def __call__(
        self,
        q: Tensor,
        key_planes: tuple[Tensor, ...],
        value_planes: tuple[Tensor, ...],
        starts: Tensor,
        stops: Tensor,
        scaling: float,
        extra: Partial | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attend ``q [batch, q_heads, head_dim]`` to tokens ``starts[b] <= t < stops[b]`` (int32, on the device).

        Planes ``[batch, tokens, width]`` as the codec makes them; ``extra`` and results as of
        :class:`~kvbench.kernels.tile_attention.TileAttention`.
        """
        from kvbench.kernels.row_kernels import attend

        batch, q_heads, dim = q.shape
        kv_heads = self.key_codec.kv_heads
        group = q_heads // kv_heads
        if dim != self.key_codec.head_dim or q_heads % kv_heads or not 1 <= group <= MAX_GROUP:
            raise ValueError(f"q must be [batch, up to {MAX_GROUP} x {kv_heads} heads, head_dim], not {list(q.shape)}")
        grouped = self.key_codec.to_space(q.reshape(batch, kv_heads, group, dim)).contiguous()
        splits = self.splits or self._default_splits(batch * kv_heads, key_planes[0].shape[1])
        partial = torch.empty(batch, kv_heads, group, splits, dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(batch, kv_heads, group, splits, dtype=torch.float32, device=q.device)
        planes = (*key_planes, *value_planes)
        attend[(splits, batch * kv_heads)](
            grouped, *key_planes, self._key.ints, self._key.floats, self._key.levels, *value_planes, self._value.ints,
            self._value.floats, self._value.levels, starts, stops, partial, lse, scaling, group, kv_heads,
            *(plane.stride(1) for plane in planes), *(plane.stride(0) for plane in planes),
            DIM=dim, WIDTH=max(16, 1 << (dim - 1).bit_length()), BLOCK=BLOCK,
            KEY_TABLE=self._key.levels.shape[-1], VALUE_TABLE=self._value.levels.shape[-1],
            KEY_LOG=key_planes[1].dtype == torch.uint8, VALUE_LOG=value_planes[1].dtype == torch.uint8, num_warps=4,
        )  # fmt: skip
        return self._merge(partial, lse, q, extra)

    def _merge(self, partial: Tensor, lse: Tensor, q: Tensor, extra: Partial | None) -> tuple[Tensor, Tensor]:
        total = torch.logsumexp(lse, -1)
        weights = torch.exp(lse - torch.nan_to_num(total, neginf=0.0)[..., None])
        out = self.value_codec.from_space(torch.einsum("bhgs,bhgsd->bhgd", weights, partial)).reshape(q.shape)
        total = total.reshape(q.shape[:2])
        if extra is not None:
            both = torch.logaddexp(total, extra.lse)
            safe = torch.nan_to_num(both, neginf=0.0)
            out = out * torch.exp(total - safe)[..., None] + extra.out.float() * torch.exp(extra.lse - safe)[..., None]
            total = both
        return out.to(q.dtype), total

    def _default_splits(self, rows: int, tokens: int) -> int:
        most = -(-tokens // BLOCK)
        if self.device.type != "cuda":
            return min(most, 4)
        blocks = torch.cuda.get_device_properties(self.device).multi_processor_count * BLOCKS_PER_MULTIPROCESSOR
        return max(1, min(most, -(-blocks // rows)))
