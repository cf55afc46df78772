"""Conformance checks that run something more: another process, a kernel, a whole tiny model."""

import importlib.util
import json
import os
import pickle
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvbench.conformance import MOVED_SHARE, Check, NonConformance, NotApplicable, Specimen
from kvbench.errors import KvbenchError
from kvbench.kernels.formats import RotatedCodebook

if TYPE_CHECKING:
    from kvbench.models import LoadedModel

KERNEL_ERROR = 0.02  # relative; kernels multiply in half precision
CHUNK_ERROR = 0.05  # nats a token: a code on a threshold may move where a key's last bit does

TINY_MODEL = {
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def check_other_process(specimen: Specimen) -> None:
    """Another process fits the same format, and reads what this one stored."""
    stored = []
    for stream in specimen.tensors():
        codec = stream.codec
        planes = codec.encode(stream.sample())
        stored.append((planes, codec.decode(planes)))
    module = sys.modules[type(specimen.quantizer).__module__]
    with tempfile.TemporaryDirectory() as folder:
        order, answer = Path(folder, "order"), Path(folder, "answer")
        torch.save([planes for planes, _ in stored], order)
        Path(folder, "specimen").write_bytes(pickle.dumps(specimen))
        task = {"path": sys.path, "module": module.__name__, "file": module.__file__, "folder": folder}
        seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"  # orders of sets differ between processes
        done = subprocess.run(
            [sys.executable, "-P", "-c", "from kvbench.conformance_runs import child; child()"],
            input=json.dumps(task),
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            reason = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no output"
            raise NonConformance(f"{specimen.quantizer.name}: cannot be used in another process: {reason}")
        digest, decoded = torch.load(answer, weights_only=True)
    if digest != specimen.format.digest():
        raise NonConformance(
            f"{specimen.quantizer.name}: fit() gives another format in another process; do not depend on the order of "
            "sets, hash(), time or unseeded randomness"
        )
    for stream, (_, here), there in zip(specimen.tensors(), stored, decoded, strict=True):
        if not torch.allclose(here, there, rtol=1e-4, atol=1e-6):
            raise NonConformance(f"{stream.name} cannot be decoded in another process from its planes alone")


def child() -> None:
    """The other process of :func:`check_other_process`: reads its task from standard input."""
    task = json.load(sys.stdin)
    sys.path[:] = task["path"]
    if task["module"] not in sys.modules and task["file"]:  # a test module may not be importable by its name
        spec = importlib.util.spec_from_file_location(task["module"], task["file"])
        assert spec is not None and spec.loader is not None
        sys.modules[task["module"]] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[task["module"]])
    folder = Path(task["folder"])
    specimen: Specimen = pickle.loads((folder / "specimen").read_bytes())
    planes = torch.load(folder / "order", weights_only=True)
    decoded = [stream.codec.decode(tuple(stored)) for stream, stored in zip(specimen.tensors(), planes, strict=True)]
    torch.save((specimen.fit().digest(), decoded), folder / "answer")


def check_kernel(specimen: Specimen) -> None:
    """Where a kernel serves the format, its pages hold the codec's codes and its attention is the reference's."""
    from kvbench.kernels.tiles import TileLayout, UnsupportedLayout

    key, value = specimen.tensors()
    if not isinstance(key.format, RotatedCodebook) or not isinstance(value.format, RotatedCodebook):
        raise NotApplicable(f"no kernel reads formats of kind '{key.format.kind}' and '{value.format.kind}'")
    try:
        layout = TileLayout(key.format, value.format)
    except UnsupportedLayout as reason:
        raise NotApplicable(f"no kernel: {reason}") from reason
    tokens, parts = 200, []
    for stream in (key, value):
        codec: Any = stream.codec
        rows, norms = codec.encode(stream.sample(tokens))
        parts += [codec.layout.unpack(rows).unflatten(-1, (codec.kv_heads, codec.head_dim)), norms]
    pages = layout.pack(*parts)[None]
    for part, unpacked in zip(parts, layout.unpack(pages[0], tokens), strict=True):
        if not torch.equal(part, unpacked):
            raise NonConformance(f"{specimen.quantizer.name}: pages do not hold the codec's codes")
    device = _kernel_device()
    if device is None:
        return
    from kvbench.kernels.tile_attention import TileAttention, reference_attention

    shape = specimen.geometry.layers[0]
    q = torch.randn(1, shape.q_heads, shape.head_dim, generator=torch.Generator().manual_seed(3)).to(device)
    start, stop = (torch.tensor([bound], dtype=torch.int32, device=device) for bound in (0, tokens))
    pages = pages.to(device)
    found, _ = TileAttention(layout, device)(q, pages, start, stop, shape.head_dim**-0.5)
    expected, _ = reference_attention(q, layout, pages, start, stop, shape.head_dim**-0.5)
    error = float((found.double() - expected).norm() / expected.norm())
    if not error < KERNEL_ERROR:
        raise NonConformance(f"{specimen.quantizer.name}: the kernel's attention differs by {error:.2g} (relative)")


def _kernel_device() -> str | None:
    """Where Triton kernels can run here: a GPU, the CPU in Triton's interpreter, or nowhere."""
    if importlib.util.find_spec("triton") is None:
        return None
    if torch.cuda.is_available():
        return "cuda"
    return "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else None


@lru_cache(maxsize=4)
def _tiny_model(head_dim: int) -> "LoadedModel":
    from kvbench.configuration import ModelConfig
    from kvbench.models import load_model

    architecture = {**TINY_MODEL, "head_dim": head_dim}
    return load_model(ModelConfig(name="tiny", random=True, architecture=architecture, dtype="float32"), "cpu")


def check_model(specimen: Specimen) -> None:
    """On a whole model: every layer engages, losses are finite and do not depend on the chunks of prefill.

    Of formats that encode tokens a block at a time they do: a chunk reads its own blocks coded or not yet.
    """
    from kvbench.calibrate import accumulate, with_model_facts
    from kvbench.calibration import Calibration
    from kvbench.configuration import CacheConfig
    from kvbench.corpora import Corpus
    from kvbench.session import Session

    loaded = _tiny_model(specimen.geometry.head_dim)
    tokens = torch.randint(0, 256, (9, 48), generator=torch.Generator().manual_seed(0))
    calibration = with_model_facts(Calibration(accumulate(loaded, tokens[1:]), {}), loaded)
    format = specimen.quantizer.fit(calibration if specimen.quantizer.needs_calibration else None, loaded.geometry)
    losses = []
    for chunk in (0, 5):
        session = Session(loaded, specimen.quantizer, format, Corpus("none", "", ""), CacheConfig(prefill_chunk=chunk))
        try:
            losses.append(session.token_losses(tokens[0]))
        except KvbenchError as error:
            raise NonConformance(f"{specimen.quantizer.name}: a tiny model does not run: {error}") from error
        if not torch.isfinite(losses[-1]).all():
            raise NonConformance(f"{specimen.quantizer.name}: a tiny model's losses are NaN or infinite")
    if any(stream.block > 1 for stream in specimen.tensors()):
        return
    difference = (losses[0] - losses[1]).abs()
    changed = float((difference > CHUNK_ERROR).float().mean())
    if changed > 5 * MOVED_SHARE:
        raise NonConformance(
            f"{specimen.quantizer.name}: {changed:.0%} of a model's losses change with the prefill chunk"
        )


RUNS: dict[str, Check] = {"other_process": check_other_process, "kernel": check_kernel, "model": check_model}
"""Slower checks, made on one geometry each."""
