"""What could mislead a reader of a comparison, one sentence each."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvbench.reports.collect import Collection, Run
from kvbench.reports.comparison import METRICS, Comparison, Metric, Row, compare, task_options
from kvbench.reports.differences import significant
from kvbench.reports.escaping import shorten
from kvbench.reports.scores import PEER, cautions, finite
from kvbench.results import Result

FEW_SAMPLES = 30
"""Below this many samples a percentile bootstrap interval is too narrow (its coverage is visibly under 95 percent)."""

MOST_NAMES = 6
NAME_LIMIT = 40


def comparison_cautions(comparison: Comparison) -> list[str]:
    """Sentences in order of weight: failures, then what makes numbers incomparable, then what makes them uncertain."""
    rows = comparison.rows
    found = [*_unfinished(rows), *_settings(comparison)]
    for metric in comparison.metrics:
        found += _mixed(rows, metric)
    found += [*_random_weights(rows), *_backends(rows), *_timings(rows), *_versions(comparison)]
    found += [*_few_samples(comparison), *_undecided(rows), *_suspicious(rows)]
    return list(dict.fromkeys(found))


def run_cautions(result: Result) -> list[str]:
    """What could mislead a reader of one run, weightiest first."""
    comparison = compare(Collection([Run(Path(), result)], []))
    rows = comparison.rows
    found = [*cautions(result), *_random_weights(rows), *_backends(rows), *_timings(rows)]
    return list(dict.fromkeys([*found, *_few_samples(comparison), *_undecided(rows), *_suspicious(rows)]))


def _names(names: Sequence[str]) -> str:
    """Some names of many."""
    unique = list(dict.fromkeys(names))
    more = f" and {len(unique) - MOST_NAMES} more" if len(unique) > MOST_NAMES else ""
    return ", ".join(shorten(name, NAME_LIMIT) for name in unique[:MOST_NAMES]) + more


def _unfinished(rows: Sequence[Row]) -> Iterator[str]:
    for status, words in (
        ("partial", "Not finished; numbers that are missing may yet come"),
        ("failed", "Failed, at least in part; the run's own report says why"),
        ("oom", "Out of memory, at least in part"),
    ):
        names = [
            row.label
            for row in rows
            if status in {row.measurement.status, *(record.status for record in row.measurement.tasks.values())}
        ]
        if names:
            yield f"{words}: {_names(names)}."


def _settings(comparison: Comparison) -> Iterator[str]:
    settings = comparison.settings
    models = {(setting.model, setting.fingerprint): setting.model for setting in settings}
    if len(models) > 1:
        yield (
            f"{len(models)} different models or weights: {_names(list(models.values()))}. "
            "Compare numbers within one model only; figures are drawn for each apart."
        )
    if len(settings) > len(models):
        texts = [dict(setting.corpus).get("name", "unnamed") for setting in settings]
        yield f"Different calibration or evaluation texts: {_names(texts)}. Numbers on different texts do not compare."


def _mixed(rows: Sequence[Row], metric: Metric) -> Iterator[str]:
    """Packed beside simulated, and different prompts or amounts of text, within one setting."""
    for setting in dict.fromkeys(row.setting for row in rows):
        scored = [row for row in rows if row.setting == setting and row.score(metric).value is not None]
        paths = {row.score(metric).path for row in scored}
        if "peer" in paths and len(paths) > 1:
            yield f"{metric.title}: {PEER}"
        if len(paths - {"peer"}) > 1:
            simulated = [row.label for row in scored if row.score(metric).path == "simulated"]
            yield (
                f"{metric.title}: simulated numbers (quantized and dequantized in place, nothing packed) stand beside "
                f"packed ones: {_names(simulated)}."
            )
        options = {task_options(row, metric.task) for row in scored}
        if len(options) > 1:
            yield (
                f"{metric.title} on {shorten(setting.model, NAME_LIMIT)} was measured on different prompts or amounts "
                f"of text ({len(options)} sets of options for task '{metric.task}'): compare rows with equal options."
            )


def _random_weights(rows: Sequence[Row]) -> Iterator[str]:
    names = [row.run.result.model.name for row in rows if row.run.result.model.source == "random"]
    if names:
        yield f"Random weights: {_names(names)}. Only times and bytes are those of the real model; scores mean nothing."


def _backends(rows: Sequence[Row]) -> Iterator[str]:
    ran = {row.key: row.measurement.cache.backend for row in rows if row.measurement.cache is not None}
    fallen = [row.label for row in rows if ran.get(row.key) == "reference" and not _on_cpu(row)]
    if fallen:
        yield (
            f"Fallback: the torch reference ran on a GPU instead of Triton kernels: {_names(fallen)}. "
            "Their speed says nothing about the method."
        )
    different = set(ran.values()) - {"torch"}  # PyTorch's own attention over an unquantized cache is what it should be
    if len(different) > 1:
        yield f"Different backends ran: {_names(sorted(different))}. Compare times within one backend only."


def _on_cpu(row: Row) -> bool:
    return row.run.result.environment.device.lower().startswith("cpu")


def _timings(rows: Sequence[Row]) -> Iterator[str]:
    timed = [row for row in rows if row.task("latency") is not None]
    on_cpu = [row.label for row in timed if _on_cpu(row)]
    if on_cpu:
        yield f"Timed on a CPU, which says nothing about a GPU: {_names(on_cpu)}."
    devices = {row.run.result.environment.device for row in timed}
    if len(devices) > 1:
        yield f"Timed on different devices: {_names(sorted(devices))}."


def _versions(comparison: Comparison) -> Iterator[str]:
    told: tuple[tuple[str, Callable[[Row], str]], ...] = (
        ("kvbench", lambda row: row.run.result.environment.kvbench),
        ("torch", lambda row: row.run.result.environment.packages.get("torch", "unknown")),
        ("transformers", lambda row: row.run.result.environment.packages.get("transformers", "unknown")),
        ("model dtype", lambda row: row.run.result.model.dtype),
    )
    for what, of in told:
        values = sorted({of(row) for row in comparison.rows})
        if len(values) > 1:
            yield f"Runs differ in {what}: {_names(values)}."


def _few_samples(comparison: Comparison) -> Iterator[str]:
    tasks = dict.fromkeys(metric.task for metric in METRICS)
    for task in tasks:
        records = [record for row in comparison.rows if (record := row.task(task)) is not None]
        counts = [len(values) for record in records for values in record.samples.values()]
        few = [count for count in counts if count < FEW_SAMPLES]
        if few:
            yield (
                f"Few samples: task '{task}' has as few as {min(few)}. Under {FEW_SAMPLES} the intervals are too "
                "narrow and small differences mean nothing."
            )


def _undecided(rows: Sequence[Row]) -> Iterator[str]:
    """Differences whose interval holds zero."""
    undecided: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        for task, record in row.measurement.tasks.items():
            for baseline, differences in record.paired.items():
                for metric, difference in differences.items():
                    if not significant(difference):
                        undecided.setdefault((task, metric, baseline), []).append(row.label)
    for (task, metric, baseline), labels in undecided.items():
        yield (
            f"Overlapping intervals: {shorten(task, NAME_LIMIT)} {shorten(metric, NAME_LIMIT)} of {_names(labels)} "
            f"cannot be told from {shorten(baseline, NAME_LIMIT)} at 95 percent."
        )


def _suspicious(rows: Sequence[Row]) -> Iterator[str]:
    """What the harness itself noted about two formats that measured the same, and prompts that were cut."""
    for row in rows:
        for task, record in row.measurement.tasks.items():
            for note in record.notes:
                if note.startswith("identical to"):
                    yield f"{shorten(row.label, NAME_LIMIT)}, {shorten(task, NAME_LIMIT)}: {shorten(note, 200)}."
    cut = {
        (task, int(count))
        for row in rows
        for task, record in row.measurement.tasks.items()
        if (count := finite(record.metrics.get("truncated")))
    }
    for task, count in sorted(cut):
        yield f"Task '{shorten(task, NAME_LIMIT)}': {count} prompts were too long and had their middle cut out."
