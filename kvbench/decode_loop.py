"""Decoding token after token: in whole steps on the device, captured in a CUDA graph, where the cache permits it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from kvbench.attention import cache_argument, packed_attention
from kvbench.decode_step import Span, Step, StepCache, StepStorage, current
from kvbench.errors import ConfigurationError, EngagementError
from kvbench.merged_projections import Merging, merge_projections
from kvbench.output_folding import Folding, fold_outputs
from kvbench.packed_cache import PackedCache, PackedLayer

Hook = Callable[[], object]
ModelStep = Callable[[Tensor, Tensor, StepCache], Tensor]
OUTPUT = 512  # tokens a sequence that are kept on the device before they are copied out
COMPILE: dict[str, dict[str, Any] | None] = {
    "none": None,
    "default": {},
    "tuned": {"coordinate_descent_tuning": True},
    "max-autotune": {"coordinate_descent_tuning": True, "max_autotune": True},
}
"""Ways to compile the model's step, and torch.compile's options for each; the graph is captured by the loop itself.

With ``tuned`` the products of one token with the weights become reductions whose shapes are searched for; with
``max-autotune`` those of several tokens are chosen among libraries and templates too.
"""
WARM_UP = 2  # steps before capture: the first compiles kernels, the second finds them compiled


def nothing() -> None:
    """A hook that does nothing."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: greedily at ``temperature`` 0, else at random, on the device.

    ``top_k`` tokens of the largest probability are candidates (0: all), and of these the fewest whose probabilities sum
    to at least ``top_p``. Draws come from torch's default generator of the device.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ConfigurationError(
                f"sampling with temperature={self.temperature:g}, top_k={self.top_k}, top_p={self.top_p:g} is not "
                "possible: temperature and top_k are at least 0, top_p is above 0 and at most 1."
            )

    def choose(self, logits: Tensor) -> Tensor:
        """A token for each row of ``logits [batch, vocabulary]``: int64 ``[batch]``. Does not wait for the device."""
        if self.temperature == 0:
            return logits.argmax(-1)
        logits = logits.float() / self.temperature
        if self.top_k:
            least = logits.topk(min(self.top_k, logits.shape[-1]), -1).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        if self.top_p < 1:
            ordered, order = logits.sort(-1, descending=True)
            probabilities = ordered.softmax(-1)
            beyond = probabilities.cumsum(-1) - probabilities >= self.top_p
            logits = torch.full_like(logits, -torch.inf).scatter(-1, order, ordered.masked_fill(beyond, -torch.inf))
        # the largest of p / e with e exponential is a draw from p, and, unlike multinomial, needs no look by the host
        return (logits.softmax(-1) / torch.empty_like(logits).exponential_()).argmax(-1)


def obstacle(cache: PackedCache) -> str | None:
    """Why steps over ``cache`` need the host, or None where they can run on the device alone."""
    options = cache.options
    if options.n_sink or options.recent_window:
        return "sinks and recent windows are kept by the host"
    for index, layer in enumerate(cache.layers):
        if not isinstance(layer, PackedLayer):
            return f"layer {index} has a sliding window"
        if layer.storage is None:
            return f"layer {index} holds nothing yet"
        if not hasattr(layer.storage, "step"):
            return f"layer {index} is read by the {layer.storage.backend} backend: {layer.storage.why}"
    return None


def decode_loop(
    model: Any,
    cache: PackedCache,
    tokens: Tensor,
    sampling: Sampling | None = None,
    graph: bool = True,
    compile: str = "none",
    fold: bool = False,
    merge: bool = False,
) -> "DeviceLoop | HostLoop":
    """A loop that continues ``cache``, filled with prompts, from ``tokens [batch]``, which are chosen but not yet read.

    On the device alone where the cache permits it (:func:`obstacle`), otherwise by the model's ordinary forward passes.
    ``graph`` captures a step in a CUDA graph where there is a CUDA device; ``compile`` is a key of :data:`COMPILE`.
    ``fold`` folds rotations of packed values into the model's output projections, where a step has them
    (:mod:`kvbench.output_folding`); ``merge`` reads projections of one input as one
    (:mod:`kvbench.merged_projections`). Raises ConfigurationError for another ``compile``.
    """
    if compile not in COMPILE:
        raise ConfigurationError(f"compile={compile} is not known: choose {', '.join(COMPILE)}.")
    for layer in cache.packed_layers:
        layer.store()
    sampling = sampling or Sampling()
    if (why := obstacle(cache)) is not None:
        return HostLoop(model, cache, tokens, sampling, why)
    return DeviceLoop(model, cache, tokens, sampling, graph and tokens.is_cuda, compile, fold, merge)


class HostLoop:
    """Steps by the model's ordinary forward pass over the packed cache; ``why`` says why not on the device alone."""

    graph, compile, folded, merged = False, "none", False, False

    def __init__(self, model: Any, cache: PackedCache, tokens: Tensor, sampling: Sampling, why: str) -> None:
        self.model, self.cache, self.sampling, self.why = model, cache, sampling, why
        self.tokens = tokens
        starts = cache.packed_layers[0].starts
        self._starts = starts if bool(starts.any()) else None

    def run(self, steps: int, before_step: Hook = nothing, after_steps: Hook = nothing) -> Tensor:
        """Decode ``steps`` tokens of each sequence: int64 ``[batch, steps]``. See :meth:`DeviceLoop.run`."""
        chosen = []
        with packed_attention(self.model), torch.no_grad():
            for _ in range(steps):
                before_step()
                self.tokens = self.sampling.choose(self._logits())
                chosen.append(self.tokens)
            after_steps()
        return torch.stack(chosen, 1)

    def _logits(self) -> Tensor:
        options: dict[str, Any] = {}
        past = self.cache.get_seq_length()
        if self._starts is not None:
            slots = torch.arange(past + 1, device=self.tokens.device)
            options["attention_mask"] = (slots >= self._starts[:, None]).long()
            options["position_ids"] = (past - self._starts)[:, None]
        options[cache_argument(self.model)] = self.cache
        logits: Tensor = self.model(self.tokens[:, None], use_cache=True, **options).logits
        return logits[:, -1]


class DeviceLoop:
    """Steps whose every input is on the device: token, positions, lengths. The host only launches them.

    With ``graph`` a step is captured once and replayed; when the cache is full it grows and the step is captured again.
    """

    why = None

    def __init__(
        self,
        model: Any,
        cache: PackedCache,
        tokens: Tensor,
        sampling: Sampling,
        graph: bool,
        compile: str,
        fold: bool,
        merge: bool,
    ) -> None:
        self.model, self.cache, self.sampling, self.graph, self.compile = model, cache, sampling, graph, compile
        first = cache.packed_layers[0]
        device, batch = tokens.device, len(tokens)
        self.tokens = tokens.clone()
        slots = torch.full((batch,), first.tokens, dtype=torch.int32, device=device)
        span = Span(first.starts.to(torch.int32), slots, slots + 1)
        storages = [cast(StepStorage, layer.storage) for layer in cache.packed_layers]
        exact = cache.options.exact_prefill
        self._folding = fold_outputs(model, storages) if fold and not exact else Folding(storages, ())
        self._merging = merge_projections(model) if merge else Merging()
        self.position = Step(self._folding.storages, span, exact)
        self._positions = (first.tokens - first.starts)[:, None].clone()
        self._output = torch.zeros(batch, OUTPUT, dtype=torch.long, device=device)
        self._column = torch.zeros(1, dtype=torch.long, device=device)
        self._forward, self._cache = _compiled(model, len(cache.layers), compile, self.merged)
        self._replay: Callable[[], None] | None = None

    def run(self, steps: int, before_step: Hook = nothing, after_steps: Hook = nothing) -> Tensor:
        """Decode ``steps`` tokens of each sequence: int64 ``[batch, steps]``.

        ``before_step`` is called before each step is launched, ``after_steps`` after the last one.
        """
        chosen = []
        for first in range(0, steps, OUTPUT):
            count = min(OUTPUT, steps - first)
            self._make_room(count)
            self.prepare()
            assert self._replay is not None
            self._column.zero_()
            for _ in range(count):
                before_step()
                self._replay()
            if first + count == steps:
                after_steps()
            chosen.append(self._output[:, :count].clone())
            self._account(count)
        return torch.cat(chosen, 1)

    @property
    def folded(self) -> bool:
        """Whether any output projection has values' rotation folded in."""
        return bool(self._folding.projections)

    @property
    def merged(self) -> bool:
        """Whether any projections are read as one."""
        return bool(self._merging.replaced)

    def prepare(self) -> None:
        """Compile and capture what :meth:`run` replays, unless that is done."""
        if self._replay is None:
            self._replay = self._captured() if self.graph else self._advance

    def _advance(self) -> None:
        """One step: read the token, choose the next, move on."""
        logits = self.forward(self.position)
        self.tokens.copy_(self.sampling.choose(logits))
        self._output.index_copy_(1, self._column, self.tokens[:, None])
        for counter in self._counters:
            counter.add_(1)

    @property
    def _counters(self) -> tuple[Tensor, ...]:
        return self.position.at.slots, self.position.at.stops, self._positions, self._column

    def forward(self, step: Step) -> Tensor:
        """The model's pass over the current tokens with the storages of ``step``: logits ``[batch, vocabulary]``."""
        with (
            packed_attention(self.model),
            torch.no_grad(),
            current(step),
            self._folding.weights(),
            self._merging.projections(),
        ):
            return self._forward(self.tokens[:, None], self._positions, self._cache)

    def _captured(self) -> Callable[[], None]:
        """A step as a CUDA graph, after a warm-up on a side stream; both leave the loop where it was."""
        state = (self.tokens, self._output, *self._counters)
        kept = [tensor.clone() for tensor in state]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):  # what it stores is stored again by the true step, in the same slot
                self._advance()
                for tensor, before in zip(state, kept, strict=True):
                    tensor.copy_(before)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._advance()
        return graph.replay

    def _make_room(self, steps: int) -> None:
        needed = self.cache.packed_layers[0].tokens + steps
        limit = self.cache.options.capacity
        if limit is not None and needed > limit:
            raise ConfigurationError(f"{needed} tokens do not fit a cache of fixed capacity {limit}: use a larger one.")
        if needed > min(storage.capacity for storage in self.position.storages):
            self._replay = None  # what was captured reads tensors that are now replaced
            for storage in self.position.storages:
                storage.reserve(needed)

    def _account(self, steps: int) -> None:
        """Bring the host's counts up to date, and prove by the device's that the steps were taken."""
        for layer in self.cache.packed_layers:
            layer.packed_tokens_read += steps * layer.tokens + steps * (steps + 1) // 2
            layer.tokens += steps
        slots, tokens = self.position.at.slots.tolist(), self.cache.packed_layers[0].tokens
        if any(slot != tokens for slot in slots):
            raise EngagementError(f"a step did not run: the device counts {slots} tokens, the host {tokens}.")


def model_step(model: Any) -> ModelStep:
    """The model's step: ``(tokens [batch, 1], positions [batch, 1], cache) -> logits [batch, vocabulary]``."""
    argument = cache_argument(model)

    def step(tokens: Tensor, positions: Tensor, cache: StepCache) -> Tensor:
        logits: Tensor = model(tokens, position_ids=positions, use_cache=True, **{argument: cache}).logits
        return logits[:, -1]

    return step


def _compiled(model: Any, layers: int, compile: str, merged: bool) -> tuple[ModelStep, StepCache]:
    """The model's step, compiled as asked with projections merged or not, and the cache to give it.

    Both are kept with the model: compiling takes long, and another cache would be compiled for again.
    """
    kept: dict[tuple[str, bool], tuple[ModelStep, StepCache]] = model.__dict__.setdefault("_kvbench_steps", {})
    if (compile, merged) not in kept:
        step, options = model_step(model), COMPILE[compile]
        compiled = step if options is None else torch.compile(step, fullgraph=True, dynamic=False, options=options)
        kept[compile, merged] = compiled, StepCache(layers)
    return kept[compile, merged]
