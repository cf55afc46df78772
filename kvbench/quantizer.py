"""The plugin contract for quantizers: a function from statistics to a format."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from kvbench.calibration import Calibration
from kvbench.geometry import ModelGeometry
from kvbench.kernels.formats import CacheFormat


@dataclass(frozen=True)
class Quantizer(ABC):
    """Base of every quantizer: a frozen dataclass whose fields are its options on the command line.

    A field's ``metadata={"help": ...}`` is its help text. Fields have plain types that Hydra can hold (int, float,
    str, bool, lists of them, Optional). Validate values in ``__post_init__`` and raise ``ConfigurationError`` saying
    what was given, what is allowed, and what to do.
    """

    name: ClassVar[str]
    needs_calibration: ClassVar[bool] = True

    @abstractmethod
    def fit(self, calibration: Calibration | None, geometry: ModelGeometry) -> CacheFormat:
        """The cache format for a model of this geometry.

        ``calibration`` is None only where ``needs_calibration`` is False. Deterministic: the same inputs give the
        same format in every process and on every platform. Raises ``ConfigurationError`` where the geometry cannot
        be served.
        """
