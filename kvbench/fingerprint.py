"""A model's identity: SHA-256 over its weights as loaded and the configuration that gives them meaning."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

# The same weights under another rope_theta are another model; where they were loaded from is not part of them.
NOT_IDENTITY = ("_name_or_path", "transformers_version", "architectures")


def tensor_digest(tensor: "torch.Tensor") -> bytes:
    """SHA-256 over a tensor's bytes, in row-major order."""
    import torch

    raw = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(raw.numpy().data).digest()


def fingerprint(model: "PreTrainedModel") -> str:
    """Hexadecimal SHA-256 over names, shapes, dtypes and bytes of all parameters and over the configuration.

    Tied weights count once. Hashing runs on a few threads: 135M float32 weights take a fraction of a second.
    """
    parameters = sorted(model.named_parameters(), key=lambda item: item[0])
    with ThreadPoolExecutor(max_workers=4) as pool:
        digests = list(pool.map(lambda item: tensor_digest(item[1]), parameters))
    configuration = {key: value for key, value in model.config.to_diff_dict().items() if key not in NOT_IDENTITY}
    total = hashlib.sha256(json.dumps(configuration, sort_keys=True, default=str).encode())
    for (name, parameter), digest in zip(parameters, digests, strict=True):
        total.update(f"{name} {tuple(parameter.shape)} {parameter.dtype} ".encode() + digest)
    return total.hexdigest()
