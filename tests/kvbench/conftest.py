"""Real plugin distributions in temporary folders, and the command as a user calls it."""

import itertools
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from .small_run import command_environment

PREAMBLE = """\
from dataclasses import dataclass
from typing import ClassVar
from kvbench.api import CacheFormat, ConfigurationError, Dense, Quantizer, Task, hookimpl
from kvbench.configuration import ModelConfig


class DenseFit:
    def fit(self, calibration, geometry):
        layers = tuple(Dense(layer.kv_heads, layer.head_dim, "float16") for layer in geometry.layers)
        return CacheFormat(layers, layers)

"""

_serial = itertools.count()


@pytest.fixture
def distribution(tmp_path: Path) -> Callable[..., Path]:
    """Writes a distribution with one plugin module, as an installer would lay it out; returns its folder."""

    def write(source: str, name: str = "myplugin", version: str = "1.2", provider: str = "") -> Path:
        site = tmp_path / "site"
        provider = provider or f"{name}-dist"
        module = f"plugin_module_{next(_serial)}"  # imported modules outlive a test
        info = site / f"{provider.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {provider}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[kvbench]\n{name} = {module}\n")
        (site / f"{module}.py").write_text(PREAMBLE + textwrap.dedent(source))
        return site

    return write


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs ``kvbench`` in an empty working directory with a cache of its own."""
    environment = command_environment(tmp_path)

    def run(arguments: Sequence[str], site: Path | None = None, **extra: str) -> subprocess.CompletedProcess[str]:
        path = {"PYTHONPATH": str(site)} if site else {}
        return subprocess.run(
            [sys.executable, "-P", "-m", "kvbench", *arguments],
            cwd=tmp_path,
            env={**environment, **path, **extra},
            capture_output=True,
            text=True,
            check=False,
        )

    return run
