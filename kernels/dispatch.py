"""Which implementation serves a layer's decode attention: Triton or the torch reference, and why."""

import importlib.util
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

from kvbench.errors import ConfigurationError
from kvbench.kernels.bit_planes import MAX_DIM, MAX_GROUPS, BitPlaneLayout
from kvbench.kernels.formats import RotatedCodebook, TensorFormat
from kvbench.kernels.page_attention import MAX_GROUP
from kvbench.kernels.tiles import TileLayout, UnsupportedLayout

Kind = Literal["tiles", "bit_planes", "reference"]


@dataclass(frozen=True)
class Choice:
    """What serves one layer: ``tiles`` (fastest), ``bit_planes`` (any widths) or ``reference`` (torch).

    ``backend`` is what results report, ``"triton"`` or ``"reference"``; ``why`` is one clause for a person.
    ``layout`` is the layout of the pages that the first two have.
    """

    kind: Kind
    why: str
    layout: TileLayout | BitPlaneLayout | None = None

    @property
    def backend(self) -> str:
        return "reference" if self.kind == "reference" else "triton"


def choose(
    key: TensorFormat, value: TensorFormat, device: torch.device | str, group: int, backend: str = "auto"
) -> Choice:
    """The implementation for a layer with ``group`` query heads a KV head on ``device``.

    ``backend`` is ``"auto"`` (Triton on a CUDA device where it serves the format, else the reference), or forces
    ``"triton"`` or ``"reference"``. Raises ConfigurationError where what is forced cannot serve, with the reason.
    """
    if backend not in ("auto", "triton", "reference"):
        raise ConfigurationError(f"backend={backend} is not known: choose auto, triton or reference.")
    if backend == "reference":
        return Choice("reference", "asked for")
    obstacle = _obstacle(key, value, torch.device(device), group, forced=backend == "triton")
    if obstacle is None:
        assert isinstance(key, RotatedCodebook)
        assert isinstance(value, RotatedCodebook)
        choice = _triton(key, value)
        if choice.kind != "reference":
            return choice
        obstacle = choice.why
    if backend == "triton":
        raise ConfigurationError(f"backend=triton cannot serve this layer: {obstacle}. Use backend=auto.")
    return Choice("reference", obstacle)


def _obstacle(key: TensorFormat, value: TensorFormat, device: torch.device, group: int, forced: bool) -> str | None:
    """Why no Triton kernel can serve a layer, or None where one can. Forced on a CPU, the interpreter may do."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if device.type != "cuda" and not (forced and interpreting()):
        return f"no Triton kernel runs on {device.type}"
    for name, format in (("key", key), ("value", value)):
        if not isinstance(format, RotatedCodebook):
            return f"the {name} format '{format.kind}' has no Triton kernel"
        norms = max(len(head.groups) for head in format.heads)
        if norms > MAX_GROUPS:
            return f"the {name} format has {norms} norms a head, past {MAX_GROUPS}"
    if key.head_dim > MAX_DIM:
        return f"head_dim {key.head_dim} is past {MAX_DIM}"
    if group > MAX_GROUP:
        return f"{group} query heads a KV head are past {MAX_GROUP}"
    return None


def interpreting() -> bool:
    """Whether Triton kernels run in its interpreter (``TRITON_INTERPRET=1``), which is what tests on a CPU do."""
    import triton

    return bool(triton.knobs.runtime.interpret)


@lru_cache(maxsize=256)  # caches come and go; a layer's layout stays the same object
def _triton(key: RotatedCodebook, value: RotatedCodebook) -> Choice:
    try:
        return Choice("tiles", "fits the tile layout", TileLayout(key, value))
    except UnsupportedLayout as reason:
        if key.centre or value.centre:
            return Choice("reference", f"the general kernel adds no centre, and tiles do not serve: {reason}")
        return Choice("bit_planes", f"the general kernel: {reason}", BitPlaneLayout(key, value))
