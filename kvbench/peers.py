"""Peers: published implementations, measured as they are, in the cache that transformers makes of them.

Their bytes mean what their libraries say, so kvbench has no codec for them, and no kernel. What they are called, what
they read and what they allocate is observed from outside (:mod:`kvbench.peer_cache`), and every score says ``peer``.
"""

import importlib.metadata
import importlib.util
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from kvbench.calibration import Calibration
from kvbench.errors import ConfigurationError
from kvbench.geometry import ModelGeometry
from kvbench.kernels.formats import CacheFormat, TensorFormat
from kvbench.quantizer import Quantizer

if TYPE_CHECKING:
    import torch
    from transformers import Cache, PreTrainedModel

    from kvbench.kernels.codec import Codec

SCALE_BITS = 32  # a scale and a zero point in 16 bits each, by count; what is allocated follows the model's dtype


@dataclass(frozen=True)
class PeerFormat(TensorFormat):
    """What another library stores: its options, and its version, which numbers depend on. There is no codec."""

    kv_heads: int
    head_dim: int
    library: str
    version: str
    bits: int
    group: int
    axis: int
    residual: int
    kind: ClassVar[str] = "peer"

    @property
    def code_bits(self) -> float:
        return float(self.bits)

    @property
    def bits_per_token(self) -> float:
        return self.kv_heads * self.head_dim * (self.bits + SCALE_BITS / self.group)

    def codec(self, device: "torch.device | str" = "cpu") -> "Codec":
        raise TypeError(f"what {self.library} stores has no codec of kvbench's")


@dataclass(frozen=True)
class PeerQuantizer(Quantizer):
    """Base of the peers: a quantizer that brings its own transformers cache."""

    needs_calibration: ClassVar[bool] = False
    module: ClassVar[str]
    """What is imported where the library is installed."""
    library: ClassVar[str]
    """Its name on PyPI."""

    def __post_init__(self) -> None:
        self.check()
        if importlib.util.find_spec(self.module.partition(".")[0]) is None or not importlib.util.find_spec(self.module):
            raise ConfigurationError(
                f"quantizer={self.name} needs {self.library}, which is not installed: pip install 'kvbench[peers]'."
            )

    def check(self) -> None:
        """Complete the options; raise ConfigurationError for those out of range."""

    @property
    def version(self) -> str:
        return importlib.metadata.version(self.library)

    @abstractmethod
    def new_cache(self, model: "PreTrainedModel") -> "Cache":
        """An empty cache of the library's for ``model``. Raises ConfigurationError where it cannot serve the model."""


@dataclass(frozen=True)
class QuantizedCachePeer(PeerQuantizer):
    """Base of the backends of transformers' ``QuantizedCache``.

    Keys and values have one width. The first chunk of a text, and every chunk on itself, is attended to in full
    precision; tokens are coded, together with all that are coded already, when ``residual`` of them wait.
    """

    backend: ClassVar[str]
    widths: ClassVar[tuple[int, ...]]
    axes: ClassVar[tuple[int, ...]]

    k_bits: int = field(default=4, metadata={"help": "bits an element of keys and of values"})
    v_bits: int = field(default=0, metadata={"help": "0 or the same as k_bits: the library has one width for both"})
    group: int = field(default=64, metadata={"help": "elements that share a scale"})
    residual: int = field(default=128, metadata={"help": "tokens that wait in full precision"})
    axis: int = field(default=0, metadata={"help": "the library's axis_key and axis_value"})

    def check(self) -> None:
        if self.k_bits not in self.widths:
            allowed = ", ".join(map(str, self.widths))
            raise ConfigurationError(f"quantizer.k_bits={self.k_bits} is not allowed: {self.library} has {allowed}.")
        if self.v_bits == 0:
            object.__setattr__(self, "v_bits", self.k_bits)
        if self.v_bits != self.k_bits:
            raise ConfigurationError(
                f"quantizer.v_bits={self.v_bits} is not allowed beside k_bits={self.k_bits}: transformers' "
                "QuantizedCache has one width for keys and values. Leave v_bits out."
            )
        if self.axis not in self.axes:
            raise ConfigurationError(
                f"quantizer.axis={self.axis} is not allowed: choose {' or '.join(map(str, self.axes))}."
            )
        for option in ("group", "residual"):
            if getattr(self, option) < 1:
                raise ConfigurationError(f"quantizer.{option}={getattr(self, option)} is not allowed: at least 1.")

    def fit(self, calibration: Calibration | None, geometry: ModelGeometry) -> CacheFormat:
        for index, layer in enumerate(geometry.layers):
            if layer.kv_heads * layer.head_dim % self.group:
                raise ConfigurationError(
                    f"quantizer.group={self.group} does not divide the {layer.kv_heads * layer.head_dim} numbers of a "
                    f"token in layer {index}. Choose a divisor."
                )
        options: dict[str, Any] = {
            "library": self.library,
            "version": self.version,
            "bits": int(self.k_bits),
            "group": self.group,
            "axis": self.axis,
            "residual": self.residual,
        }
        layers = tuple(PeerFormat(layer.kv_heads, layer.head_dim, **options) for layer in geometry.layers)
        return CacheFormat(key=layers, value=layers)

    def new_cache(self, model: "PreTrainedModel") -> "Cache":
        from transformers import QuantizedCache

        try:
            return QuantizedCache(
                self.backend,
                model.config,
                nbits=int(self.k_bits),
                axis_key=self.axis,
                axis_value=self.axis,
                q_group_size=self.group,
                residual_length=self.residual,
            )
        except (ImportError, ValueError) as error:
            raise ConfigurationError(f"quantizer={self.name}: transformers refuses its cache: {error}") from error


@dataclass(frozen=True)
class HQQ(QuantizedCachePeer):
    """Peer: half-quadratic quantization by the library hqq, in transformers' QuantizedCache (``kvbench[peers]``)."""

    name: ClassVar[str] = "hqq"
    module: ClassVar[str] = "hqq"
    library: ClassVar[str] = "hqq"
    backend: ClassVar[str] = "hqq"
    widths: ClassVar[tuple[int, ...]] = (1, 2, 3, 4, 8)
    axes: ClassVar[tuple[int, ...]] = (0, 1)

    axis: int = field(default=1, metadata={"help": "the library's axis_key and axis_value: 0 or 1"})


@dataclass(frozen=True)
class Quanto(QuantizedCachePeer):
    """Peer: optimum-quanto in transformers' QuantizedCache (``kvbench[peers]``); it compiles C++ when first used."""

    name: ClassVar[str] = "quanto"
    module: ClassVar[str] = "optimum.quanto"
    library: ClassVar[str] = "optimum-quanto"
    backend: ClassVar[str] = "quanto"
    widths: ClassVar[tuple[int, ...]] = (2, 4)
    axes: ClassVar[tuple[int, ...]] = (0, -1)

    axis: int = field(default=0, metadata={"help": "the library's axis_key and axis_value: 0 or -1"})
