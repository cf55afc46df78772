"""The example plugin and a freshly generated one, installed into environments of their own and used as strangers do."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import kvbench
from kvbench.api import API_VERSION
from kvbench.errors import ConfigurationError
from kvbench.new_plugin import write_plugin

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "kvbench-plugin-hadamard"
SMALL_RUN = ["model=random", "calibration.tokens=128", "calibration.window=64", "task=[logit_error,perplexity]"]
SMALL_RUN += ["task.logit_error.tokens=32", "task.logit_error.window=32", "baselines=[fp16]", "threads=1"]
SMALL_RUN += ["task.perplexity.windows=1", "task.perplexity.window=64", "hydra.run.dir=out"]


def run(command: Sequence[str | Path], folder: Path, **extra: str) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("KVBENCH_", "PYTHONPATH"))}
    cache = {"KVBENCH_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env={**environment, **cache, **extra}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def installed(distribution: Path, folder: Path) -> Path:
    """``distribution`` installed with pip into a folder of its own, which shadows nothing and is nowhere else."""
    source, site = folder / "source", folder / "site"
    shutil.copytree(distribution, source, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__", "build"))
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        str(site),
    ]
    run([*pip, str(source)], folder)
    return site


def kvbench_command(site: Path, *arguments: str) -> str:
    return run([sys.executable, "-P", "-m", "kvbench", *arguments], site.parent, PYTHONPATH=str(site))


def own_tests(site: Path, select: str) -> str:
    """The distribution's own tests, against what was installed."""
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", select, "source/tests"]
    return run(command, site.parent, PYTHONPATH=str(site))


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(EXAMPLE, tmp_path_factory.mktemp("example"))


@pytest.fixture(scope="module")
def scaffold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scaffold")
    run([sys.executable, "-P", "-m", "kvbench", "new-plugin", "my-quant"], folder)
    return installed(folder / "kvbench-my-quant", folder)


@pytest.mark.slow
def test_the_example_is_listed_with_its_distribution(example: Path) -> None:
    listing = kvbench_command(example, "plugins")
    assert re.search(
        r"^hadamard +kvbench-plugin-hadamard +0\.1\.0 +\w+ +reference +enabled +Random Hadamard", listing, re.MULTILINE
    )
    assert re.search(r"^hadamard-bits +kvbench-plugin-hadamard", listing, re.MULTILINE)
    assert "broken" not in listing


@pytest.mark.slow
def test_the_example_runs_in_its_own_format_and_adds_its_section(example: Path) -> None:
    printed = kvbench_command(example, "quantizer=hadamard", "quantizer.k_bits=3", *SMALL_RUN)
    assert "hadamard" in printed
    report = (example.parent / "out" / "report.md").read_text()
    assert "hadamard_integers" in report
    assert "Keys: 3.00 bits of codes and" in report
    assert "Where hadamard&#x27;s bits went" in (example.parent / "out" / "report.html").read_text()


@pytest.mark.slow
def test_the_example_passes_its_own_tests(example: Path) -> None:
    assert re.search(r"\d+ passed", own_tests(example, "not other_process"))


@pytest.mark.slow
def test_a_generated_plugin_passes_its_own_tests_as_generated(scaffold: Path) -> None:
    assert re.search(r"\d+ passed", own_tests(scaffold, "not other_process"))


@pytest.mark.slow
def test_a_generated_plugin_runs_as_generated(scaffold: Path) -> None:
    assert "my-quant" in kvbench_command(scaffold, "quantizer=my-quant", *SMALL_RUN)
    assert (scaffold.parent / "out" / "report.html").exists()


def test_a_generated_plugin_is_well_formed(tmp_path: Path) -> None:
    folder = write_plugin("kvbench-none", tmp_path)
    assert folder == tmp_path / "kvbench-none"
    run([sys.executable, "-m", "ruff", "check", "--isolated", "--line-length", "120", str(folder)], tmp_path)
    run(
        [sys.executable, "-m", "ruff", "format", "--check", "--isolated", "--line-length", "120", str(folder)], tmp_path
    )
    source = (folder / "src" / "kvbench_none" / "quantizer.py").read_text()
    assert "class NoneQuantizer(Quantizer):" in source
    assert f'kvbench_api_version = "{API_VERSION[0]}"' in (folder / "src" / "kvbench_none" / "__init__.py").read_text()


@pytest.mark.parametrize("name", ["My-Quant", "my_quant", "9lives", "a--b", "", "kvbench-"])
def test_a_name_that_cannot_be_a_distributions_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match="cannot name a plugin: use small letters"):
        write_plugin(name, tmp_path)


def test_a_name_that_is_taken_is_refused_with_its_owner(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"already provided by kvbench {re.escape(kvbench.__version__)}"):
        write_plugin("tqmse", tmp_path)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    folder = write_plugin("mine", tmp_path)
    (folder / "README.md").write_text("precious")
    with pytest.raises(ConfigurationError, match="is already there"):
        write_plugin("mine", tmp_path)
    assert (folder / "README.md").read_text() == "precious"
