"""The figures in docs/latency.md are those of the committed runs."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RUN, LONG = "latency-h200-2026-11-30", "latency-h200-2026-11-30-512k"


def points(run: str = RUN) -> dict[tuple[str, int], dict[str, Any]]:
    """The measured points of a run by method and context."""
    result = json.loads((ROOT / "benchmarks/results" / run / "result.json").read_text(encoding="utf-8"))
    baselines = {name: each["tasks"] for name, each in result["baselines"].items()}
    tasks = {result["quantizer"]["name"]: result["tasks"], **baselines}
    return {
        (name, point["context"]): point for name, task in tasks.items() for point in task["latency"]["metrics"]["curve"]
    }


def test_the_page_quotes_the_run() -> None:
    measured = points()
    text = (ROOT / "docs/latency.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith(("| fp16 ", "| tqmse "))]
    assert len(rows) == len(measured) == 4
    for method, context, attention, *figures in rows:
        point, fp16 = measured[method, int(context)], measured["fp16", int(context)]
        parts = point["parts"]
        times = (point["decode_ms_median"], parts["attention"], parts["append"], parts["rest"], point["floor_ms"])
        speed_up = fp16["decode_ms_median"] / point["decode_ms_median"]
        assert attention == point["attention"]
        assert figures == [*(f"{value:.3f}" for value in times), f"{speed_up:.2f}"]


def test_the_page_quotes_the_caches_sizes() -> None:
    text, measured = (ROOT / "docs/latency.md").read_text(encoding="utf-8"), points()
    for method in ("tqmse", "fp16"):
        assert str(round(measured[method, 131072]["cache_bytes"] / 2**20)) in text


def test_the_page_quotes_the_longest_context() -> None:
    point = points(LONG)["tqmse", 524288]
    text = " ".join((ROOT / "docs/latency.md").read_text(encoding="utf-8").split())
    quoted = (
        f"a step at 524288 tokens took {point['decode_ms_median']:.3f} ms, with {point['cache_bytes'] / 2**20:.0f} MiB"
    )
    assert f"{quoted} of cache and {point['peak_bytes'] / 2**30:.1f} GiB at the peak" in text
