"""The conformance kit: one line in a plugin's tests checks everything that a quantizer owes its users.

    from kvbench.testing import quantizer_conformance

    test_conformance = quantizer_conformance(MyQuant)

pytest then runs ``test_conformance[round_trip-head_dim 64]`` and its like: formats, planes, round trips, zero, huge and
NaN input, declared bytes, batches, appending, other processes, kernels, a whole tiny model. Needs pytest.
"""

from collections.abc import Callable, Sequence

from kvbench.conformance import CHECKS, NonConformance, NotApplicable, Specimen, synthetic_calibration
from kvbench.conformance_runs import RUNS
from kvbench.errors import KvbenchError
from kvbench.geometry import LayerGeometry, ModelGeometry
from kvbench.quantizer import Quantizer

__all__ = ["NonConformance", "Specimen", "model_geometry", "quantizer_conformance", "synthetic_calibration"]

HEAD_DIMS = (64, 80, 96, 128, 256)  # those of the models that kvbench ships configurations for, and of Gemma
KERNEL_HEAD_DIM = 128


def model_geometry(
    head_dim: int,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    kv_heads: int = 2,
    group_size: int = 3,
    layers: int = 2,
    dtype: str = "float32",
) -> ModelGeometry:
    """A small model's shape: ``layers`` equal layers; all dims rotate unless ``rotary_dim`` says otherwise."""
    rotary = head_dim if rotary_dim is None else rotary_dim
    layer = LayerGeometry(kv_heads * group_size, kv_heads, head_dim, rotary, interleaved)
    return ModelGeometry((layer,) * layers, dtype)


def quantizer_conformance(
    quantizer: type[Quantizer] | Quantizer, head_dims: Sequence[int] = HEAD_DIMS
) -> Callable[..., None]:
    """A parametrized pytest function: every check on every geometry that the quantizer claims.

    ``quantizer`` is a class, taken with its default options, or an instance. ``head_dims`` are those it claims to
    serve; any other of the usual ones must either work or be refused by ``fit`` with ConfigurationError. The first one
    is checked with partial rotary, interleaved RoPE, no RoPE, one KV head and a bfloat16 model as well.
    """
    import pytest

    if not head_dims:
        raise ValueError("name at least one head_dim that the quantizer serves")
    instance = quantizer() if isinstance(quantizer, type) else quantizer
    first = head_dims[0]
    geometries = {f"head_dim {dim}": model_geometry(dim) for dim in head_dims}
    geometries |= {
        "partial rotary": model_geometry(first, rotary_dim=first // 2),
        "interleaved": model_geometry(first, interleaved=True),
        "no RoPE": model_geometry(first, rotary_dim=0),
        "one KV head": model_geometry(first, kv_heads=1, group_size=7),
        "bfloat16 model": model_geometry(first, dtype="bfloat16"),
    }
    specimens = {name: Specimen.of(instance, geometry) for name, geometry in geometries.items()}
    cases = [
        pytest.param(check, specimen, id=f"{check_name}-{name}")
        for name, specimen in specimens.items()
        for check_name, check in CHECKS.items()
    ]
    kernel_dim = KERNEL_HEAD_DIM if KERNEL_HEAD_DIM in head_dims else first
    cases += [
        pytest.param(check, specimens[f"head_dim {kernel_dim if name == 'kernel' else first}"], id=name)
        for name, check in RUNS.items()
    ]
    cases += [
        pytest.param(check_refusal, Specimen.of(instance, model_geometry(dim)), id=f"refusal-head_dim {dim}")
        for dim in HEAD_DIMS
        if dim not in head_dims
    ]

    @pytest.mark.parametrize(("check", "specimen"), cases)
    def conformance(check: Callable[[Specimen], None], specimen: Specimen) -> None:
        try:
            check(specimen)
        except NotApplicable as reason:
            pytest.skip(str(reason))

    return conformance


def check_refusal(specimen: Specimen) -> None:
    """A head_dim that is not claimed works all the same, or is refused as the user's error."""
    try:
        specimen.fit()
    except KvbenchError:
        return
    except Exception as error:
        raise NonConformance(
            f"{specimen.quantizer.name}: fit() fails on head_dim {specimen.geometry.head_dim} with "
            f"{type(error).__name__}; raise ConfigurationError saying which head_dims are served"
        ) from error
    CHECKS["round_trip"](specimen)
