"""Which device a run uses."""

from typing import TYPE_CHECKING

from kvbench.errors import ConfigurationError

if TYPE_CHECKING:
    import torch


def resolve_device(device: str) -> "torch.device":
    """``"auto"`` is the first CUDA device, or the CPU without one.

    Raises ConfigurationError for a name that is no device, and for a device that is not there.
    """
    import torch

    available = torch.cuda.device_count()
    if device == "auto":
        return torch.device("cuda" if available else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ConfigurationError(f"device={device} is not a device: choose auto, cpu, cuda or cuda:<n>.") from error
    if found.type not in ("cpu", "cuda"):
        raise ConfigurationError(f"device={device} is not supported: choose auto, cpu, cuda or cuda:<n>.")
    if found.type == "cuda" and (found.index or 0) >= available:
        raise ConfigurationError(f"device={device} is not here: this machine has {available} CUDA devices.")
    return found
