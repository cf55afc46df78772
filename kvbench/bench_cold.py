"""What compiling costs: ``kvbench bench cold`` measures a first decode step with nothing compiled yet.

A process of its own with an empty Triton cache decodes one token through every layer's attention, encoding a prompt
first, for models of several numbers of layers whose allocations are mixed. Kernels are counted by what is compiled: if
the numbers differ between models, compile time grows with the model.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvbench.errors import ConfigurationError

LAYERS = (2, 4, 8)
KV_HEADS, Q_HEADS, DIM, TOKENS = 2, 16, 128, 200
ALLOCATIONS = ("4332", "4422", "3333", "4431")  # slab widths of a head's keys: every layer begins with another one


def decode_once(layers: int, device: str) -> dict[str, Any]:
    """Encode a prompt, store a token and attend to it in every one of ``layers``, with no kernel compiled before.

    Returns the seconds that took, host and compiler included but not the import of torch and Triton, and the names of
    the kernels that were compiled, one for each variant. Triton's interpreter compiles none.
    """
    from triton import knobs

    from kvbench.bench import head_format
    from kvbench.kernels.formats import RotatedCodebook
    from kvbench.kernels.tile_attention import NewToken, TileAttention
    from kvbench.kernels.tile_encode import TileEncoder
    from kvbench.kernels.tiles import TileLayout

    layouts = []
    for layer in range(layers):
        widths = [ALLOCATIONS[(layer + head) % len(ALLOCATIONS)] for head in range(KV_HEADS)]
        key = tuple(head_format(each, 100 * layer + head) for head, each in enumerate(widths))
        value = tuple(head_format("3333", 100 * layer + 50 + head) for head in range(KV_HEADS))
        layouts.append(TileLayout(RotatedCodebook(key), RotatedCodebook(value)))
    random = lambda *shape: torch.randn(shape, device=device, dtype=torch.float16)  # noqa: E731
    keys, values, query = random(1, TOKENS, KV_HEADS, DIM), random(1, TOKENS, KV_HEADS, DIM), random(1, Q_HEADS, DIM)
    starts, slots = (torch.full((1,), at, dtype=torch.int32, device=device) for at in (0, TOKENS))
    compiled: list[str] = []
    knobs.runtime.jit_post_compile_hook = lambda *, fn, **_: compiled.append(fn.name)
    _wait(device)
    begun = time.perf_counter()
    for layout in layouts:
        encoder, attention = TileEncoder(layout, device), TileAttention(layout, device)
        pages = layout.allocate(1, TOKENS + 1, device)
        encoder(keys, values, pages, starts)
        new = NewToken(encoder, keys[:, :1], values[:, :1], slots)
        attention(query, pages, starts, slots + 1, DIM**-0.5, new=new)
    _wait(device)
    return {"layers": layers, "seconds": time.perf_counter() - begun, "kernels": sorted(compiled)}


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def run_cold(out: Path, device: str = "cuda", layers: Sequence[int] = LAYERS) -> dict[str, Any]:
    """Measure cold first steps and write ``out/cold.json``.

    Raises ConfigurationError where there is no CUDA device, or a process that measures fails.
    """
    from kvbench.bench import environment

    if not torch.cuda.is_available():
        raise ConfigurationError("bench cold needs a CUDA device, and there is none. Run it on a machine with a GPU.")
    out.mkdir(parents=True, exist_ok=True)
    models = [_in_a_new_process(count, device) for count in layers]
    result = {"schema_version": 1, "environment": environment(device), "models": models}
    (out / "cold.json").write_text(json.dumps(result, indent=1) + "\n")
    for model in models:
        print(f"{model['layers']} layers: {model['seconds']:.1f} s, {len(model['kernels'])} kernels compiled")
    return result


def _in_a_new_process(layers: int, device: str) -> dict[str, Any]:
    """:func:`decode_once` where nothing was compiled before: another process, an empty cache folder."""
    with tempfile.TemporaryDirectory() as cache:
        # -P: the working directory must not shadow installed packages, as it does not for the command itself.
        done = subprocess.run(
            [sys.executable, "-P", "-m", "kvbench.bench_cold", str(layers), device],
            env={**os.environ, "TRITON_CACHE_DIR": cache},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ConfigurationError(f"bench cold, {layers} layers: {reason}")
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def main(arguments: Sequence[str] | None = None) -> int:
    """Print :func:`decode_once` as a line of JSON: what the processes of :func:`run_cold` do."""
    parser = argparse.ArgumentParser(prog="python -m kvbench.bench_cold", description=main.__doc__)
    parser.add_argument("layers", type=int)
    parser.add_argument("device")
    given = parser.parse_args(arguments)
    print(json.dumps(decode_once(given.layers, given.device)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
