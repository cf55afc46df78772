"""The data behind ``docs/comparators.md``: what each sweep measured, and on what, as one typed file."""

from collections.abc import Iterable
from typing import Any

from kvbench.errors import ResultError
from kvbench.reports.collect import Run
from kvbench.reports.comparison import Comparison
from kvbench.results import Record


class MeasuredRow(Record):
    """One quantizer, measured: its options, its size, its scores and the samples that differences are made of."""

    quantizer: str
    label: str
    parameters: dict[str, Any]
    backend: str
    path: str
    recent_window: int
    effective_bits: float
    counted_bits: float
    ratio: float
    perplexity: float
    logit_error: float | None
    nll: list[float]

    def has(self, name: str, **options: Any) -> bool:
        """Whether this is quantizer ``name`` with these options; ``recent_window`` is one of them."""
        told = {**self.parameters, "recent_window": self.recent_window}
        return self.quantizer == name and all(told.get(option) == value for option, value in options.items())


class Circumstances(Record):
    """What a sweep was measured on, and how much of it."""

    model: str
    dtype: str
    corpus: str
    device: str
    kvbench: str
    torch: str
    measured: str
    window: int
    windows: int
    chunk: int


class ComparatorData(Record):
    """All that the page is made of."""

    of: Circumstances
    of_peers: Circumstances
    logit_error_tokens: int
    sweep: list[MeasuredRow]
    windows_sweep: list[MeasuredRow]
    decode_sweep: list[MeasuredRow]
    peers_sweep: list[MeasuredRow]


def comparator_data(sweep: Comparison, windows: Comparison, decode: Comparison, peers: Comparison) -> ComparatorData:
    """The data of the sweeps.

    Raises ResultError where one is not whole, or they are not of one model and text, and but for the peers one device.
    """
    for run in (run for each in (sweep, windows, decode, peers) for run in each.runs):
        if run.result.status != "ok":
            raise ResultError(
                f"{run.path} ended with status '{run.result.status}'. Repeat the sweep: it goes on there."
            )
    models = {
        (run.result.model.name, *sorted(run.result.corpus.items()))
        for each in (sweep, windows, decode, peers)
        for run in each.runs
    }
    devices = {run.result.environment.device for each in (sweep, windows, decode) for run in each.runs}
    if len(models) > 1 or len(devices) > 1:
        raise ResultError("the sweeps are of different models, texts or devices. Repeat them on one.")
    return ComparatorData(
        of=_circumstances(sweep),
        of_peers=_circumstances(peers),
        logit_error_tokens=_option(sweep.runs[0], "logit_error", "tokens"),
        sweep=_rows(sweep),
        windows_sweep=_rows(windows),
        decode_sweep=_rows(decode),
        peers_sweep=_rows(peers),
    )


def _circumstances(sweep: Comparison) -> Circumstances:
    first = sweep.runs[0].result
    return Circumstances(
        model=first.model.name,
        dtype=first.model.dtype,
        corpus=first.corpus["name"],
        device=first.environment.device,
        kvbench=first.environment.kvbench,
        torch=first.environment.packages["torch"],
        measured=max(run.result.created for run in sweep.runs).date().isoformat(),
        window=_option(sweep.runs[0], "perplexity", "window"),
        windows=_option(sweep.runs[0], "perplexity", "windows"),
        chunk=int(first.config["cache"]["prefill_chunk"]),
    )


def _option(run: Run, task: str, option: str) -> int:
    return int(run.result.config["task"][task][option])


def _rows(comparison: Comparison) -> list[MeasuredRow]:
    rows = []
    for row in comparison.rows:
        size, cache, perplexity = row.measurement.compression, row.measurement.cache, row.task("perplexity")
        if size is None or cache is None or perplexity is None or row.effective_bits is None:
            raise ResultError(f"{row.run.path} has no perplexity of {row.label}. Repeat the sweep: it goes on there.")
        error = row.task("logit_error")
        rows.append(
            MeasuredRow(
                quantizer=row.name,
                label=row.label,
                parameters=row.measurement.quantizer.parameters,
                backend=cache.backend,
                path=perplexity.path or "unknown",
                recent_window=cache.recent_window,
                effective_bits=row.effective_bits,
                counted_bits=16 * size.bytes_analytical / size.bytes_fp16,
                ratio=size.ratio,
                perplexity=perplexity.metrics["perplexity"],
                logit_error=error.metrics["mean"] if error else None,
                nll=perplexity.samples["nll"],
            )
        )
    return rows


def find(rows: Iterable[MeasuredRow], name: str, **options: Any) -> MeasuredRow:
    """The one row of that quantizer with these options. Raises ResultError where there is none, or more than one."""
    found = [row for row in rows if row.has(name, **options)]
    if len(found) != 1:
        told = ", ".join(f"{option}={value}" for option, value in options.items())
        raise ResultError(f"the sweeps have {len(found)} rows of {name} with {told or 'any options'}; one is needed.")
    return found[0]
