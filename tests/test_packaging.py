"""What is shipped: wheel, sdist and editable install, and the repository's root as a working directory."""

import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = {
    "kvbench": "kvbench",
    "conf": "kvbench/conf",
    "kernels": "kvbench/kernels",
    "quantizers": "kvbench/quantizers",
    "reports": "kvbench/reports",
    "tasks": "kvbench/tasks",
    "hydra_plugins/kvbench": "hydra_plugins/kvbench",
}
pytestmark = pytest.mark.slow


def tracked_files() -> list[str]:
    return subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


def shipped_files() -> set[str]:
    """The repository's files that belong in a wheel, by their path in it."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    files = set()
    for name in listed:
        for room, place in ROOMS.items():
            if name.startswith(f"{room}/") and name.endswith((".py", ".yaml", ".template", "py.typed")):
                files.add(f"{place}/{name.removeprefix(f'{room}/')}")
    return files


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository's tracked files: builds leave the checkout alone."""
    copy = tmp_path_factory.mktemp("source")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    for name in filter(None, listed):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an sdist, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(source)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return folder


def test_the_wheel_holds_every_room_and_its_yaml_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("kvbench-*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == shipped_files()
    assert "kvbench/conf/model/smollm2-135m.yaml" in names


def test_the_sdist_builds_the_same_wheel_and_holds_the_tests(built: Path) -> None:
    (sdist,) = built.glob("kvbench-*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "constraints.txt", "conf/config.yaml", "tests/test_packaging.py"} <= names


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_an_install_answers_help_and_finds_its_configuration(
    built: Path, source: Path, tmp_path: Path, kind: str
) -> None:
    """The dependencies are those of the environment that runs the tests; only kvbench is installed anew."""
    python = fresh_environment(tmp_path / "venv")
    target = (
        [str(next(built.glob("*.whl")))] if kind == "wheel" else ["--no-build-isolation", "--editable", str(source)]
    )
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--ignore-installed"]
    subprocess.run([*install, *target], check=True, cwd=tmp_path)
    command = python.parent / "kvbench"
    done = subprocess.run([command, "--cfg", "job"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "name: blockgtq" in done.stdout
    where = subprocess.run(
        [python, "-P", "-c", "import kvbench.kernels, hydra_plugins.kvbench; print(kvbench.kernels.__file__)"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    expected = source / "kernels" if kind == "editable" else tmp_path / "venv"
    assert Path(where.stdout.strip()).is_relative_to(expected)


def fresh_environment(folder: Path) -> Path:
    """A virtual environment that sees this one's packages behind its own, kvbench aside; its Python."""
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    here = next(Path(entry) for entry in sys.path if entry.endswith("site-packages"))
    # A .pth line adds a folder without reading the .pth files in it, so this environment's editable kvbench stays out.
    (site / "dependencies.pth").write_text(f"{here}\n")
    return folder / "bin" / "python"


IMPORT_TRANSFORMERS = """
import transformers.integrations.hub_kernels
from transformers.utils.import_utils import is_kernels_available
from transformers import LlamaForCausalLM
import kvbench.kernels.formats
import kernels
print(is_kernels_available(), hasattr(kernels, "get_kernel"))
"""


def import_in_the_root(site: Path | None) -> str:
    path = {"PYTHONPATH": str(site)} if site else {}
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_TRANSFORMERS],  # -c puts the working directory first on sys.path
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", **path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_transformers_imports_in_the_root_without_the_package_kernels() -> None:
    assert import_in_the_root(None) == "False False"


def test_transformers_imports_in_the_root_with_the_package_kernels(tmp_path: Path) -> None:
    """The real package, its version set to one that this transformers accepts: it imports nothing of any other."""
    from transformers.utils.import_utils import KERNELS_MIN_VERSION

    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path), "kernels"]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("the package kernels cannot be fetched")
    (metadata,) = tmp_path.glob("kernels-*.dist-info/METADATA")
    version = f"Version: {KERNELS_MIN_VERSION}"
    metadata.write_text(re.sub(r"^Version: .*$", version, metadata.read_text(), count=1, flags=re.MULTILINE))
    assert import_in_the_root(tmp_path) == "True True"


def test_constraints_hold_a_version_for_every_dependency() -> None:
    from importlib.metadata import requires

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    pinned = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            pinned[canonicalize_name(name)] = version
    needed = [Requirement(text) for text in requires("kvbench") or ()]
    own = [each for each in needed if each.marker is None or "dev" in str(each.marker)]
    for requirement in own:
        if requirement.name != "kvbench":
            assert pinned[canonicalize_name(requirement.name)] in requirement.specifier
