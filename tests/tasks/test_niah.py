"""Needle in a haystack: prompts of exact length with every needle in its place, and scores that follow the answer."""

import math
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from kvbench.byte_tokenizer import byte_tokenizer
from kvbench.chat import decode
from kvbench.errors import ConfigurationError
from kvbench.quantizers.fp16 import Fp16
from kvbench.quantizers.tqmse import TQMSE
from kvbench.sample_store import SampleStore
from kvbench.session import Session
from kvbench.tasks.niah import Niah, found_fraction
from kvbench.tasks.niah_needles import TASKS, draw_needles
from kvbench.tasks.niah_prompts import Prompt, answer_tokens, build_prompt, plant, read_haystack

from .sessions import Identity, session

TOKENIZER = byte_tokenizer()
TEXT = "The sky was clear. Nothing happened for a while. Then it rained, and it rained. " * 40
TEMPLATE = "{% for m in messages %}<user>{{ m['content'] }}</user>{% endfor %}<assistant>"
SMALL = Niah(tasks=["single", "multi"], lengths=[300, 340], depths=[0.2, 0.8], trials=1, batch_size=1, max_new_tokens=4)


def prompt(task: str = "single", length: int = 600, depth: float = 0.5, trial: int = 0, chat: bool = True) -> Prompt:
    haystack = read_haystack(TEXT, TOKENIZER, length)
    return build_prompt(TOKENIZER, haystack, task, length, depth, trial, seed=0, start=0, chat=chat)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_a_prompt_has_exactly_its_tokens_and_every_needle_and_question(task: str, depth: float) -> None:
    built = prompt(task, 777, depth)
    assert len(built.tokens) == 777
    text = decode(TOKENIZER, built.tokens)
    needles = draw_needles(task, depth, f"0 777 {depth:g} 0")
    assert all(fact.statement in text for _, fact in needles.planted)
    assert all(text.count(fact.question) == 1 for fact in needles.asked)
    assert built.expected == [fact.value for fact in needles.asked]


def test_needles_stand_at_their_depths() -> None:
    starts = []
    for depth in (0.0, 0.25, 0.5, 0.75, 1.0):
        built = prompt("single", 3000, depth)
        fact = draw_needles("single", depth, f"0 3000 {depth:g} 0").asked[0]
        starts.append(decode(TOKENIZER, built.tokens).index(fact.statement))
    assert all(abs(start - depth * 2850) < 120 for start, depth in zip(starts, (0, 0.25, 0.5, 0.75, 1), strict=True))


def test_a_needle_stands_behind_the_end_of_the_nearest_sentence() -> None:
    hay, ends = [1, 2, 3, 4, 5, 6], [False, True, False, False, True, False]
    assert plant(hay, ends, [(0.9, [70]), (0.2, [80])]) == [1, 2, 80, 3, 4, 5, 70, 6]


def test_several_needles_in_one_place_keep_their_order() -> None:
    assert plant([1, 2], [False, False], [(0.1, [7]), (0.0, [8, 9])]) == [1, 2, 7, 8, 9]


def test_a_text_that_is_too_short_begins_anew() -> None:
    haystack = read_haystack("One. Two.", TOKENIZER, 50)
    tokens, _ = haystack.cut(4, 11)
    assert decode(TOKENIZER, tokens) == " Two.One. T"


def test_needles_differ_between_trials_and_are_the_same_for_the_same_seed() -> None:
    values = [prompt(trial=trial).expected for trial in (0, 1, 0)]
    assert values[0] == values[2] != values[1]


@pytest.mark.parametrize("task", TASKS)
def test_no_value_is_asked_for_twice_or_given_away_by_a_distractor(task: str) -> None:
    for seed in range(50):
        needles = TASKS[task](0.5, random.Random(seed))
        values = [fact.value for _, fact in needles.planted]
        assert len(set(values)) == len(values)


def test_the_chat_template_is_used_where_there_is_one_and_wanted() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    haystack = read_haystack(TEXT, tokenizer, 600)
    for wanted in (True, False):
        built = build_prompt(tokenizer, haystack, "single", 600, 0.5, 0, seed=0, start=0, chat=wanted)
        assert len(built.tokens) == 600
        assert built.chat_template is wanted
        assert decode(tokenizer, built.tokens).endswith("</user><assistant>") is wanted


def test_a_length_without_room_for_a_haystack_is_refused_with_one_that_has() -> None:
    with pytest.raises(ConfigurationError, match=r"Choose \d+ or more"):
        prompt("multivalue", 150)


def test_only_values_are_scored_and_the_answer_reads_as_a_sentence() -> None:
    tokens, scored = answer_tokens(TOKENIZER, [("1. The code of Ann is", "12"), (".\n2. The town of Bo is", "Oslo")])
    assert decode(TOKENIZER, tokens) == "1. The code of Ann is 12.\n2. The town of Bo is Oslo"
    assert decode(TOKENIZER, [token for token, kept in zip(tokens, scored, strict=True) if kept]) == " 12 Oslo"


@pytest.mark.parametrize(
    ("answer", "fraction"), [("It is OSLO.", 0.5), ("oslo and 123", 1.0), ("Bergen, 12 3", 0.0), ("", 0.0)]
)
def test_the_score_is_the_fraction_of_values_found_case_aside(answer: str, fraction: float) -> None:
    assert found_fraction(["Oslo", "123"], answer) == fraction


def test_the_answers_likelihood_is_that_of_the_session() -> None:
    opened = session(Identity(), prefill_chunk=64)
    record = measured(SMALL, opened)
    built = SMALL._prompts(opened)[0]

    def nll(tokens: int) -> float:
        return -opened.loglikelihood(torch.tensor(built.tokens), torch.tensor(built.answer[:tokens]))[0]

    values = [i for i, scored in enumerate(built.scored) if scored]
    expected = sum(nll(i + 1) - (nll(i) if i else 0.0) for i in values) / len(values)
    assert record[0] == pytest.approx(expected, abs=1e-4)


def measured(task: Niah, opened: Session) -> list[float]:
    return task.run(opened).samples["answer_nll"]


def test_every_cell_of_the_heat_map_is_the_mean_of_its_prompts() -> None:
    opened = session(Fp16())
    result = SMALL.run(opened)
    heat = result.metrics["heat_map"]
    prompts = SMALL._prompts(opened)
    for row, depth in enumerate(heat["depths"]):
        for column, length in enumerate(heat["lengths"]):
            cell = [
                value
                for value, built in zip(result.samples["answer_nll"], prompts, strict=True)
                if (built.depth, built.length) == (depth, length)
            ]
            assert len(cell) == 2
            assert heat["answer_nll"][row][column] == pytest.approx(sum(cell) / 2)
    assert result.n == 8
    assert result.metrics["answer_nll"] == pytest.approx(math.fsum(result.samples["answer_nll"]) / 8)


def test_all_quantizers_read_the_same_prompts_from_packed_storage() -> None:
    memo: dict[str, object] = {}
    results = []
    for quantizer in (Fp16(), TQMSE(k_bits=2, v_bits=2)):
        opened = session(quantizer)
        opened.memo = memo
        results.append(SMALL.run(opened))
        assert all(layer.packed_tokens_read > 8 * 300 for layer in opened.engagement)
    assert len(memo) == 1
    first, second = (result.samples["answer_nll"] for result in results)
    assert len(first) == len(second)
    assert all(one != other for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("batch_size", [1, 2])
def test_an_interrupted_task_ends_with_the_same_numbers_and_proof(tmp_path: Path, batch_size: int) -> None:
    task = replace(SMALL, batch_size=batch_size)
    kept = tmp_path / "kept.jsonl"
    whole = session(TQMSE(k_bits=2, v_bits=2), prefill_chunk=64)
    whole.samples = SampleStore(kept)
    expected = task.run(whole)
    lines = kept.read_text().splitlines(keepends=True)
    for finished in (1, 3):
        kept.write_text("".join(lines[:finished]) + lines[finished][:40])  # killed while writing the next sample
        resumed = session(TQMSE(k_bits=2, v_bits=2), prefill_chunk=64)
        resumed.samples = SampleStore(kept)
        assert task.run(resumed) == expected
        assert resumed.engagement == whole.engagement
        assert resumed.compression == whole.compression


def test_scores_do_not_depend_on_how_many_prompts_are_read_together() -> None:
    alone, together = (
        replace(SMALL, batch_size=size).run(session(TQMSE(k_bits=3, v_bits=3), prefill_chunk=64)).metrics["per_task"]
        for size in (1, 3)
    )
    for task in SMALL.tasks:
        assert together[task] == pytest.approx(alone[task], rel=1e-4)


def test_prompts_that_begin_alike_are_neighbours() -> None:
    prompts = SMALL._prompts(session(Fp16()))
    assert all(one.tokens <= other.tokens for one, other in pairwise(prompts))


@pytest.mark.parametrize(
    "options", [{"preset": "tiny"}, {"tasks": ["singel"]}, {"depths": [1.5]}, {"lengths": []}, {"trials": 0}], ids=str
)
def test_options_that_make_no_sense_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        Niah(**options)  # type: ignore[arg-type]


def test_a_prompt_longer_than_the_models_window_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="reads 512"):
        replace(SMALL, lengths=[510]).run(session(Fp16()))
