"""The numbers a report leads with, read from a result: how small, how good, against what.

Everything here is a reading of :class:`kvbench.results.Result`; a number that is not there stays not there, with the
reason, and is never replaced by a zero or a blank.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvbench.reports.escaping import NAME_LIMIT, shorten

if TYPE_CHECKING:
    from kvbench.results import Compression, Measurement, Result

REFERENCE = "fp16"  # perplexity is compared with the model's uncompressed cache
YARDSTICK = "tqmse"  # logit error is compared with uniform TurboQuant-MSE, as in the Block-GTQ paper
PEER = (
    "peer: keys and values went through another library's cache, memory is what that allocated, and a chunk of text "
    "reads itself in full precision (as with cache.prefill=exact)."
)


@dataclass(frozen=True)
class Score:
    """One metric of one task, or why there is none.

    ``status`` is the task's own ("ok", "partial", "failed", "oom"), "not run", or "not reported" for a task that
    ended well without the metric.
    """

    status: str
    value: float | None = None
    path: str | None = None

    @property
    def marks(self) -> tuple[str, ...]:
        """What a reader must know beside the number."""
        if self.value is None:
            return ()
        return tuple(
            mark
            for mark, holds in (
                ("simulated", self.path == "simulated"),
                ("peer", self.path == "peer"),
                ("partial", self.status == "partial"),
            )
            if holds
        )

    def change_from(self, reference: "Score | None") -> float | None:
        """Relative change against ``reference``: 0.1 is ten percent more. None where the two cannot be compared."""
        if reference is None or self.value is None or not reference.value:
            return None
        if "partial" in (self.status, reference.status):
            return None  # other samples, other number
        return self.value / reference.value - 1


@dataclass(frozen=True)
class Contender:
    """A quantizer as one row of a table: the one asked for, or a baseline."""

    label: str
    measurement: "Measurement"
    is_baseline: bool

    def score(self, task: str, metric: str) -> Score:
        """``tasks.<task>.metrics.<metric>`` of this quantizer."""
        record = self.measurement.tasks.get(task)
        if record is None:
            return Score(self.measurement.status if self.measurement.status in ("failed", "oom") else "not run")
        value = finite(record.metrics.get(metric))
        if record.status in ("failed", "oom"):
            return Score(record.status)
        if value is None:
            return Score("not reported" if record.status == "ok" else record.status)
        return Score(record.status, value, record.path)

    @property
    def per_layer_error(self) -> list[float | None]:
        """Logit error of every layer; None where a layer has none; empty where the task gave nothing."""
        record = self.measurement.tasks.get("logit_error")
        values = record.metrics.get("per_layer") if record is not None else None
        return [finite(value) for value in values] if isinstance(values, list) else []


def contenders(result: "Result") -> list[Contender]:
    """The quantizer asked for, then the baselines in the run's order."""
    return [
        Contender(label, measurement, is_baseline=measurement is not result)
        for label, measurement in result.measurements().items()
    ]


def comparison(result: "Result", name: str) -> Contender | None:
    """The contender that others are compared with: the baseline ``name``, or the quantizer asked for if that is it."""
    if name in result.baselines:
        return next(c for c in contenders(result) if c.measurement is result.baselines[name])
    return contenders(result)[0] if result.quantizer.name == name else None


def error_change(result: "Result", contender: Contender) -> float | None:
    """Relative change of the mean logit error against uniform TQ-MSE; None for TQ-MSE itself and the fp16 cache."""
    reference = comparison(result, YARDSTICK)
    if reference is None or contender.measurement is reference.measurement:
        return None
    if contender.measurement.quantizer.name == REFERENCE:
        return None  # "-100 %" for not quantizing says nothing
    return contender.score("logit_error", "mean").change_from(reference.score("logit_error", "mean"))


def perplexity_change(result: "Result", contender: Contender) -> float | None:
    """Relative change of perplexity against the fp16 cache; None for the fp16 cache itself."""
    reference = comparison(result, REFERENCE)
    if reference is None or contender.measurement is reference.measurement:
        return None
    return contender.score("perplexity", "perplexity").change_from(reference.score("perplexity", "perplexity"))


@dataclass(frozen=True)
class BitsByUse:
    """Bits a cached element takes, keys and values averaged."""

    codes: float
    norms: float
    padding: float

    @property
    def total(self) -> float:
        return self.codes + self.norms + self.padding


def bits_by_use(compression: "Compression") -> BitsByUse:
    """Splits the allocated bytes: codes; norms and scales (what the bit count adds); padding (what allocation adds).

    Keys and values are taken to have equally many elements, which holds for every cache but latent ones (MLA).
    """
    elements = compression.bytes_fp16 / 2
    codes = (compression.code_bits_k + compression.code_bits_v) / 2
    analytical = compression.bytes_analytical * 8 / elements if elements else codes
    allocated = compression.bytes_allocated * 8 / elements if elements else codes
    return BitsByUse(codes, max(0.0, analytical - codes), max(0.0, allocated - max(analytical, codes)))


def cautions(result: "Result") -> list[str]:
    """What could mislead a reader of this result, one sentence each."""
    rows = contenders(result)
    found = []
    for row in rows:
        label = shorten(row.label, NAME_LIMIT)
        if row.measurement.status != "ok":
            found.append(f"{label}: {row.measurement.status}. {row.measurement.error or ''}".strip())
        found += [
            f"{label}, task {shorten(name, NAME_LIMIT)}: {record.status}. {record.error or ''}".strip()
            for name, record in row.measurement.tasks.items()
            if record.status != "ok"
        ]
    paths = {record.path for row in rows for record in row.measurement.tasks.values() if record.path}
    if "simulated" in paths:
        found.append(
            "simulated: keys and values were quantized and dequantized in place, not read from packed storage."
        )
    if len(paths - {"peer"}) > 1:
        found.append("Packed and simulated numbers stand side by side; compare only numbers with the same mark.")
    if "peer" in paths:
        found.append(PEER)
    yardstick = comparison(result, YARDSTICK)
    if yardstick is not None and yardstick.is_baseline:
        mine, theirs = code_bits(result), code_bits(yardstick.measurement)
        if mine and theirs and mine != theirs:
            label = shorten(rows[0].label, NAME_LIMIT)
            found.append(f"{label} uses {mine} code bits, {yardstick.label} {theirs}: not an equal-bits comparison.")
    if result.cache is not None and result.cache.excluded_layers:
        layers = ", ".join(map(str, result.cache.excluded_layers))
        found.append(f"Layers kept in the model's dtype by configuration: {layers}.")
    return found


def code_bits(measurement: "Measurement") -> str | None:
    """Code bits of keys and values, as papers write them: ``K3 V3``, ``K2.5 V3``."""
    if measurement.compression is None:
        return None
    return f"K{measurement.compression.code_bits_k:.3g} V{measurement.compression.code_bits_v:.3g}"


def finite(value: Any) -> float | None:
    """``value`` as a float if it is a finite number, else None (plugins' metrics may be anything)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def number(value: float) -> str:
    """Four significant digits, thousands grouped: ``2.413``, ``27.41``, ``12,346``."""
    if abs(value) >= 1e9:
        return f"{value:.3e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.4g}".rstrip(".")


def whole_or_number(value: float) -> str:
    """A count as it is, anything else by :func:`number`: ``4,096``, ``3.200``."""
    return f"{value:,.0f}" if value == int(value) else number(value)


def counted(count: int, what: str) -> str:
    """``1 run``, ``2 runs``."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def percent(change: float | None) -> str:
    """A relative change with its sign: ``-43.1 %``; a dash where there is none."""
    return "–" if change is None else f"{change * 100:+.1f} %"
