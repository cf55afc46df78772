"""What a quantizer stores and what reads it, found out by fitting it to a small model's shape."""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbench.peers import PeerFormat

if TYPE_CHECKING:
    from kvbench.quantizer import Quantizer

ENABLED = "enabled"
UNKNOWN = "?"
LONGEST_STATUS = 100


@dataclass(frozen=True)
class Served:
    """Formats of keys and values, and the backends that can read them: on any device, and on a GPU.

    ``status`` is ``enabled``, or why the quantizer cannot be used with its default options.
    """

    formats: str = UNKNOWN
    backends: str = UNKNOWN
    status: str = ENABLED


def probe_quantizer(cls: "type[Quantizer]") -> Served:
    """Fit ``cls`` with its default options to one layer of head_dim 128. Whatever it raises becomes its status."""
    from kvbench.conformance import synthetic_calibration
    from kvbench.kernels.dispatch import choose
    from kvbench.testing import model_geometry

    needed = [field.name for field in dataclasses.fields(cls) if _has_no_default(field)]
    if needed:
        return Served(status=f"needs quantizer.{needed[0]}")
    shape = model_geometry(128, kv_heads=1, group_size=4, layers=1)
    try:
        quantizer = cls()
        format = quantizer.fit(synthetic_calibration(shape) if quantizer.needs_calibration else None, shape)
        key, value = format.key[0], format.value[0]
        formats = " + ".join(dict.fromkeys((key.kind, value.kind)))
        if isinstance(key, PeerFormat):
            return Served(formats, f"{key.library} {key.version}")
        chosen = choose(key, value, "cuda", shape.layers[0].group_size)
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        return Served(status=reason if len(reason) <= LONGEST_STATUS else f"{reason[: LONGEST_STATUS - 1]}…")
    return Served(formats, "reference" if chosen.kind == "reference" else f"reference, triton ({chosen.kind})")


def _has_no_default(field: "dataclasses.Field[object]") -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
