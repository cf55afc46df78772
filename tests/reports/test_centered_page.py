"""The tables on Centered Block-GTQ say what the committed measurements say, and measurements are read as they were."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from kvbench.errors import ResultError
from kvbench.quantizers.blockgtq import BlockGTQ
from kvbench.quantizers.cblockgtq import CenteredBlockGTQ
from kvbench.quantizers.tqmse import TQMSE
from kvbench.reports.centered_page import (
    ERROR,
    FIGURE,
    KL,
    OTHER_TEXT,
    PERPLEXITY,
    QUALITY,
    SETTINGS,
    TABLES,
    WIKITEXT,
    agreement_table,
    difference,
    equal_bytes,
    filled,
    layers_below,
    of_texts,
    pareto_figure,
    within,
)
from kvbench.reports.collect import Run
from kvbench.reports.evidence import Evidence, Row, between, evidence, find, read_evidence, write_evidence
from kvbench.results import Result
from kvbench.statistics import paired_difference

from .example_results import measurement, result

ROOT = Path(__file__).parents[2]
DATA = ROOT / "benchmarks" / "results" / "centered.json"
OWN_NORMS = "blockgtq norm_bits=8"
KINDS = {"tqmse": TQMSE, "blockgtq": BlockGTQ, "cblockgtq": CenteredBlockGTQ}


@pytest.fixture(scope="module")
def committed() -> Evidence:
    return read_evidence(DATA)


@pytest.mark.parametrize("page", TABLES)
def test_the_page_says_what_the_data_say(committed: Evidence, page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert filled(page, text, committed) == text


def test_the_figure_has_the_points_of_the_data(committed: Evidence) -> None:
    points = pareto_figure(committed)["data"]["values"]
    picture = (ROOT / "docs" / FIGURE).read_text(encoding="utf-8")
    assert {point["family"] for point in points} >= {"tqmse", "blockgtq", "cblockgtq"}
    assert picture.count("<svg") == 1
    for family in {point["family"] for point in points}:
        assert family in picture


def row(name: str, bits_k: float = 2.5, error: float = 1.0, **options: Any) -> Row:
    return Row(
        quantizer=name,
        parameters=dataclasses.asdict(KINDS[name](**{"v_bits": 4.0, **options})),
        n_sink=0,
        calibration=WIKITEXT[0],
        evaluation=WIKITEXT[1],
        device="none",
        packages={},
        tokens=2048,
        bits_k=bits_k,
        bits_v=4.25,
        metrics={ERROR: error, PERPLEXITY: 10 * error, KL: error / 10},
        layers=[error, 2 * error],
        samples={"fidelity.kl": [error, error + 1]},
    )


def of(*rows: Row) -> Evidence:
    return Evidence(model="m", dtype="float32", kvbench="0", measured="2026-01-01", rows=list(rows))


def test_a_row_is_of_a_quantizer_only_with_all_its_options() -> None:
    flagged = row("cblockgtq", center_flag=True, k_bits=3)
    assert flagged.is_a("cblockgtq", center_flag=True)
    assert flagged.is_a("cblockgtq", center_flag=True, k_bits=3)
    assert not flagged.is_a("cblockgtq", center_flag=True, k_bits=2)
    assert not flagged.is_a("cblockgtq")
    assert not flagged.is_a("blockgtq", center_flag=True)


def test_within_a_budget_the_lowest_logit_error_counts_and_no_row_beyond_it() -> None:
    rows = [
        row("cblockgtq", 2.2, 3.0, align=16, norm_bits=6),
        row("cblockgtq", 2.4, 2.0),
        row("cblockgtq", 2.6, 1.0),
        row("cblockgtq", 2.1, 0.5, center_flag=True),  # not of the family
    ]
    found = within(rows, "cblockgtq", 2.5)
    assert found is not None
    assert found.metrics[ERROR] == 2.0
    assert within(rows, "cblockgtq", 2.0) is None
    assert within(rows, "cblockgtq", 3.5) is None  # what was measured falls too far short of it
    assert within(rows, "tqmse", 5.0) is None


def test_budgets_are_compared_where_there_is_more_than_one_family() -> None:
    data = of(
        *(row(name, 2.25, error) for name, error in (("tqmse", 4.0), ("blockgtq", 3.0), ("cblockgtq", 2.0))),
        row("blockgtq", 4.0, 1.0),
        row("tqmse", 3.9, 2.0),
    )
    found = equal_bytes(data, KL)
    assert {budget: set(rows) for budget, rows in found.items()} == {
        2.25: {"tqmse", "blockgtq", "cblockgtq"},
        2.5: {"tqmse", "blockgtq", "cblockgtq"},
        4.0: {"tqmse", "blockgtq"},
        4.25: {"tqmse", "blockgtq"},
    }


def test_layers_are_compared_one_by_one_and_samples_pair_by_pair() -> None:
    first, second = row("cblockgtq", error=1.0), row("blockgtq", error=1.5)
    assert layers_below(first, second) == "2 of 2"
    assert layers_below(second, first) == "0 of 2"
    assert difference(first, second, "fidelity.kl") == "-0.5000 (-0.5000 to -0.5000)"


def test_a_missing_measurement_is_named() -> None:
    with pytest.raises(ResultError, match=r"fidelity\.kl of tqmse with k_bits=7"):
        find([row("tqmse")], "tqmse", needs=KL, k_bits=7)


def continued(name: str, k_bits: float, v_bits: float, same: float) -> Row:
    """A row of which greedy continuations are all that was measured."""
    return row(name, k_bits=k_bits, v_bits=v_bits).model_copy(
        update={
            "metrics": {"agreement.agreement": same, "agreement.agreed_prefix": 100 * same},
            "samples": {"agreement.agreement": [same, same], "agreement.agreed_prefix": [100 * same] * 2},
        }
    )


def test_continuations_are_told_at_every_setting_and_none_may_be_missing() -> None:
    rows = [
        continued(name, k, v, k / 10 + v / 100 + step)
        for k, v in SETTINGS
        for name, step in (("blockgtq", 0.0), ("cblockgtq", 0.05))
    ]
    lines = [line for line in agreement_table(of(*rows)).markdown().splitlines() if line.startswith("| K")]
    assert [line.split(" | ")[:3] for line in lines] == [
        [f"| K{k}V{v}", name, f"{k / 10 + v / 100 + step:.3f}"]
        for k, v in SETTINGS
        for name, step in (("blockgtq", 0.0), ("cblockgtq", 0.05))
    ]
    assert all("+0.0500 (+0.0500 to +0.0500)" in line for line in lines[1::2])
    with pytest.raises(ResultError, match=r"agreement\.agreement of cblockgtq with k_bits=2, v_bits=3"):
        agreement_table(of(*(row for row in rows if (row.quantizer, row.parameters["v_bits"]) != ("cblockgtq", 3))))


def test_text_between_markers_is_replaced_and_nothing_else() -> None:
    text = "a\n<!-- t -->\n\nold\n\n<!-- end of t -->\nb\n"
    assert between(text, "t", "new") == "a\n<!-- t -->\n\nnew\n\n<!-- end of t -->\nb\n"
    with pytest.raises(ResultError, match="<!-- u -->"):
        between(text, "u", "new")


def run(bits: int, task: str, tokens: int) -> Run:
    """A run of one task of blockgtq, with a baseline, on two files."""
    made = measurement("blockgtq", bits, 4.0, 20.0)
    made.tasks = {task: made.tasks[task]}
    assert made.compression is not None
    made.compression.tokens = tokens
    texts = {"name": "files", "calibration": "somewhere/train_excerpt.txt", "evaluation": "test_excerpt.txt"}
    fields = {key: getattr(made, key) for key in type(made).model_fields} | {
        "config": {"corpus": texts},
        "run_id": f"{bits} {task}",
        "baselines": {},
        "status": "ok",
    }
    return Run(Path(task), Result.model_validate(result().model_dump() | fields))


def test_runs_of_the_same_thing_are_one_row(tmp_path: Path) -> None:
    data = evidence([run(2, "logit_error", 1024), run(2, "perplexity", 2048), run(3, "perplexity", 2048)])
    two, three = data.rows
    assert (two.calibration, two.evaluation, two.tokens) == ("train_excerpt", "test_excerpt", 2048)
    assert {"logit_error.mean", "perplexity.perplexity"} <= set(two.metrics)
    assert two.layers
    assert "logit_error.mean" not in three.metrics
    write_evidence(data, tmp_path / "data.json")
    assert read_evidence(tmp_path / "data.json") == data


def test_unfinished_tasks_are_not_evidence() -> None:
    unfinished = run(2, "perplexity", 64)
    unfinished.result.tasks["perplexity"].status = "oom"
    with pytest.raises(ResultError, match="no finished task"):
        evidence([unfinished])


def test_the_claims_of_the_page_hold_in_the_data(committed: Evidence) -> None:
    """Words of the page that are not tables: each is a comparison of measured numbers."""
    own, other = of_texts(committed, WIKITEXT), of_texts(committed, OTHER_TEXT)
    two = find(own, "cblockgtq", needs=ERROR, k_bits=2)
    assert two.metrics[ERROR] < find(own, "blockgtq", needs=ERROR, k_bits=3).metrics[ERROR]
    for bits in (2, 3, 4):
        for rows in (own, other):
            centred, block, uniform = (
                find(rows, name, needs=ERROR, k_bits=bits) for name in ("cblockgtq", "blockgtq", "tqmse")
            )
            assert centred.metrics[ERROR] < (1 - 0.66) * uniform.metrics[ERROR]
            assert layers_below(centred, block) == "30 of 30"
    apart = {}
    for metric in ("perplexity.nll", "fidelity.kl"):
        pair = (find(own, name, needs=PERPLEXITY, k_bits=4, v_bits=4) for name in ("cblockgtq", "blockgtq"))
        apart[metric] = paired_difference(*(row.samples[metric] for row in pair))
    assert apart["perplexity.nll"].low < 0 < apart["perplexity.nll"].high
    assert apart["fidelity.kl"].high < 0
    exceptions = set()
    for metric in QUALITY:
        for budget, rows in equal_bytes(committed, metric).items():
            others = [row.metrics[metric] for family, row in rows.items() if family not in ("cblockgtq", OWN_NORMS)]
            assert rows["cblockgtq"].metrics[metric] < min(others)
            if OWN_NORMS in rows and rows[OWN_NORMS].metrics[metric] < rows["cblockgtq"].metrics[metric]:
                exceptions.add((metric, budget))
    assert exceptions == {(KL, 4.25), (PERPLEXITY, 4.5)}
