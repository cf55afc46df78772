"""Texts to calibrate and to evaluate on, which never overlap, and their cutting into windows of tokens."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.configuration import CorpusConfig
from kvbench.errors import ConfigurationError, CorpusError, unknown_name
from kvbench.hub import HubUnavailable, resolve_revision

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

CORPORA = ("pydoc", "wikitext2", "files")
WIKITEXT = ("Salesforce/wikitext", "wikitext-2-raw-v1")
SHARED_PASSAGE = 200  # characters; English boilerplate is shorter, a copied paragraph is not
TEXT_FILES = (".txt", ".md")
USE_OTHERS = "Use corpus=pydoc, or your own texts with corpus=files corpus.calibration=PATH corpus.evaluation=PATH."


@dataclass(frozen=True)
class Corpus:
    """Two texts without a common passage."""

    name: str
    calibration: str
    evaluation: str

    @property
    def digests(self) -> dict[str, str]:
        """SHA-256 of both texts (UTF-8), hexadecimal, under ``"calibration"`` and ``"evaluation"``."""
        return {
            "calibration": hashlib.sha256(self.calibration.encode()).hexdigest(),
            "evaluation": hashlib.sha256(self.evaluation.encode()).hexdigest(),
        }


def load_corpus(config: CorpusConfig) -> Corpus:
    """The two texts ``config`` names. Raises CorpusError where one is missing, unreadable, or overlaps the other."""
    match config.name:
        case "pydoc":
            return _pydoc()
        case "wikitext2":
            return _wikitext2()
        case "files":
            return _files(config.calibration, config.evaluation)
    raise CorpusError(unknown_name("corpus", config.name, CORPORA))


def token_windows(text: str, tokenizer: "PreTrainedTokenizerBase", tokens: int, window: int) -> "torch.Tensor":
    """The first ``tokens`` tokens of ``text`` as int64 ``[tokens / window, window]``, without special tokens.

    Raises ConfigurationError where ``tokens`` is not a positive multiple of ``window``, CorpusError where the text is
    too short.
    """
    import torch

    if window < 1 or tokens < window or tokens % window:
        raise ConfigurationError(
            f"tokens={tokens} cannot be cut into windows of {window}: choose a positive multiple of it."
        )
    ids = _first_tokens(text, tokenizer, tokens)
    if len(ids) < tokens:
        raise CorpusError(
            f"the text is too short: it has {len(ids)} tokens, {tokens} were asked for.\n"
            "Give a longer text, or ask for fewer tokens (calibration.tokens, task.<name>.tokens or windows)."
        )
    return torch.tensor(ids[:tokens], dtype=torch.int64).reshape(-1, window)


def _first_tokens(text: str, tokenizer: "PreTrainedTokenizerBase", tokens: int) -> list[int]:
    """At least ``tokens`` ids where the text has as many. Reads no more of a long text than it needs."""
    margin = 64  # where a text is cut, its last tokens may differ from those of the whole text
    length = 8 * (tokens + margin)
    while True:
        ids = tokenizer(text[:length], add_special_tokens=False, verbose=False)["input_ids"]
        if length >= len(text) or len(ids) >= tokens + margin:
            return ids
        length *= 2


def shared_passage(first: str, second: str, length: int = SHARED_PASSAGE) -> str | None:
    """A passage of ``length`` characters that both texts have, whitespace aside, or None.

    Every common passage of twice that length is found, shorter ones down to ``length`` often. A text shorter than
    ``length`` is looked for whole.
    """
    short, long = sorted((" ".join(first.split()), " ".join(second.split())), key=len)
    if len(short) < length:
        return short if short and short in long else None
    passages = {short[start : start + length] for start in range(0, len(short) - length + 1, length)}
    windows = (long[start : start + length] for start in range(len(long) - length + 1))
    return next((window for window in windows if window in passages), None)


def _pydoc() -> Corpus:
    """The standard library's language reference, about 400 KB of technical English; every other topic calibrates."""
    from pydoc_data.topics import topics

    seen: set[str] = set()
    halves: tuple[list[str], list[str]] = ([], [])
    for number, name in enumerate(sorted(topics)):
        # Topics quote whole sections of one another: a paragraph stays with the topic that has it first.
        halves[number % 2].extend(_unseen_paragraphs(topics[name], seen))
    return Corpus("pydoc", "\n\n".join(halves[0]) + "\n", "\n\n".join(halves[1]) + "\n")


def _unseen_paragraphs(text: str, seen: set[str]) -> Iterator[str]:
    for paragraph in text.strip().split("\n\n"):
        key = " ".join(paragraph.split())
        if key and key not in seen:
            seen.add(key)
            yield paragraph


def _wikitext2() -> Corpus:
    """WikiText-2 raw from the hub, the published protocol: the training split calibrates, the test split evaluates."""
    try:
        import datasets
    except ImportError as error:
        raise CorpusError(
            f"corpus=wikitext2 needs the package datasets: pip install 'kvbench[hub]'.\n{USE_OTHERS}"
        ) from error
    from huggingface_hub import snapshot_download

    repository, folder = WIKITEXT
    revision, unavailable = None, ""
    try:
        revision = resolve_revision(repository, None, "dataset")
    except HubUnavailable as error:  # what was downloaded before still serves
        unavailable = str(error)
    try:
        # The files first: datasets alone would retry a dead connection for half a minute.
        local = snapshot_download(
            repository,
            repo_type="dataset",
            revision=revision,
            allow_patterns=f"{folder}/*.parquet",
            local_files_only=bool(unavailable),
        )
        files = {split: f"{local}/{folder}/{split}-*.parquet" for split in ("train", "test")}
        splits = [datasets.load_dataset("parquet", data_files=files, split=split) for split in ("train", "test")]
    except Exception as error:  # datasets lets errors of many libraries through
        reason = unavailable or (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise CorpusError(f"cannot load WikiText-2 from {repository}: {reason}.\n{USE_OTHERS}") from error
    train, test = (split["text"] for split in splits)
    return Corpus("wikitext2", wikitext_calibration(train), wikitext_evaluation(test))


def wikitext_calibration(rows: Iterable[str]) -> str:
    """The text the published protocol calibrates on: rows of more than 50 characters, as they are."""
    return "\n".join(row for row in rows if len(row) > 50)


def wikitext_evaluation(rows: Iterable[str]) -> str:
    """The text the published protocol evaluates on: paragraphs without headings (``= Title =``), stripped."""
    paragraphs = (row.strip() for row in rows)
    return "\n\n".join(p for p in paragraphs if p and not (p.startswith("=") and p.endswith("=")))


def _files(calibration: str | None, evaluation: str | None) -> Corpus:
    if not calibration or not evaluation:
        missing = "corpus.calibration" if not calibration else "corpus.evaluation"
        raise CorpusError(f"corpus=files needs two texts: set {missing}=PATH to a UTF-8 text file.")
    first, second = _read("calibration", calibration), _read("evaluation", evaluation)
    if (passage := shared_passage(first, second)) is not None:
        raise CorpusError(
            f"calibration and evaluation text overlap: both have '{passage[:60]}...'.\n"
            "A score on text that was calibrated on says nothing: give two texts with no passage in common."
        )
    return Corpus("files", first, second)


def _read(role: str, path: str) -> str:
    """The text of a file, or of all text files of a folder, one after another in the order of their names."""
    place = Path(path).expanduser()
    try:
        files = sorted(file for file in place.rglob("*") if file.suffix in TEXT_FILES) if place.is_dir() else [place]
        text = "\n\n".join(file.read_text(encoding="utf-8") for file in files)
    except OSError as error:
        raise CorpusError(f"corpus.{role}={path} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise CorpusError(f"corpus.{role}={path} is not UTF-8 text (byte {error.start}). Convert it first.") from error
    if not text.strip():
        wanted = f" with {' or '.join(TEXT_FILES)} files" if place.is_dir() else ""
        raise CorpusError(f"corpus.{role}={path} is empty. Give a UTF-8 text file, or a folder{wanted}.")
    return text
