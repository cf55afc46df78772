"""Storage of formats that encode tokens a block at a time, such as KIVI's keys: blocks in planes, the rest in a tail.

A sequence's blocks count from its own first token, wherever left padding puts it, so that it is stored the same
alone and in a batch. Tokens that do not fill a block yet wait in full precision; their tensor is counted.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.kernels.codec import Codec

GROWTH = 1.5


class DecodedTokens(Codec):
    """Reads what :meth:`BlockStorage.read` gives: tokens that are decoded already, one plane of them.

    Planes and constant bytes are those of the blocks' codec, since they are what is stored.
    """

    def __init__(self, codec: Codec) -> None:
        self.blocks = codec
        self.kv_heads, self.head_dim, self.planes = codec.kv_heads, codec.head_dim, codec.planes
        self.block_tokens = codec.block_tokens

    @property
    def constant_bytes(self) -> int:
        return self.blocks.constant_bytes

    def encode(self, x: Tensor, positions: Tensor | None = None) -> tuple[Tensor, ...]:
        return self.blocks.encode(x, positions)

    def decode(self, planes: tuple[Tensor, ...]) -> Tensor:
        return planes[0].unflatten(-1, (self.kv_heads, self.head_dim))


class BlockStorage:
    """Planes ``[batch, blocks, width]`` of full blocks and a tail ``[batch, block_tokens - 1, kv_heads, head_dim]``.

    Rows need not have the same number of tokens: ``filled[row]`` counts a sequence's real ones.
    """

    def __init__(self, codec: Codec, batch: int, capacity: int, like: Tensor) -> None:
        self.codec, self.block = DecodedTokens(codec), codec.block_tokens
        blocks = capacity // self.block
        self.planes = [
            torch.zeros(batch, blocks, plane.width, dtype=plane.dtype, device=like.device) for plane in codec.planes
        ]
        self.tail = like.new_zeros(batch, self.block - 1, codec.kv_heads, codec.head_dim)
        self.filled = [0] * batch
        self.starts = [0] * batch

    @property
    def batch(self) -> int:
        return self.tail.shape[0]

    @property
    def nbytes(self) -> int:
        tensors = [*self.planes, self.tail]
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors) + self.codec.constant_bytes

    def reserve(self, tokens: int) -> None:
        """Make room for ``tokens`` tokens a sequence."""
        present = self.planes[0].shape[1]
        if tokens // self.block <= present:
            return
        blocks = max(tokens // self.block, int(present * GROWTH))
        for index, plane in enumerate(self.planes):
            grown = plane.new_zeros(plane.shape[0], blocks, plane.shape[2])
            grown[:, :present] = plane
            self.planes[index] = grown

    def write(self, start: int, states: Tensor, positions: Tensor) -> None:
        """Append ``states [batch, tokens, kv_heads, head_dim]`` at slot ``start``; negative positions are padding."""
        if not torch.isfinite(states).all():
            raise ValueError("cannot encode NaN or infinity")
        self.starts = (start - positions[:, 0]).tolist()
        counts = (positions >= 0).sum(1).tolist()
        alike: dict[tuple[int, int], list[int]] = {}
        for row, count in enumerate(counts):
            alike.setdefault((self.filled[row], count), []).append(row)
        for (filled, count), rows in alike.items():
            if count:
                self._append(rows, filled, states[rows, -count:])

    def _append(self, rows: Sequence[int], filled: int, states: Tensor) -> None:
        """Append to sequences that have ``filled`` tokens each."""
        first, waiting = divmod(filled, self.block)
        tokens = torch.cat([self.tail[rows, :waiting], states], 1)
        full, rest = divmod(tokens.shape[1], self.block)
        if full:
            encoded = self.codec.encode(tokens[:, : full * self.block])
            for plane, part in zip(self.planes, encoded, strict=True):
                plane[rows, first : first + full] = part
        self.tail[rows, :rest] = tokens[:, full * self.block :]
        for row in rows:
            self.filled[row] = filled + states.shape[1]

    def read(self, length: int) -> tuple[Tensor, ...]:
        """Tokens of slots ``0 .. length - 1``, decoded: one float32 tensor ``[batch, length, kv_heads * head_dim]``."""
        codec = self.codec.blocks
        blocks = max(self.filled) // self.block
        decoded = codec.decode(tuple(plane[:, :blocks] for plane in self.planes))
        tokens = decoded.new_zeros(self.batch, length, codec.kv_heads, codec.head_dim)
        for row, (start, filled) in enumerate(zip(self.starts, self.filled, strict=True)):
            full = filled // self.block * self.block
            tokens[row, start : start + full] = decoded[row, :full]
            tokens[row, start + full : start + filled] = self.tail[row, : filled - full].float()
        return (tokens.flatten(-2),)

    def crop(self, length: int) -> None:
        """Forget all slots from ``length`` on. What is left of a block that is cut waits in the tail, as decoded."""
        for row, (start, filled) in enumerate(zip(self.starts, self.filled, strict=True)):
            kept = max(0, min(filled, length - start))
            block, rest = divmod(kept, self.block)
            if rest and block < filled // self.block:
                cut = self.codec.blocks.decode(tuple(plane[row, block : block + 1] for plane in self.planes))
                self.tail[row, :rest] = cut[:rest].to(self.tail.dtype)
            self.filled[row] = kept

    def select(self, rows: Tensor) -> None:
        """Keep the sequences ``rows``, in that order, repeats allowed."""
        self.planes = [plane.index_select(0, rows.to(plane.device)) for plane in self.planes]
        self.tail = self.tail.index_select(0, rows.to(self.tail.device))
        self.filled, self.starts = ([each[row] for row in rows.tolist()] for each in (self.filled, self.starts))

    def move(self, device: torch.device | str) -> None:
        self.planes = [plane.to(device, non_blocking=True) for plane in self.planes]
        self.tail = self.tail.to(device, non_blocking=True)
