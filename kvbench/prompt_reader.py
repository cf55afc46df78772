"""Reading prompts into a packed cache, then scoring or generating answers against it."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kvbench.packed_cache import PackedCache, PackedLayer

if TYPE_CHECKING:
    from kvbench.session import Session


class Scored(NamedTuple):
    """A continuation's negative log-likelihoods in nats, float64 ``[count]`` on the CPU, and whether it is greedy."""

    losses: Tensor
    greedy: bool


@dataclass
class PromptReader:
    """Prompts of one cache, read one after another; what a prompt shares with the one before is not read again.

    Prefill steps end at multiples of ``cache.prefill_chunk``, and only whole steps are shared, so that a prompt is
    computed in the same steps whatever was read before it: results do not depend on the order of prompts to the last
    bit. Windows in full precision cannot be taken back; with ``cache.recent_window``, or with sliding-window layers,
    nothing is shared. Made by :meth:`kvbench.session.Session.reading`.
    """

    session: "Session"
    cache: PackedCache
    unproven: bool = field(default=False, init=False)
    _tokens: Tensor | None = field(default=None, init=False, repr=False)  # [batch, slots], left-padded
    _mask: Tensor | None = field(default=None, init=False, repr=False)
    _following: Tensor = field(default_factory=lambda: torch.empty(0), init=False, repr=False)  # logits [batch, vocab]

    @property
    def can_rewind(self) -> bool:
        """Whether tokens can be taken back from the cache without a trace."""
        return self.cache.options.recent_window == 0 and all(
            isinstance(layer, PackedLayer) for layer in self.cache.layers
        )

    def read(self, prompts: list[Tensor]) -> None:
        """Prefill prompts (token ids ``[count]`` each) as one batch, padded on the left."""
        tokens, mask = self.session.left_pad(prompts)
        self._rewind_to(self._shared(tokens))
        self._tokens, self._mask = tokens, None if bool(mask.all()) else mask
        self._prefill()

    def continue_after(self, prompts: list[Tensor]) -> None:
        """Where nothing was read yet, bring the cache to where it was after ``prompts``, without counting the reads.

        An interrupted run then shares, and counts, what it would have without the interruption.
        """
        if self._tokens is None and len(prompts) == 1:
            self.read(prompts)
            self._forget_reads()

    def _prefill(self) -> None:
        assert self._tokens is not None
        self.unproven = True
        rest = self._tokens[:, self.cache.get_seq_length() :]
        for _, logits in self.session.stream(rest, self.cache, self._mask, last_only=True):
            self._following = logits[:, -1].float()

    def _shared(self, tokens: Tensor) -> int:
        """How many tokens of the cache can be kept for ``tokens``: whole prefill steps, and never all of them."""
        chunk = self.session.cache.prefill_chunk
        if self._tokens is None or not self.can_rewind or not chunk or len(tokens) > 1 or len(self._tokens) > 1:
            return 0
        length = min(self._tokens.shape[1], tokens.shape[1] - 1)
        differs = (self._tokens[0, :length] != tokens[0, :length]).nonzero()
        return (int(differs[0]) if len(differs) else length) // chunk * chunk

    def _rewind_to(self, tokens: int) -> None:
        surplus = self.cache.get_seq_length() - tokens
        if surplus and (tokens == 0 or not self.can_rewind):
            self.cache.reset()
        elif surplus:
            self.cache.crop(-surplus)

    def rewind(self) -> None:
        """Take back what followed the prompts."""
        assert self._tokens is not None
        if self.can_rewind:
            self._rewind_to(self._tokens.shape[1])
        elif self.cache.get_seq_length() > self._tokens.shape[1]:
            self._rewind_to(0)
            self._prefill()

    def score(self, continuations: list[Tensor]) -> list[Scored]:
        """Score a continuation (token ids ``[count]``, one or more) of each prompt, against the cache."""
        self.rewind()
        self.unproven = True
        longest = max(map(len, continuations))
        tokens = torch.full((len(continuations), longest), self.session.padding_token, device=self.session.device)
        for row, continuation in enumerate(continuations):
            tokens[row, : len(continuation)] = continuation.to(self.session.device)
        found: list[Tensor] = []
        hits: list[Tensor] = []
        following = self._following[:, None]
        for start, logits in self.session.stream(tokens, self.cache, self._mask_with(tokens)):
            chunk = torch.cat([following, logits[:, :-1].float()], 1)
            targets = tokens[:, start : start + chunk.shape[1]]
            scores = torch.log_softmax(chunk, -1).gather(2, targets[..., None])[..., 0]
            found.append(-scores.double().cpu())
            hits.append((chunk.argmax(-1) == targets).cpu())
            following = logits[:, -1:].float()
        losses, greedy = torch.cat(found, 1), torch.cat(hits, 1)
        counts = [len(continuation) for continuation in continuations]
        return [Scored(losses[row, :n], bool(greedy[row, :n].all())) for row, n in enumerate(counts)]

    def generate(self, max_new_tokens: int, stop: frozenset[int], at_least: int = 0) -> list[list[int]]:
        """Continue each prompt greedily, until a token of ``stop`` (left out) or ``max_new_tokens`` tokens.

        No answer ends before its first ``at_least`` tokens.
        """
        self.rewind()
        self.unproven = True
        answers: list[list[int]] = [[] for _ in range(len(self._following))]
        running = [True] * len(answers)
        following = self._following
        mask = self._mask
        for step in range(max_new_tokens):
            if step < at_least:
                following = following.clone()
                following[:, sorted(stop)] = -torch.inf
            tokens = following.argmax(-1)
            for row, token in enumerate(tokens.tolist()):
                running[row] &= token not in stop
                if running[row]:
                    answers[row].append(token)
            if not any(running) or step == max_new_tokens - 1:
                break
            mask = None if mask is None else torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
            for _, logits in self.session.stream(tokens[:, None], self.cache, mask):
                following = logits[:, -1].float()
        return answers

    def note(self) -> None:
        """Prove that all that was read since the last note came from packed storage. Raises EngagementError."""
        self.session.note(self.cache)
        self._forget_reads()

    def _forget_reads(self) -> None:
        self.cache.forget_reads()
        self.unproven = False

    def _mask_with(self, tokens: Tensor) -> Tensor | None:
        """The mask of prompts and ``tokens``. Padding after a continuation needs none: nothing real comes after it."""
        if self._mask is None:
            return None
        return torch.cat([self._mask, self._mask.new_ones(tokens.shape)], 1)
