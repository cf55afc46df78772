"""How much memory a stretch of work needed at its peak, beyond what was in use when it began."""

from pathlib import Path

import torch

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # what Linux takes as "forget the peak of the resident size" (man 5 proc)


class PeakMemory:
    """Begins when it is made; :meth:`bytes` tells the peak so far.

    On a CUDA device: what PyTorch allocated on it. On a CPU: the process's resident size, as Linux keeps it; None on
    other systems, or where the peak may not be reset.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before: int | None = None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)
            return
        try:
            CLEAR_REFS.write_text(RESET_PEAK)
            self._before = _status("VmRSS")
        except OSError:
            return

    def bytes(self) -> int | None:
        """Bytes at the peak beyond those at the start; None where that cannot be told."""
        if self._before is None:
            return None
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._before
        return max(0, _status("VmHWM") - self._before)


def _status(name: str) -> int:
    """A size of this process in bytes. Raises OSError where the system does not tell it."""
    for line in STATUS.read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    raise OSError(f"{STATUS} has no {name}")
