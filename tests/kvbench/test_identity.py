"""What identifies a measurement: options and code, a plugin's data files included."""

import importlib
import sys
from pathlib import Path

import pytest

from kvbench.identity import digest, implementation, source_digest
from kvbench.quantizers.tqmse import TQMSE


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An imported plugin package with a subpackage and a table beside its code."""
    root = tmp_path / "identity_plugin"
    (root / "inner").mkdir(parents=True)
    for name in ("__init__.py", "inner/__init__.py", "inner/code.py"):
        (root / name).write_text("")
    (root / "table.json").write_text("[1]")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("identity_plugin.inner.code")
    yield root
    for name in [name for name in sys.modules if name.startswith("identity_plugin")]:
        del sys.modules[name]
    source_digest.cache_clear()


def fresh(module: str) -> str:
    source_digest.cache_clear()
    return source_digest(module)


def test_every_module_of_a_package_has_the_packages_digest(package: Path) -> None:
    assert fresh("identity_plugin") == fresh("identity_plugin.inner.code")


@pytest.mark.parametrize("file", ["__init__.py", "inner/code.py", "table.json", "inner/new.py"])
def test_change_of_any_file_of_a_plugin_changes_its_digest(package: Path, file: str) -> None:
    before = fresh("identity_plugin.inner.code")
    (package / file).write_text("# changed\n")
    assert fresh("identity_plugin.inner.code") != before


def test_bytecode_does_not_count(package: Path) -> None:
    before = fresh("identity_plugin")
    (package / "__pycache__").mkdir(exist_ok=True)
    (package / "__pycache__" / "code.pyc").write_bytes(b"1")
    assert fresh("identity_plugin") == before


def test_renamed_file_changes_the_digest(package: Path) -> None:
    before = fresh("identity_plugin")
    (package / "table.json").rename(package / "other.json")
    assert fresh("identity_plugin") != before


def test_single_module_plugin_has_its_files_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "identity_module.py").write_text("a = 1\n")
    (tmp_path / "unrelated.py").write_text("a = 1\n")
    monkeypatch.delitem(sys.modules, "identity_module", raising=False)
    importlib.import_module("identity_module")
    before = fresh("identity_module")
    (tmp_path / "unrelated.py").write_text("a = 2\n")
    assert fresh("identity_module") == before
    (tmp_path / "identity_module.py").write_text("a = 2\n")
    assert fresh("identity_module") != before


def test_every_room_of_kvbench_counts_as_kvbench() -> None:
    assert (
        source_digest("kvbench.quantizers.tqmse") == source_digest("kvbench.kernels.codec") == source_digest("kvbench")
    )


def test_options_are_part_of_an_implementation() -> None:
    assert digest(implementation(TQMSE(k_bits=3))) == digest(implementation(TQMSE(k_bits=3)))
    assert digest(implementation(TQMSE(k_bits=3))) != digest(implementation(TQMSE(k_bits=2)))


def test_digest_does_not_depend_on_the_order_of_keys() -> None:
    assert digest({"a": 1, "b": {"c": 2, "d": 3}}) == digest({"b": {"d": 3, "c": 2}, "a": 1})
