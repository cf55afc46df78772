"""The cache's options, as its layers read them."""

from dataclasses import dataclass

from kvbench.configuration import CacheConfig


@dataclass(frozen=True)
class CacheOptions:
    """What the cache keeps in full precision, what a chunk of queries sees of itself, and what reads the storage.

    ``exact_prefill``: a chunk attends to its own keys and values in full precision (what serving stacks do);
    otherwise to their quantized selves (the paper's protocol). ``capacity``: tokens of fixed storage, None to grow.
    ``backend``: ``auto``, ``triton`` or ``reference`` (see :func:`kvbench.kernels.dispatch.choose`).
    """

    n_sink: int = 0
    recent_window: int = 0
    exact_prefill: bool = False
    capacity: int | None = None
    backend: str = "auto"

    @staticmethod
    def from_config(config: CacheConfig, backend: str = "auto", capacity: int | None = None) -> "CacheOptions":
        return CacheOptions(config.n_sink, config.recent_window, config.prefill == "exact", capacity, backend)
