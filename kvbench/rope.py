"""The model's own rotary frequencies, and turning by them with angles reduced in double precision."""

import torch
from torch import Tensor, nn

from kvbench.calibration import Rotary
from kvbench.errors import ModelError
from kvbench.geometry import LayerGeometry


def rotary_module(model: nn.Module) -> nn.Module:
    """The module that computes the model's cosines and sines. Raises ModelError where there is none."""
    for name, module in model.named_modules():
        if name.rsplit(".", 1)[-1].startswith("rotary_emb"):
            return module
    raise ModelError(f"{type(model).__name__} has no rotary embedding module; kvbench serves models with RoPE.")


def layer_frequencies(model: nn.Module, layer: int, geometry: LayerGeometry) -> tuple[Tensor, float]:
    """Inverse frequencies (float64 ``[rotary_dim / 2]``, radians a position) and the attention scaling of one layer.

    ``geometry`` is the layer's own: a layer without RoPE has no frequencies, whatever the rest of the model has.

    Read from the model's own rotary module, so RoPE scaling (llama3, yarn, linear, longrope's short factors) is the
    model's own. Models with several layer types (Gemma 3) keep one set a type.
    """
    module = rotary_module(model)
    types = getattr(getattr(module, "config", None), "layer_types", None)
    prefix = f"{types[layer]}_" if types and hasattr(module, f"{types[layer]}_inv_freq") else ""
    frequencies = getattr(module, f"{prefix}inv_freq")
    scaling = getattr(module, f"{prefix}attention_scaling", 1.0)
    return frequencies.detach().double()[: geometry.rotary_dim // 2], float(scaling)


def layer_rotary(model: nn.Module, layer: int, geometry: LayerGeometry) -> Rotary:
    """One layer's RoPE as plain data, for calibrations."""
    frequencies, scaling = layer_frequencies(model, layer, geometry)
    module = rotary_module(model)
    kind = getattr(module, "rope_type", "default")
    if isinstance(kind, dict):  # one a layer type
        kind = kind.get(getattr(module.config, "layer_types", [])[layer], "default")
    return Rotary(tuple(frequencies.tolist()), scaling, str(kind))


def turn(x: Tensor, angles: Tensor, geometry: LayerGeometry) -> Tensor:
    """Rotate every RoPE block of ``x [..., head_dim]`` by ``angles [..., rotary_dim / 2]`` (broadcast), as RoPE does.

    ``out_i0 = x_i0 cos - x_i1 sin``, ``out_i1 = x_i1 cos + x_i0 sin``; dims outside the rotary part stay.
    """
    blocks = torch.tensor(geometry.blocks, dtype=torch.long, device=x.device).reshape(-1, 2)
    first, second = x[..., blocks[:, 0]], x[..., blocks[:, 1]]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    out = x.clone()
    out[..., blocks[:, 0]] = first * cos - second * sin
    out[..., blocks[:, 1]] = second * cos + first * sin
    return out
