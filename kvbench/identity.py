"""What identifies a measurement: everything that determines its numbers, hashed. And what it ran on."""

import dataclasses
import hashlib
import importlib.metadata
import inspect
import json
import platform
import sys
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import kvbench
from kvbench.results import Environment
from kvbench.task import Task

if TYPE_CHECKING:
    from kvbench.quantizer import Quantizer

PACKAGES = ("torch", "transformers", "triton", "numpy", "hydra-core", "pluggy", "safetensors", "lm-eval", "flash-attn")
NUMERIC_PACKAGES = ("torch", "transformers", "triton", "numpy")  # those whose version can change a number


def digest(data: Any) -> str:
    """SHA-256 of plain JSON data, independent of the order of keys."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()


def package_versions(names: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Versions of those packages that are installed."""
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


@lru_cache(maxsize=64)
def source_digest(module_name: str) -> str:
    """SHA-256 over the code of the top-level package (or single module) that ``module_name`` belongs to.

    kvbench's rooms lie in several folders; all of them count as kvbench. Of a plugin's package every file counts, since
    tables and kernels beside its Python determine its numbers too.
    """
    top = module_name.split(".")[0]
    module = sys.modules[top]
    if top == "kvbench":
        from kvbench import conf, kernels, quantizers, reports, tasks

        places = [Path(room.__path__[0]) for room in (kvbench, conf, kernels, quantizers, reports, tasks)]
        files = sorted(file for place in places for file in place.rglob("*.py"))
    elif hasattr(module, "__path__"):
        found = (file for place in module.__path__ for file in Path(place).rglob("*"))
        files = sorted(file for file in found if file.is_file() and "__pycache__" not in file.parts)
    else:
        files = [Path(inspect.getfile(module))]
    total = hashlib.sha256()
    for file in files:
        total.update(f"{file.parent.name}/{file.name}\0".encode() + file.read_bytes())
    return total.hexdigest()


def implementation(instance: "Quantizer | Task") -> dict[str, Any]:
    """A quantizer's or task's name, options and code, and a task's input files, as hashed into what it measures."""
    identity = {
        "name": instance.name,
        "parameters": dataclasses.asdict(instance),
        "code": source_digest(type(instance).__module__),
    }
    inputs = instance.inputs() if isinstance(instance, Task) else {}
    return {**identity, "inputs": inputs} if inputs else identity


def code_version() -> dict[str, Any]:
    """kvbench's own code and the packages that numbers depend on."""
    return {"kvbench": source_digest("kvbench"), "packages": package_versions(NUMERIC_PACKAGES)}


def environment(device: torch.device) -> Environment:
    """What this process runs on."""
    cuda = device.type == "cuda"
    return Environment(
        kvbench=kvbench.__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        packages=package_versions(),
        device=torch.cuda.get_device_name(device) if cuda else f"CPU ({platform.machine()})",
        driver=_driver_version() if cuda else None,
        threads=torch.get_num_threads(),
    )


def _driver_version() -> str | None:
    """The NVIDIA driver's version, from its library; None where it does not say."""
    try:
        import pynvml  # type: ignore[import-not-found]

        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
    except Exception:
        return None
    return version.decode() if isinstance(version, bytes) else str(version)
