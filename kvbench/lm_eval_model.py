"""kvbench as a model of lm-eval: log-likelihoods and generation that read a quantized, packed cache.

Importing this module registers the model ``kvbench`` with lm-eval, whose own command line does not look for other
people's models::

    import lm_eval, kvbench.lm_eval_model
    lm_eval.simple_evaluate(model="kvbench", model_args="pretrained=smollm2-135m,quantizer=blockgtq,k_bits=3,v_bits=3")

lm-eval scores a log-likelihood with one forward pass and no cache, so that no quantizer shows in it; here the context
is prefilled into the cache and the continuation is scored against it.
"""

import copy
import dataclasses
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor

from kvbench.attention import cache_argument
from kvbench.configuration import CacheConfig, CorpusConfig, ModelConfig
from kvbench.errors import ConfigurationError, unknown_name
from kvbench.identity import digest
from kvbench.prompt_reader import PromptReader
from kvbench.session import Session

CALIBRATION = (2048, 256)  # tokens, and tokens a window: kvbench's defaults
HFLM_OPTIONS = ("max_length", "add_bos_token", "enable_thinking", "think_end_token", "chat_template_args")

Request = tuple[Any, list[int], list[int]]  # lm-eval's: the texts, the context's tokens, the continuation's


@register_model("kvbench")
class KvbenchLM(HFLM):
    """A language model whose every request reads the packed cache of one quantizer.

    ``pretrained`` is one of kvbench's models (``smollm2-135m``), a folder, or a repository on the hub; ``quantizer`` a
    quantizer's name. Further arguments are the quantizer's options (``k_bits=2``), the cache's (``recent_window=64``),
    or one of lm-eval's own: max_length, add_bos_token, enable_thinking, think_end_token, chat_template_args. With
    ``session`` all of that is there already. Raises ConfigurationError for an argument that none of them has.
    """

    AUTO_MODEL_CLASS: ClassVar[Any] = None

    def __init__(
        self,
        pretrained: str = "smollm2-135m",
        quantizer: str = "blockgtq",
        session: Session | None = None,
        batch_size: int | str | None = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
        **options: Any,
    ) -> None:
        if not str(batch_size or 1).isdecimal() or int(batch_size or 1) < 1:
            raise ConfigurationError(f"batch_size={batch_size} is not allowed: give a number of 1 or more.")
        own = {name: options.pop(name) for name in HFLM_OPTIONS if name in options}
        if session is None:
            session = open_session(pretrained, quantizer, device or "auto", options)
        elif options:
            raise ConfigurationError(unknown_name("argument", next(iter(options)), HFLM_OPTIONS))
        self.session = session
        super().__init__(
            pretrained=session.loaded.model,
            tokenizer=copy.deepcopy(session.loaded.tokenizer),  # HFLM gives it a padding token
            batch_size=int(batch_size or 1),
            **own,
        )

    def set_cache_hook(self, cache_hook: Any) -> NoReturn:
        """Refused: lm-eval's cache of answers knows requests by their text alone, so quantizers would get each other's.

        kvbench keeps its own samples, by model, quantizer and code.
        """
        raise ConfigurationError("lm-eval's use_cache would mix up quantizers: leave it out with model=kvbench.")

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes into the configuration of its results."""
        loaded, quantizer = self.session.loaded, self.session.quantizer
        return {
            "model_num_parameters": loaded.model.num_parameters(),
            "model_dtype": loaded.geometry.dtype,
            "model_fingerprint": loaded.fingerprint,
            "quantizer": {"name": quantizer.name, **dataclasses.asdict(quantizer)},
            "cache_format": self.session.format.digest(),
            "cache": dataclasses.asdict(self.session.cache),
        }

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        return super().generate_until(requests, disable_tqdm=True)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        return super().loglikelihood_rolling(requests, disable_tqdm=True)

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Log-likelihood in nats, and whether it is greedy, of each continuation; requests may come in any order."""
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        batches = self._batches(requests)
        longest = max((len(context) + len(continuation) for _, context, continuation in requests), default=0)
        before: list[Tensor] = []
        with self.session.reading(min(longest, self.max_length + 1)) as reader:
            for batch in self.session.track(batches, "log-likelihoods"):
                order = [index for choices in batch.values() for index, _ in choices]
                names = [f"loglikelihood {digest(requests[index][1:])}" for index in order]
                records = self.session.measured(names, partial(score_choices, reader, batch, before))
                for index, record in zip(order, records, strict=True):
                    answers[index] = (record["loglikelihood"], record["greedy"])
                before = [torch.tensor(context) for context in batch]
        return answers

    def _batches(self, requests: list[Request]) -> "list[Choices]":
        """Requests by context, so that a context is read once for all its continuations; a few contexts at a time.

        One by one, contexts that begin alike stand side by side; together, those of similar length do.
        """
        contexts: Choices = {}
        for index, (_, context, continuation) in enumerate(requests):
            room = self.max_length + 1 - len(continuation)  # as HFLM: the last token is scored, never read
            contexts.setdefault(tuple(context[-room:]), []).append((index, continuation))
        alone = self.batch_size == 1
        order = sorted(contexts, key=lambda context: context if alone else (-len(context), *context))
        size = int(self.batch_size)
        return [
            {context: contexts[context] for context in order[start : start + size]}
            for start in range(0, len(order), size)
        ]

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **options: Any) -> Tensor:
        """HFLM's generation on a packed cache: ``context [batch, tokens]``, left-padded, is prefilled in chunks."""
        mask = options["attention_mask"]
        asked = {"max_length": max_length, "stop": stop, **{k: v for k, v in options.items() if k != "attention_mask"}}
        rows = [row[kept.bool()].tolist() for row, kept in zip(context, mask, strict=True)]
        names = [f"generate {digest([row, asked])}" for row in rows]
        records = self.session.measured(names, partial(self._generate, context, max_length, stop, options))
        new = [torch.tensor(record["tokens"], dtype=context.dtype, device=context.device) for record in records]
        return torch.cat([context, torch.stack(new)], 1)

    def _generate(
        self, context: Tensor, max_length: int, stop: list[str], options: dict[str, Any]
    ) -> list[dict[str, Any]]:
        session = self.session
        with session.engage(max_length) as cache:
            for _ in session.stream(context[:, :-1], cache, options["attention_mask"], last_only=True):
                pass
            argument = {cache_argument(session.loaded.model): cache}
            tokens = super()._model_generate(context, max_length, stop, **argument, **options)
        new = tokens[:, context.shape[1] :].tolist()
        return [{"answer": self.tok_decode(row), "tokens": row} for row in new]


Choices = dict[tuple[int, ...], list[tuple[int, list[int]]]]  # context to its numbered continuations


def score_choices(reader: PromptReader, batch: Choices, before: list[Tensor]) -> list[dict[str, Any]]:
    """Read the contexts of ``batch`` together, then score their first continuations, their second ones, and so on."""
    reader.continue_after(before)
    reader.read([torch.tensor(context) for context in batch])
    found: dict[int, dict[str, Any]] = {}
    for turn in range(max(map(len, batch.values()))):
        choices = [choices[min(turn, len(choices) - 1)] for choices in batch.values()]  # rows that are done repeat
        scored = reader.score([torch.tensor(continuation) for _, continuation in choices])
        for (index, _), (losses, greedy) in zip(choices, scored, strict=True):
            found[index] = {"loglikelihood": -float(losses.sum()), "greedy": greedy}
    reader.note()
    return [found[index] for choices in batch.values() for index, _ in choices]


def open_session(pretrained: str, quantizer: str, device: str, options: dict[str, Any]) -> Session:
    """A session as kvbench's defaults make it: calibrated on Python's documentation where the quantizer needs it."""
    from kvbench.calibrate import calibrate
    from kvbench.corpora import load_corpus
    from kvbench.models import load_model
    from kvbench.registry import load_registry

    registry = load_registry()
    known = [option.name for option in dataclasses.fields(registry.quantizer(quantizer).value)]
    cache = [option.name for option in dataclasses.fields(CacheConfig)]
    for name in options:
        if name not in known and name not in cache:
            raise ConfigurationError(unknown_name("argument", name, [*known, *cache, *HFLM_OPTIONS]))
    chosen = {name: value for name, value in options.items() if name in known}
    built = registry.build_quantizer({"name": quantizer, **chosen})
    settings = CacheConfig(**{name: value for name, value in options.items() if name not in known})
    loaded = load_model(find_model(pretrained), device)
    corpus = load_corpus(CorpusConfig("pydoc"))
    calibration = calibrate(loaded, corpus, *CALIBRATION) if built.needs_calibration else None
    fitted = built.fit(calibration, loaded.geometry)
    return Session(loaded, built, fitted, corpus, settings)


def find_model(pretrained: str) -> ModelConfig:
    """The configuration of one of kvbench's models, of a folder, or of a repository on the hub."""
    from omegaconf import OmegaConf

    shipped = resources.files("kvbench.conf") / "model" / f"{pretrained}.yaml"
    if "/" not in pretrained and shipped.is_file():
        written = OmegaConf.create(shipped.read_text(encoding="utf-8"))
        found = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ModelConfig), written))
        assert isinstance(found, ModelConfig)
        return found
    if Path(pretrained).expanduser().is_dir():
        return ModelConfig(name=Path(pretrained).name, path=pretrained)
    return ModelConfig(name=pretrained, hub_id=pretrained)
