"""Kernel benchmarks: packed decode attention against the best fp16 attention of the same process.

``kvbench bench kernels --out DIR`` writes ``DIR/kernels.json``; ``kvbench bench table --from FILE`` prints such a file
as Markdown. Everything is timed by
:func:`kvbench.kernels.measure.measure`: CUDA graph replays over rotated buffers larger than the L2 cache. The packed
time includes rotating and quantizing the query, the merge and the output's inverse rotation; ``folded`` leaves the last
of these out, for a model whose output projection has it folded in (the general kernel has no such figure).
"""

import argparse
import contextlib
import datetime
import json
import platform
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import kvbench
from kvbench.bench_cold import run_cold
from kvbench.bench_general import EXACT, check_general_accuracy, exact_layout, random_bit_planes
from kvbench.bench_prefill import check_prefill_accuracy, prefill_peak, time_prefill_attention
from kvbench.errors import ConfigurationError
from kvbench.kernels import fp16_attention
from kvbench.kernels.bit_plane_attention import BitPlaneAttention
from kvbench.kernels.bit_planes import BitPlaneLayout
from kvbench.kernels.formats import Centre, Group, HaarRotation, HeadFormat, LogNorm, RotatedCodebook, Segment
from kvbench.kernels.measure import copies, copy_bandwidth, measure, read_bandwidth
from kvbench.kernels.rotated_codebook import RotatedCodebookCodec
from kvbench.kernels.tile_attention import TileAttention, reference_attention
from kvbench.kernels.tile_encode import TileEncoder
from kvbench.kernels.tiles import SLAB, TileLayout
from kvbench.quantizers.codebooks import codebook

DIM = 128
GEOMETRIES = {"qwen2.5-3b": (16, 2), "llama3.1-8b": (32, 8)}  # query heads, KV heads
CONTEXTS = (4096, 16384, 65536, 131072, 524288)
BATCHES = (1, 8)
ALLOCATIONS = {
    # slab widths of consecutive KV heads, repeated over the layer's heads
    "tqmse-k3v3": (("3333",), 3),
    "blockgtq-k3v3": (("4332", "4422", "4332", "4431"), 3),
    "blockgtq-k2v2": (("3221", "2222", "3221", "3311"), 2),
    "tqmse-k4v4": (("4444",), 4),
    "cblockgtq-k3v3": (("4332", "4422", "4332", "4431"), 3),
    "cblockgtq-k2v2": (("3221", "2222", "3221", "3311"), 2),
}
NAMES = (*ALLOCATIONS, EXACT)
LARGEST_FP16 = 40e9  # bytes of one fp16 cache: beyond it the device's memory does not hold what is compared


@dataclass(frozen=True)
class Shape:
    """One layer's decode attention."""

    geometry: str
    batch: int
    context: int

    @property
    def q_heads(self) -> int:
        return GEOMETRIES[self.geometry][0]

    @property
    def kv_heads(self) -> int:
        return GEOMETRIES[self.geometry][1]

    @property
    def fp16_bytes(self) -> int:
        return self.batch * self.context * self.kv_heads * DIM * 2 * 2


def head_format(widths: str, seed: int) -> HeadFormat:
    """A head of 128 dims with the given slab widths (widest first), one group a width, 8-bit log norms."""
    groups, start = [], 0
    for bits in sorted(set(widths), reverse=True):
        count = widths.count(bits) * SLAB
        segment = Segment(count, codebook(count, int(bits)))
        dims = tuple(range(start, start + count))
        groups.append(Group(dims, HaarRotation(count, seed), (segment,), LogNorm(-4.0, 10 / 254)))
        start += count
    return HeadFormat(tuple(groups))


def key_centre(kv_heads: int) -> Centre:
    """A mean of keys under RoPE with base 10^6, three times the keys' spread in the slowest blocks and 0.03 times in
    the fastest."""
    blocks = DIM // 2
    size = 3 * np.logspace(-2, 0, blocks)
    vectors = np.random.default_rng(7).standard_normal((kv_heads, 2, blocks)) * size
    return Centre(
        tuple(tuple(row) for row in vectors.reshape(kv_heads, DIM).tolist()),
        tuple((block, block + blocks) for block in range(blocks)),
        tuple(1e6 ** (-block / blocks) for block in range(blocks)),
    )


def layout_for(allocation: str, kv_heads: int) -> TileLayout:
    """The tile layout of a layer under one of :data:`ALLOCATIONS`; keys of ``cblockgtq`` have a centre."""
    widths, value_bits = ALLOCATIONS[allocation]
    key = tuple(head_format(widths[head % len(widths)], 100 + head) for head in range(kv_heads))
    value = tuple(head_format(str(value_bits) * 4, 900 + head) for head in range(kv_heads))
    centre = key_centre(kv_heads) if allocation.startswith("cblockgtq") else None
    return TileLayout(RotatedCodebook(key, centre), RotatedCodebook(value))


def random_pages(layout: TileLayout, batch: int, tokens: int, device: str, generator: torch.Generator) -> Tensor:
    """Pages of random bits: every bit pattern is a valid code, and time does not depend on which."""
    pages = layout.allocate(batch, tokens, device)
    pages.random_(0, 256, generator=generator)
    for head, tile in enumerate(layout.key):
        _, _, norms, value_norm = layout.offsets[head].tolist()
        stop = value_norm + 128
        assert stop - norms == 128 * (len(tile.runs) + 1)
        pages[:, :, norms:stop].random_(100, 140, generator=generator)
    return pages


def median_us(samples: Sequence[float]) -> float:
    return statistics.median(samples) * 1e6


def spread(samples: Sequence[float]) -> dict[str, float]:
    """Median and range of samples, in microseconds."""
    return {"median_us": median_us(samples), "min_us": min(samples) * 1e6, "max_us": max(samples) * 1e6}


def time_fp16(shape: Shape, device: str) -> dict[str, Any]:
    """Every fp16 baseline at a shape, and the fastest's name."""
    generator = torch.Generator(device).manual_seed(1)
    new = lambda heads, *rest: torch.randn(  # noqa: E731
        shape.batch, heads, *rest, DIM, device=device, dtype=torch.float16, generator=generator
    )
    sets = [
        (new(shape.q_heads), new(shape.kv_heads, shape.context), new(shape.kv_heads, shape.context))
        for _ in range(copies(shape.fp16_bytes, device))
    ]
    best, times = fp16_attention.fastest(sets)
    return {"best": best, "bytes": shape.fp16_bytes, "times": {name: spread(value) for name, value in times.items()}}


def time_packed(shape: Shape, allocation: str, device: str) -> dict[str, Any]:
    """Packed decode attention at a shape: time, bytes read, bytes a token."""
    generator = torch.Generator(device).manual_seed(2)
    pages = -(-shape.context // 128)
    if allocation == EXACT:
        general = exact_layout(shape.kv_heads)
        attention = BitPlaneAttention(general, device)
        splits = attention.splits_for(shape.batch, pages, shape.q_heads // shape.kv_heads)
        filled = partial(random_bit_planes, general, shape.batch, shape.context, device, generator)
        return _time_pages(shape, allocation, general, splits, filled, {"": attention}, device)
    layout = layout_for(allocation, shape.kv_heads)
    tiles, folded = TileAttention(layout, device), TileAttention(layout, device, rotate_output=False)
    splits = tiles.splits_for(shape.batch, pages, shape.q_heads // shape.kv_heads)
    filled = partial(random_pages, layout, shape.batch, shape.context, device, generator)
    return _time_pages(shape, allocation, layout, splits, filled, {"": tiles, "folded": folded}, device)


def _time_pages(
    shape: Shape,
    allocation: str,
    layout: TileLayout | BitPlaneLayout,
    splits: int,
    filled: Callable[[], Tensor],
    attentions: Mapping[str, TileAttention | BitPlaneAttention],
    device: str,
) -> dict[str, Any]:
    """Times of ``attentions`` over sets of random queries and pages; the one without a name is the cell's own."""
    nbytes = shape.batch * -(-shape.context // 128) * layout.page_bytes
    generator = torch.Generator(device).manual_seed(5)
    sets = [
        (
            torch.randn(shape.batch, shape.q_heads, DIM, device=device, dtype=torch.float16, generator=generator),
            filled(),
        )
        for _ in range(copies(nbytes, device))
    ]
    starts = torch.zeros(shape.batch, dtype=torch.int32, device=device)
    stops = torch.full_like(starts, shape.context)
    times = {
        name: spread(measure([partial(run, q, p, starts, stops, DIM**-0.5) for q, p in sets], device))
        for name, run in attentions.items()
    }
    return {
        "allocation": allocation,
        "bytes": nbytes,
        "bits_per_element": layout.bytes_per_token * 8 / (2 * shape.kv_heads * DIM),
        "compression": 2 * DIM * 2 * shape.kv_heads / layout.bytes_per_token,
        "splits": splits,
        **times.pop(""),
        **times,
    }


def time_encode(allocation: str, geometry: str, device: str, tokens: int = 16384) -> dict[str, float]:
    """Encoding a prompt of ``tokens`` (keys and values of one layer) and appending one token, in microseconds."""
    kv_heads = GEOMETRIES[geometry][1]
    layout = layout_for(allocation, kv_heads)
    encoder = TileEncoder(layout, device)
    pages = layout.allocate(1, tokens + 128, device)
    generator = torch.Generator(device).manual_seed(4)
    x = torch.randn(8, 1, tokens, kv_heads, DIM, device=device, dtype=torch.float16, generator=generator)
    first = torch.zeros(1, dtype=torch.int32, device=device)
    after = torch.full_like(first, tokens)
    sets = list(zip(x[0::2], x[1::2], strict=True))
    prefill = measure([lambda k=k, v=v: encoder(k, v, pages, first) for k, v in sets], device)  # type: ignore[misc]
    append = measure([lambda k=k, v=v: encoder(k[:, :1], v[:, :1], pages, after) for k, v in sets], device)  # type: ignore[misc]
    return {
        "tokens": tokens,
        "input_bytes": 2 * x[0].nbytes,
        "prefill_us": median_us(prefill),
        "prefill_input_gb_s": 2 * x[0].nbytes / median_us(prefill) / 1e3,
        "append_us": median_us(append),
    }


def measure_prefill(allocation: str, geometry: str, device: str) -> dict[str, Any]:
    """Prefill attention: a prompt of 32K tokens, the peak memory at 512K, the error (:mod:`kvbench.bench_prefill`)."""
    q_heads, kv_heads = GEOMETRIES[geometry]
    layout = layout_for(allocation, kv_heads)
    return {
        **time_prefill_attention(layout, q_heads, device),
        **check_prefill_accuracy(layout, q_heads, device),
        "peak": prefill_peak(layout, q_heads, device),
    }


def check_accuracy(allocation: str, geometry: str, device: str, tokens: int = 5000) -> dict[str, float]:
    """Relative error of packed attention and of fp16 attention on the same decoded values, against float64."""
    q_heads, kv_heads = GEOMETRIES[geometry]
    if allocation == EXACT:
        return check_general_accuracy(exact_layout(kv_heads), q_heads, device, tokens)
    layout = layout_for(allocation, kv_heads)
    generator = torch.Generator(device).manual_seed(3)
    key, value = RotatedCodebookCodec(layout.key_format, device), RotatedCodebookCodec(layout.value_format, device)
    lengths = [tokens, tokens // 3]
    starts = torch.tensor([0, 37], dtype=torch.int32, device=device)
    pages = layout.allocate(len(lengths), tokens, device)
    for index, length in enumerate(lengths):
        x = torch.randn(2, length, kv_heads, DIM, device=device, generator=generator) * 2
        positions = torch.arange(length, device=device) - starts[index]
        if (centre := key.centre(positions)) is not None:
            x[0] += centre
        shaped, norms = [], []
        for codec, part in zip((key, value), x, strict=True):
            rows, stored = codec.encode(part, positions)
            shaped.append(codec.layout.unpack(rows).reshape(length, kv_heads, DIM))
            norms.append(stored)
        packed = layout.pack(shaped[0], norms[0], shaped[1], norms[1])
        pages[index, : packed.shape[0]] = packed
    q = torch.randn(len(lengths), q_heads, DIM, device=device, dtype=torch.float16, generator=generator)
    stops = torch.tensor(lengths, dtype=torch.int32, device=device)
    arguments = (pages, starts, stops, DIM**-0.5)
    exact, exact_lse = reference_attention(q, layout, *arguments)
    out, lse = TileAttention(layout, device)(q, *arguments)
    half = fp16_attention_of_decoded(q, layout, *arguments)
    size = exact.norm()
    return {
        "packed_error": float((out - exact).norm() / size),
        "fp16_error": float((half - exact).norm() / size),
        "lse_error": float((lse - exact_lse).abs().max()),
    }


def fp16_attention_of_decoded(
    q: Tensor, layout: TileLayout, pages: Tensor, starts: Tensor, stops: Tensor, scaling: float
) -> Tensor:
    """FlashAttention-2 in fp16 on the reference's decoded keys and values, sequence by sequence."""
    codecs = [RotatedCodebookCodec(format, pages.device) for format in (layout.key_format, layout.value_format)]
    outs = []
    for index in range(len(q)):
        start, stop = int(starts[index]), int(stops[index])
        parts = layout.unpack(pages[index], stop)
        halves = []
        for codec, codes, norms in zip(codecs, parts[::2], parts[1::2], strict=True):
            rotated = codec.decode((codec.layout.pack(codes.flatten(1)), norms))
            decoded = codec.from_space(rotated[:, :, None])[:, :, 0]
            if (centre := codec.centre(torch.arange(stop, device=pages.device) - start)) is not None:
                decoded = decoded + centre
            halves.append(decoded[start:].transpose(0, 1)[None].half().contiguous())
        outs.append(fp16_attention.decode("torch-flash", q[index : index + 1], *halves)[0])
    return torch.stack(outs)


def environment(device: str) -> dict[str, Any]:
    """What was measured on: device, driver, versions, clocks as read."""
    query = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,temperature.gpu,power.draw"
    reading = ""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        reading = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True, check=True
        ).stdout.strip()
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = "not installed"
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device),
        "multiprocessors": torch.cuda.get_device_properties(device).multi_processor_count,
        "nvidia_smi": dict(zip(query.split(","), reading.split(", "), strict=False)),
        "versions": {
            "kvbench": kvbench.__version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "triton": triton_version,
            "python": platform.python_version(),
        },
    }


def run_bench(
    out: Path,
    device: str = "cuda",
    geometries: Sequence[str] = tuple(GEOMETRIES),
    contexts: Sequence[int] = CONTEXTS,
    batches: Sequence[int] = BATCHES,
    allocations: Sequence[str] = NAMES,
) -> dict[str, Any]:
    """Measure decode attention over a grid of shapes and write ``out/kernels.json``, which grows as rows finish.

    Raises ConfigurationError where there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise ConfigurationError(
            "bench kernels needs a CUDA device, and there is none. Run it on a machine with a GPU."
        )
    out.mkdir(parents=True, exist_ok=True)
    of_tiles = [name for name in allocations if name in ALLOCATIONS][:2]
    result: dict[str, Any] = {
        "schema_version": 1,
        "environment": environment(device),
        "ceilings": {"copy_gb_s": copy_bandwidth(device) / 1e9, "read_gb_s": read_bandwidth(device) / 1e9},
        "accuracy": {f"{a} {g}": check_accuracy(a, g, device) for a in allocations for g in geometries},
        "encode": {f"{a} {g}": time_encode(a, g, device) for a in of_tiles for g in geometries},
        "prefill": {f"{a} {g}": measure_prefill(a, g, device) for a in of_tiles for g in geometries},
        "decode": [],
    }
    print(json.dumps({key: result[key] for key in ("ceilings", "accuracy", "encode", "prefill")}, indent=1), flush=True)
    for geometry in geometries:
        for batch in batches:
            for context in contexts:
                shape = Shape(geometry, batch, context)
                if shape.fp16_bytes > LARGEST_FP16:
                    continue
                row = measure_shape(shape, allocations, device, result["ceilings"]["read_gb_s"])
                result["decode"].append(row)
                print(summary(row), flush=True)
                (out / "kernels.json").write_text(json.dumps(result, indent=1) + "\n")
    result["environment_after"] = environment(device)
    (out / "kernels.json").write_text(json.dumps(result, indent=1) + "\n")
    return result


def measure_shape(shape: Shape, allocations: Sequence[str], device: str, ceiling: float) -> dict[str, Any]:
    """All baselines and formats at one shape, with ratios."""
    fp16 = time_fp16(shape, device)
    torch.cuda.empty_cache()
    best = fp16["times"][fp16["best"]]["median_us"]
    flash = fp16["times"]["torch-flash"]["median_us"]
    packed = []
    for allocation in allocations:
        cell = time_packed(shape, allocation, device)
        torch.cuda.empty_cache()
        rate = cell["bytes"] / cell["median_us"] / 1e3
        cell |= {
            "gb_s": rate,
            "share_of_read_ceiling": rate / ceiling,
            "speedup_best_fp16": best / cell["median_us"],
            "speedup_torch_flash": flash / cell["median_us"],
        }
        if "folded" in cell:
            cell["speedup_best_fp16_folded"] = best / cell["folded"]["median_us"]
        packed.append(cell)
    return {
        **asdict(shape),
        "head_dim": DIM,
        "q_heads": shape.q_heads,
        "kv_heads": shape.kv_heads,
        "fp16": fp16,
        "packed": packed,
    }


def _both(cell: dict[str, Any], ratio: str) -> str:
    """A ratio of a cell, and after a stroke the one with the output's rotation folded, where there is one."""
    folded = cell.get(f"{ratio}_folded")
    return f"{cell[ratio]:.2f}" + (f" / {folded:.2f}" if folded else "")


def _microseconds(cell: dict[str, Any]) -> str:
    folded = cell.get("folded")
    return f"{cell['median_us']:.1f}" + (f" / {folded['median_us']:.1f}" if folded else "")


def summary(row: dict[str, Any]) -> str:
    """One line for a terminal."""
    fp16 = " ".join(f"{name}={time['median_us']:.1f}" for name, time in row["fp16"]["times"].items())
    packed = " ".join(
        f"{cell['allocation']}={cell['median_us']:.1f} (x{_both(cell, 'speedup_best_fp16')},"
        f" {cell['share_of_read_ceiling']:.0%})"
        for cell in row["packed"]
    )
    return f"{row['geometry']} B={row['batch']} T={row['context']}: {fp16} | {packed}"


def markdown(result: dict[str, Any]) -> str:
    """The decode figures of a result as a Markdown table: microseconds and ratios to the best fp16 of the shape.

    Each as measured, and with the output's rotation folded into the model's weights.
    """
    names = [cell["allocation"] for cell in result["decode"][0]["packed"]]
    columns = ["geometry", "batch", "context", "best fp16", "us"]
    columns += [f"{name} us" for name in names] + [f"{name} x" for name in names]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in result["decode"]:
        best = row["fp16"]["best"]
        cells = [row["geometry"], str(row["batch"]), f"{row['context'] // 1024}K", best]
        cells.append(f"{row['fp16']['times'][best]['median_us']:.1f}")
        cells += [_microseconds(cell) for cell in row["packed"]]
        cells += [_both(cell, "speedup_best_fp16") for cell in row["packed"]]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """``kvbench bench``. Raises ConfigurationError where there is no CUDA device."""
    parser = argparse.ArgumentParser(prog="kvbench bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    table = commands.add_parser("table", help="print a result file as Markdown")
    table.add_argument("--from", dest="source", type=Path, required=True)
    kernels = commands.add_parser("kernels", help="measure and write kernels.json")
    kernels.add_argument("--out", type=Path, required=True)
    kernels.add_argument("--contexts", type=int, nargs="*", default=CONTEXTS)
    kernels.add_argument("--batches", type=int, nargs="*", default=BATCHES)
    kernels.add_argument("--geometries", nargs="*", default=tuple(GEOMETRIES), choices=tuple(GEOMETRIES))
    kernels.add_argument("--allocations", nargs="*", default=NAMES, choices=NAMES)
    cold = commands.add_parser("cold", help="measure a first decode step with nothing compiled, and write cold.json")
    cold.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    if options.command == "cold":
        run_cold(options.out)
        return 0
    if options.command == "table":
        print(markdown(json.loads(options.source.read_text())))
        return 0
    run_bench(
        options.out,
        contexts=options.contexts,
        batches=options.batches,
        geometries=options.geometries,
        allocations=options.allocations,
    )
    return 0
