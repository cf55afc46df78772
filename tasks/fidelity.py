"""Fidelity: how far next-token distributions move, on the same tokens, from those of the unquantized cache."""

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from kvbench.errors import ConfigurationError
from kvbench.task import Task, TaskResult

if TYPE_CHECKING:
    from torch import Tensor

    from kvbench.session import Session

BLOCK = 32  # tokens averaged into one sample: neighbours are correlated


def divergence(reference: "Tensor", other: "Tensor") -> "Tensor":
    """KL divergence in nats, ``[tokens]``, of next-token distributions given as logits ``[tokens, vocabulary]``."""
    import torch

    expected = torch.log_softmax(reference.double(), -1)
    found = torch.log_softmax(other.double(), -1)
    return (expected.exp() * (expected - found)).sum(-1)


@dataclass(frozen=True)
class Fidelity(Task):
    """Mean KL divergence from the unquantized model's next-token distribution, and how often the top token agrees.

    Reference and quantizer read the same tokens of the evaluation text, chunk by chunk; the reference keeps its keys
    and values in the model's own dtype. Intervals are bootstrapped over blocks of 32 tokens.
    """

    name: ClassVar[str] = "fidelity"

    windows: int = field(default=2, metadata={"help": "windows of text"})
    window: int = field(default=512, metadata={"help": "tokens a window"})

    def __post_init__(self) -> None:
        if self.windows < 1 or self.window < 1:
            raise ConfigurationError(
                f"task.fidelity.windows={self.windows} and window={self.window} must both be at least 1."
            )

    def run(self, session: "Session") -> TaskResult:
        from kvbench.statistics import block_means, bootstrap_mean

        windows = list(session.windows(self.windows * self.window, self.window))
        divergences: list[float] = []
        agreements: list[float] = []
        for index in session.track(range(self.windows), "fidelity"):
            measure = partial(measure_window, session, windows[index])
            [record] = session.measured([f"window {index}"], measure)
            divergences += record["kl"]
            agreements += record["top1_agreement"]
        session.prefill_peak_bytes = None  # two caches were read side by side: the peak is neither's
        samples = {
            "kl": block_means(divergences, BLOCK),
            "top1_agreement": block_means(agreements, BLOCK),
        }
        return TaskResult(
            metrics={
                "kl": sum(divergences) / len(divergences),
                "kl_interval": list(bootstrap_mean(samples["kl"])),
                "kl_max": max(divergences),
                "top1_agreement": sum(agreements) / len(agreements),
                "top1_agreement_interval": list(bootstrap_mean(samples["top1_agreement"])),
                "windows": self.windows,
                "window": self.window,
                "block": BLOCK,
            },
            n=len(divergences),
            unit="tokens",
            path=session.path,
            samples=samples,
        )


def measure_window(session: "Session", tokens: "Tensor") -> list[dict[str, Any]]:
    """Divergence and agreement after each of a window's ``tokens``, from both caches side by side."""
    import torch

    divergences: list[float] = []
    agreements: list[float] = []
    with session.engage(len(tokens)) as cache:
        pairs = zip(
            session.stream(tokens[None], session.unquantized_cache()), session.stream(tokens[None], cache), strict=True
        )
        for (_, reference), (_, found) in pairs:
            divergences += divergence(reference[0], found[0]).tolist()
            agreements += (reference[0].argmax(-1) == found[0].argmax(-1)).to(torch.float64).tolist()
    return [{"kl": divergences, "top1_agreement": agreements}]
