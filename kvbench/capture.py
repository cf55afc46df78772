"""Queries, keys and values as a model's own attention makes them, before RoPE.

How: a forward pre-hook on each attention module runs the module's own forward once more with identity rotary
embeddings (cos 1, sin 0) and an attention function that hands over what it is given. So the tensors are those that
feed RoPE, after any bias, fused projection and q/k norm, for every layout of RoPE, and no knowledge of the
architecture goes in. The true pass is left as it is: what reaches later layers is exactly what the model computes.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AttentionInterface

from kvbench.errors import ModelError
from kvbench.geometry import LayerGeometry, ModelGeometry

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CAPTURE_VERSION = 1  # part of what a stored calibration is keyed by: raise it when captured values change
_ATTENTION = "kvbench_capture"
_RECOGNIZABLE = "kvbench_recognizable_output"


class QKV(NamedTuple):
    """One layer: q ``[batch, tokens, q_heads, head_dim]``, k and v ``[batch, tokens, kv_heads, head_dim]``."""

    q: Tensor
    k: Tensor
    v: Tensor


class _Handover(Exception):
    """Carries q, k, v out of an attention module; the rest of its forward is not needed."""

    def __init__(self, qkv: QKV) -> None:
        self.qkv = qkv


def _hand_over(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> None:
    for option in ("s_aux", "softcap"):
        if options.get(option) is not None:
            raise ModelError(
                f"{type(module).__name__} passes '{option}' to attention (sinks, soft-capping), which cannot be served."
            )
    raise _Handover(QKV(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)))


def capture_qkv(model: "PreTrainedModel", input_ids: Tensor) -> list[QKV]:
    """q, k, v of every layer before RoPE, in the model's dtype and on its device, from one forward of ``input_ids``.

    ``input_ids`` is int64 ``[batch, tokens]``; positions start at 0 in each row. Raises ModelError for models whose
    attention does not go through transformers' attention interface.
    """
    captured: list[QKV] = []
    stream_qkv(model, input_ids, lambda layer, qkv: captured.append(qkv))
    return captured


def stream_qkv(model: "PreTrainedModel", input_ids: Tensor, consume: Callable[[int, QKV], None]) -> None:
    """Like :func:`capture_qkv`, but ``consume(layer, qkv)`` is called layer by layer, and nothing is kept."""
    with _hooks(model, lambda layer, module, args, kwargs: consume(layer, _qkv(module, args, kwargs, rotate=False))):
        _decode(model, input_ids)


def output_metrics(
    model: "PreTrainedModel", geometry: ModelGeometry, input_ids: Tensor
) -> list[NDArray[np.float64] | None]:
    """What errors of values do to each layer's output: ``[kv_heads, head_dim, head_dim]`` a layer.

    An error e of a KV head's value moves the output by about ``p^2 e^T M e`` in square: p its attention weight, M the
    sum of ``W^T W`` over the parts W of the output projection that read the head's group of query heads. The projection
    is the linear layer that is given what the attention function returns; None where there is no such layer.
    ``input_ids`` is ``[1, a few]``.
    """
    metrics: list[NDArray[np.float64] | None] = [None] * len(geometry.layers)

    def note(layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        shape, projection = geometry.layers[layer], _output_projection(module, args, kwargs)
        if projection is not None:
            parts = projection.weight.detach().float().reshape(-1, shape.kv_heads, shape.group_size, shape.head_dim)
            metrics[layer] = torch.einsum("okgd,okge->kde", parts, parts).double().cpu().numpy()

    AttentionInterface.register(_RECOGNIZABLE, _recognizable_output)
    with _hooks(model, note):
        _decode(model, input_ids)
    return metrics


def check_geometry(model: "PreTrainedModel", geometry: ModelGeometry, input_ids: Tensor) -> None:
    """Check ``geometry`` against what the model does to ``input_ids`` (``[1, a few]``).

    The head counts and dims are those of q, k and v, v is as wide as k, RoPE leaves ``unrotated_dims`` alone and
    preserves the energy of every block but not its coordinates' (up to the attention scaling of yarn and longrope).
    Raises ModelError naming the layer and what differs.
    """
    seen = 0

    def check(layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal seen
        seen += 1
        if layer < len(geometry.layers):
            before, after = (_qkv(module, args, kwargs, rotate=rotate) for rotate in (False, True))
            if difference := _difference(geometry.layers[layer], before, after):
                raise ModelError(f"layer {layer} of {type(model).__name__} is not what its config says: {difference}.")

    with _hooks(model, check):
        _decode(model, input_ids)
    if seen != len(geometry.layers):
        raise ModelError(
            f"{type(model).__name__} ran {seen} attention layers; its config describes {len(geometry.layers)}."
        )


def _difference(geometry: LayerGeometry, before: QKV, after: QKV) -> str | None:
    expected = {"q": geometry.q_heads, "k": geometry.kv_heads, "v": geometry.kv_heads}
    for name, heads in expected.items():
        shape = tuple(getattr(before, name).shape[2:])
        if shape != (heads, geometry.head_dim):
            return f"{name} has {shape[0]} heads of {shape[1]} dims, not {heads} of {geometry.head_dim}"
    rest = list(geometry.unrotated_dims)
    if not torch.equal(before.k[..., rest], after.k[..., rest]):
        return f"RoPE changes dims beyond its {geometry.rotary_dim}"
    if not geometry.rotary_dim:
        return None
    blocks = torch.tensor(geometry.blocks, device=before.k.device)
    first, second = (qkv.k.double()[..., blocks].square().sum(-1) for qkv in (before, after))
    scale = (second.sum() / first.sum()).item()  # yarn and longrope multiply rotated keys by a constant
    tolerance = 32 * torch.finfo(before.k.dtype).eps * max(scale, 1.0) * first.amax().item()
    if not torch.allclose(second, first * scale, rtol=0.0, atol=tolerance):
        layout = "interleaved" if geometry.interleaved else "half-split"
        return f"RoPE does not rotate within the {layout} pairs of {geometry.rotary_dim} dims, or a norm follows it"
    return None


def _decode(model: "PreTrainedModel", input_ids: Tensor) -> None:
    with torch.no_grad():
        model.get_decoder()(input_ids=input_ids.to(model.device), use_cache=False)  # no logits: the head is not needed


@contextmanager
def _hooks(
    model: "PreTrainedModel", call: Callable[[int, nn.Module, tuple[Any, ...], dict[str, Any]], None]
) -> Iterator[None]:
    """``call(layer, module, args, kwargs)`` before each attention module of ``model`` runs; hooks go on the way out."""
    modules = attention_modules(model)
    AttentionInterface.register(_ATTENTION, _hand_over)  # stateless; chosen by name, and only inside _qkv
    with ExitStack() as stack:
        for layer, module in enumerate(modules):

            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], layer: int = layer) -> None:
                call(layer, module, args, kwargs)

            stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield


def attention_modules(model: "PreTrainedModel") -> list[nn.Module]:
    """The decoder's attention modules in layer order: innermost modules that take rotary position embeddings."""
    taking = [(name, module) for name, module in model.get_decoder().named_modules() if _takes_positions(module)]
    found = [m for name, m in taking if not any(other.startswith(f"{name}.") for other, _ in taking if name != other)]
    if not found:
        raise ModelError(
            f"{type(model).__name__} passes no rotary embeddings to its attention, so it cannot be calibrated."
        )
    return found


def _takes_positions(module: nn.Module) -> bool:
    return "position_embeddings" in inspect.signature(type(module).forward).parameters


def _qkv(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], rotate: bool) -> QKV:
    """q, k, v that ``module`` would attend with, before RoPE or after it. Leaves the module as it was."""
    if not rotate:
        args, kwargs = _without_rotation(module, args, kwargs)
    try:
        with _attention(module, _ATTENTION), torch.no_grad():
            module.forward(*args, **kwargs)
    except _Handover as handover:
        return handover.qkv
    raise ModelError(
        f"{type(module).__name__} does not use transformers' attention interface, so it cannot be calibrated."
    )


def _recognizable(count: int, like: Tensor) -> Tensor:
    return (torch.arange(count, device=like.device) % 251).to(like.dtype)


def _recognizable_output(module: nn.Module, query: Tensor, *args: Any, **options: Any) -> tuple[Tensor, None]:
    states = query.transpose(1, 2)
    return _recognizable(states.numel(), states).reshape(states.shape), None


def _output_projection(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Linear | None:
    """The linear layer inside ``module`` that reads what its attention function returns, unchanged."""
    found: list[nn.Linear] = []

    def look(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        states = inputs[0].flatten()
        if isinstance(layer, nn.Linear) and torch.equal(states, _recognizable(states.numel(), states)):
            found.append(layer)

    with ExitStack() as stack:
        for layer in module.modules():
            if isinstance(layer, nn.Linear):
                stack.callback(layer.register_forward_pre_hook(look).remove)
        with _attention(module, _RECOGNIZABLE), torch.no_grad():
            module.forward(*args, **kwargs)
    return found[0] if len(found) == 1 and found[0].weight.is_floating_point() else None


@contextmanager
def _attention(module: nn.Module, implementation: str) -> Iterator[None]:
    """Within the context ``module`` attends by the function registered under that name."""
    config: Any = module.config
    before = config._attn_implementation
    config._attn_implementation = implementation
    try:
        yield
    finally:
        config._attn_implementation = before


def _without_rotation(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if "position_embeddings" in kwargs:
        return args, {**kwargs, "position_embeddings": _identity(module, kwargs["position_embeddings"])}
    index = list(inspect.signature(type(module).forward).parameters).index("position_embeddings") - 1  # self
    return (*args[:index], _identity(module, args[index]), *args[index + 1 :]), kwargs


def _identity(module: nn.Module, embeddings: Any) -> tuple[Tensor, ...]:
    """Rotary embeddings that rotate by nothing. At position 0, the first entry, cos is positive and sin is zero."""
    if not isinstance(embeddings, tuple) or not all(torch.is_tensor(part) for part in embeddings):
        raise ModelError(
            f"{type(module).__name__} takes rotary embeddings of an unknown kind, so it cannot be calibrated."
        )
    return tuple(
        torch.ones_like(part) if part.flatten()[0].item() != 0 else torch.zeros_like(part) for part in embeddings
    )
