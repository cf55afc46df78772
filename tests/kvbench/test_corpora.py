"""Corpora: two texts that never overlap, cut into windows of tokens."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvbench.byte_tokenizer import byte_tokenizer
from kvbench.configuration import CorpusConfig
from kvbench.corpora import (
    Corpus,
    load_corpus,
    shared_passage,
    token_windows,
    wikitext_calibration,
    wikitext_evaluation,
)
from kvbench.errors import ConfigurationError, CorpusError

PROSE = " ".join(f"Sentence number {i} says something that no other sentence says." for i in range(40))
OTHER = " ".join(f"Here is line {i} of an altogether different text, about boats." for i in range(40))


def files(tmp_path: Path, calibration: str, evaluation: str) -> CorpusConfig:
    (tmp_path / "a.txt").write_text(calibration, encoding="utf-8")
    (tmp_path / "b.txt").write_text(evaluation, encoding="utf-8")
    return CorpusConfig("files", str(tmp_path / "a.txt"), str(tmp_path / "b.txt"))


def test_pydoc_is_always_there_with_enough_text_for_both_uses() -> None:
    corpus = load_corpus(CorpusConfig("pydoc"))
    assert min(len(corpus.calibration), len(corpus.evaluation)) > 100_000


def test_pydoc_halves_are_of_like_length() -> None:
    corpus = load_corpus(CorpusConfig("pydoc"))
    assert len(corpus.calibration) / len(corpus.evaluation) == pytest.approx(1.0, abs=0.25)


def test_pydoc_halves_share_no_passage() -> None:
    corpus = load_corpus(CorpusConfig("pydoc"))
    assert shared_passage(corpus.calibration, corpus.evaluation) is None


def test_pydoc_repeats_no_paragraph() -> None:
    corpus = load_corpus(CorpusConfig("pydoc"))
    paragraphs = [p for p in (corpus.calibration + "\n\n" + corpus.evaluation).split("\n\n") if p.strip()]
    assert len(paragraphs) == len(set(paragraphs))


def test_digests_are_sha256_of_the_utf8_texts() -> None:
    assert Corpus("files", "abc", "").digests == {
        "calibration": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
        "evaluation": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    }


def test_files_gives_both_texts_as_they_are(tmp_path: Path) -> None:
    corpus = load_corpus(files(tmp_path, PROSE, OTHER))
    assert (corpus.calibration, corpus.evaluation) == (PROSE, OTHER)


@pytest.mark.parametrize(
    "evaluation",
    [
        pytest.param(PROSE, id="the same text"),
        pytest.param(OTHER + PROSE + OTHER, id="one contains the other"),
        pytest.param(OTHER + PROSE[700:1200], id="a long passage in common"),
        pytest.param(OTHER + PROSE[700:1200].replace(" ", "\n"), id="a passage in common, wrapped differently"),
        pytest.param(PROSE[100:150], id="a short excerpt"),
    ],
)
def test_files_that_overlap_are_refused(tmp_path: Path, evaluation: str) -> None:
    with pytest.raises(CorpusError, match="overlap"):
        load_corpus(files(tmp_path, PROSE, evaluation))


def test_files_with_only_short_phrases_in_common_are_accepted(tmp_path: Path) -> None:
    load_corpus(files(tmp_path, PROSE, OTHER + PROSE[700:800]))


def test_missing_file_is_named(tmp_path: Path) -> None:
    config = CorpusConfig("files", str(tmp_path / "absent.txt"), str(tmp_path / "absent.txt"))
    with pytest.raises(CorpusError, match=r"corpus\.calibration=.*absent\.txt cannot be read"):
        load_corpus(config)


def test_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    config = files(tmp_path, PROSE, OTHER)
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(CorpusError, match=r"corpus\.evaluation=.* is not UTF-8"):
        load_corpus(config)


def test_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="is empty"):
        load_corpus(files(tmp_path, PROSE, " \n"))


def test_files_without_a_path_says_which_option_to_set() -> None:
    with pytest.raises(CorpusError, match=r"set corpus\.evaluation=PATH"):
        load_corpus(CorpusConfig("files", "a.txt", None))


ROWS = [
    "",
    " = Robert Boulter = \n",
    f" {'A long paragraph . ' * 3}\n",
    " = Qualified\n",
    " == Career == \n",
    " Short .\n",
]


def test_wikitext_is_evaluated_on_paragraphs_without_headings() -> None:
    expected = "A long paragraph . A long paragraph . A long paragraph .\n\n= Qualified\n\nShort ."
    assert wikitext_evaluation(ROWS) == expected


def test_wikitext_is_calibrated_on_long_rows_as_they_are() -> None:
    assert wikitext_calibration([*ROWS, ROWS[2]]) == f"{ROWS[2]}\n{ROWS[2]}"


def test_wikitext2_that_cannot_be_had_names_the_ways_out_in_two_lines(tmp_path: Path) -> None:
    code = (
        "from kvbench.configuration import CorpusConfig\nfrom kvbench.corpora import load_corpus\n"
        "from kvbench.errors import CorpusError\n"
        "try:\n    load_corpus(CorpusConfig('wikitext2'))\n"
        "except CorpusError as error:\n    print(error)\n    raise SystemExit(2)\n"
    )
    # an endpoint that refuses connections and an empty cache; the client reads both when imported
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert len(done.stdout.splitlines()) == 2
    assert "corpus=pydoc" in done.stdout
    assert "corpus=files corpus.calibration=PATH" in done.stdout


def test_unknown_corpus_suggests_a_near_name() -> None:
    with pytest.raises(CorpusError, match="Did you mean 'pydoc'"):
        load_corpus(CorpusConfig("pydocs"))


def test_windows_are_consecutive_tokens_from_the_start() -> None:
    tokenizer = byte_tokenizer()
    windows = token_windows(PROSE, tokenizer, tokens=96, window=32)
    assert windows.shape == (3, 32)
    assert windows.dtype == torch.int64
    assert tokenizer.decode(windows.flatten()) == PROSE[:96]


def test_windows_of_a_long_text_are_those_of_its_beginning() -> None:
    text = PROSE * 100
    tokenizer = byte_tokenizer()
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert token_windows(text, tokenizer, 4096, 512).flatten().tolist() == whole[:4096]


def test_text_that_is_too_short_says_how_many_tokens_there_are() -> None:
    with pytest.raises(CorpusError, match="it has 11 tokens, 64 were asked for"):
        token_windows("hello world", byte_tokenizer(), tokens=64, window=32)


@pytest.mark.parametrize(("tokens", "window"), [(100, 32), (16, 32), (0, 32), (32, 0), (-32, 32)])
def test_tokens_must_be_a_positive_multiple_of_the_window(tokens: int, window: int) -> None:
    with pytest.raises(ConfigurationError, match="choose a positive multiple"):
        token_windows(PROSE, byte_tokenizer(), tokens, window)


@pytest.mark.slow
def test_a_real_tokenizer_gives_the_same_first_tokens_for_the_whole_text(smollm2) -> None:
    text = load_corpus(CorpusConfig("pydoc")).calibration
    whole = smollm2.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    assert token_windows(text, smollm2.tokenizer, 2048, 256).flatten().tolist() == whole[:2048]


def test_a_folder_is_the_text_of_its_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    config = files(tmp_path, PROSE, "")
    folder = tmp_path / "texts"
    (folder / "more").mkdir(parents=True)
    for name, text in {"b.md": "Second.", "a.txt": "First.", "c.py": "no_prose", "more/d.txt": "Third."}.items():
        (folder / name).write_text(text)
    config.evaluation = str(folder)
    assert load_corpus(config).evaluation == "First.\n\nSecond.\n\nThird."


def test_a_folder_without_texts_is_refused_with_what_it_should_hold(tmp_path: Path) -> None:
    config = files(tmp_path, PROSE, "")
    config.evaluation = str(tmp_path / "none")
    (tmp_path / "none").mkdir()
    with pytest.raises(CorpusError, match=r"\.txt or \.md files"):
        load_corpus(config)
