"""Calibrations made of random moments, for geometries no test would want to load a model for."""

import numpy as np

from kvbench.calibration import Calibration, LayerCalibration, TensorStatistics
from kvbench.geometry import LayerGeometry, ModelGeometry


def geometry(
    head_dim: int,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    kv_heads: int = 2,
    group: int = 3,
    layers: int = 2,
    dtype: str = "float32",
) -> ModelGeometry:
    """``layers`` equal layers; all dims rotate unless ``rotary_dim`` says otherwise."""
    rotary = head_dim if rotary_dim is None else rotary_dim
    return ModelGeometry((LayerGeometry(kv_heads * group, kv_heads, head_dim, rotary, interleaved),) * layers, dtype)


def calibration(of: ModelGeometry, seed: int = 0, magnitude: float = 1.0, spread: float = 1.5) -> Calibration:
    """Statistics of random tensors whose dims' energies differ by factors of ``exp(spread * normal)``."""
    generator = np.random.default_rng(seed)
    layers = tuple(
        LayerCalibration(*(statistics(generator, shape, magnitude, spread) for _ in "qkv")) for shape in of.layers
    )
    return Calibration(layers, {"model": "synthetic", "seed": seed})


def statistics(
    generator: np.random.Generator, shape: LayerGeometry, magnitude: float, spread: float
) -> TensorStatistics:
    scale = magnitude * np.exp(spread * generator.standard_normal((shape.kv_heads, shape.head_dim)))
    x = generator.standard_normal((16, shape.kv_heads, shape.head_dim)) * scale
    return TensorStatistics(
        mean=x.mean(0),
        second_moment=np.einsum("thd,the->hde", x, x) / len(x),
        minimum=x.min(0),
        maximum=x.max(0),
        sample=x.astype(np.float32),
    )
