"""The plugin registry, on real distributions: what loads, what is refused, and that neither disturbs the rest."""

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import kvbench
from kvbench.errors import ConfigurationError
from kvbench.options import options_class
from kvbench.registry import Plugin, Registry, load_registry

BUILTIN_QUANTIZERS = {"fp16", "tqmse", "blockgtq"}

Distribution = Callable[..., Path]

GOOD = """
@dataclass(frozen=True)
class Mine(DenseFit, Quantizer):
    '''Mine, in one line.

    And more.
    '''
    name: ClassVar[str] = "mine"
    bits: int = 4
    widths: tuple[int, ...] = (1, 2)

@hookimpl
def kvbench_quantizers():
    return [Mine]
"""


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Registry]:
    def load_from(*sites: Path, **environ: str) -> Registry:
        for site in dict.fromkeys(sites):
            monkeypatch.syspath_prepend(site)
        return load_registry(environ)

    return load_from


def plugin(registry: Registry, name: str = "myplugin") -> Plugin:
    return next(each for each in registry.plugins if each.name == name)


def test_builtins_come_through_the_hooks_with_their_distribution() -> None:
    registry = load_registry({})
    assert set(registry.quantizers) >= BUILTIN_QUANTIZERS
    assert set(registry.tasks) >= {"logit_error", "perplexity"}
    assert "summary" in registry.report_sections
    entry = registry.quantizer("tqmse")
    assert (entry.distribution, entry.version) == ("kvbench", kvbench.__version__)
    assert plugin(registry, "builtins").errors == []


def test_importing_and_loading_the_registry_imports_no_torch() -> None:
    code = (
        "import sys; from kvbench.registry import load_registry; load_registry();"
        "print(*{'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_a_plugin_s_quantizer_knows_who_provides_it(distribution: Distribution, load: Callable[..., Registry]) -> None:
    entry = load(distribution(GOOD)).quantizer("mine")
    assert (entry.distribution, entry.version, entry.description) == ("myplugin-dist", "1.2", "Mine, in one line.")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_module", "No module named 'no_such_module'"),
        ("raise SystemExit('bye')", "SystemExit: bye"),
        ("@hookimpl\ndef kvbench_quantizers():\n    raise RuntimeError('no luck')", "RuntimeError: no luck"),
        ("@hookimpl\ndef kvbench_quantisers():\n    return []", "kvbench_quantisers"),
        ("@hookimpl\ndef kvbench_quantizers(surprise):\n    return []", "surprise"),
        ("@hookimpl\ndef kvbench_quantizers():\n    return 'mine'", "must return a list, not 'mine'"),
        ("@hookimpl\ndef kvbench_quantizers():\n    return 3", "must return a list, not 3"),
        (
            "@hookimpl\ndef kvbench_quantizers():\n    return [dict]",
            "must be a subclass of kvbench.quantizer.Quantizer",
        ),
        ("@hookimpl\ndef kvbench_tasks():\n    return [7]", "must be a subclass of kvbench.task.Task"),
        ("@hookimpl\ndef kvbench_models():\n    return ['llama']", "must return ModelConfig objects"),
    ],
)
def test_a_broken_plugin_is_recorded_and_takes_nothing_down(
    distribution: Distribution, load: Callable[..., Registry], source: str, reason: str
) -> None:
    broken, good = distribution(source, "broken"), distribution(GOOD, "good")
    registry = load(broken, good)
    assert reason in plugin(registry, "broken").errors[0]
    assert len(plugin(registry, "broken").errors) == 1
    assert set(registry.quantizers) >= BUILTIN_QUANTIZERS | {"mine"}
    assert plugin(registry, "good").errors == []


@pytest.mark.parametrize(
    ("definition", "reason"),
    [
        ("class Bad(DenseFit, Quantizer):\n    name: ClassVar[str] = 'bad'", "must be decorated with @dataclass"),
        ("@dataclass(frozen=True)\nclass Bad(Quantizer):\n    name: ClassVar[str] = 'bad'", "does not implement fit"),
        (
            "@dataclass(frozen=True)\nclass Bad(DenseFit, Quantizer):\n    bits: int = 1",
            "needs a class attribute 'name",
        ),
        (
            "@dataclass(frozen=True)\nclass Bad(DenseFit, Quantizer):\n    name: ClassVar[str] = 'a b'",
            "needs a 'name' of letters",
        ),
        (
            "@dataclass(frozen=True)\nclass Bad(DenseFit, Quantizer):\n"
            "    name: ClassVar[str] = 'bad'\n    when: complex = 1j",
            "a type that Hydra cannot hold",
        ),
    ],
)
def test_a_class_that_breaks_the_contract_is_refused_and_its_neighbour_kept(
    distribution: Distribution, load: Callable[..., Registry], definition: str, reason: str
) -> None:
    source = definition + GOOD.replace("return [Mine]", "return [Bad, Mine]")
    registry = load(distribution(source))
    assert reason in plugin(registry).errors[0]
    assert "mine" in registry.quantizers
    assert "bad" not in registry.quantizers


def test_a_plugin_whose_registration_failed_provides_nothing(
    distribution: Distribution, load: Callable[..., Registry]
) -> None:
    registry = load(distribution(GOOD + "\n@hookimpl\ndef kvbench_tasks(surprise):\n    return []\n"))
    assert "surprise" in plugin(registry).errors[0]
    assert "mine" not in registry.quantizers


def test_a_name_that_is_taken_is_refused_naming_both(distribution: Distribution, load: Callable[..., Registry]) -> None:
    registry = load(distribution(GOOD.replace('"mine"', '"tqmse"')))
    assert registry.quantizer("tqmse").distribution == "kvbench"
    (error,) = plugin(registry).errors
    assert "quantizer 'tqmse'" in error
    assert "Mine" in error
    assert "kvbench.quantizers.tqmse.TQMSE" in error


def test_two_plugins_of_one_name_are_told_apart(distribution: Distribution, load: Callable[..., Registry]) -> None:
    distribution(GOOD, "same", provider="one")
    registry = load(distribution(GOOD.replace('"mine"', '"other"'), "same", provider="two"))
    assert len({"mine", "other"} & set(registry.quantizers)) == 1
    (broken,) = registry.broken
    (error,) = broken.errors
    assert "another plugin is called 'same'" in error


def test_disabled_plugins_are_not_imported(distribution: Distribution, load: Callable[..., Registry]) -> None:
    registry = load(distribution("import no_such_module"), KVBENCH_DISABLE_PLUGINS=" myplugin ,")
    assert plugin(registry).disabled
    assert registry.broken == []
    assert registry.warnings == []


def test_disabling_a_plugin_that_is_not_there_is_said(
    distribution: Distribution, load: Callable[..., Registry]
) -> None:
    (warning,) = load(distribution(GOOD), KVBENCH_DISABLE_PLUGINS="myplugins").warnings
    assert "unknown plugin 'myplugins'. Did you mean 'myplugin'?" in warning


def test_a_node_of_the_configuration_becomes_the_quantizer(
    distribution: Distribution, load: Callable[..., Registry]
) -> None:
    registry = load(distribution(GOOD))
    cls = registry.quantizer("mine").value
    node = OmegaConf.merge(OmegaConf.structured(options_class(cls)), {"bits": 2, "widths": [3]})
    quantizer = registry.build_quantizer(node)
    assert type(quantizer) is cls
    assert dataclasses.asdict(quantizer) == {"bits": 2, "widths": (3,)}


def test_options_that_a_quantizer_refuses_are_the_user_s_error(
    distribution: Distribution, load: Callable[..., Registry]
) -> None:
    refusal = "\n    def __post_init__(self):\n        if self.bits > 8:\n            raise ValueError('too wide')\n"
    registry = load(distribution(GOOD.replace("(1, 2)\n", "(1, 2)\n" + refusal)))
    with pytest.raises(ConfigurationError, match="quantizer 'mine' refuses its options: too wide"):
        registry.build_quantizer({"name": "mine", "bits": 9})


def test_an_option_without_a_default_must_be_given(distribution: Distribution, load: Callable[..., Registry]) -> None:
    registry = load(distribution(GOOD.replace("bits: int = 4", "bits: int")))
    node = OmegaConf.structured(options_class(registry.quantizer("mine").value))
    with pytest.raises(ConfigurationError, match=r"give quantizer\.bits=VALUE"):
        registry.build_quantizer(node)


def test_an_unknown_name_is_answered_with_near_misses_and_broken_plugins(
    distribution: Distribution, load: Callable[..., Registry]
) -> None:
    registry = load(distribution("import no_such_module", "clever"))
    with pytest.raises(ConfigurationError) as caught:
        registry.quantizer("clever")
    message = str(caught.value)
    assert "unknown quantizer 'clever'" in message
    assert "plugin 'clever' is broken: ModuleNotFoundError: No module named 'no_such_module'" in message
    with pytest.raises(ConfigurationError, match="Did you mean 'blockgtq'"):
        registry.quantizer("blockgtp")


def test_a_plugin_s_models_are_listed_and_may_not_take_a_built_in_name(
    distribution: Distribution, load: Callable[..., Registry]
) -> None:
    source = """
    @hookimpl
    def kvbench_models():
        return [ModelConfig(name="mine-7b", hub_id="me/mine"), ModelConfig(name="random")]
    """
    registry = load(distribution(source))
    assert registry.models["mine-7b"].value.hub_id == "me/mine"
    assert "model 'random' is already provided by kvbench" in plugin(registry).errors[0]


def test_report_sections_of_a_plugin_join_the_built_in_ones(
    distribution: Distribution, load: Callable[..., Registry]
) -> None:
    source = """
    from kvbench.reports.section import ReportSection

    class Mine(ReportSection):
        name = "mine"
        title = "Mine"

        def html(self, result):
            return "<p>mine</p>"

    @hookimpl
    def kvbench_report_sections():
        return [Mine, int]
    """
    registry = load(distribution(source))
    assert list(registry.report_sections)[-1] == "mine"
    assert "must be a subclass of kvbench.reports.section.ReportSection" in plugin(registry).errors[0]
