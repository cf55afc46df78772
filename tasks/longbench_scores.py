"""LongBench's scores of single answers (Bai et al., arXiv 2308.14508): what its public scorer gives, between 0 and 1.

Published numbers hang on details of that scorer, odd ones included; they are kept here and marked as such.
"""

import difflib
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

from kvbench.errors import ConfigurationError, unknown_name

FIRST_LINE_ONLY = frozenset({"trec", "triviaqa", "samsum"})  # few-shot: what follows is the model's next example
COMMENT_MARKS = ("`", "#", "//")


def score(dataset: str, prediction: str, answers: Sequence[str], all_classes: Sequence[str] | None = None) -> float:
    """The best score of ``prediction`` against any of ``answers``; 0 without answers.

    ``all_classes`` are the labels of a classification dataset. Raises ConfigurationError for an unknown dataset.
    """
    if dataset not in METRICS:
        raise ConfigurationError(unknown_name("LongBench dataset", dataset, METRICS))
    if dataset in FIRST_LINE_ONLY:
        prediction = prediction.lstrip("\n").split("\n")[0]
    metric = METRICS[dataset]
    return max((metric(prediction, answer, all_classes or ()) for answer in answers), default=0.0)


def qa_f1(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """F1 over words, without case, punctuation and articles."""
    found, expected = normalized_words(prediction), normalized_words(answer)
    common = (Counter(found) & Counter(expected)).total()
    if not common:
        return 0.0
    precision, recall = common / len(found), common / len(expected)
    return 2 * precision * recall / (precision + recall)


def normalized_words(text: str) -> list[str]:
    """Words in lower case; ASCII punctuation is dropped before articles are, so that "a-n" is the article "an"."""
    letters = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", letters).split()


def rouge_l(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """F score of the longest common subsequence, by the package rouge, whose constants published numbers contain."""
    from rouge import Rouge

    try:
        return float(Rouge().get_scores([prediction], [answer], avg=True)["rouge-l"]["f"])
    except (ValueError, RecursionError):  # an answer without words
        return 0.0


def classification(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """1 over the number of labels named, if the right one is among them.

    Labels that are part of the right one do not count. As published, they are removed while they are walked through,
    which leaves the second of two neighbouring ones in.
    """
    named = [label for label in classes if label in prediction]
    for label in named:
        if label in answer and label != answer:
            named.remove(label)
    return 1 / len(named) if answer in named else 0.0


def retrieval(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """The share of the right paragraph's number among all numbers named."""
    match = re.search(r"Paragraph (\d+)", answer)
    return number_share(prediction, match.group(1)) if match else 0.0


def count(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """The share of the right count among all numbers named."""
    return number_share(prediction, str(answer))


def number_share(prediction: str, right: str) -> float:
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(right) / len(numbers) if numbers else 0.0


def code_similarity(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """Similarity in whole percent of the first line of code, by the standard library's matcher."""
    lines = prediction.lstrip("\n").split("\n")
    code = next((line for line in lines if not any(mark in line for mark in COMMENT_MARKS)), "")
    if code == answer:
        return 1.0
    if not code or not answer:
        return 0.0
    return round(100 * difflib.SequenceMatcher(None, code, answer).ratio()) / 100


METRICS: dict[str, Callable[[str, str, Sequence[str]], float]] = {
    "narrativeqa": qa_f1,
    "qasper": qa_f1,
    "multifieldqa_en": qa_f1,
    "hotpotqa": qa_f1,
    "2wikimqa": qa_f1,
    "musique": qa_f1,
    "gov_report": rouge_l,
    "qmsum": rouge_l,
    "multi_news": rouge_l,
    "trec": classification,
    "triviaqa": qa_f1,
    "samsum": rouge_l,
    "passage_count": count,
    "passage_retrieval_en": retrieval,
    "lcc": code_similarity,
    "repobench-p": code_similarity,
}
