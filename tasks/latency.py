"""Latency: what reading a prompt and decoding after it cost in time and memory, over contexts and batch sizes."""

import dataclasses
import gc
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from kvbench.errors import ConfigurationError
from kvbench.task import Task, TaskResult

if TYPE_CHECKING:
    from torch import Tensor

    from kvbench.decode_loop import DeviceLoop, HostLoop
    from kvbench.packed_cache import PackedCache
    from kvbench.session import Session

FILLS = ("prefill", "synthetic")
WARM_UP = 4  # steps after capture that are not timed
REPEATED = 2048  # tokens that are read before a synthetic cache repeats their keys and values: whole pages
BOUNDED = "The fp16 attention takes no lengths from the device: it read the whole context in every timed step."
ON_CPU = "Timed on a CPU by the reference: not comparable with figures of a GPU."


@dataclass(frozen=True)
class Latency(Task):
    """Times of prefill and of whole decode steps, and memory, for a prompt of random tokens.

    A cell is a context and a batch size. The prompt fills the cache but for the tokens that are then decoded, so that
    the last step reads ``context`` tokens. The model's code, its compilation and the CUDA graph around a whole step are
    the same for every quantizer and for fp16, whose attention is the fastest that was measured on this very cache.
    Running out of memory is a result.
    """

    name: ClassVar[str] = "latency"

    contexts: list[int] = field(default_factory=lambda: [512, 2048], metadata={"help": "tokens a sequence at the end"})
    batches: list[int] = field(default_factory=lambda: [1], metadata={"help": "sequences decoded together"})
    steps: int = field(default=64, metadata={"help": "decode steps timed in a cell"})
    fill: str = field(
        default="prefill",
        metadata={"help": f"prefill: the prompt is read; synthetic: {REPEATED} tokens are, and repeated in the cache"},
    )
    graph: bool = field(default=True, metadata={"help": "capture a step in a CUDA graph, where there is a GPU"})
    compile: str = field(
        default="none", metadata={"help": "torch.compile a step: none | default | tuned | max-autotune"}
    )
    attention: list[str] = field(
        default_factory=lambda: ["auto"],
        metadata={"help": "decode attention of unquantized caches on a GPU; auto: the fastest; several: compared"},
    )
    fold: bool = field(
        default=True, metadata={"help": "fold rotations of packed values into the model's output projections"}
    )
    merge: bool = field(
        default=True, metadata={"help": "read q, k, v and the MLP's gate, up as one product each, for every method"}
    )
    temperature: float = field(default=0.0, metadata={"help": "0: greedy; above: sampled on the device"})
    decompose: bool = field(default=False, metadata={"help": "time attention, appending and the rest apart, on a GPU"})
    seed: int = field(default=0, metadata={"help": "seed of the prompts' tokens"})

    def __post_init__(self) -> None:
        from kvbench.decode_loop import COMPILE

        if not (self.contexts and self.batches and self.attention):
            raise ConfigurationError("task.latency.contexts, batches and attention must each have at least one entry.")
        if self.steps < 1 or min(self.batches) < 1:
            raise ConfigurationError("task.latency.steps and batches must be 1 or more.")
        if min(self.contexts) <= self.steps + WARM_UP:
            raise ConfigurationError(
                f"task.latency.contexts={min(self.contexts)} leaves no prompt before {self.steps} steps and {WARM_UP} "
                f"to warm up: choose more than {self.steps + WARM_UP} tokens, or fewer steps."
            )
        for option, allowed in (("fill", FILLS), ("compile", tuple(COMPILE))):
            if getattr(self, option) not in allowed:
                raise ConfigurationError(
                    f"task.latency.{option}={getattr(self, option)} is not allowed: choose {' or '.join(allowed)}."
                )

    def inputs(self) -> dict[str, str]:
        """The device: times of another one are not this one's."""
        import torch

        return {"device": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}

    def run(self, session: "Session") -> TaskResult:
        from kvbench.decode_timing import read_rate

        if session.path == "peer":
            raise ConfigurationError(
                f"task.latency times kvbench's own cache; quantizer={session.quantizer.name} brings another. "
                "Leave it out."
            )
        if session.device.type == "cuda":
            read_rate(session)  # measured while there is memory
        cells = [(context, batch) for batch in self.batches for context in self.contexts]
        curve: list[dict[str, Any]] = []
        others: list[dict[str, Any]] = []
        for context, batch in session.track(cells, "latency"):
            first, *rest = measure_cell(self, session, context, batch)
            curve.append(first)
            others += rest
        notes = [ON_CPU] if session.device.type == "cpu" else []
        if any(row["bounded"] for row in [*curve, *others]):
            notes.append(BOUNDED)
        return TaskResult(
            metrics={
                "curve": curve,
                "other_attention": others,
                "weights": "random" if session.loaded.source == "random" else session.loaded.source,
                "model": session.loaded.name,
                "steps": self.steps,
                "fill": self.fill,
            },
            n=len(cells),
            unit="cells",
            path=session.path,
            notes=tuple(notes),
        )


def measure_cell(task: Latency, session: "Session", context: int, batch: int) -> list[dict[str, Any]]:
    """The rows of one cell: the first is the quantizer's own, others are of further attentions that were asked for."""
    import torch

    try:
        rows = list(_rows(task, session, context, batch))
    except (torch.OutOfMemoryError, MemoryError):
        rows = [_blank_row(task, session, context, batch) | {"out_of_memory": True}]
    gc.collect()
    if session.device.type == "cuda":
        torch.cuda.empty_cache()
    return rows


def _blank_row(task: Latency, session: "Session", context: int, batch: int) -> dict[str, Any]:
    """A row with what is known before anything was measured."""
    return {
        "context": context,
        "batch": batch,
        "method": session.quantizer.name,
        "dtype": session.loaded.geometry.dtype,
        "attention": None,
        "bounded": False,
        "fill": task.fill,
        "graph": False,
        "folded": False,
        "merged": False,
        "compile": task.compile,
        "compile_s": None,
        "prefill_s": None,
        "ttft_s": None,
        "decode_ms_median": None,
        "decode_ms_p5": None,
        "decode_ms_p95": None,
        "tokens_per_s": None,
        "cache_bytes": None,
        "peak_bytes": None,
        "floor_ms": None,
        "parts": None,
        "out_of_memory": False,
    }


def _rows(task: Latency, session: "Session", context: int, batch: int) -> Iterator[dict[str, Any]]:
    import torch

    from kvbench.decode_timing import choose_attention, floor_ms, step_parts, timed_steps

    on_gpu = session.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(session.device)
    decoded = task.steps + WARM_UP
    row = _blank_row(task, session, context, batch)
    with session.engage(context) as cache:
        following, times = _fill(task, session, cache, context - decoded, batch)
        row |= times
        for number, attention in enumerate(task.attention):
            named = choose_attention(cache, attention)
            if number:
                if named is None:
                    break  # a quantizer's attention is its own
                cache.crop(-decoded)
            started = time.perf_counter()
            loop = _loop(task, session, cache, following)
            compile_s = time.perf_counter() - started if loop.why is None else None
            loop.run(WARM_UP)
            milliseconds = [1e3 * second for second in timed_steps(loop, task.steps)]
            median = statistics.median(milliseconds)
            own = row | {
                "attention": named or cache.packed_layers[0].backend,
                "bounded": named is not None and not named.startswith(("triton", "torch-math")),
                "graph": loop.graph,
                "folded": loop.folded,
                "merged": loop.merged,
                "compile": loop.compile,
                "compile_s": compile_s,
                "decode_ms_median": median,
                "decode_ms_p5": _percentile(milliseconds, 5),
                "decode_ms_p95": _percentile(milliseconds, 95),
                "tokens_per_s": 1e3 * batch / median,
                "cache_bytes": sum(cache.bytes_allocated()),
                "peak_bytes": torch.cuda.max_memory_allocated(session.device) if on_gpu else None,
                "floor_ms": floor_ms(session, cache) if on_gpu else None,
            }
            if task.decompose and loop.why is None and on_gpu:
                own["parts"] = dataclasses.asdict(step_parts(loop))
            yield own
            del loop


def _fill(
    task: Latency, session: "Session", cache: "PackedCache", count: int, batch: int
) -> "tuple[Tensor, dict[str, float | None]]":
    """Fill the cache with ``count`` tokens a sequence; the token that follows each, and the times that took."""
    import torch

    vocabulary = session.loaded.model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(task.seed)
    read = count if task.fill == "prefill" else min(count, REPEATED)
    tokens = torch.randint(0, vocabulary, (batch, read), generator=generator).to(session.device)
    _wait(session)
    started = time.perf_counter()
    for _, logits in session.stream(tokens, cache, last_only=True):  # noqa: B007 - the last chunk's are used
        pass
    _wait(session)
    prefill_s = time.perf_counter() - started
    following = logits[:, -1].argmax(-1)
    _wait(session)
    ttft_s = time.perf_counter() - started
    if read < count:
        cache.repeat(count)
        return following, {"prefill_s": None, "ttft_s": None}
    return following, {"prefill_s": prefill_s, "ttft_s": ttft_s}


def _loop(task: Latency, session: "Session", cache: "PackedCache", following: "Tensor") -> "DeviceLoop | HostLoop":
    from kvbench.decode_loop import DeviceLoop, Sampling, decode_loop

    sampling = Sampling(temperature=task.temperature)
    model = session.loaded.model
    loop = decode_loop(model, cache, following, sampling, task.graph, task.compile, task.fold, task.merge)
    if isinstance(loop, DeviceLoop):
        loop.prepare()
    _wait(session)
    return loop


def _wait(session: "Session") -> None:
    import torch

    if session.device.type == "cuda":
        torch.cuda.synchronize(session.device)


def _percentile(samples: list[float], percent: float) -> float:
    import numpy as np

    return float(np.percentile(samples, percent))
