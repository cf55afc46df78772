"""FIELD-CASES 19: reported memory is what was allocated, as the operating system sees it."""

import subprocess
import sys

import pytest

MEASURE = """
import ctypes, gc, os
import numpy as np
import torch
from kvbench.calibration import Calibration, LayerCalibration, TensorStatistics
from kvbench.compression import measure_compression
from kvbench.geometry import LayerGeometry, ModelGeometry
from kvbench.packed_cache import PackedCache
from kvbench.quantizers.blockgtq import BlockGTQ

TOKENS, CHUNK = 32768, 1024
torch.set_num_threads(1)
geometry = ModelGeometry((LayerGeometry(9, 3, 64, 64),) * 30)  # SmolLM2-135M
energy = np.random.default_rng(0).gamma(1.0, size=(3, 64))
one = TensorStatistics(np.zeros((3, 64)), np.stack([np.diag(e) for e in energy]), -4 * energy, 4 * energy,
                       np.zeros((1, 3, 64), np.float32))
format = BlockGTQ().fit(Calibration((LayerCalibration(one, one, one),) * 30, {}), geometry)

def resident():
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

states = torch.randn(1, 3, CHUNK, 64)
warm = PackedCache(format, geometry)
warm.layers[0].update(states, states)
warm.layers[0].store()
del warm
before = resident()
cache = PackedCache(format, geometry)
cache.expect(TOKENS)
for layer in cache.layers:
    for _ in range(0, TOKENS, CHUNK):
        layer.update(states, states)
compression = measure_compression(cache)
print(resident() - before, compression.bytes_allocated, compression.bytes_fp16, compression.ratio)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the resident size from Linux's /proc")
def test_resident_memory_grows_by_the_bytes_reported() -> None:
    """32K tokens of SmolLM2's geometry: growth within 5 percent of what the result will say, and the ratio from it."""
    output = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True).stdout
    grown, allocated, fp16, ratio = (float(word) for word in output.split())
    assert grown == pytest.approx(allocated, rel=0.05)
    assert ratio == pytest.approx(fp16 / allocated)
    assert fp16 == 32768 * 30 * 2 * 3 * 64 * 2
