"""Needle in a haystack: whether facts planted in a long text are found again, and how likely the right answer was."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from kvbench.errors import ConfigurationError, unknown_name
from kvbench.task import Task, TaskResult
from kvbench.tasks.niah_needles import TASKS

if TYPE_CHECKING:
    from kvbench.prompt_reader import PromptReader
    from kvbench.session import Session
    from kvbench.tasks.niah_prompts import Prompt


LONGER = 12  # tokens that an answer may be longer than the right one: models repeat the question, or greet


class Grid(NamedTuple):
    """Prompt lengths in tokens, depths from 0 to 1, needle sets a cell, and prompts read together."""

    lengths: list[int]
    depths: list[float]
    trials: int
    batch_size: int


PRESETS = {
    # minutes on two CPU cores with a model of 135M parameters
    "small": Grid([256, 384], [0.2, 0.8], 1, 3),
    "standard": Grid([1024, 4096, 16384], [0.0, 0.25, 0.5, 0.75, 1.0], 4, 1),
    # arXiv 2606.24033 and its public benchmark: 4K to 128K tokens, eleven depths, three trials; the longest prompt
    # leaves room for its answer in a window of 131,072 tokens
    "paper": Grid([4096, 8192, 16384, 32768, 65536, 130816], [step / 10 for step in range(11)], 3, 1),
}


@dataclass(frozen=True)
class Niah(Task):
    """Facts about invented people are planted in the evaluation text and asked for; six tasks, depths times lengths.

    ``score`` is the mean fraction of the expected values found, case aside, in the greedy answer. ``answer_nll`` is the
    mean negative log-likelihood in nats per token of the values of the right answer, given the prompt and the answer's
    wording up to each value. Prompts have exactly the tokens they say and are the same for every quantizer.
    """

    name: ClassVar[str] = "niah"

    preset: str = field(default="small", metadata={"help": "small | standard | paper: lengths, depths and trials"})
    tasks: list[str] = field(default_factory=lambda: list(TASKS), metadata={"help": "of " + ", ".join(TASKS)})
    lengths: list[int] | None = field(default=None, metadata={"help": "tokens a prompt; null: the preset's"})
    depths: list[float] | None = field(default=None, metadata={"help": "from 0 to 1; null: the preset's"})
    trials: int | None = field(default=None, metadata={"help": "needle sets a cell; null: the preset's"})
    batch_size: int | None = field(
        default=None, metadata={"help": "prompts read together; 1: what prompts share is read once; null: the preset's"}
    )
    max_new_tokens: int = field(default=64, metadata={"help": "longest answer"})
    chat: bool = field(default=True, metadata={"help": "use the model's chat template where it has one"})
    seed: int = field(default=0, metadata={"help": "seed of names, values and questions"})

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise ConfigurationError(unknown_name("task.niah.preset", self.preset, PRESETS))
        for task in self.tasks:
            if task not in TASKS:
                raise ConfigurationError(unknown_name("needle task", task, TASKS))
        grid = self.grid
        if not (self.tasks and grid.lengths and grid.depths):
            raise ConfigurationError("task.niah.tasks, lengths and depths must each have at least one entry.")
        if min(grid.trials, grid.batch_size, self.max_new_tokens) < 1:
            raise ConfigurationError("task.niah.trials, batch_size and max_new_tokens must be 1 or more.")
        if not all(0 <= depth <= 1 for depth in grid.depths):
            raise ConfigurationError(f"task.niah.depths={grid.depths} is not allowed: give depths from 0 to 1.")

    @property
    def grid(self) -> Grid:
        preset = PRESETS[self.preset]
        return Grid(
            list(preset.lengths if self.lengths is None else self.lengths),
            list(preset.depths if self.depths is None else self.depths),
            preset.trials if self.trials is None else self.trials,
            preset.batch_size if self.batch_size is None else self.batch_size,
        )

    def run(self, session: "Session") -> TaskResult:
        prompts = self._prompts(session)
        longest = max(len(prompt.tokens) + max(len(prompt.answer), self._limit(prompt)) for prompt in prompts)
        if longest > session.context_window:
            raise ConfigurationError(
                f"task.niah.lengths={max(self.grid.lengths)} and the answer take {longest} tokens; "
                f"{session.loaded.name} reads {session.context_window}. Choose shorter lengths."
            )
        records = []
        before: list[Prompt] = []
        with session.reading(longest) as reader:
            for batch in session.track(self._batches(prompts), "needles"):
                measure = partial(self._measure, session, reader, batch, before)
                records += session.measured([prompt.name for prompt in batch], measure)
                before = batch
        return self._result(session, prompts, records)

    def _batches(self, prompts: "list[Prompt]") -> "list[list[Prompt]]":
        """Prompts that are read together: of one length, so that nothing is padded, and answers of similar length."""
        size = self.grid.batch_size
        if size == 1:
            return [[prompt] for prompt in prompts]
        groups = [list(group) for _, group in groupby(prompts, key=kin)]
        return [group[start : start + size] for group in groups for start in range(0, len(group), size)]

    def _limit(self, prompt: "Prompt") -> int:
        """The longest answer to ``prompt``, in tokens."""
        return min(self.max_new_tokens, len(prompt.answer) + LONGER)

    def _prompts(self, session: "Session") -> "list[Prompt]":
        """All prompts: those that begin alike side by side where they are read one by one, else those akin."""
        from kvbench.tasks.niah_prompts import build_prompt, read_haystack

        name = f"niah prompts {self!r}"
        if name not in session.memo:
            grid, tokenizer = self.grid, session.loaded.tokenizer
            haystack = read_haystack(session.corpus.evaluation, tokenizer, max(grid.lengths) * grid.trials)
            prompts = [
                build_prompt(
                    tokenizer, haystack, task, length, depth, trial, self.seed, trial * max(grid.lengths), self.chat
                )
                for task in self.tasks
                for length in grid.lengths
                for depth in grid.depths
                for trial in range(grid.trials)
            ]
            session.memo[name] = sorted(prompts, key=(lambda p: p.tokens) if grid.batch_size == 1 else kin)
        return session.memo[name]

    def _measure(
        self, session: "Session", reader: "PromptReader", batch: "list[Prompt]", before: "list[Prompt]"
    ) -> list[dict[str, Any]]:
        import torch

        from kvbench.chat import decode

        reader.continue_after([torch.tensor(prompt.tokens) for prompt in before])
        reader.read([torch.tensor(prompt.tokens) for prompt in batch])
        scored = reader.score([torch.tensor(prompt.answer) for prompt in batch])
        generated = reader.generate(max(map(self._limit, batch)), session.stop_tokens)
        reader.note()
        answers = [decode(session.loaded.tokenizer, tokens) for tokens in generated]
        return [
            {
                "score": found_fraction(prompt.expected, answer),
                "answer_nll": float(losses[torch.tensor(prompt.scored)].mean()),
                "answer": answer,
                "expected": prompt.expected,
            }
            for prompt, answer, (losses, _) in zip(batch, answers, scored, strict=True)
        ]

    def _result(self, session: "Session", prompts: "list[Prompt]", records: list[dict[str, Any]]) -> TaskResult:
        from kvbench.statistics import summary

        samples = {key: [float(record[key]) for record in records] for key in ("score", "answer_nll")}
        metrics: dict[str, Any] = {}
        for key, values in samples.items():
            metrics |= summary(key, values)
        grid = self.grid
        return TaskResult(
            metrics={
                **metrics,
                "per_task": {
                    task: {
                        key: mean([value for value, prompt in zip(values, prompts, strict=True) if prompt.task == task])
                        for key, values in samples.items()
                    }
                    for task in self.tasks
                },
                "heat_map": {
                    "lengths": grid.lengths,
                    "depths": grid.depths,
                    **{key: heat_map(grid, prompts, values) for key, values in samples.items()},
                },
                "trials": grid.trials,
                "batch_size": grid.batch_size,
                "chat_template": prompts[0].chat_template,
                "max_new_tokens": self.max_new_tokens,
            },
            n=len(records),
            unit="prompts",
            path=session.path,
            samples=samples,
        )


def kin(prompt: "Prompt") -> tuple[int, int]:
    """What prompts that are read together have in common: their length, and how many values are asked for."""
    return prompt.length, len(prompt.expected)


def found_fraction(expected: Sequence[str], answer: str) -> float:
    """The fraction of ``expected`` that ``answer`` contains, case aside."""
    return sum(value.lower() in answer.lower() for value in expected) / len(expected)


def heat_map(grid: Grid, prompts: "Sequence[Prompt]", values: Sequence[float]) -> list[list[float]]:
    """Means over tasks and trials, a row a depth, a column a length."""
    cells: dict[tuple[float, int], list[float]] = {}
    for prompt, value in zip(prompts, values, strict=True):
        cells.setdefault((prompt.depth, prompt.length), []).append(value)
    return [[mean(cells[depth, length]) for length in grid.lengths] for depth in grid.depths]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
