"""Sections that let a reader check and repeat a run: proof of engagement, environment, configuration, command."""

import json
from itertools import groupby
from typing import TYPE_CHECKING, Any, ClassVar

from kvbench.reports.escaping import html_preformatted, html_text, markdown_block, markdown_text
from kvbench.reports.scores import Contender, contenders
from kvbench.reports.section import ReportSection
from kvbench.reports.table import Column, Table

if TYPE_CHECKING:
    from kvbench.results import LayerEngagement, Result


class EngagementSection(ReportSection):
    """What each layer's cache really did."""

    name: ClassVar[str] = "engagement"
    title: ClassVar[str] = "Proof of engagement"

    def html(self, result: "Result") -> str:
        parts = []
        for row in contenders(result):
            table = engagement_table(row)
            body = table.html() if table else ""
            parts.append(f"<details><summary>{html_text(engagement_line(row))}</summary>{body}</details>")
        return "".join(parts)

    def markdown(self, result: "Result") -> str:
        parts = []
        for row in contenders(result):
            table = engagement_table(row)
            parts.append(f"{markdown_text(engagement_line(row))}\n" + (f"\n{table.markdown()}\n" if table else ""))
        return "\n".join(parts).rstrip()


def engagement_line(row: Contender) -> str:
    cache = row.measurement.cache
    if cache is None:
        return f"{row.label}: no engagement recorded"
    read = sum(layer.packed_tokens_read > 0 for layer in cache.engagement)
    windows = f"{cache.n_sink} sink and {cache.recent_window} recent tokens in full precision"
    return (
        f"{row.label}: {read} of {len(cache.engagement)} layers read packed tokens; backend {cache.backend}, "
        f"prefill {cache.prefill}, {windows}"
    )


def engagement_table(row: Contender) -> Table | None:
    """Neighbouring layers that did the same share a line."""
    cache = row.measurement.cache
    if cache is None or not cache.engagement:
        return None

    def deed(layer: "LayerEngagement") -> tuple[str, ...]:
        read = f"{layer.packed_tokens_read:,}"
        return (layer.key_format, layer.value_format, read, layer.backend, layer.note or "–")

    lines = []
    for what, group in groupby(cache.engagement, key=deed):
        numbers = [layer.layer for layer in group]
        span = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
        lines.append([span, *what])
    columns = [
        Column(title, numeric=False) for title in ("layers", "keys", "values", "packed tokens read", "backend", "note")
    ]
    columns[3] = Column("packed tokens read")
    return Table(f"{row.label}: what each layer's cache did.", tuple(columns), lines)


class EnvironmentSection(ReportSection):
    """All it takes to repeat the run."""

    name: ClassVar[str] = "environment"
    title: ClassVar[str] = "Repeat this run"

    def html(self, result: "Result") -> str:
        config = f"<pre>{html_preformatted(_json(result.config))}</pre>"
        geometry = f"<pre>{html_preformatted(_json(result.model.geometry))}</pre>"
        return (
            f'<pre class="wrap" tabindex="0" aria-label="Command">{html_preformatted(result.command)}</pre>'
            f"<details><summary>Run, model, texts and environment</summary>{facts_table(result).html()}</details>"
            f"<details><summary>Quantizers</summary>{quantizers_table(result).html()}</details>"
            f"<details><summary>Resolved configuration</summary>{_focusable(config)}</details>"
            f"<details><summary>Model geometry</summary>{_focusable(geometry)}</details>"
        )

    def markdown(self, result: "Result") -> str:
        return "\n\n".join(
            [
                markdown_block(result.command, "sh"),
                facts_table(result).markdown(),
                quantizers_table(result).markdown(),
                "Resolved configuration:",
                markdown_block(_json(result.config), "json"),
            ]
        )


def _focusable(preformatted: str) -> str:
    """A wide ``<pre>`` scrolls sideways, which the keyboard must be able to do."""
    return preformatted.replace("<pre>", '<pre tabindex="0">', 1)


def facts_table(result: "Result") -> Table:
    model, environment = result.model, result.environment
    facts: list[tuple[str, Any]] = [
        ("run", result.run_id),
        ("created", result.created.isoformat(sep=" ", timespec="seconds")),
        ("duration", f"{result.duration_s:.1f} s"),
        ("model", f"{model.name}, from {model.source}, revision {model.revision or 'none'}, {model.dtype}"),
        ("model fingerprint", model.fingerprint),
        *((f"corpus {key}", value) for key, value in result.corpus.items()),
        *((f"calibration {key}", value) for key, value in result.calibration.items()),
        ("device", environment.device),
        ("driver", environment.driver or "none"),
        ("threads", environment.threads),
        ("attention of the fp16 baseline", environment.attention_baseline or "not recorded"),
        ("platform", environment.platform),
        ("python", environment.python),
        ("kvbench", environment.kvbench),
        *environment.packages.items(),
    ]
    rows = [[name, str(value)] for name, value in facts]
    return Table("What the run depended on.", (Column("fact", numeric=False), Column("value", numeric=False)), rows)


def quantizers_table(result: "Result") -> Table:
    rows = []
    for row in contenders(result):
        it = row.measurement.quantizer
        parameters = ", ".join(f"{name}={value}" for name, value in it.parameters.items())
        rows.append([row.label, f"{it.distribution} {it.version}", parameters or "none", it.format_digest or "none"])
    titles = ("quantizer", "distribution", "parameters", "format digest (SHA-256)")
    return Table(
        "Who made the formats, with which options.", tuple(Column(title, numeric=False) for title in titles), rows
    )


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, default=str)
