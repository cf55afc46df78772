"""Logit error: how far attention logits move when keys are quantized, layer by layer."""

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from kvbench.errors import ConfigurationError
from kvbench.geometry import LayerGeometry
from kvbench.task import Task, TaskResult

if TYPE_CHECKING:
    from torch import Tensor

    from kvbench.session import Session

WINDOWS_AT_ONCE = 4  # bounds the memory of captured queries, keys and values


def offset_errors(q: "Tensor", error: "Tensor", angles: "Tensor", geometry: LayerGeometry) -> "Tensor":
    """``sum |q^T R_a e|`` over tokens and query heads of a KV head, per KV head ``[kv_heads]``.

    ``q [tokens, q_heads, head_dim]`` and ``error [tokens, kv_heads, head_dim]`` (key minus decoded key) are before
    RoPE; ``angles [offsets, rotary_dim / 2]`` are offset times inverse frequency. A block contributes
    ``A cos + B sin`` with A its dot product and B its cross product, so all offsets are two matrix products.
    """
    import torch

    tokens, kv_heads, _ = error.shape
    grouped = q.float().reshape(tokens, kv_heads, geometry.group_size, -1)
    spread = error.float().unsqueeze(2)
    blocks = torch.tensor(geometry.blocks, dtype=torch.long, device=q.device).reshape(-1, 2)
    q0, q1 = grouped[..., blocks[:, 0]], grouped[..., blocks[:, 1]]
    e0, e1 = spread[..., blocks[:, 0]], spread[..., blocks[:, 1]]
    cos, sin = angles.cos().float().T, angles.sin().float().T
    logits = (q0 * e0 + q1 * e1) @ cos + (q1 * e0 - q0 * e1) @ sin
    rest = torch.tensor(geometry.unrotated_dims, dtype=torch.long, device=q.device)
    logits += (grouped[..., rest] * spread[..., rest]).sum(-1, keepdim=True)
    return logits.abs().double().sum(dim=(0, 2, 3))


@dataclass(frozen=True)
class LogitError(Task):
    """Mean over KV heads, query heads, tokens and offsets d of ``|q^T R_d k - q^T R_d k'|``, k' the decoded key.

    q and k are the model's own before RoPE, at the same token, from the evaluation text, which the quantizer has not
    seen (arXiv 2606.24033, section 4; softmax scaling is not applied).
    """

    name: ClassVar[str] = "logit_error"

    tokens: int = field(default=2048, metadata={"help": "tokens of the evaluation text"})
    window: int = field(default=256, metadata={"help": "tokens a forward pass; positions restart in each window"})
    offsets: int = field(default=50, metadata={"help": "relative positions, evenly from -max_offset to max_offset"})
    max_offset: int = field(default=1024, metadata={"help": "largest relative position"})

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.window < 1 or self.tokens % self.window:
            raise ConfigurationError(
                f"task.logit_error.tokens={self.tokens} and window={self.window}: both must be positive and tokens a "
                "multiple of window."
            )
        if self.offsets < 1 or self.max_offset < 0:
            raise ConfigurationError("task.logit_error.offsets must be at least 1 and max_offset not negative.")

    def run(self, session: "Session") -> TaskResult:
        geometry = session.loaded.geometry
        windows = session.windows(self.tokens, self.window)
        starts = range(0, len(windows), WINDOWS_AT_ONCE)
        sums = [np.zeros(layer.kv_heads) for layer in geometry.layers]
        for start in session.track(starts, "logit error"):
            batch = windows[start : start + WINDOWS_AT_ONCE]
            names = [f"windows {start} to {start + len(batch) - 1}"]
            [record] = session.measured(names, partial(self._measure, session, batch, start))
            sums = [total + np.array(part) for total, part in zip(sums, record["sums"], strict=True)]
        per_head = [
            total / (self.tokens * shape.group_size * self.offsets)
            for total, shape in zip(sums, geometry.layers, strict=True)
        ]
        per_layer = [float(head.mean()) for head in per_head]
        return TaskResult(
            metrics={
                "per_layer": per_layer,
                "mean": sum(per_layer) / len(per_layer),
                "per_head": [head.tolist() for head in per_head],
                "offsets": self.offsets,
                "max_offset": self.max_offset,
            },
            n=self.tokens,
            unit="tokens",
            path=session.path,
        )

    def _measure(self, session: "Session", windows: "Tensor", start: int) -> list[dict[str, Any]]:
        """Errors summed over windows, tokens, query heads and offsets, a float a KV head, layer by layer."""
        import torch

        from kvbench.rope import layer_frequencies

        distances = torch.linspace(-self.max_offset, self.max_offset, self.offsets, dtype=torch.float64)
        sums: list[list[float]] = []
        with session.storage() as cache:
            captured = session.captured(f"windows of {self.window} from {start}", windows)
            for layer, (q, k) in enumerate(captured):
                shape = session.loaded.geometry.layers[layer]
                frequencies, _ = layer_frequencies(session.loaded.model, layer, shape)
                angles = distances[:, None].to(frequencies.device) * frequencies
                error = k.float() - session.stored_keys(cache, layer, k)
                sums.append(offset_errors(q.flatten(0, 1), error.flatten(0, 1), angles, shape).tolist())
        return [{"sums": sums}]
