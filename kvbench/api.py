"""What plugins import. Names here are stable within a major version; everything else may change.

A plugin says which version it was built for by an attribute beside its hooks, ``kvbench_api_version = "1"``. Another
major version, or a newer minor one than this, is refused when the plugin is loaded.
"""

from typing import TYPE_CHECKING, Any

from kvbench.calibration import Calibration, LayerCalibration, Rotary, TensorStatistics
from kvbench.errors import ConfigurationError, KvbenchError
from kvbench.geometry import LayerGeometry, ModelGeometry
from kvbench.hookspecs import hookimpl
from kvbench.kernels.comparator_formats import (
    Affine,
    BlockFloat4,
    ChannelAffine,
    Float8,
    NonUniform,
    TokenBlocks,
    TurboQuantProd,
)
from kvbench.kernels.formats import (
    CacheFormat,
    Centre,
    Codebook,
    Dense,
    Fp16Norm,
    Group,
    HaarRotation,
    HeadFormat,
    LogNorm,
    RotatedCodebook,
    Segment,
    TensorFormat,
)
from kvbench.quantizer import Quantizer
from kvbench.reports.section import ReportSection
from kvbench.task import Task, TaskResult

if TYPE_CHECKING:
    from kvbench.configuration import ModelConfig
    from kvbench.kernels.bitpack import RowLayout
    from kvbench.kernels.codec import Codec, Plane
    from kvbench.results import Result
    from kvbench.session import Session

API_VERSION = "1.0"

__all__ = [
    "API_VERSION",
    "Affine",
    "BlockFloat4",
    "CacheFormat",
    "Calibration",
    "Centre",
    "ChannelAffine",
    "Codebook",
    "Codec",
    "ConfigurationError",
    "Dense",
    "Float8",
    "Fp16Norm",
    "Group",
    "HaarRotation",
    "HeadFormat",
    "KvbenchError",
    "LayerCalibration",
    "LayerGeometry",
    "LogNorm",
    "ModelConfig",
    "ModelGeometry",
    "NonUniform",
    "Plane",
    "Quantizer",
    "ReportSection",
    "Result",
    "Rotary",
    "RotatedCodebook",
    "RowLayout",
    "Segment",
    "Session",
    "Task",
    "TaskResult",
    "TensorFormat",
    "TensorStatistics",
    "TokenBlocks",
    "TurboQuantProd",
    "hookimpl",
]

# These import torch, OmegaConf or pydantic, and plugins are loaded before --help is answered: fetched when asked for.
_LATE = {
    "Codec": "kvbench.kernels.codec",
    "ModelConfig": "kvbench.configuration",
    "Plane": "kvbench.kernels.codec",
    "Result": "kvbench.results",
    "RowLayout": "kvbench.kernels.bitpack",
    "Session": "kvbench.session",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATE[name]), name)
