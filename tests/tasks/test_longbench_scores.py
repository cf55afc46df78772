"""LongBench's scores on cases computed by hand."""

import pytest

from kvbench.errors import ConfigurationError
from kvbench.tasks.longbench_scores import METRICS, score

LABELS = ["City", "Country", "State", "Other location"]


def test_all_sixteen_english_datasets_have_a_score() -> None:
    assert len(METRICS) == 16


@pytest.mark.parametrize(
    ("prediction", "answer", "expected"),
    [
        ("Paris", "paris", 1.0),
        ("The capital is Paris.", "Paris", 2 * (1 / 3) * 1 / (1 / 3 + 1)),  # capital, is, paris: "the" is dropped
        ("an apple, a pear", "apple pear", 1.0),
        ("red red blue", "red blue blue", 2 / 3),  # each word counts as often as both have it
        ("London", "Paris", 0.0),
        ("", "Paris", 0.0),
        ("the", "a", 0.0),  # nothing is left of either
        ("state-of-the-art", "stateoftheart", 1.0),  # punctuation goes before articles do
    ],
)
def test_answers_to_questions_score_f1_over_words(prediction: str, answer: str, expected: float) -> None:
    assert score("qasper", prediction, [answer]) == pytest.approx(expected)


def test_the_best_of_several_answers_counts() -> None:
    assert score("hotpotqa", "in Rome", ["Paris", "Rome", "in Rome"]) == 1.0


def test_without_answers_the_score_is_zero() -> None:
    assert score("hotpotqa", "in Rome", []) == 0.0


def test_summaries_score_the_longest_common_subsequence() -> None:
    # words in order in both: the, cat, mat: 3 of 4 predicted, 3 of 6 expected
    expected = 2 * (3 / 4) * (3 / 6) / (3 / 4 + 3 / 6)
    assert score("gov_report", "the cat mat slept", ["the cat sat upon warm mat"]) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("prediction", ["", " \n", "..."])
def test_a_summary_without_words_scores_zero(prediction: str) -> None:
    assert score("qmsum", prediction, ["the cat sat"]) == 0.0


@pytest.mark.parametrize(
    ("prediction", "answer", "expected"),
    [
        ("City", "City", 1.0),
        ("It is a City or a State", "City", 0.5),
        ("city", "City", 0.0),  # case counts
        ("Country", "City", 0.0),
        ("", "City", 0.0),
    ],
)
def test_labels_score_one_over_the_number_named(prediction: str, answer: str, expected: float) -> None:
    assert score("trec", prediction, [answer], LABELS) == expected


def test_labels_within_the_right_one_do_not_count_except_the_second_of_two_neighbours() -> None:
    assert score("trec", "Other location", ["Other location"], ["location", "City", "Other location"]) == 1.0
    labels = ["Other", "location", "Other location"]  # while "Other" is removed, "location" is stepped over
    assert score("trec", "Other location", ["Other location"], labels) == 0.5


@pytest.mark.parametrize("dataset", ["trec", "triviaqa", "samsum"])
def test_few_shot_answers_end_with_their_first_line(dataset: str) -> None:
    right, wrong = "\n\nCity\nState", "State\nCity"
    assert score(dataset, right, ["City"], LABELS) == pytest.approx(1.0)
    assert score(dataset, wrong, ["City"], LABELS) == 0.0


def test_other_answers_keep_all_their_lines() -> None:
    assert score("hotpotqa", "\nRome\nItaly", ["Rome Italy"]) == 1.0


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [("Paragraph 12", 1.0), ("12", 1.0), ("12 or 7", 0.5), ("Paragraph 1", 0.0), ("none", 0.0), ("12, 12, 3", 2 / 3)],
)
def test_retrieval_scores_the_share_of_the_right_number(prediction: str, expected: float) -> None:
    assert score("passage_retrieval_en", prediction, ["Paragraph 12"]) == pytest.approx(expected)


@pytest.mark.parametrize(("prediction", "expected"), [("7", 1.0), ("There are 7 of 30.", 0.5), ("seven", 0.0)])
def test_counting_scores_the_share_of_the_right_number(prediction: str, expected: float) -> None:
    assert score("passage_count", prediction, ["7"]) == expected


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [
        ("return x", 1.0),
        ("\n\nreturn x\nreturn y", 1.0),
        ("# a comment\n```python\n// another\nreturn x", 1.0),
        ("return y", 0.88),  # 7 of 8 characters on both sides: 87.5, rounded to the even percent
        ("return", 0.86),  # 2 * 6 / 14
        ("# nothing else", 0.0),
        ("  \nreturn x", 0.2),  # a line of spaces is a line of code; one space matches: 2 * 1 / 10
    ],
)
def test_code_scores_the_likeness_of_its_first_line_in_whole_percent(prediction: str, expected: float) -> None:
    assert score("lcc", prediction, ["return x"]) == expected


def test_an_unknown_dataset_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigurationError, match="Did you mean 'qasper'"):
        score("quasper", "", [])
