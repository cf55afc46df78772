"""What a task works with: one quantizer on one model, every forward pass through the packed cache.

A session keeps the proof of engagement of every cache it used; a task cannot obtain a score from a cache that was not
packed, because :meth:`Session.engage` raises.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor

from kvbench.attention import cache_argument, packed_attention
from kvbench.cache_options import CacheOptions
from kvbench.compression import measure_compression
from kvbench.configuration import CacheConfig
from kvbench.engagement import prove_engagement
from kvbench.kernels.formats import CacheFormat, Dense
from kvbench.packed_cache import PackedCache, PackedLayer
from kvbench.peak_memory import PeakMemory
from kvbench.progress import track
from kvbench.prompt_reader import PromptReader
from kvbench.quantizer import Quantizer
from kvbench.results import Compression, LayerEngagement
from kvbench.rope import layer_frequencies, turn
from kvbench.sample_store import KeptSamples, SampleStore
from kvbench.task import CachePath

if TYPE_CHECKING:
    from kvbench.corpora import Corpus
    from kvbench.models import LoadedModel

T = TypeVar("T")


@dataclass
class Session:
    """One quantizer on one model.

    ``memo`` is shared by the sessions of one run (same model and texts): work that does not depend on the quantizer is
    kept there under a name.
    """

    loaded: "LoadedModel"
    quantizer: Quantizer
    format: CacheFormat
    corpus: "Corpus"
    cache: CacheConfig
    backend: str = "auto"
    memo: dict[str, Any] = field(default_factory=dict)
    engagement: list[LayerEngagement] = field(default_factory=list)
    compression: Compression | None = None
    prefill_peak_bytes: int | None = None
    samples: SampleStore = field(default_factory=SampleStore)

    path: ClassVar[CachePath] = "packed"

    @property
    def device(self) -> torch.device:
        return self.loaded.model.device

    def windows(self, tokens: int, window: int | None = None) -> Tensor:
        """The first ``tokens`` tokens of the evaluation text, ``[tokens / window, window]``; without it, one row."""
        from kvbench.corpora import token_windows

        return token_windows(self.corpus.evaluation, self.loaded.tokenizer, tokens, window or tokens).to(self.device)

    def track(self, items: Sequence[T], description: str) -> Iterable[T]:
        """Iterate with a progress bar on a terminal."""
        return track(items, f"{self.quantizer.name}: {description}")

    def new_cache(self) -> PackedCache:
        """An empty packed cache of this session's format and options."""
        options = CacheOptions.from_config(self.cache, self.backend)
        return PackedCache(self.format, self.loaded.geometry, options, self.cache.excluded_layers)

    def unquantized_cache(self) -> PackedCache:
        """An empty cache that keeps keys and values in the model's own dtype: what quantized ones are compared with."""
        geometry = self.loaded.geometry
        formats = tuple(Dense(layer.kv_heads, layer.head_dim, geometry.dtype) for layer in geometry.layers)
        return PackedCache(CacheFormat(formats, formats), geometry)

    @contextmanager
    def engage(self, expected_tokens: int = 0) -> Iterator[PackedCache]:
        """A packed cache with the model attending to it; on leaving, its engagement is proven and its size noted.

        ``expected_tokens`` a sequence, where known, spares the cache from growing. Raises EngagementError where a layer
        was not packed.
        """
        cache = self.new_cache()
        cache.expect(expected_tokens)
        with packed_attention(self.loaded.model), torch.no_grad():
            yield cache
        self.note(cache)

    def note(self, cache: PackedCache) -> None:
        """Prove the engagement of a cache that has been used, and keep the proof and the cache's size.

        :meth:`engage` does it on leaving. Raises EngagementError where a layer was not packed.
        """
        self._add(prove_engagement(cache), measure_compression(cache))

    def _add(self, engagement: list[LayerEngagement], compression: Compression | None) -> None:
        self.engagement = added(self.engagement, engagement)
        if compression is not None and (self.compression is None or compression.tokens > self.compression.tokens):
            self.compression = compression

    def measured(self, names: Sequence[str], measure: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """The records ``measure()`` gives, plain JSON data, one for each of ``names``; kept as soon as they are there.

        Samples that an interrupted run measured together under the same names are not measured again: their records
        and the proof of their cache's engagement are recalled.
        """
        kept = self.samples.recall(names)
        if kept is None:
            outer, self.engagement, self.compression = (self.engagement, self.compression), [], None
            try:
                records = measure()
                kept = KeptSamples(
                    names=list(names), records=records, engagement=self.engagement, compression=self.compression
                )
            finally:
                self.engagement, self.compression = outer
            if len(records) != len(names):
                raise ValueError(f"{len(names)} samples were to be measured, {len(records)} came back")
            self.samples.remember(kept)
        self._add(kept.engagement, kept.compression)
        return kept.records

    @contextmanager
    def reading(self, expected_tokens: int = 0) -> Iterator[PromptReader]:
        """A reader of prompts on one packed cache, with the model attending to it.

        What was read is proven by ``note()`` of the reader, at the latest on leaving.
        """
        cache = self.new_cache()
        cache.expect(expected_tokens)
        reader = PromptReader(self, cache)
        with packed_attention(self.loaded.model), torch.no_grad():
            yield reader
        if reader.unproven:
            reader.note()

    def stream(
        self, tokens: Tensor, cache: PackedCache, attention_mask: Tensor | None = None, last_only: bool = False
    ) -> Iterator[tuple[int, Tensor]]:
        """Feed ``tokens [batch, count]`` to the model in chunks of ``cache.prefill_chunk``, appending to ``cache``.

        Yields ``(start, logits [batch, chunk, vocabulary])``, the logits that follow the tokens from ``start`` on.
        ``attention_mask [batch, cached + count]`` marks real tokens where sequences are left-padded. ``last_only``
        leaves out all logits of a chunk but the last, which saves a third of a small model's time.
        """
        chunk = self.cache.prefill_chunk or tokens.shape[1]
        peak = PeakMemory(self.device)
        model: Any = self.loaded.model
        options: dict[str, Any] = {"use_cache": True, cache_argument(model): cache}
        if last_only and "logits_to_keep" in inspect.signature(model.forward).parameters:
            options["logits_to_keep"] = 1
        for start in range(0, tokens.shape[1], chunk):
            piece = tokens[:, start : start + chunk]
            stop = cache.get_seq_length() + piece.shape[1]
            extra: dict[str, Any] = {}
            if attention_mask is not None:
                mask = attention_mask[:, :stop]
                positions = (mask.long().cumsum(-1) - 1).clamp_min(0)
                extra = {"attention_mask": mask, "position_ids": positions[:, -piece.shape[1] :]}
            output = model(piece, **options, **extra)
            yield start, output.logits
        self.prefill_peak_bytes = max(filter(None, (self.prefill_peak_bytes, peak.bytes())), default=None)

    def token_losses(self, tokens: Tensor) -> Tensor:
        """Negative log-likelihood (nats) of each of ``tokens[1:]`` given those before: float64 ``[count - 1]``, CPU."""
        losses = []
        with self.engage(len(tokens)) as cache:
            for start, logits in self.stream(tokens[None], cache):
                targets = tokens[start + 1 : start + 1 + logits.shape[1]]
                scores = torch.log_softmax(logits[0, : len(targets)].float(), -1)
                losses.append(-scores.gather(1, targets[:, None])[:, 0].double().cpu())
        return torch.cat(losses)

    def loglikelihood(self, context: Tensor, continuation: Tensor) -> tuple[float, bool]:
        """Log-likelihood (nats) of ``continuation`` after ``context`` (ids ``[count]``), and whether it is greedy.

        The context is prefilled into the cache and the continuation is scored against it; an empty context is not
        allowed, since the first token would have nothing to follow.
        """
        if not len(context) or not len(continuation):
            raise ValueError("context and continuation must each have at least one token")
        with self.reading(len(context) + len(continuation)) as reader:
            reader.read([context])
            [scored] = reader.score([continuation])
        return -float(scored.losses.sum()), scored.greedy

    def generate(self, prompts: list[Tensor], max_new_tokens: int, **options: Any) -> list[Tensor]:
        """Continue prompts (token ids ``[count]`` each) through transformers' ``generate``; the new tokens of each.

        Prompts are left-padded into one batch and prefilled in chunks. Greedy unless ``options``, transformers'
        generation options, say otherwise.
        """
        tokens, mask = self.left_pad(prompts)
        options = {"do_sample": False, **options}
        with self.engage(tokens.shape[1] + max_new_tokens) as cache:
            if tokens.shape[1] > 1:
                for _ in self.stream(tokens[:, :-1], cache, mask):
                    pass
            generate: Any = self.loaded.model.generate
            output = generate(
                tokens,
                attention_mask=mask,
                max_new_tokens=max_new_tokens,
                pad_token_id=self.padding_token,
                **{cache_argument(self.loaded.model): cache},
                **options,
            )
        return list(output[:, tokens.shape[1] :].cpu())

    @property
    def padding_token(self) -> int:
        """Any token will do, since padding is masked: the tokenizer's own, else its end of text, else 0."""
        tokenizer = self.loaded.tokenizer
        for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
            if token is not None:
                return int(token)
        return 0

    @property
    def stop_tokens(self) -> frozenset[int]:
        """Tokens that end an answer: the model's own and its tokenizer's."""
        settings = getattr(self.loaded.model, "generation_config", None)
        own = getattr(settings, "eos_token_id", None)
        listed = own if isinstance(own, list) else [own]
        return frozenset(int(token) for token in [*listed, self.loaded.tokenizer.eos_token_id] if token is not None)

    @property
    def context_window(self) -> int:
        """The most tokens that the model was made for; without bound where its configuration does not say."""
        config = self.loaded.model.config.get_text_config(decoder=True)
        return int(getattr(config, "max_position_embeddings", None) or sys.maxsize)

    def left_pad(self, prompts: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Prompts as one batch ``[batch, longest]`` padded on the left, and the mask of real tokens."""
        longest = max(len(prompt) for prompt in prompts)
        tokens = torch.full((len(prompts), longest), self.padding_token, device=self.device)
        mask = torch.zeros_like(tokens)
        for row, prompt in enumerate(prompts):
            tokens[row, longest - len(prompt) :] = prompt.to(self.device)
            mask[row, longest - len(prompt) :] = 1
        return tokens, mask

    def captured(self, name: str, windows: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Queries and keys before RoPE of every layer, ``[windows, tokens, heads, head_dim]``.

        From the unquantized model; kept in ``memo`` under ``name``, so that all quantizers of a run see the same
        tensors.
        """
        from kvbench.capture import capture_qkv

        if name not in self.memo:
            self.memo[name] = [(q, k) for q, k, _ in capture_qkv(self.loaded.model, windows)]
        return self.memo[name]

    @contextmanager
    def storage(self) -> Iterator[PackedCache]:
        """A packed cache to write to and read from directly; on leaving, its engagement is proven.

        Raises EngagementError where a layer was not packed or not read.
        """
        cache = self.new_cache()
        with torch.no_grad():
            yield cache
        self.note(cache)

    def stored_keys(self, cache: PackedCache, layer: int, keys: Tensor) -> Tensor:
        """Keys before RoPE ``[windows, tokens, kv_heads, head_dim]`` as ``cache`` gives them back, before RoPE.

        Each window is rotated from position 0 on, put into the layer's packed storage in place of what was there,
        decoded, and rotated back. Layers that stay dense give back what they were given.
        """
        shape = self.loaded.geometry.layers[layer]
        frequencies, scaling = layer_frequencies(self.loaded.model, layer, shape)
        positions = torch.arange(keys.shape[1], dtype=torch.float64, device=keys.device)
        angles = (positions[:, None] * frequencies)[:, None]
        given_back = self.given_back(cache, layer, scaling * turn(keys.float(), angles, shape))
        return keys.float() if given_back is None else turn(given_back, -angles, shape) / scaling

    def given_back(self, cache: PackedCache, layer: int, keys: Tensor) -> Tensor | None:
        """``keys [batch, tokens, kv_heads, head_dim]`` after RoPE as a layer gives them back; what it held is dropped.

        None of a layer that stays dense.
        """
        packed = cache.layers[layer]
        if not isinstance(packed, PackedLayer):
            return None
        states = keys.transpose(1, 2)
        packed.reset()
        packed.update(states, torch.zeros_like(states))
        return packed.decode()[0]


def added(first: list[LayerEngagement], second: list[LayerEngagement]) -> list[LayerEngagement]:
    """The engagement of two uses of the same layers: their reads added."""
    if not first or not second:
        return first or second
    return [
        new.model_copy(update={"packed_tokens_read": old.packed_tokens_read + new.packed_tokens_read})
        for old, new in zip(first, second, strict=True)
    ]
