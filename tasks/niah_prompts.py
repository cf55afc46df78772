"""Needle-in-a-haystack prompts of an exact number of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbench.chat import decode, encode, frame
from kvbench.errors import ConfigurationError, CorpusError
from kvbench.tasks.niah_needles import draw_needles

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BEFORE = "Read this text. A question about it follows.\n\n"
AFTER = "\n\nAccording to the text: {}"
CHARACTERS_A_TOKEN = 8  # more than any tokenizer's average on prose


@dataclass(frozen=True)
class Prompt:
    """A prompt of ``length`` tokens, and its right answer.

    ``answer`` are the token ids of the answer, ``scored`` says which of them are values; ``expected`` are the values as
    text.
    """

    task: str
    length: int
    depth: float
    trial: int
    tokens: list[int]
    answer: list[int]
    scored: list[bool]
    expected: list[str]
    chat_template: bool

    @property
    def name(self) -> str:
        return f"{self.task} {self.length} tokens, depth {self.depth:g}, trial {self.trial}"


@dataclass(frozen=True)
class Haystack:
    """Token ids of a text, which begins anew at its end, and where in it sentences end."""

    tokens: list[int]
    sentence_end: list[bool]

    def cut(self, start: int, count: int) -> tuple[list[int], list[bool]]:
        places = [place % len(self.tokens) for place in range(start, start + count)]
        return [self.tokens[place] for place in places], [self.sentence_end[place] for place in places]


def read_haystack(text: str, tokenizer: "PreTrainedTokenizerBase", tokens: int) -> Haystack:
    """The first ``tokens`` tokens of ``text``, or all it has. Raises CorpusError where it has none."""
    ids = encode(tokenizer, text[: CHARACTERS_A_TOKEN * tokens])[:tokens]
    if not ids:
        raise CorpusError("task=niah has no text to hide needles in: the evaluation text is empty. Use corpus=pydoc.")
    ends = {token: decode(tokenizer, [token]).rstrip(" ").endswith((".", "\n")) for token in set(ids)}
    return Haystack(ids, [ends[token] for token in ids])


def build_prompt(
    tokenizer: "PreTrainedTokenizerBase",
    haystack: Haystack,
    task: str,
    length: int,
    depth: float,
    trial: int,
    seed: int,
    start: int,
    chat: bool,
) -> Prompt:
    """The prompt of one cell; its haystack begins at token ``start``.

    Raises ConfigurationError where ``length`` leaves no room for a haystack.
    """
    needles = draw_needles(task, depth, f"{seed} {length} {depth:g} {trial}")
    around = frame(tokenizer, BEFORE, AFTER.format(needles.request), chat)
    planted = [(at, encode(tokenizer, f"\n{fact.statement}\n")) for at, fact in needles.planted]
    rest = length - len(around) - sum(len(ids) for _, ids in planted)
    if rest < len(planted):
        raise ConfigurationError(
            f"task.niah.lengths={length} leaves no room for a haystack: the question and the needles of '{task}' alone "
            f"take {length - rest} tokens. Choose {length - rest + 100} or more."
        )
    hay, ends = haystack.cut(start, rest)
    tokens = [*around.before, *plant(hay, ends, planted), *around.after]
    answer, scored = answer_tokens(tokenizer, needles.answer)
    expected = [fact.value for fact in needles.asked]
    return Prompt(task, length, depth, trial, tokens, answer, scored, expected, around.chat_template)


def plant(hay: Sequence[int], ends: Sequence[bool], planted: Sequence[tuple[float, list[int]]]) -> list[int]:
    """``hay`` with each needle put behind the end of a sentence nearest to its depth."""
    places = [place + 1 for place, end in enumerate(ends) if end] or [len(hay)]
    at: dict[int, list[int]] = {}
    for depth, needle in planted:
        nearest = min(places, key=lambda place: abs(place - depth * len(hay)))
        at.setdefault(nearest, []).extend(needle)
    return [token for place in range(len(hay) + 1) for token in [*at.get(place, []), *hay[place : place + 1]]]


def answer_tokens(
    tokenizer: "PreTrainedTokenizerBase", pieces: Sequence[tuple[str, str]]
) -> tuple[list[int], list[bool]]:
    """Token ids of an answer, and which of them belong to values."""
    tokens: list[int] = []
    scored: list[bool] = []
    for opening, value in pieces:
        for text, is_value in ((opening, False), (f" {value}", True)):
            ids = encode(tokenizer, text)
            tokens += ids
            scored += [is_value] * len(ids)
    return tokens, scored
