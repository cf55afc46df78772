"""The one way this project times code: :func:`measure` returns samples, statistics are the caller's.

On a GPU the calls are captured in a CUDA graph, so that neither Python nor launch overhead is timed, and each call in
turn works on its own set of buffers, together larger than the L2 cache, so that data comes from memory as it does in a
model. On a CPU each call is timed with the wall clock.
"""

import math
import time
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]

L2_MULTIPLE = 4  # rotated buffers exceed the L2 cache this many times: nothing useful survives a round
LAUNCHES = 24  # calls a sample at least, so that the events' resolution (about 0.5 us) does not matter
MAX_COPIES = 512


def copies(nbytes: int, device: torch.device | str, budget: float = 0.3) -> int:
    """How many sets of ``nbytes`` to rotate over: past the L2 cache, within the share ``budget`` of free memory."""
    device = torch.device(device)
    if device.type != "cuda":
        return 1
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    free, _ = torch.cuda.mem_get_info(device)
    wanted = math.ceil(L2_MULTIPLE * l2 / max(nbytes, 1))
    return max(1, min(wanted, int(budget * free // max(nbytes, 1)), MAX_COPIES))


def measure(
    calls: Sequence[Call], device: torch.device | str, samples: int = 15, graph: bool = True, warm_up: int = 3
) -> list[float]:
    """Time one call, in seconds, ``samples`` times.

    ``calls`` do the same work on different buffers (see :func:`copies`); a sample is the mean over a round of all of
    them. ``graph=False`` times eager launches with events, host overhead included. Raises whatever the calls raise.
    """
    if not calls:
        raise ValueError("nothing to measure: give at least one call")
    if torch.device(device).type != "cuda":
        return _measure_cpu(calls, samples, warm_up)
    with torch.cuda.device(device):
        replay, count = replayed(calls, warm_up) if graph else _eager(calls, warm_up)
        return [_timed(replay) / count for _ in range(samples)]


def replayed(calls: Sequence[Call], warm_up: int = 3) -> tuple[Call, int]:
    """The calls captured in a CUDA graph, in rounds until there are :data:`LAUNCHES`: what replays it, and how many."""
    rounds = _rounds(calls)
    return _captured(calls, rounds, warm_up), rounds * len(calls)


def _measure_cpu(calls: Sequence[Call], samples: int, warm_up: int) -> list[float]:
    for index in range(warm_up):
        calls[index % len(calls)]()
    times = []
    for index in range(samples):
        start = time.perf_counter()
        calls[index % len(calls)]()
        times.append(time.perf_counter() - start)
    return times


def _run(calls: Sequence[Call], rounds: int) -> None:
    for _ in range(rounds):
        for call in calls:
            call()


def _captured(calls: Sequence[Call], rounds: int, warm_up: int) -> Call:
    """The rounds as one graph, warmed up on a side stream as capture demands."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        _run(calls, 1 if len(calls) >= warm_up else warm_up)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _run(calls, rounds)
    graph.replay()
    return graph.replay


def _eager(calls: Sequence[Call], warm_up: int) -> tuple[Call, int]:
    rounds = _rounds(calls)
    _run(calls, warm_up)
    return lambda: _run(calls, rounds), rounds * len(calls)


def _rounds(calls: Sequence[Call]) -> int:
    return max(1, math.ceil(LAUNCHES / len(calls)))


def _timed(work: Call) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    work()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3


def copy_bandwidth(device: torch.device | str, nbytes: int = 1 << 32) -> float:
    """Measured bytes a second of a large device copy, counting what is read and what is written."""
    source = torch.ones(nbytes // 4, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    # an addition and not a copy: a graph turns copies into transfers by another engine, which is slower
    times = measure([lambda: torch.add(source, 1, out=target)], device, samples=7, graph=False)
    return 2 * nbytes / sorted(times)[len(times) // 2]


def read_bandwidth(device: torch.device | str, nbytes: int = 1 << 32) -> float:
    """Measured bytes a second of a kernel that only reads: the ceiling of decode attention. Needs Triton and a GPU."""
    from kvbench.kernels.read_kernel import read_all

    source = torch.ones(nbytes // 4, dtype=torch.int32, device=device)
    blocks = torch.cuda.get_device_properties(device).multi_processor_count * 8
    sums = torch.empty(blocks, dtype=torch.int32, device=device)
    times = measure([lambda: read_all[(blocks,)](source, sums, source.numel(), BLOCK=4096)], device, samples=7)
    return nbytes / sorted(times)[len(times) // 2]
