"""Perplexity of windows of text, every token's key and value read back through the quantizer."""

import math
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from kvbench.errors import ConfigurationError
from kvbench.task import Task, TaskResult

if TYPE_CHECKING:
    from torch import Tensor

    from kvbench.session import Session

BLOCK = 64  # tokens averaged into one sample: neighbours are correlated


@dataclass(frozen=True)
class Perplexity(Task):
    """``exp`` of the mean negative log-likelihood of the tokens of ``windows`` windows of the evaluation text.

    Windows start ``stride`` tokens apart; where they overlap, only a window's last ``stride`` tokens are scored, so
    that no token counts twice. No BOS token is added.
    """

    name: ClassVar[str] = "perplexity"

    windows: int = field(default=2, metadata={"help": "windows of text"})
    window: int = field(default=1024, metadata={"help": "tokens a window"})
    stride: int = field(default=0, metadata={"help": "tokens between windows' starts; 0: window, no overlap"})

    def __post_init__(self) -> None:
        if self.windows < 1 or self.window < 2:
            raise ConfigurationError(
                f"task.perplexity.windows={self.windows} and window={self.window}: at least 1 window of 2 tokens."
            )
        if not 0 <= self.stride <= self.window:
            raise ConfigurationError(
                f"task.perplexity.stride={self.stride} must be from 1 to window={self.window}, or 0 for window."
            )

    def run(self, session: "Session") -> TaskResult:
        stride = self.stride or self.window
        text = session.windows((self.windows - 1) * stride + self.window)[0]
        start = time.perf_counter()
        per_window: list[float] = []
        samples: list[float] = []
        total, scored = 0.0, 0
        for index in session.track(range(self.windows), "perplexity"):
            tokens = text[index * stride : index * stride + self.window]
            [record] = session.measured([f"window {index}"], partial(measure_window, session, tokens, index, stride))
            per_window.append(math.exp(record["nll"] / record["tokens"]))
            samples += record["block_nll"]
            total += record["nll"]
            scored += record["tokens"]
        return TaskResult(
            metrics={
                "perplexity": math.exp(total / scored),
                "nll": total / scored,
                "per_window": per_window,
                "tokens": scored,
                "windows": self.windows,
                "window": self.window,
                "stride": stride,
                "seconds": time.perf_counter() - start,
            },
            n=scored,
            unit="tokens",
            path=session.path,
            samples={"nll": samples},
        )


def measure_window(session: "Session", tokens: "Tensor", index: int, stride: int) -> list[dict[str, Any]]:
    """The summed negative log-likelihood of a window's tokens, those of overlapping windows before it left out."""
    from kvbench.statistics import block_means

    losses = session.token_losses(tokens)
    kept = losses if index == 0 else losses[-stride:]
    return [{"nll": float(kept.sum()), "tokens": len(kept), "block_nll": block_means(kept.tolist(), BLOCK)}]
