"""Folders of runs as sweeps leave them, with every kind of measurement a comparison can show."""

import hashlib
from pathlib import Path
from typing import Any

from kvbench.results import BlockEnergy, Measurement, PairedDifference, Result, TaskRecord, write_result

from .example_results import BLOCKS, LAYERS, measurement, result

QUANTIZERS = ("tqmse", "blockgtq", "cblockgtq")
BITS = (2, 3, 4)
BETTER = {"tqmse": 1.0, "blockgtq": 0.55, "cblockgtq": 0.3}  # errors relative to uniform TQ-MSE
CONTEXTS = (1024, 4096, 16384, 65536)


def fidelity(kl: float) -> TaskRecord:
    metrics = {"kl": kl, "top1_agreement": 1 - kl / 2, "windows": 4}
    return TaskRecord(status="ok", path="packed", metrics=metrics, n=512, unit="tokens", samples={"kl": [kl] * 40})


def niah(score: float, samples: int = 36) -> TaskRecord:
    lengths, depths = [256, 512], [0.1, 0.5, 0.9]
    grid = [[min(1.0, score + 0.05 * i - 0.1 * j) for j in range(len(lengths))] for i in range(len(depths))]
    nll = [[2 - value for value in row] for row in grid]
    return TaskRecord(
        status="ok",
        path="packed",
        metrics={
            "score": score,
            "answer_nll": 2 - score,
            "heat_map": {"lengths": lengths, "depths": depths, "score": grid, "answer_nll": nll},
        },
        n=samples,
        unit="prompts",
        samples={"score": [score] * samples},
    )


def latency_point(name: str, context: int, bits: float, **changes: Any) -> dict[str, Any]:
    """A point as task latency tells it; times grow with the bytes read, as on a GPU."""
    cache = context * bits * 1440
    decode = 0.4 + context * bits * 1e-6
    return {
        "context": context,
        "batch": 1,
        "method": name,
        "dtype": "float16",
        "attention": "torch-flash" if name == "fp16" else "triton",
        "bounded": name == "fp16",
        "fill": "prefill",
        "graph": True,
        "compile": "none",
        "compile_s": 2.5,
        "prefill_s": context / 9000,
        "ttft_s": context / 9000 + decode / 1000,
        "decode_ms_median": decode,
        "decode_ms_p5": decode * 0.97,
        "decode_ms_p95": decode * 1.08,
        "tokens_per_s": 1000 / decode,
        "cache_bytes": cache,
        "peak_bytes": cache + 3e8,
        "floor_ms": 0.1 + context * bits * 3e-7,
        "parts": None,
        "out_of_memory": False,
        **changes,
    }


def latency(name: str, bits: float) -> TaskRecord:
    """A curve over CONTEXTS; fp16's cache does not fit at the longest, and a slower attention was timed beside."""
    points = [latency_point(name, context, bits) for context in CONTEXTS]
    others = []
    if name == "fp16":
        lost = {key: None for key in points[-1] if key.endswith(("_s", "_bytes")) or "_ms" in key}
        points[-1] |= {**lost, "out_of_memory": True}
        others = [latency_point(name, CONTEXTS[0], bits, attention="torch-cudnn", decode_ms_median=0.9)]
    return TaskRecord(status="ok", metrics={"curve": points, "other_attention": others}, n=len(points), unit="cells")


def block_energy() -> BlockEnergy:
    """Energies over four orders of magnitude, strongest in slow-turning blocks."""
    grid = [[10 ** (4 * block / BLOCKS + layer % 3 / 4) for block in range(BLOCKS)] for layer in range(LAYERS)]
    return BlockEnergy(q=grid, k=[[value / 7 for value in line] for line in grid])


def measured(name: str, bits: float) -> Measurement:
    if name == "fp16":
        made = measurement("fp16", 16, 0.0021, 24.94)
        tasks = {"fidelity": fidelity(1e-6), "niah": niah(0.95), "latency": latency("fp16", 16)}
    else:
        error = BETTER[name] * 4.0 * 4 ** (2 - bits)
        made = measurement(name, bits, error, 24.94 + 5 * error)
        tasks = {
            "fidelity": fidelity(error / 10),
            "niah": niah(max(0.1, 0.95 - error / 8)),
            "latency": latency(name, bits),
        }
        size = made.compression
        assert size is not None
    made.tasks.update(tasks)
    for record in made.tasks.values():
        record.path = "packed"
    return made


def run(name: str, bits: float, **changes: Any) -> Result:
    """``kvbench quantizer=NAME quantizer.k_bits=BITS quantizer.v_bits=BITS`` with fp16 and tqmse beside."""
    asked = measured(name, bits)
    asked.tasks["perplexity"].paired = {
        "fp16": {"nll": PairedDifference(mean=0.08, low=0.05, high=0.11, n=40)},
        "tqmse": {"nll": PairedDifference(mean=-0.01, low=-0.03, high=0.01, n=40)},
    }
    fields = {key: getattr(asked, key) for key in Measurement.model_fields} | {
        "run_id": hashlib.sha256(f"{name} {bits} {changes}".encode()).hexdigest(),
        "command": f"kvbench quantizer={name} quantizer.k_bits={bits} quantizer.v_bits={bits}",
        "block_energy": block_energy(),
        "baselines": {other: measured(other, bits) for other in ("fp16", "tqmse") if other != name},
    }
    return result().model_copy(update=fields | changes)


def write_sweep(folder: Path) -> Path:
    """A Hydra multirun tree of nine cells under ``folder``."""
    for i, (name, bits) in enumerate((name, bits) for name in QUANTIZERS for bits in BITS):
        write_result(run(name, bits), folder / "2025-11-03" / f"{i}_{name}")
    return folder


def write_sweep_of(count: int, folder: Path) -> Path:
    """``count`` different runs: seeds of the nine cells."""
    for i in range(count):
        name, bits = QUANTIZERS[i % 3], BITS[i // 3 % 3]
        made = run(name, bits, run_id=hashlib.sha256(str(i).encode()).hexdigest())
        made.quantizer.parameters = {**made.quantizer.parameters, "seed": i}
        made.tasks["perplexity"].metrics["perplexity"] += i * 1e-3
        write_result(made, folder / str(i))
    return folder
