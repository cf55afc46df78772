"""What was measured for a page of the documentation: runs, brought down to the numbers that its tables are made of.

The rows are kept in a file beside the benchmarks, so that the page can be made anew, and held to its numbers, without
the runs.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from kvbench.errors import ResultError
from kvbench.quantizer import Quantizer
from kvbench.quantizers.blockgtq import BlockGTQ
from kvbench.quantizers.cblockgtq import CenteredBlockGTQ
from kvbench.quantizers.fp16 import Fp16
from kvbench.quantizers.tqmse import TQMSE
from kvbench.reports.collect import Run
from kvbench.reports.scores import finite
from kvbench.results import Measurement, Record, Result, write_text_atomically

KINDS: dict[str, type[Quantizer]] = {kind.name: kind for kind in (Fp16, TQMSE, BlockGTQ, CenteredBlockGTQ)}
WIDTHS = ("k_bits", "v_bits")
SAME = ("quantizer", "parameters", "n_sink", "calibration", "evaluation", "device")  # rows alike in these are one
DIGITS = 6  # significant ones that are kept of a sample


class Row(Record):
    """One quantizer on one pair of texts: its size, its scores, and the samples that differences are made of.

    ``metrics`` and ``samples`` are named ``<task>.<metric>``; ``layers`` is the logit error layer by layer.
    """

    quantizer: str
    parameters: dict[str, Any]
    n_sink: int
    calibration: str
    evaluation: str
    device: str
    packages: dict[str, str]
    tokens: int
    bits_k: float
    bits_v: float
    metrics: dict[str, float]
    layers: list[float] = Field(default_factory=list)
    samples: dict[str, list[float]] = Field(default_factory=dict)

    @property
    def bits(self) -> float:
        """Bits a cached element, keys and values, all allocated bytes counted."""
        return (self.bits_k + self.bits_v) / 2

    def is_a(self, name: str, **options: Any) -> bool:
        """Whether this is quantizer ``name`` with these options and, apart from its widths, no others of its own."""
        if name != self.quantizer:
            return False
        expected = dataclasses.asdict(KINDS[name]()) | options
        return all(
            self.parameters.get(option) == value
            for option, value in expected.items()
            if option not in WIDTHS or option in options
        )


class Evidence(Record):
    """All rows of a page, and what they were measured with."""

    model: str
    dtype: str
    kvbench: str
    measured: str
    rows: list[Row]


def evidence(runs: Sequence[Run]) -> Evidence:
    """The rows of runs, one for each quantizer, texts, sinks and device; of a stopped run, the tasks that it finished.

    Raises ResultError where no task was finished, or the runs are of several models.
    """
    results = [run.result for run in runs if any(task.status == "ok" for task in run.result.tasks.values())]
    if not results:
        raise ResultError("no finished task was found. Give the folders of the runs.")
    models = {(result.model.name, result.model.dtype, result.model.fingerprint) for result in results}
    if len(models) > 1:
        names = ", ".join(sorted(f"{name} in {dtype}" for name, dtype, _ in models))
        raise ResultError(f"the runs are of several models ({names}). Give those of one.")
    rows: dict[str, Row] = {}
    for result in sorted(results, key=lambda result: result.created):
        for name, measurement in [(result.quantizer.name, result), *result.baselines.items()]:
            if name in KINDS and measurement.compression is not None:
                row = _row(result, measurement)
                same = json.dumps(
                    [row.quantizer, row.parameters, row.n_sink, row.calibration, row.evaluation, row.device]
                )
                rows[same] = _joined(rows[same], row) if same in rows else row
    first = results[0]
    return Evidence(
        model=first.model.name,
        dtype=first.model.dtype,
        kvbench=first.environment.kvbench,
        measured=max(result.created for result in results).date().isoformat(),
        rows=list(rows.values()),
    )


def _row(result: Result, measurement: Measurement) -> Row:
    size, cache = measurement.compression, measurement.cache
    assert size is not None and cache is not None
    metrics: dict[str, float] = {}
    samples: dict[str, list[float]] = {}
    layers: list[float] = []
    for task, record in measurement.tasks.items():
        if record.status != "ok":
            continue
        for name, value in record.metrics.items():
            number = finite(value)
            if number is not None:
                metrics[f"{task}.{name}"] = number
        samples |= {f"{task}.{name}": [_short(value) for value in values] for name, values in record.samples.items()}
        if task == "logit_error":
            layers = [_short(value) for value in record.metrics["per_layer"]]
    texts = result.config["corpus"]
    return Row(
        quantizer=measurement.quantizer.name,
        parameters=measurement.quantizer.parameters,
        n_sink=cache.n_sink,
        calibration=_text(texts, "calibration"),
        evaluation=_text(texts, "evaluation"),
        device=result.environment.device,
        packages={name: result.environment.packages[name] for name in ("torch", "transformers")},
        tokens=size.tokens,
        bits_k=size.effective_bits_k,
        bits_v=size.effective_bits_v,
        metrics=metrics,
        layers=layers,
        samples=samples,
    )


def _text(corpus: Mapping[str, Any], role: str) -> str:
    """A text's name: the corpus's, or its file's without ending where it is a file."""
    return Path(corpus[role]).stem if corpus["name"] == "files" else str(corpus["name"])


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _joined(first: Row, second: Row) -> Row:
    """What two runs measured of the same thing; the size is that of the larger cache."""
    larger = second if second.tokens >= first.tokens else first
    return larger.model_copy(
        update={
            "metrics": first.metrics | second.metrics,
            "samples": first.samples | second.samples,
            "layers": second.layers or first.layers,
        }
    )


def write_evidence(data: Evidence, path: Path) -> None:
    """A JSON file with a line a row."""
    facts = json.dumps(data.model_dump(exclude={"rows"}), indent=1)[:-2]
    rows = ",\n".join(json.dumps(row.model_dump(mode="json")) for row in data.rows)
    write_text_atomically(path, f'{facts},\n "rows": [\n{rows}\n]}}\n')


def read_evidence(path: Path) -> Evidence:
    """Read such a file. Raises ResultError where it is none."""
    try:
        return Evidence.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValidationError) as error:
        raise ResultError(f"{path} holds no measurements: {str(error).splitlines()[0]}") from error


def find(rows: Iterable[Row], name: str, *, needs: str = "", **options: Any) -> Row:
    """The row of quantizer ``name`` with these options that has the metric ``needs``; the first where several have.

    Raises ResultError where there is none.
    """
    for row in rows:
        if row.is_a(name, **options) and (not needs or needs in row.metrics):
            return row
    told = ", ".join(f"{option}={value}" for option, value in options.items()) or "its own options"
    raise ResultError(f"no run measured {needs or 'anything'} of {name} with {told}.")


def between(text: str, name: str, content: str) -> str:
    """``text`` with what stands between the markers ``<!-- name -->`` and ``<!-- end of name -->`` replaced.

    Raises ResultError where the markers are not there.
    """
    opening, closing = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, found, rest = text.partition(opening)
    _, ended, after = rest.partition(closing)
    if not found or not ended:
        raise ResultError(f"the page has no markers '{opening.strip()}' and '{closing}' to put a table between.")
    return f"{before}{opening}\n{content.strip()}\n\n{closing}{after}"
