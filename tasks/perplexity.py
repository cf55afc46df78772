"""Perplexity of windows of text, every token's key and value read back through the quantizer."""

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from kvbench.errors import ConfigurationError
from kvbench.task import Task, TaskResult

if TYPE_CHECKING:
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
        from kvbench.statistics import block_means

        stride = self.stride or self.window
        text = session.windows((self.windows - 1) * stride + self.window)[0]
        start = time.perf_counter()
        per_window: list[float] = []
        samples: list[float] = []
        total, scored = 0.0, 0
        for index in session.track(range(self.windows), "perplexity"):
            tokens = text[index * stride : index * stride + self.window]
            losses = session.token_losses(tokens)
            kept = losses if index == 0 else losses[-stride:]
            per_window.append(math.exp(float(kept.mean())))
            samples += block_means(kept.tolist(), BLOCK)
            total += float(kept.sum())
            scored += len(kept)
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
