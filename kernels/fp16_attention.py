"""The fp16 decode attention that packed caches are compared with: the best there is, measured, never a copied cache.

Every implementation reads each key and value once for all query heads that share it. A baseline that repeats KV heads
first moves the cache several times over and makes anything look fast.
"""

import importlib
import importlib.util
import math
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvbench.errors import ConfigurationError, unknown_name
from kvbench.kernels.measure import measure

Decode = Callable[[Tensor, Tensor, Tensor], Tensor]

TRITON_SHAPES = {"triton-64": (64, 4), "triton-128": (128, 2)}  # tokens a step, blocks a multiprocessor


def _torch_backend(backend: SDPBackend) -> Decode:
    def decode(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)[:, :, 0]

    return decode


def _flash_attn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    flash_attn_with_kvcache = importlib.import_module("flash_attn").flash_attn_with_kvcache

    out: Tensor = flash_attn_with_kvcache(q[:, None], k.transpose(1, 2), v.transpose(1, 2))
    return out[:, 0]


def _triton(shape: str) -> Decode:
    def decode(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return split_kv(shape, q, k, v)

    return decode


def split_kv(shape: str, q: Tensor, k: Tensor, v: Tensor, span: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """The Triton kernel of that :data:`TRITON_SHAPES` entry; shapes as of :func:`decode`, tokens' rows contiguous.

    ``span``: int32 ``[batch]`` first and last (exclusive) token of each sequence, read on the device, so that a graph
    can be replayed as the cache grows. Without it all tokens are read. A head's elements are counted in 32 bits: raises
    ValueError from 2^31 on.
    """
    from kvbench.kernels.fp16_kernels import attend, merge

    block, occupancy = TRITON_SHAPES[shape]
    (batch, q_heads, dim), (_, kv_heads, tokens, _) = q.shape, k.shape
    if k.stride() != v.stride() or k.stride()[2:] != (dim, 1):
        raise ValueError("k and v must have the same strides, and contiguous tokens")
    if tokens * dim >= 2**31:
        raise ValueError(
            f"{tokens} tokens of head_dim {dim} are past the 2^31 elements a head that this kernel addresses"
        )
    q = q.contiguous()
    group, rows = q_heads // kv_heads, batch * kv_heads
    splits = _splits(q.device, block, occupancy, rows, tokens)
    partial = torch.empty(rows, group, splits, dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(rows, group, splits, dtype=torch.float32, device=q.device)
    out = torch.empty_like(q)
    scale = math.log2(math.e) / math.sqrt(dim)
    width = 1 << (dim - 1).bit_length()
    attend[(splits, rows)](
        q, k, v, partial, lse, *(span or (lse, lse)), tokens, scale, group, kv_heads, k.stride(0), k.stride(1),
        DIM=dim, WIDTH=width, BLOCK=block, STAGES=3, SPAN=span is not None, DEPENDENT=q.is_cuda, num_warps=4,
    )  # fmt: skip
    parts = 1 << (splits - 1).bit_length()
    merge[(rows * group,)](
        partial, lse, out, splits, DIM=dim, WIDTH=width, SPLITS=parts, DEPENDENT=q.is_cuda,
        **({"launch_pdl": True} if q.is_cuda else {}),
    )  # fmt: skip
    return out


def _splits(device: torch.device, block: int, occupancy: int, rows: int, tokens: int) -> int:
    """Blocks a sequence and head are spread over, none of them without tokens when all are in use."""
    most = math.ceil(tokens / block)
    if device.type != "cuda":
        return min(most, 4)
    blocks = torch.cuda.get_device_properties(device).multi_processor_count * occupancy
    return math.ceil(most / max(1, math.ceil(most * rows / blocks)))


def append(key: Tensor, value: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Put a token's ``key, value [batch, kv_heads, head_dim]`` into token ``slots[b]`` of ``k, v``, in Triton."""
    from kvbench.kernels.fp16_kernels import append

    batch, kv_heads, dim = key.shape
    append[(batch * kv_heads, 2)](
        key.contiguous(), value.contiguous(), k, v, slots, kv_heads, k.stride(0), k.stride(1),
        DIM=dim, WIDTH=1 << (dim - 1).bit_length(),
    )  # fmt: skip


IMPLEMENTATIONS: dict[str, Decode] = {
    "torch-flash": _torch_backend(SDPBackend.FLASH_ATTENTION),
    "torch-cudnn": _torch_backend(SDPBackend.CUDNN_ATTENTION),
    "flash-attn": _flash_attn,
    **{name: _triton(name) for name in TRITON_SHAPES},
    "torch-math": _torch_backend(SDPBackend.MATH),
}
"""By name. ``torch-flash`` is FlashAttention-2 as PyTorch ships it; ``torch-math`` is for devices with nothing else."""


def available(device: torch.device | str) -> list[str]:
    """Names of the implementations that can run on ``device``."""
    if torch.device(device).type != "cuda":
        return ["torch-math"]
    names = ["torch-flash", "torch-cudnn"]
    if importlib.util.find_spec("flash_attn"):
        names.append("flash-attn")
    if importlib.util.find_spec("triton"):
        names += TRITON_SHAPES
    return names


def decode(name: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend ``q [batch, q_heads, head_dim]`` to all tokens of ``k, v [batch, kv_heads, tokens, head_dim]``.

    ``name`` is one of :data:`IMPLEMENTATIONS`, or ``"auto"``: measure those available on these very tensors and take
    the fastest. Returns ``[batch, q_heads, head_dim]``. Raises ConfigurationError on an unknown name.
    """
    if name == "auto":
        name = fastest([(q, k, v)])[0]
    check_name(name)
    return IMPLEMENTATIONS[name](q, k, v)


def check_name(name: str) -> None:
    """Raise ConfigurationError where ``name`` is none of :data:`IMPLEMENTATIONS`."""
    if name not in IMPLEMENTATIONS:
        raise ConfigurationError(unknown_name("fp16 attention", name, ["auto", *IMPLEMENTATIONS]))


def fastest(buffers: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[str, dict[str, list[float]]]:
    """The fastest implementation's name, and the samples in seconds of all that ran, by name.

    ``buffers`` are sets of (q, k, v) of one shape, rotated over while measuring. An implementation that refuses the
    shape is left out.
    """
    times: dict[str, list[float]] = {}
    device = buffers[0][0].device
    for name in available(device):
        run = IMPLEMENTATIONS[name]
        try:
            times[name] = measure([lambda b=b, run=run: run(*b) for b in buffers], device)  # type: ignore[misc]
        except RuntimeError:  # PyTorch's word for "this backend does not take this shape"
            continue
    if not times:
        raise ConfigurationError(f"no fp16 attention runs on {device} for q {list(buffers[0][0].shape)}.")
    return min(times, key=lambda name: statistics.median(times[name])), times
