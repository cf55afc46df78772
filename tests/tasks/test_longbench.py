"""LongBench: its prompts, its truncation, and its averages, on tiny models and samples written here."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.byte_tokenizer import byte_tokenizer
from kvbench.chat import encode
from kvbench.errors import ConfigurationError, CorpusError
from kvbench.identity import implementation
from kvbench.quantizers.fp16 import Fp16
from kvbench.quantizers.tqmse import TQMSE
from kvbench.sample_store import SampleStore
from kvbench.tasks.longbench import LongBench, Prompt, without_middle
from kvbench.tasks.longbench_data import WITHOUT_CHAT, read_samples, template
from kvbench.tasks.longbench_scores import METRICS

from .sessions import session

TOKENIZER = byte_tokenizer()
DATASETS = ["hotpotqa", "trec"]
TEMPLATE = "{% for m in messages %}<user>{{ m['content'] }}</user>{% endfor %}<assistant>"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three samples of a question answering dataset and two of a classification one, in upstream's layout."""
    questions = [{"input": f"Who is {n}?", "context": f"{n} is a baker. " * (4**i), "answers": [n]} for i, n in NAMES]
    labels = [{"input": "Question: Why?\nType:", "context": "", "answers": ["Reason"], "all_classes": ["Reason"]}] * 2
    for dataset, samples in zip(DATASETS, (questions, labels), strict=True):
        lines = [json.dumps({"dataset": dataset, "language": "en", **sample}) for sample in samples]
        (tmp_path / f"{dataset}.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


NAMES = list(enumerate(["Ada", "Bo", "Cleo"]))


def small(folder: Path, **options: object) -> LongBench:
    chosen = {"datasets": DATASETS, "data_dir": str(folder), "max_new_tokens": 3, **options}
    return LongBench(**chosen)  # type: ignore[arg-type]


def prompts(task: LongBench, dataset: str) -> list[Prompt]:
    return task._prompts(session(Fp16()), dataset)


@pytest.mark.parametrize("dataset", METRICS)
def test_every_dataset_has_a_prompt_with_its_context_and_question(dataset: str) -> None:
    filled = template(dataset).fill({"context": "{{question}} CONTEXT", "input": "QUESTION"})
    assert filled.count("{{question}} CONTEXT") == 1
    assert filled.count("QUESTION") == (0 if dataset in {"gov_report", "multi_news", "passage_count", "lcc"} else 1)
    assert "}}" not in filled.replace("{{question}}", "")


def test_prompts_end_and_are_spaced_as_upstream_has_them() -> None:
    sample = {"context": "C", "input": "Q"}
    assert template("lcc").fill(sample).endswith("CNext line of code:\n")
    assert template("passage_count").fill(sample).endswith("The final answer is: ")
    assert template("samsum").fill(sample).endswith("\n\nC\n\nQ")
    assert template("trec").fill(sample).endswith("\n\nC\nQ")


def test_answers_are_as_long_as_upstream_lets_them_be() -> None:
    assert [template(name).max_new_tokens for name in ("hotpotqa", "gov_report", "samsum")] == [32, 512, 128]


def test_a_long_text_keeps_its_first_and_last_half() -> None:
    assert without_middle(TOKENIZER, "abcdefghij", 10) == "abcdefghij"
    assert without_middle(TOKENIZER, "abcdefghij", 7) == "abchij"


def test_prompts_that_do_not_fit_the_model_are_shortened_and_counted(folder: Path) -> None:
    task = small(folder)
    built = prompts(task, "hotpotqa")
    assert [prompt.truncated for prompt in built] == [True, False, False]
    assert max(len(prompt.tokens) for prompt in built) + 3 <= 512
    result = task.run(session(Fp16()))
    assert result.metrics["truncated"] == 1
    assert result.metrics["truncated_by_dataset"] == {"hotpotqa": 1, "trec": 0}


def test_a_shorter_limit_on_prompts_is_obeyed(folder: Path) -> None:
    assert max(len(prompt.tokens) for prompt in prompts(small(folder, max_input=100), "hotpotqa")) <= 102


def test_the_longest_prompt_comes_first(folder: Path) -> None:
    lengths = [len(prompt.tokens) for prompt in prompts(small(folder), "hotpotqa")]
    assert lengths == sorted(lengths, reverse=True)


def test_the_chat_template_is_used_except_where_upstream_leaves_it_out(folder: Path) -> None:
    opened = session(Fp16())
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    opened.loaded = replace(opened.loaded, tokenizer=tokenizer)
    for dataset in DATASETS:
        [*_, built] = small(folder)._prompts(opened, dataset)
        assert built.chat_template is (dataset not in WITHOUT_CHAT)
        assert (built.tokens[:6] == encode(tokenizer, "<user>")) is built.chat_template
        [*_, plain] = small(folder, chat=False)._prompts(opened, dataset)
        assert not plain.chat_template


def test_scores_are_percent_and_the_average_is_over_datasets(folder: Path) -> None:
    result = small(folder).run(session(Fp16()))
    assert result.n == 5
    assert result.metrics["samples"] == {"hotpotqa": 3, "trec": 2}
    assert result.metrics["average"] == (result.metrics["hotpotqa"] + result.metrics["trec"]) / 2
    assert len(result.samples["score"]) == 5


def test_an_answer_that_the_model_gives_scores_a_hundred(folder: Path) -> None:
    opened = session(Fp16())
    task = small(folder, datasets=["hotpotqa"])
    opened.samples = store = SampleStore(folder / "kept.jsonl")
    task.run(opened)
    known = store.recall(["hotpotqa 0"])
    assert known is not None
    answer = known.records[0]["answer"]
    words = {"input": "Who is Ada?", "context": "Ada is a baker. ", "answers": ["no", answer]}
    (folder / "hotpotqa.jsonl").write_text(json.dumps(words) + "\n")
    expected = 100.0 if any(character.isalnum() for character in answer) else 0.0
    assert task.run(session(Fp16())).metrics["hotpotqa"] == expected


def test_batches_give_the_answers_of_single_prompts(folder: Path) -> None:
    answers = []
    for size in (1, 3):
        opened = session(TQMSE(k_bits=4, v_bits=4))
        opened.samples = SampleStore(report=folder / f"{size}.jsonl")
        small(folder, batch_size=size).run(opened)
        lines = [json.loads(line) for line in (folder / f"{size}.jsonl").read_text().splitlines()]
        answers.append({line["sample"]: line["answer"] for line in lines})
    assert answers[0] == answers[1]
    assert len(answers[0]) == 5


def test_an_interrupted_task_ends_with_the_same_numbers_and_proof(folder: Path) -> None:
    kept = folder / "kept.jsonl"
    whole = session(TQMSE(k_bits=2, v_bits=2), prefill_chunk=64)
    whole.samples = SampleStore(kept)
    expected = small(folder).run(whole)
    lines = kept.read_text().splitlines(keepends=True)
    kept.write_text("".join(lines[:2]) + lines[2][:30])
    resumed = session(TQMSE(k_bits=2, v_bits=2), prefill_chunk=64)
    resumed.samples = SampleStore(kept)
    assert small(folder).run(resumed) == expected
    assert resumed.engagement == whole.engagement


def test_changed_samples_are_another_measurement(folder: Path) -> None:
    before = implementation(small(folder))
    assert implementation(small(folder)) == before
    with (folder / "trec.jsonl").open("a") as file:
        file.write("\n")
    assert implementation(small(folder)) != before


def test_only_the_first_samples_are_read_where_a_limit_says_so(folder: Path) -> None:
    assert len(read_samples("hotpotqa", str(folder), 2)) == 2


def test_a_missing_file_is_named(folder: Path) -> None:
    with pytest.raises(CorpusError, match=r"qasper\.jsonl"):
        read_samples("qasper", str(folder), None)


def test_a_line_in_another_layout_is_named(folder: Path) -> None:
    (folder / "qasper.jsonl").write_text('{"input": "", "context": "", "answers": []}\n{"question": ""}\n')
    with pytest.raises(CorpusError, match="line 2"):
        read_samples("qasper", str(folder), None)


@pytest.mark.parametrize(
    "options", [{"datasets": []}, {"datasets": ["trec", "trec"]}, {"datasets": ["trek"]}, {"limit": 0}], ids=str
)
def test_options_that_make_no_sense_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        LongBench(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("package", ["lm_eval", "rouge"])
def test_a_missing_package_is_named_with_the_way_to_it(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigurationError, match=rf"{package}.*kvbench\[longbench\]"):
        LongBench()
