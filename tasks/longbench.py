"""LongBench-EN: question answering, summaries, few-shot learning, retrieval and code over long texts."""

import importlib.util
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from kvbench.errors import ConfigurationError, unknown_name
from kvbench.task import Task, TaskResult
from kvbench.tasks.longbench_scores import METRICS, score

if TYPE_CHECKING:
    from kvbench.prompt_reader import PromptReader
    from kvbench.session import Session

SPARE = 16  # tokens: a text that was cut in the middle may have a few more when it is read again


class Prompt(NamedTuple):
    """One sample, ready to be read."""

    name: str
    tokens: list[int]
    chat_template: bool
    truncated: bool
    sample: dict[str, Any]


@dataclass(frozen=True)
class LongBench(Task):
    """LongBench's English tasks (arXiv 2308.14508) by its own protocol: its prompts, greedy answers, its scores.

    Prompts that are too long lose their middle; how many did is counted. Scores are on 0..100, ``average`` is the mean
    over datasets. The standard protocol without ``limit`` and ``max_new_tokens`` gives the published numbers' setting.
    """

    name: ClassVar[str] = "longbench"

    datasets: list[str] = field(default_factory=lambda: list(METRICS), metadata={"help": "of " + ", ".join(METRICS)})
    data_dir: str | None = field(default=None, metadata={"help": "folder of upstream's jsonl files; null: the hub"})
    limit: int | None = field(default=None, metadata={"help": "samples a dataset, the first ones; null: all"})
    max_input: int | None = field(
        default=None, metadata={"help": "longest prompt in tokens, template aside; null: what the model reads"}
    )
    max_new_tokens: int | None = field(default=None, metadata={"help": "longest answer; null: the dataset's own"})
    batch_size: int = field(default=1, metadata={"help": "prompts read together"})
    chat: bool = field(default=True, metadata={"help": "use the model's chat template, where upstream does"})

    def __post_init__(self) -> None:
        for dataset in self.datasets:
            if dataset not in METRICS:
                raise ConfigurationError(unknown_name("LongBench dataset", dataset, METRICS))
        if not self.datasets or len(set(self.datasets)) < len(self.datasets):
            raise ConfigurationError("task.longbench.datasets must name at least one dataset, and none twice.")
        for option in ("limit", "max_input", "max_new_tokens", "batch_size"):
            value = getattr(self, option)
            if value is not None and value < 1:
                raise ConfigurationError(f"task.longbench.{option}={value} is not allowed: give 1 or more.")

        for package in ("lm_eval", "rouge"):
            if importlib.util.find_spec(package) is None:
                raise ConfigurationError(
                    f"task=longbench needs the package {package}, which is not installed: "
                    "pip install 'kvbench[longbench]'."
                )

    def inputs(self) -> dict[str, str]:
        from kvbench.tasks.longbench_data import samples_digest

        return {"samples": samples_digest(self.datasets, self.data_dir)}

    def run(self, session: "Session") -> TaskResult:
        records = {}
        for dataset in self.datasets:  # one after another: all prompts at once take gigabytes
            records[dataset] = self._answer(session, dataset, self._prompts(session, dataset))
        return self._result(session, records)

    def _new_tokens(self, dataset: str) -> int:
        from kvbench.tasks.longbench_data import template

        longest = template(dataset).max_new_tokens
        return longest if self.max_new_tokens is None else min(longest, self.max_new_tokens)

    def _prompts(self, session: "Session", dataset: str) -> list[Prompt]:
        """The prompts of ``dataset``, the longest first, so that what does not fit fails at once."""
        from kvbench.tasks.longbench_data import read_samples

        samples = read_samples(dataset, self.data_dir, self.limit)
        prompts = [self._prompt(session, dataset, index, sample) for index, sample in enumerate(samples)]
        return sorted(prompts, key=lambda prompt: (-len(prompt.tokens), prompt.tokens))

    def _prompt(self, session: "Session", dataset: str, index: int, sample: dict[str, Any]) -> Prompt:
        from kvbench.chat import as_chat, encode
        from kvbench.tasks.longbench_data import WITHOUT_CHAT, template

        tokenizer = session.loaded.tokenizer
        chat = self.chat and dataset not in WITHOUT_CHAT
        around = len(encode(tokenizer, as_chat(tokenizer, "") or "")) if chat else 1
        room = session.context_window - self._new_tokens(dataset) - around - SPARE
        if room < 2:
            raise ConfigurationError(
                f"task.longbench: the answers to '{dataset}' take {self._new_tokens(dataset)} tokens, and "
                f"{session.loaded.name} reads {session.context_window}. Choose a smaller task.longbench.max_new_tokens."
            )
        text = template(dataset).fill(sample)
        shortened = without_middle(tokenizer, text, room if self.max_input is None else min(room, self.max_input))
        templated = as_chat(tokenizer, shortened) if chat else None
        tokens = list(tokenizer(shortened)["input_ids"]) if templated is None else encode(tokenizer, templated)
        return Prompt(f"{dataset} {index}", tokens, templated is not None, shortened != text, sample)

    def _answer(self, session: "Session", dataset: str, prompts: list[Prompt]) -> list[dict[str, Any]]:
        """A record for each prompt, in the same order."""
        records: list[dict[str, Any]] = []
        before: list[Prompt] = []
        batches = [prompts[start : start + self.batch_size] for start in range(0, len(prompts), self.batch_size)]
        longest = max((len(prompt.tokens) for prompt in prompts), default=0) + self._new_tokens(dataset)
        with session.reading(longest) as reader:
            for batch in session.track(batches, dataset):
                measure = partial(self._measure, session, reader, dataset, batch, before)
                records += session.measured([prompt.name for prompt in batch], measure)
                before = batch
        return records

    def _measure(
        self, session: "Session", reader: "PromptReader", dataset: str, batch: list[Prompt], before: list[Prompt]
    ) -> list[dict[str, Any]]:
        import torch

        from kvbench.chat import decode, encode

        tokenizer = session.loaded.tokenizer
        stop, at_least = session.stop_tokens, 0
        if dataset == "samsum":  # as upstream: models go on to the next dialogue otherwise
            stop, at_least = stop | {encode(tokenizer, "\n")[-1]}, 1
        reader.continue_after([torch.tensor(prompt.tokens) for prompt in before])
        reader.read([torch.tensor(prompt.tokens) for prompt in batch])
        generated = reader.generate(self._new_tokens(dataset), stop, at_least)
        reader.note()
        records = []
        for prompt, tokens in zip(batch, generated, strict=True):
            answer = decode(tokenizer, tokens)
            points = score(dataset, answer, prompt.sample["answers"], prompt.sample["all_classes"])
            facts = {
                "tokens": len(prompt.tokens),
                "truncated": prompt.truncated,
                "chat_template": prompt.chat_template,
            }
            records.append({"score": 100 * points, "answer": answer, "expected": prompt.sample["answers"], **facts})
        return records

    def _result(self, session: "Session", records: dict[str, list[dict[str, Any]]]) -> TaskResult:
        from kvbench.statistics import summary

        measured = {dataset: found for dataset, found in records.items() if found}
        if not measured:
            raise ConfigurationError("task.longbench found no samples: the files of its datasets are empty.")
        scores = {dataset: [float(record["score"]) for record in found] for dataset, found in measured.items()}
        metrics: dict[str, Any] = {}
        for dataset, values in scores.items():
            metrics |= summary(dataset, values)
        truncated = {dataset: sum(record["truncated"] for record in found) for dataset, found in measured.items()}
        return TaskResult(
            metrics={
                **metrics,
                "average": sum(metrics[dataset] for dataset in scores) / len(scores),
                "samples": {dataset: len(values) for dataset, values in scores.items()},
                "truncated": sum(truncated.values()),
                "truncated_by_dataset": truncated,
                "chat_template": {d: any(record["chat_template"] for record in found) for d, found in measured.items()},
                "longest_prompt": max(record["tokens"] for found in measured.values() for record in found),
            },
            n=sum(map(len, scores.values())),
            unit="samples",
            path=session.path,
            samples={"score": [value for values in scores.values() for value in values]},
        )


def without_middle(tokenizer: Any, text: str, tokens: int) -> str:
    """``text`` if it has at most ``tokens`` tokens, else its first and last ``tokens // 2``, as LongBench cuts it."""
    from kvbench.chat import decode, encode

    ids = encode(tokenizer, text)
    if len(ids) <= tokens:
        return text
    half = tokens // 2
    return decode(tokenizer, ids[:half]) + decode(tokenizer, ids[-half:])
