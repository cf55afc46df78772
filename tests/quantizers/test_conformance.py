"""Every built-in quantizer keeps the contract that plugins are held to."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is first imported

from kvbench.peers import PeerQuantizer
from kvbench.quantizers.integer import Integer
from kvbench.quantizers.kivi import Kivi
from kvbench.quantizers.kvquant import KVQuant
from kvbench.quantizers.quarot import QuaRot
from kvbench.registry import load_registry
from kvbench.testing import quantizer_conformance

BUILTINS = {
    name: entry.value()
    for name, entry in load_registry({}).quantizers.items()
    if entry.distribution == "kvbench" and not issubclass(entry.value, PeerQuantizer)  # these have no format of kvbench
}
OPTIONS = {
    "kivi_short": Kivi(residual=32, group=16, scale_only=True),
    "int2": Integer(k_bits=2, v_bits=2),
    "kvquant2": KVQuant(k_bits=2, v_bits=2, outliers=0.0),
    "quarot2": QuaRot(k_bits=2, v_bits=2, group=48, clip=1.0),
}

for name, quantizer in {**BUILTINS, **OPTIONS}.items():
    globals()[f"test_{name}"] = quantizer_conformance(quantizer)
