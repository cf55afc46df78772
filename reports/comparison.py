"""Many runs as one comparison: a row for every quantizer measured, each number with its run and its reference."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kvbench.reports.collect import Collection, LeftOut, Run
from kvbench.reports.scores import REFERENCE, YARDSTICK, Contender, Score, bits_by_use, code_bits
from kvbench.results import Measurement, TaskRecord

UNREPEATABLE = frozenset({"seconds", "per_window"})  # metrics that do not tell two measurements apart


@dataclass(frozen=True)
class Metric:
    """A number that quantizers are compared by, and the quantizer whose own number it is held against.

    ``relative`` tells whether a relative change says something, as it does of magnitudes but not of scores.
    """

    task: str
    name: str
    title: str
    lower_is_better: bool
    reference: str = REFERENCE
    relative: bool = False


METRICS = (
    Metric("logit_error", "mean", "logit error", True, YARDSTICK, relative=True),
    Metric("perplexity", "perplexity", "perplexity", True, relative=True),
    Metric("fidelity", "kl", "KL divergence", True),
    Metric("fidelity", "top1_agreement", "top-1 agreement", False),
    Metric("niah", "score", "NIAH score", False),
    Metric("niah", "answer_nll", "NIAH answer NLL", True),
    Metric("longbench", "average", "LongBench average", False),
)
"""The metrics that have a column, in reading order; every other one is in the CSV and Parquet files."""


@dataclass(frozen=True)
class Setting:
    """What must be the same for two numbers to be compared: the model's weights and the texts."""

    model: str
    fingerprint: str
    corpus: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, run: Run) -> "Setting":
        model = run.result.model
        return cls(model.name, model.fingerprint, tuple(sorted(run.result.corpus.items())))

    @property
    def title(self) -> str:
        return f"{self.model} on {dict(self.corpus).get('name', 'unnamed corpus')}"


@dataclass(frozen=True)
class Row:
    """One measured quantizer. ``key`` is its anchor in the page; ``run`` is where it was measured."""

    key: str
    label: str
    run: Run
    measurement: Measurement
    is_baseline: bool
    setting: Setting

    @property
    def name(self) -> str:
        return self.measurement.quantizer.name

    @property
    def is_reference(self) -> bool:
        return self.name == REFERENCE

    @property
    def effective_bits(self) -> float | None:
        """Bits an element, keys and values averaged, all allocated bytes counted."""
        size = self.measurement.compression
        return None if size is None else bits_by_use(size).total

    @cached_property
    def contender(self) -> Contender:
        return Contender(self.label, self.measurement, self.is_baseline)

    def score(self, metric: Metric) -> Score:
        return self.contender.score(metric.task, metric.name)

    def task(self, name: str) -> TaskRecord | None:
        """The task's record if it has numbers."""
        record = self.measurement.tasks.get(name)
        return record if record is not None and record.metrics and record.status in ("ok", "partial") else None


@dataclass(frozen=True)
class Comparison:
    """Rows by setting, then by quantizer and bits; and what could not be compared."""

    runs: Sequence[Run]
    rows: Sequence[Row]
    left_out: Sequence[LeftOut]

    @cached_property
    def settings(self) -> list[Setting]:
        return list(dict.fromkeys(row.setting for row in self.rows))

    @cached_property
    def metrics(self) -> list[Metric]:
        """The metrics of which some row has a number."""
        return [metric for metric in METRICS if any(row.score(metric).value is not None for row in self.rows)]

    @cached_property
    def setting_titles(self) -> dict[Setting, str]:
        """Titles that differ where settings do."""
        counts = Counter(setting.title for setting in self.settings)
        return {
            setting: setting.title if counts[setting.title] == 1 else f"{setting.title} ({_digest(setting)})"
            for setting in self.settings
        }

    @cached_property
    def run_anchors(self) -> dict[Path, str]:
        """Where in the page each run is told of, by its file."""
        return {run.path: f"run-{i}" for i, run in enumerate(self.runs)}

    @cached_property
    def _references(self) -> dict[tuple[Setting, str], list[Row]]:
        found: dict[tuple[Setting, str], list[Row]] = {}
        for row in self.rows:
            found.setdefault((row.setting, row.name), []).append(row)
        return found

    def has_changes(self, metric: Metric) -> bool:
        """Whether there are relative changes to show."""
        return metric in self._with_changes

    @cached_property
    def _with_changes(self) -> list[Metric]:
        relative = [metric for metric in self.metrics if metric.relative]
        return [metric for metric in relative if any(self.change(row, metric) is not None for row in self.rows)]

    def reference(self, row: Row, metric: Metric) -> Row | None:
        """The row that ``row`` is held against: of its setting, measured with the same options of the task.

        Where the reference takes bits, with the same code bits. None for the reference itself.
        """
        if row.name in (metric.reference, REFERENCE):
            return None
        for other in self._references.get((row.setting, metric.reference), ()):
            same_bits = metric.reference == REFERENCE or code_bits(other.measurement) == code_bits(row.measurement)
            measured = other.score(metric).value is not None
            if same_bits and measured and task_options(other, metric.task) == task_options(row, metric.task):
                return other
        return None

    def change(self, row: Row, metric: Metric) -> float | None:
        """Relative change of ``row`` against its reference; None where there is none to compare with."""
        reference = self.reference(row, metric)
        return None if reference is None else row.score(metric).change_from(reference.score(metric))


def compare(collection: Collection) -> Comparison:
    """The comparison of all runs. A baseline that several runs measured with equal numbers is one row."""
    found: dict[str, tuple[Run, Measurement, bool]] = {}
    for run in collection.runs:
        for measurement in run.result.measurements().values():
            identity = _identity(run, measurement)
            is_baseline = measurement is not run.result
            if identity not in found or (found[identity][2] and not is_baseline):
                found[identity] = (run, measurement, is_baseline)
    measured = sorted(found.values(), key=_reading_order)
    labels = _labels([(run, measurement) for run, measurement, _ in measured])
    rows = [
        Row(f"row-{i}", label, run, measurement, is_baseline, Setting.of(run))
        for i, ((run, measurement, is_baseline), label) in enumerate(zip(measured, labels, strict=True))
    ]
    return Comparison(collection.runs, rows, collection.left_out)


def task_options(row: Row, task: str) -> str:
    """The options that a task ran with, and whether it read packed storage, as comparable text."""
    return _text(_task_options(row.run, task))


def _task_options(run: Run, task: str) -> Any:
    tasks = run.result.config.get("task")
    return tasks.get(task) if isinstance(tasks, Mapping) else None


def _identity(run: Run, measurement: Measurement) -> str:
    """Text that two measurements share only if everything told of them but time is the same."""
    tasks = {
        name: [record.status, {key: value for key, value in record.metrics.items() if key not in UNREPEATABLE}]
        for name, record in measurement.tasks.items()
    }
    setting = Setting.of(run)
    quantizer = measurement.quantizer
    cache = measurement.cache.model_dump(exclude={"engagement"}) if measurement.cache else None
    options = {name: _task_options(run, name) for name in measurement.tasks}
    asked = [
        [setting.fingerprint, setting.corpus, run.result.environment.device, cache, options],
        [quantizer.name, quantizer.version, quantizer.parameters, quantizer.format_digest],
    ]
    return _text(asked) + json.dumps([measurement.status, tasks], sort_keys=True, default=str)


def _reading_order(found: tuple[Run, Measurement, bool]) -> tuple[Any, ...]:
    run, measurement, _ = found
    size = measurement.compression
    bits = (size.code_bits_k, size.code_bits_v) if size else (0.0, 0.0)
    return (
        Setting.of(run).title,
        run.result.model.fingerprint,
        measurement.quantizer.name != REFERENCE,
        *bits,
        (measurement.quantizer.name),
    )


def _labels(measured: Sequence[tuple[Run, Measurement]]) -> list[str]:
    """``blockgtq K3 V3``, with what else tells rows of one setting apart where that is not enough."""
    groups: dict[tuple[str, str], list[int]] = {}
    labels = [_short_label(measurement) for _, measurement in measured]
    for i, (run, _) in enumerate(measured):
        groups.setdefault((_text(Setting.of(run).__dict__), labels[i]), []).append(i)
    for members in groups.values():
        if len(members) > 1:
            told = [_facts(*measured[i]) for i in members]
            differing = [key for key in told[0] if len({fact.get(key) for fact in told}) > 1]
            for i, fact in zip(members, told, strict=True):
                labels[i] += "".join(f", {key}={fact.get(key, 'none')}" for key in differing if key != "run")
            repeated = Counter(labels[i] for i in members)
            for count, i in enumerate(members, start=1):
                if repeated[labels[i]] > 1:
                    labels[i] += f", run {measured[i][0].result.run_id[:8]} ({count})"
    return labels


def _short_label(measurement: Measurement) -> str:
    quantizer = measurement.quantizer
    if quantizer.name == REFERENCE:
        return quantizer.name
    bits = [quantizer.parameters.get(f"{role}_bits") for role in "kv"]
    if all(isinstance(value, int | float) for value in bits):
        return f"{quantizer.name} K{bits[0]:.3g} V{bits[1]:.3g}"
    return quantizer.name


def _facts(run: Run, measurement: Measurement) -> dict[str, str]:
    """What may differ between measurements of one quantizer in one setting, by option name."""
    facts = {key: _text(value).strip('"') for key, value in measurement.quantizer.parameters.items()}
    if measurement.cache is not None:
        cache = measurement.cache
        facts |= {"prefill": cache.prefill, "n_sink": str(cache.n_sink), "recent_window": str(cache.recent_window)}
        facts |= {"excluded_layers": _text(cache.excluded_layers), "backend": cache.backend}
    facts |= {"device": run.result.environment.device, "status": measurement.status}
    facts |= {"kvbench": run.result.environment.kvbench}
    for task in measurement.tasks:
        options = _task_options(run, task)
        if isinstance(options, Mapping):
            facts |= {f"{task}.{key}": _text(value).strip('"') for key, value in options.items()}
    return facts


def _digest(setting: Setting) -> str:
    texts = dict(setting.corpus)
    return f"weights {setting.fingerprint[:8]}, text {texts.get('evaluation', 'unknown')[:8]}"


def _text(value: Any) -> str:
    """Equal text for equal values: ``3.0`` is ``3``, and the order of keys is nothing."""
    return json.dumps(_plain(value), sort_keys=True, default=str)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value
