"""Putting a text to a model the way it was trained to be spoken to: by its chat template, where it has one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLACE = "\u241f"  # stands for the text while the template is filled in; no tokenizer's template uses it
# Templates that print today's date or let the model think aloud would make answers depend on the day, or not come.
TEMPLATE_OPTIONS: dict[str, Any] = {"date_string": "26 Jul 2024", "enable_thinking": False}


@dataclass(frozen=True)
class Frame:
    """Token ids that stand before and after a text; ``chat_template`` says whether the model's template is in them."""

    before: list[int]
    after: list[int]
    chat_template: bool

    def __len__(self) -> int:
        return len(self.before) + len(self.after)


def as_chat(tokenizer: "PreTrainedTokenizerBase", content: str) -> str | None:
    """``content`` as a user's message with the opening of the answer after it; None without a chat template."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    message = [{"role": "user", "content": content}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True, **TEMPLATE_OPTIONS)
    assert isinstance(text, str)
    return text


def frame(tokenizer: "PreTrainedTokenizerBase", before: str, after: str, chat: bool = True) -> Frame:
    """The tokens around a text that ``before`` introduces and ``after`` asks about.

    With ``chat`` and a chat template all of it is one user's message; otherwise the tokenizer's own special tokens
    open it and an answer is invited in plain text.
    """
    filled = as_chat(tokenizer, before + PLACE + after) if chat else None
    if filled is None:
        opening = tokenizer(before)["input_ids"]
        if tokenizer.eos_token_id is not None and opening[-1:] == [tokenizer.eos_token_id]:
            opening = opening[:-1]
        return Frame(list(opening), encode(tokenizer, f"{after}\nAnswer:"), False)
    opening_text, _, closing_text = filled.partition(PLACE)
    return Frame(encode(tokenizer, opening_text), encode(tokenizer, closing_text), True)


def encode(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Token ids of ``text`` without special tokens."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def decode(tokenizer: "PreTrainedTokenizerBase", tokens: Sequence[int]) -> str:
    """The text of ``tokens``, special tokens left out."""
    text = tokenizer.decode(list(tokens), skip_special_tokens=True)
    assert isinstance(text, str)
    return text
