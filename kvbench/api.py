"""What plugins import. Names here are stable within a major version; everything else may change."""

from kvbench.calibration import Calibration, LayerCalibration, TensorStatistics
from kvbench.errors import ConfigurationError, KvbenchError
from kvbench.geometry import LayerGeometry, ModelGeometry
from kvbench.hookspecs import hookimpl
from kvbench.kernels.formats import (
    CacheFormat,
    Codebook,
    Dense,
    Fp16Norm,
    Group,
    HaarRotation,
    HeadFormat,
    RotatedCodebook,
    Segment,
    TensorFormat,
)
from kvbench.quantizer import Quantizer
from kvbench.task import Task, TaskResult

__all__ = [
    "CacheFormat",
    "Calibration",
    "Codebook",
    "ConfigurationError",
    "Dense",
    "Fp16Norm",
    "Group",
    "HaarRotation",
    "HeadFormat",
    "KvbenchError",
    "LayerCalibration",
    "LayerGeometry",
    "ModelGeometry",
    "Quantizer",
    "RotatedCodebook",
    "Segment",
    "Task",
    "TaskResult",
    "TensorFormat",
    "TensorStatistics",
    "hookimpl",
]
