"""Compression from allocated bytes: the promised ratios, and nothing left out of the count."""

import pytest
import torch

from kvbench.cache_options import CacheOptions
from kvbench.calibrate import calibrate
from kvbench.compression import measure_compression
from kvbench.configuration import CacheConfig, ModelConfig
from kvbench.geometry import ModelGeometry
from kvbench.models import load_model
from kvbench.packed_cache import PackedCache
from kvbench.plane_storage import PlaneStorage
from kvbench.quantizer import Quantizer
from kvbench.quantizers.blockgtq import BlockGTQ
from kvbench.quantizers.fp16 import Fp16
from kvbench.quantizers.tqmse import TQMSE
from kvbench.session import Session

from ..quantizers.synthetic_calibration import calibration, geometry
from ..tasks.sessions import BASE, corpus

TOKENS = 100


def filled(quantizer: Quantizer, shape: ModelGeometry, tokens: int = TOKENS, **options: int) -> PackedCache:
    """A cache of two sequences of random tokens, appended in two steps."""
    fitted = quantizer.fit(calibration(shape), shape)
    cache = PackedCache(fitted, shape, CacheOptions(**options))
    cache.expect(tokens)
    heads, dim = shape.layers[0].kv_heads, shape.layers[0].head_dim
    for layer in range(len(shape.layers)):
        for count in (tokens - 7, 7):
            cache.layers[layer].update(torch.randn(2, heads, count, dim), torch.randn(2, heads, count, dim))
    return cache


@pytest.mark.parametrize("quantizer", [TQMSE(), BlockGTQ(), Fp16()], ids=lambda quantizer: quantizer.name)
def test_bytes_are_those_of_the_tensors_that_hold_the_cache(quantizer: Quantizer) -> None:
    cache = filled(quantizer, geometry(64))
    size = measure_compression(cache)
    assert size is not None
    storages = [layer.storage for layer in cache.packed_layers if isinstance(layer.storage, PlaneStorage)]
    planes = [plane for storage in storages for part in (storage.keys, storage.values) for plane in part.planes]
    assert size.bytes_allocated == sum(plane.numel() * plane.element_size() for plane in planes)
    assert size.tokens == 2 * TOKENS
    assert size.bytes_fp16 == 2 * (2 * 2 * TOKENS) * 2 * 2 * 64
    assert size.ratio == size.bytes_fp16 / size.bytes_allocated


def test_effective_bits_are_code_bits_plus_one_norm_a_head() -> None:
    size = measure_compression(filled(TQMSE(k_bits=3, v_bits=4), geometry(64)))
    assert size is not None
    assert (size.code_bits_k, size.code_bits_v) == (3, 4)
    assert (size.effective_bits_k, size.effective_bits_v) == (3 + 16 / 64, 4 + 16 / 64)
    assert size.bytes_analytical == size.bytes_allocated


def test_half_precision_does_not_compress() -> None:
    size = measure_compression(filled(Fp16(), geometry(64)))
    assert size is not None
    assert size.ratio == 1.0
    assert size.effective_bits_k == 16


def test_fractional_bits_are_counted_as_they_are_stored() -> None:
    size = measure_compression(filled(BlockGTQ(k_bits=2.5), geometry(64)))
    assert size is not None
    assert size.code_bits_k == 2.5
    assert size.bytes_allocated >= size.bytes_analytical


def test_padding_of_rows_is_allocated_but_not_analytical() -> None:
    """10 dims at 3 bits are 30 bits, stored in 4 bytes."""
    size = measure_compression(filled(TQMSE(), geometry(10)))
    assert size is not None
    rows = 2 * TOKENS * 2 * 2 * 2
    assert size.bytes_allocated - size.bytes_analytical == rows * 2 / 8


def test_spare_capacity_counts() -> None:
    full, spare = (measure_compression(filled(TQMSE(), geometry(64), capacity=c)) for c in (TOKENS, 2 * TOKENS))
    assert full is not None and spare is not None
    assert spare.bytes_allocated == 2 * full.bytes_allocated
    assert spare.bytes_analytical == full.bytes_analytical


def test_sinks_count_beside_the_packed_tokens() -> None:
    without, with_sinks = (measure_compression(filled(TQMSE(), geometry(64), n_sink=n)) for n in (0, 4))
    assert without is not None and with_sinks is not None
    float32_copies = 2 * 2 * 4 * 2 * 64 * 2 * 4  # layers, sequences, sinks, heads, dims, K and V, bytes
    assert with_sinks.bytes_allocated - without.bytes_allocated == float32_copies


def test_empty_cache_has_no_compression() -> None:
    shape = geometry(64)
    assert measure_compression(PackedCache(TQMSE().fit(calibration(shape), shape), shape)) is None


@pytest.mark.parametrize(("head_dim", "promised"), [(128, 4.7), (64, 4.3)])
def test_block_gtq_at_three_bits_keeps_the_promised_ratio_on_a_model(head_dim: int, promised: float) -> None:
    """A random-weight model through its own forward and calibration, all norms counted."""
    architecture = {**BASE, "model_type": "qwen3", "head_dim": head_dim}
    loaded = load_model(ModelConfig(name="random", random=True, architecture=architecture), "cpu")
    statistics = calibrate(loaded, corpus(), 128, 64)
    quantizer = BlockGTQ(k_bits=3, v_bits=3)
    work = Session(loaded, quantizer, quantizer.fit(statistics, loaded.geometry), corpus(), CacheConfig())
    work.token_losses(work.windows(200)[0])
    size = work.compression
    assert size is not None
    assert (size.code_bits_k, size.code_bits_v, size.tokens) == (3, 3, 200)
    assert size.ratio >= promised
