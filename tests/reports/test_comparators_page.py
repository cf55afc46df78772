"""The page on the methods compared: made from runs, it says what its data say; so does the committed one."""

import hashlib
from pathlib import Path
from typing import Any

import pytest

from kvbench.errors import ResultError
from kvbench.reports.collect import collect
from kvbench.reports.comparators_data import ComparatorData, comparator_data, find
from kvbench.reports.comparators_page import SWEEPS, main, page, verdict
from kvbench.reports.comparison import compare
from kvbench.results import Measurement, Result, read_result, write_result
from kvbench.statistics import Interval

from .example_results import measurement, result

ROOT = Path(__file__).parents[2]
COMMITTED = sorted((ROOT / "benchmarks" / "results").glob("comparators.json"))
LOSSES = {"fp16": 2.5, "tqmse": 2.7, "turboquant_prod": 2.9, "kivi": 2.6, "int": 2.8, "hqq": 2.75}
BLOCKS = 16


def measured(name: str, bits: int, window: int = 0, **parameters: Any) -> Result:
    """A run of which four times the bits and a window make the loss smaller, as a real one's does."""
    loss = LOSSES[name] - 0.02 * bits - (0.1 if window else 0.0) - parameters.get("residual", 128) / 12800
    made = measurement(name, bits, 4.0 / bits, 2.718**loss)
    made.quantizer.parameters |= parameters
    made.tasks["perplexity"].path = "peer" if name == "hqq" else "packed"
    made.tasks["perplexity"].samples = {"nll": [loss + 0.01 * (block % 3) for block in range(BLOCKS)]}
    assert made.cache is not None
    made.cache.recent_window = window
    options = {"window": 2048, "windows": 4}
    fields = {key: getattr(made, key) for key in Measurement.model_fields} | {
        "run_id": hashlib.sha256(f"{name} {bits} {window} {parameters}".encode()).hexdigest(),
        "config": {"task": {"perplexity": options, "logit_error": {"tokens": 2048}}, "cache": {"prefill_chunk": 512}},
        "baselines": {},
    }
    return result().model_copy(update=fields)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """The three sweeps, as ``make comparators`` leaves them."""
    cells = {
        "comparators": [
            measured("fp16", 16),
            *(measured(name, bits) for name in ("tqmse", "turboquant_prod") for bits in (2, 4)),
            *(measured("kivi", bits, residual=128) for bits in (2, 4)),
        ],
        "comparators_windows": [
            measured(name, bits, window, group=32) for name in ("kivi", "int") for bits in (2, 4) for window in (0, 128)
        ],
        "comparators_decode": [measured("kivi", 2, residual=residual) for residual in (32, 128)],
        "comparators_peers": [measured("fp16", 16), measured("hqq", 4, group=64), measured("int", 4, group=64)],
    }
    for sweep, results in cells.items():
        for number, each in enumerate(results):
            write_result(each, tmp_path / "runs" / sweep / str(number))
    return tmp_path / "runs"


def test_the_command_writes_page_figure_and_data_which_agree(runs: Path, tmp_path: Path) -> None:
    data = tmp_path / "comparators.json"
    assert main([str(runs), "--docs", str(tmp_path / "docs"), "--data", str(data)]) == 0
    stored = ComparatorData.model_validate_json(data.read_text())
    text = (tmp_path / "docs" / "comparators.md").read_text()
    assert text == page(stored)
    figure = (tmp_path / "docs" / "comparators.svg").read_text()
    for row in stored.sweep:
        assert f"| {row.label} | {row.effective_bits:.3f} |" in text
        assert row.quantizer == "fp16" or f"{row.label}: {row.effective_bits:.3f} bits" in figure


def test_claims_are_judged_by_paired_samples(runs: Path) -> None:
    text = page(comparator_data(*(compare(collect([runs / sweep])) for sweep in SWEEPS)))
    claims = {line.split(" | ")[0].lstrip("| "): line for line in text.splitlines() if line.startswith("| ")}
    assert claims["tqmse over turboquant_prod, K2 V2"].endswith("| -0.2000 | -0.2000 to -0.2000 | holds |")
    assert claims["kivi K2 V2, window of 128, over none"].endswith("| -0.1000 | -0.1000 to -0.1000 | holds |")
    assert claims["kivi K2 V2, residual of 128, over 32"].endswith("| -0.0075 | -0.0075 to -0.0075 | holds |")
    assert claims["kivi K4 V4 over int, no window"].endswith("| -0.2000 | -0.2000 to -0.2000 | holds |")


def test_peers_say_that_they_are_and_what_they_were_measured_on(runs: Path) -> None:
    for file in (runs / "comparators_peers").rglob("result.json"):
        elsewhere = read_result(file)
        elsewhere.environment.device = "another machine"
        write_result(elsewhere, file.parent)
    text = page(comparator_data(*(compare(collect([runs / sweep])) for sweep in SWEEPS))).partition("## Peers")[2]
    assert "on another machine" in text
    assert "| hqq K4 V4 | peer | reference |" in text
    assert "| int K4 V4 | packed | reference |" in text
    assert "+0.4900 | +0.4900 to +0.4900 |" in text  # 2.75 - 0.02 * 4 over 2.5 - 0.02 * 16


@pytest.mark.parametrize(
    ("low", "high", "pairs", "said"),
    [
        (-0.2, -0.1, 40, "holds"),
        (0.1, 0.2, 40, "does not hold"),
        (-0.1, 0.1, 40, "not decided"),
        (-0.2, -0.1, 1, "not decided"),
    ],
)
def test_a_claim_holds_only_where_the_interval_leaves_zero_out(low: float, high: float, pairs: int, said: str) -> None:
    assert verdict(Interval((low + high) / 2, low, high), pairs) == said


def test_a_sweep_that_is_not_whole_is_refused(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_result(measured("int", 2).model_copy(update={"status": "failed"}), runs / "comparators" / "0")
    assert main([str(runs)]) == 2
    assert "ended with status 'failed'. Repeat the sweep" in capsys.readouterr().err


def test_sweeps_of_two_devices_are_refused(runs: Path) -> None:
    other = measured("kivi", 2, residual=64)
    other.environment.device = "another"
    write_result(other, runs / "comparators_decode" / "9")
    with pytest.raises(ResultError, match="different models, texts or devices"):
        comparator_data(*(compare(collect([runs / sweep])) for sweep in SWEEPS))


def test_a_missing_row_is_named(runs: Path) -> None:
    data = comparator_data(*(compare(collect([runs / sweep])) for sweep in SWEEPS))
    with pytest.raises(ResultError, match="0 rows of int with k_bits=2, recent_window=64; one is needed"):
        find(data.windows_sweep, "int", k_bits=2, recent_window=64)


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.name)
def test_the_committed_page_is_that_of_the_committed_data(path: Path) -> None:
    data = ComparatorData.model_validate_json(path.read_text())
    assert (ROOT / "docs" / "comparators.md").read_text() == page(data)
    figure = (ROOT / "docs" / "comparators.svg").read_text()
    for row in data.sweep:
        assert row.quantizer == "fp16" or f"{row.label}: {row.effective_bits:.3f} bits" in figure
