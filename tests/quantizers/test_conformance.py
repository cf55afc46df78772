"""Every built-in quantizer keeps the contract that plugins are held to."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is first imported

from kvbench.quantizers.blockgtq import BlockGTQ
from kvbench.quantizers.fp16 import Fp16
from kvbench.quantizers.tqmse import TQMSE
from kvbench.testing import quantizer_conformance

test_fp16 = quantizer_conformance(Fp16)
test_tqmse = quantizer_conformance(TQMSE)
test_blockgtq = quantizer_conformance(BlockGTQ)
