"""The shape of a model's attention, layer by layer: what a quantizer must know to lay out a cache."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerGeometry:
    """One attention layer.

    ``rotary_dim`` leading dims carry RoPE (0: none). In the half-split layout block ``i`` is dims
    ``(i, i + rotary_dim / 2)``; in the interleaved layout dims ``(2i, 2i + 1)``.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    interleaved: bool = False
    sliding_window: int | None = None

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.q_heads // self.kv_heads

    @property
    def blocks(self) -> tuple[tuple[int, int], ...]:
        """The RoPE blocks as pairs of head dims, ``rotary_dim / 2`` of them, slow-turning last."""
        half = self.rotary_dim // 2
        if self.interleaved:
            return tuple((2 * i, 2 * i + 1) for i in range(half))
        return tuple((i, i + half) for i in range(half))

    @property
    def unrotated_dims(self) -> tuple[int, ...]:
        """Head dims that RoPE leaves alone."""
        return tuple(range(self.rotary_dim, self.head_dim))


@dataclass(frozen=True)
class ModelGeometry:
    """All attention layers of a model, and the dtype its weights and activations have (``"bfloat16"``, ...)."""

    layers: tuple[LayerGeometry, ...]
    dtype: str = "float32"

    @property
    def head_dim(self) -> int:
        """Head dim of the first layer (most models have one)."""
        return self.layers[0].head_dim
