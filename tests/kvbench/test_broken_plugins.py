"""A plugin that breaks the contract is told by name and layer, at start-up or at run time; others go on."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

from kvbench.application import store_configuration
from kvbench.errors import KvbenchError, PluginError
from kvbench.registry import Registry, load_registry
from kvbench.results import Result
from kvbench.run import run
from kvbench.sweep import register_sweep_plugins

Distribution = Callable[..., Path]

FAULTY = Path(__file__).with_name("faulty_quantizer.py").read_text()
HOOK = """

@hookimpl
def kvbench_quantizers():
    return [Faulty]
"""


@pytest.fixture
def registry(distribution: Distribution, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Registry:
    """The built-ins, and the quantizer ``faulty``, broken as its option says."""
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(distribution(FAULTY + HOOK))
    return load_registry({})


def measured(registry: Registry, folder: Path, *overrides: str) -> Result:
    store_configuration(registry)
    register_sweep_plugins()
    options = ["calibration.tokens=128", "calibration.window=64", "task=[perplexity]"]
    options += ["task.perplexity.windows=1", "task.perplexity.window=64", "baselines=[]", "device=cpu"]
    with initialize_config_module("kvbench.conf", version_base="1.3"):
        return run(compose("config", ["model=random", *options, *overrides]), folder, registry)


@pytest.mark.parametrize(
    ("declared", "reason"),
    [
        ("'2'", r"was built for kvbench API 2; kvbench .* has API 1\.0: upgrade kvbench"),
        ("'1.7'", r"was built for kvbench API 1\.7; .*: upgrade kvbench"),
        ("'0.9'", r"was built for kvbench API 0\.9; .*: install a newer version of the plugin"),
        ("'one'", r"kvbench_api_version must be a version such as '1\.0', not 'one'"),
    ],
)
def test_a_plugin_for_another_api_is_refused_with_a_sentence(
    distribution: Distribution, monkeypatch: pytest.MonkeyPatch, declared: str, reason: str
) -> None:
    monkeypatch.syspath_prepend(distribution(f"kvbench_api_version = {declared}\n{FAULTY}{HOOK}"))
    found = load_registry({})
    (broken,) = found.broken
    assert len(broken.errors) == 1
    with pytest.raises(KvbenchError, match=reason):
        raise KvbenchError(broken.errors[0])
    assert "faulty" not in found.quantizers
    assert "tqmse" in found.quantizers


@pytest.mark.parametrize("declared", ["'1'", "1", "'1.0'"])
def test_a_plugin_for_this_api_is_loaded(
    distribution: Distribution, monkeypatch: pytest.MonkeyPatch, declared: str
) -> None:
    monkeypatch.syspath_prepend(distribution(f"{FAULTY}{HOOK}\nkvbench_api_version = {declared}\n"))
    found = load_registry({})
    assert found.broken == []
    assert "faulty" in found.quantizers


def test_a_plugin_without_hooks_is_told_that_it_provides_nothing(
    distribution: Distribution, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(distribution(FAULTY + HOOK.replace("@hookimpl", "")))
    found = load_registry({})
    (broken,) = found.broken
    assert "provides nothing: it has no function kvbench_quantizers" in broken.errors[0]
    assert "tqmse" in found.quantizers


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("returns a list", r"quantizer 'faulty' must return a CacheFormat from fit\(\), not list"),
        ("one layer", "quantizer 'faulty' gave formats for 1 layers; the model has 2"),
        ("another head_dim", "quantizer 'faulty', layer 0: its key format has 2 KV heads of 64 dims"),
        ("crashes", r"quantizer 'faulty' \(plugin_module_\d+\) failed in fit\(\): IndexError: list index out of range"),
        ("wrong shape", r"quantizer 'faulty', layer 0, keys: format 'bytes' .* encodes plane 'codes'"),
        ("missing plane", r"quantizer 'faulty', layer 0, keys: .* encodes 1 planes but declares 2"),
        ("double", r"quantizer 'faulty', layer 0, keys: .* decodes to torch.float64"),
        ("decodes NaN", r"quantizer 'faulty', layer 0, keys: .* decodes finite input to NaN or infinity"),
        ("raises", r"quantizer 'faulty', layer 0, keys: .* fails on ordinary numbers with RuntimeError: no luck"),
        ("claims too much", r"quantizer 'faulty', layer 0, keys: .* stores 576 bits a token but declares"),
        ("hides scales", r"quantizer 'faulty', layer 0, keys: .* stores 576 bits a token but declares .*=512"),
    ],
)
def test_a_quantizer_that_breaks_the_contract_is_named(
    registry: Registry, tmp_path: Path, fault: str, message: str
) -> None:
    with pytest.raises(PluginError, match=message):
        measured(registry, tmp_path / "out", "quantizer=faulty", f"quantizer.fault={fault}")


def test_a_fit_of_another_signature_is_told_in_a_line(
    distribution: Distribution, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    other = FAULTY.replace("def fit(self, calibration: Calibration | None, geometry", "def fit(self, geometry")
    assert other != FAULTY
    monkeypatch.syspath_prepend(distribution(other + HOOK))
    with pytest.raises(PluginError, match=r"quantizer 'faulty' \(.*\) failed in fit\(\): TypeError: .*fit\(\) takes 2"):
        measured(load_registry({}), tmp_path / "out", "quantizer=faulty")


def test_nan_that_appears_only_in_use_is_told_by_layer(registry: Registry, tmp_path: Path) -> None:
    message = r"quantizer 'faulty', layer 0, keys: format 'bytes' .* decodes finite input to NaN or infinity"
    with pytest.raises(PluginError, match=message):
        measured(registry, tmp_path / "out", "quantizer=faulty", "quantizer.fault='NaN in long caches'")


def test_a_sound_plugin_and_the_built_ins_run_beside_it(registry: Registry, tmp_path: Path) -> None:
    result = measured(registry, tmp_path / "out", "quantizer=faulty", "baselines=[fp16]")
    assert [each.status for each in result.measurements().values()] == ["ok", "ok"]
    assert result.cache is not None
    assert {layer.key_format for layer in result.cache.engagement} == {"bytes"}
