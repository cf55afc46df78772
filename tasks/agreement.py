"""Agreement: how long greedy generation from a quantized cache says what it says from an unquantized one."""

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from kvbench.errors import ConfigurationError
from kvbench.task import Task, TaskResult

if TYPE_CHECKING:
    from torch import Tensor

    from kvbench.packed_cache import PackedCache
    from kvbench.session import Session


@dataclass(frozen=True)
class Agreement(Task):
    """Greedy continuations of pieces of the evaluation text, token by token against the unquantized model's.

    ``agreement`` is the mean fraction of positions with the same token, ``agreed_prefix`` the mean number of tokens
    before the first other one, ``identical`` the fraction of continuations without any. The reference keeps its keys
    and values in the model's own dtype. Tokens that end an answer do not end it here: all continuations are as long.
    """

    name: ClassVar[str] = "agreement"

    prompts: int = field(default=20, metadata={"help": "pieces of the evaluation text, one after another"})
    prompt_tokens: int = field(default=128, metadata={"help": "tokens a piece"})
    new_tokens: int = field(default=128, metadata={"help": "tokens generated after each"})
    batch_size: int = field(default=20, metadata={"help": "pieces read together"})

    def __post_init__(self) -> None:
        for option in ("prompts", "prompt_tokens", "new_tokens", "batch_size"):
            if getattr(self, option) < 1:
                raise ConfigurationError(
                    f"task.agreement.{option}={getattr(self, option)} is not allowed: give 1 or more."
                )

    def run(self, session: "Session") -> TaskResult:
        from kvbench.statistics import summary

        pieces = session.windows(self.prompts * self.prompt_tokens, self.prompt_tokens)
        records: list[dict[str, Any]] = []
        for start in session.track(range(0, self.prompts, self.batch_size), "agreement"):
            batch = pieces[start : start + self.batch_size]
            names = [f"prompt {index}" for index in range(start, start + len(batch))]
            records += session.measured(names, partial(self._measure, session, batch, start))
        session.prefill_peak_bytes = None  # two caches were read side by side: the peak is neither's
        samples = {key: [float(record[key]) for record in records] for key in ("agreement", "agreed_prefix")}
        metrics: dict[str, Any] = {}
        for key, values in samples.items():
            metrics |= summary(key, values)
        return TaskResult(
            metrics={
                **metrics,
                "identical": sum(prefix == self.new_tokens for prefix in samples["agreed_prefix"]) / len(records),
                "prompt_tokens": self.prompt_tokens,
                "new_tokens": self.new_tokens,
            },
            n=len(records),
            unit="prompts",
            path=session.path,
            samples=samples,
        )

    def _measure(self, session: "Session", prompts: "Tensor", start: int) -> list[dict[str, Any]]:
        from kvbench.chat import decode

        name = f"greedy continuations {self!r} from {start}"
        with session.engage(self.prompt_tokens + self.new_tokens) as cache:
            if name not in session.memo:
                session.memo[name] = self._continue(session, session.unquantized_cache(), prompts)
            found = self._continue(session, cache, prompts)
        tokenizer = session.loaded.tokenizer
        return [
            {
                "agreement": sum(a == b for a, b in zip(tokens, reference, strict=True)) / self.new_tokens,
                "agreed_prefix": agreed_prefix(tokens, reference),
                "answer": decode(tokenizer, tokens),
                "reference": decode(tokenizer, reference),
            }
            for tokens, reference in zip(found, session.memo[name], strict=True)
        ]

    def _continue(self, session: "Session", cache: "PackedCache", prompts: "Tensor") -> list[list[int]]:
        """The greedy continuation of each of ``prompts [batch, tokens]`` through ``cache``."""
        from kvbench.prompt_reader import PromptReader

        reader = PromptReader(session, cache)
        reader.read(list(prompts))
        return reader.generate(self.new_tokens, stop=frozenset())


def agreed_prefix(first: list[int], second: list[int]) -> int:
    """How many tokens two continuations have in common before the first difference."""
    pairs = enumerate(zip(first, second, strict=True))
    return next((index for index, (one, other) in pairs if one != other), len(first))
