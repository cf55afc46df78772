"""A page of what ``kvbench bench kernels`` measured: one layer's decode attention against the best fp16.

python -m kvbench.reports.kernel_page benchmarks/results/h200-2026-11-30.json --out docs/gallery/kernels.html
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvbench.errors import KvbenchError, ResultError
from kvbench.reports.curves import MIB, Curve, latency_figures_of
from kvbench.reports.escaping import html_text
from kvbench.reports.html import Page, document
from kvbench.reports.rendering import render_bodies
from kvbench.reports.scores import REFERENCE, number
from kvbench.reports.table import Cell, Column, Table
from kvbench.results import write_text_atomically

SCHEMA_VERSION = 1
HOW = (
    "Medians of CUDA graph replays over buffers larger than the L2 cache. A packed time has the query's rotation and "
    "quantization, the merge and the output's inverse rotation in it; fp16 is the fastest of several implementations. "
    "The bandwidth is that of a plain read of a large buffer in the same process; it is measured, so the best kernels "
    "may pass it by a little."
)

Data = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page; the exit code is 2 where the file is not one of kernel results."""
    parser = argparse.ArgumentParser(prog="python -m kvbench.reports.kernel_page", description=__doc__)
    parser.add_argument("results", type=Path, help="a file that 'kvbench bench kernels' wrote")
    parser.add_argument("--out", type=Path, required=True, help="the page")
    given = parser.parse_args(arguments)
    try:
        write_text_atomically(given.out, kernel_page(read_kernels(given.results), given.results.name))
    except KvbenchError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def read_kernels(path: Path) -> Data:
    """The results in ``path``. Raises ResultError where it holds none, or of another schema."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ResultError(f"cannot read kernel results from {path}: {error}.") from error
    if not isinstance(data, dict) or not data.get("decode") or data.get("schema_version") != SCHEMA_VERSION:
        raise ResultError(
            f"{path} holds no kernel results of schema {SCHEMA_VERSION}. "
            "Give a file that 'kvbench bench kernels --out DIR' wrote."
        )
    return data


def kernel_page(data: Data, source: str) -> str:
    """The page of kernel results ``data``, read from the file ``source``."""
    geometries = list(dict.fromkeys(str(row["geometry"]) for row in data["decode"]))
    environment = data["environment"]
    sections: list[tuple[str, str, Callable[[], str]]] = [
        (geometry, f"Decode attention, {geometry}", partial(_geometry_html, data, geometry)) for geometry in geometries
    ]
    sections += [
        ("encoding", "Encoding", lambda: _encoding(data).html()),
        ("accuracy", "Accuracy", lambda: _accuracy(data).html()),
        ("environment", "Measured on", lambda: _environment_html(data, source)),
    ]
    page = Page(
        title="Decode kernels",
        heading="Decode attention from packed caches against fp16",
        context=f"One layer, {html_text(environment['device'])}, {html_text(environment['date'])}. {html_text(HOW)}",
        footer=html_text(source),
        kvbench=str(environment["versions"]["kvbench"]),
        body_class="wide",
    )
    return document(page, render_bodies(sections))


def kernel_curves(data: Data, geometry: str) -> list[Curve]:
    """fp16 and every allocation over contexts, a curve a batch size; the floor is what the device can read at most."""
    curves: dict[tuple[str, float], list[Data]] = {}
    for row in data["decode"]:
        if row["geometry"] != geometry:
            continue
        fp16 = row["fp16"]
        at = {"context": row["context"], "batch": row["batch"]}
        best = fp16["times"][fp16["best"]]["median_us"]
        found = {REFERENCE: (best, fp16["bytes"], fp16["best"])}
        found |= {each["allocation"]: (each["median_us"], each["bytes"], "triton") for each in row["packed"]}
        for name, (microseconds, size, attention) in found.items():
            floor = size / data["ceilings"]["read_gb_s"] / 1e6
            point = {"decode_ms_median": microseconds / 1e3, "cache_bytes": size, "floor_ms": floor}
            curves.setdefault((name, row["batch"]), []).append({**at, **point, "attention": attention})
    return [
        Curve(f"{name}, batch {batch:g}", "", name, "", batch, sorted(points, key=lambda point: point["context"]))
        for (name, batch), points in curves.items()
    ]


def _geometry_html(data: Data, geometry: str) -> str:
    first = next(row for row in data["decode"] if row["geometry"] == geometry)
    heads = f"{first['q_heads']} query heads, {first['kv_heads']} KV heads of {first['head_dim']} dims"
    figures = latency_figures_of(kernel_curves(data, geometry), f"One layer of {geometry} ({heads})")
    return "".join(figure.html() for figure in figures) + _times(data, geometry).html()


def _times(data: Data, geometry: str) -> Table:
    """Every shape of a geometry and everything that was timed there."""
    lines: list[list[Cell | str]] = []
    for row in data["decode"]:
        if row["geometry"] != geometry:
            continue
        shape = f"{row['context'] // 1024}K × {row['batch']}"
        fp16 = row["fp16"]
        for name, time in fp16["times"].items():
            best = " (fastest)" if name == fp16["best"] else ""
            told = [number(time["median_us"]), f"{number(time['min_us'])} to {number(time['max_us'])}"]
            lines.append([shape, f"{REFERENCE}: {name}{best}", *told, "–", "–", "–", number(fp16["bytes"] / MIB)])
        for each in row["packed"]:
            told = [number(each["median_us"]), f"{number(each['min_us'])} to {number(each['max_us'])}"]
            keys = ("speedup_best_fp16", "speedup_best_fp16_folded")
            ratios = [f"{each[key]:.2f}×" if key in each else "–" for key in keys]
            share = f"{100 * each['share_of_read_ceiling']:.0f} %"
            lines.append([shape, each["allocation"], *told, *ratios, share, number(each["bytes"] / MIB)])
    titles = ("µs", "range, µs", "vs best fp16", "with the output's rotation folded", "of read ceiling", "MiB")
    columns = (Column("context × batch", numeric=False), Column("attention", numeric=False), *map(Column, titles))
    return Table(f"All that was timed of {geometry}.", columns, lines)


def _encoding(data: Data) -> Table:
    lines = [
        [name, f"{each['tokens']:,}", number(each["prefill_us"]), number(each["prefill_input_gb_s"]),
         number(each["append_us"])]
        for name, each in data["encode"].items()
    ]  # fmt: skip
    titles = ("tokens of the prompt", "prompt, µs", "prompt, GB/s of input", "one token, µs")
    return Table("Encoding keys and values.", (Column("format", numeric=False), *map(Column, titles)), lines)


def _accuracy(data: Data) -> Table:
    lines = [
        [name, *(f"{each[key]:.2e}" for key in ("packed_error", "fp16_error", "lse_error"))]
        for name, each in data["accuracy"].items()
    ]
    titles = ("packed", "fp16 on the decoded cache", "log-sum-exp, largest difference")
    caption = "Relative error of the output against the reference in float64 on the same bytes."
    return Table(caption, (Column("format", numeric=False), *map(Column, titles)), lines)


def _environment_html(data: Data, source: str) -> str:
    environment = data["environment"]
    facts = {"file": source, "device": environment["device"], "date": environment["date"]}
    facts |= environment.get("versions", {}) | environment.get("nvidia_smi", {})
    facts |= {f"ceiling, {name}": number(value) for name, value in data["ceilings"].items()}
    lines = [[str(name), str(value)] for name, value in facts.items()]
    table = Table("What the kernels ran on.", (Column("fact", numeric=False), Column("value", numeric=False)), lines)
    return f'<pre class="wrap" tabindex="0">kvbench bench kernels --out DIR</pre>{table.html()}'


if __name__ == "__main__":
    sys.exit(main())
