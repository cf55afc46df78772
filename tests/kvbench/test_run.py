"""A run from configuration to result.json: kept, continued, not repeated, and never served another code's scores."""

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from omegaconf import DictConfig

from kvbench.application import store_configuration
from kvbench.errors import NonFiniteError, PluginError, ResultError
from kvbench.identity import source_digest
from kvbench.registry import Registry, load_registry
from kvbench.results import Result, read_result
from kvbench.run import run
from kvbench.session import Session
from kvbench.sweep import register_sweep_plugins
from kvbench.task import TaskResult
from kvbench.tasks.logit_error import LogitError
from kvbench.tasks.perplexity import Perplexity

SMALL = (
    "model=random",
    "device=cpu",
    "calibration.tokens=128",
    "calibration.window=64",
)
TASKS = {
    "logit_error": ("task.logit_error.tokens=32", "task.logit_error.window=32"),
    "perplexity": ("task.perplexity.windows=1", "task.perplexity.window=64"),
}
IDLE_QUANTIZER = """
@dataclass(frozen=True)
class Idle(DenseFit, Quantizer):
    name: ClassVar[str] = "idle"
    needs_calibration: ClassVar[bool] = False

@dataclass(frozen=True)
class Padded(Quantizer):
    name: ClassVar[str] = "padded"
    needs_calibration: ClassVar[bool] = False

    def fit(self, calibration, geometry):
        # float32 holds what the model computes: nothing can tell these two formats' scores apart
        key = tuple(Dense(layer.kv_heads, layer.head_dim, "float32") for layer in geometry.layers)
        return CacheFormat(key, key)

@dataclass(frozen=True)
class OtherValues(Padded):
    name: ClassVar[str] = "other-values"

    def fit(self, calibration, geometry):
        key = tuple(Dense(layer.kv_heads, layer.head_dim, "float32") for layer in geometry.layers)
        value = tuple(Dense(layer.kv_heads, layer.head_dim, "float16") for layer in geometry.layers)
        return CacheFormat(key, value)

@hookimpl
def kvbench_quantizers():
    return [Idle, Padded, OtherValues]
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def registry() -> Registry:
    return load_registry()


@pytest.fixture
def idle_plugin(distribution: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The installed file of a plugin whose quantizers keep everything."""
    site = distribution(IDLE_QUANTIZER)
    monkeypatch.syspath_prepend(site)
    importlib.invalidate_caches()
    (module,) = site.glob("*.py")
    return module


def configuration(registry: Registry, *overrides: str, tasks: Sequence[str] = tuple(TASKS)) -> DictConfig:
    store_configuration(registry)
    register_sweep_plugins()
    with initialize_config_module("kvbench.conf", version_base="1.3"):
        options = [option for task in tasks for option in TASKS[task]]
        return compose("config", [*SMALL, f"task=[{','.join(tasks)}]", *options, *overrides])


def reused(result: Result) -> dict[str, bool]:
    records = result.measurements().items()
    return {f"{name} {task}": record.reused for name, each in records for task, record in each.tasks.items()}


def test_result_holds_quantizer_and_baselines_with_proof(registry: Registry, tmp_path: Path) -> None:
    result = run(configuration(registry), tmp_path / "out", registry)
    assert read_result(tmp_path / "out" / "result.json") == result
    assert list(result.measurements()) == ["blockgtq", "fp16", "tqmse"]
    for name, measurement in result.measurements().items():
        assert measurement.status == "ok"
        assert measurement.tasks.keys() == {"logit_error", "perplexity"}
        assert measurement.cache is not None
        assert all(layer.packed_tokens_read > 0 for layer in measurement.cache.engagement)
        stored = {layer.key_format for layer in measurement.cache.engagement}
        assert stored == {"dense" if name == "fp16" else "rotated_codebook"}
    assert not any(record.notes for each in result.measurements().values() for record in each.tasks.values())


def test_result_holds_the_energy_of_every_layers_blocks(registry: Registry, tmp_path: Path) -> None:
    result = run(configuration(registry, tasks=["perplexity"]), tmp_path / "out", registry)
    assert result.block_energy is not None
    blocks = result.model.geometry["layers"][0]["rotary_dim"] // 2
    for grid in result.block_energy.by_tensor().values():
        assert [len(line) for line in grid] == [blocks] * len(result.model.geometry["layers"])
        assert all(value > 0 for line in grid for value in line)


def test_baselines_take_the_quantizers_bits(registry: Registry, tmp_path: Path) -> None:
    config = configuration(registry, "quantizer.k_bits=2", "quantizer.v_bits=4", tasks=["perplexity"])
    result = run(config, tmp_path / "out", registry)
    parameters = result.baselines["tqmse"].quantizer.parameters
    assert (parameters["k_bits"], parameters["v_bits"]) == (2, 4)


def test_second_run_reuses_every_measurement(registry: Registry, tmp_path: Path) -> None:
    first, second = (run(configuration(registry), tmp_path / name, registry) for name in ("first", "second"))
    assert set(reused(first).values()) == {False}
    assert set(reused(second).values()) == {True}
    assert first.run_id == second.run_id
    for name, measurement in first.measurements().items():
        again = second.measurements()[name]
        assert again.compression == measurement.compression
        assert again.cache == measurement.cache
        assert {task: record.metrics for task, record in again.tasks.items()} == {
            task: record.metrics for task, record in measurement.tasks.items()
        }


@pytest.mark.parametrize(
    ("override", "kept"),
    [
        ("task.perplexity.window=32", {"logit_error"}),
        ("quantizer.k_bits=4", set()),
        ("cache.n_sink=2", set()),
        ("calibration.tokens=64", set()),
        ("model.seed=1", set()),
    ],
)
def test_only_what_is_not_affected_by_a_change_is_reused(
    registry: Registry, tmp_path: Path, override: str, kept: set[str]
) -> None:
    before = run(configuration(registry, "baselines=[]"), tmp_path / "first", registry)
    after = run(configuration(registry, "baselines=[]", override), tmp_path / "second", registry)
    assert {task for task, record in after.tasks.items() if record.reused} == kept
    assert after.run_id != before.run_id


def test_finished_run_in_the_same_folder_is_read_not_repeated(registry: Registry, tmp_path: Path) -> None:
    config = configuration(registry, "baselines=[]")
    first = run(config, tmp_path / "out", registry)
    written = (tmp_path / "out" / "result.json").stat()
    assert run(config, tmp_path / "out", registry) == first
    assert (tmp_path / "out" / "result.json").stat().st_ino == written.st_ino


def test_other_run_in_the_same_folder_replaces_the_result(registry: Registry, tmp_path: Path) -> None:
    first = run(configuration(registry, "baselines=[]"), tmp_path / "out", registry)
    second = run(configuration(registry, "baselines=[]", "quantizer.k_bits=4"), tmp_path / "out", registry)
    assert read_result(tmp_path / "out" / "result.json").run_id == second.run_id != first.run_id


def test_interrupted_run_leaves_what_it_finished_and_continues_there(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configuration(registry, "baselines=[]")

    def interrupt(self: Perplexity, session: Session) -> TaskResult:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Perplexity, "run", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(config, tmp_path / "out", registry)
    left = read_result(tmp_path / "out" / "result.json")
    assert (left.status, list(left.tasks)) == ("partial", ["logit_error"])
    finished = run(config, tmp_path / "out", registry)
    assert finished.status == "ok"
    assert reused(finished) == {"blockgtq logit_error": True, "blockgtq perplexity": False}
    assert finished.tasks["logit_error"].metrics == left.tasks["logit_error"].metrics


def test_task_that_breaks_is_a_result_and_is_tried_again(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configuration(registry, "baselines=[tqmse]")

    def fail(self: LogitError, session: Session) -> TaskResult:
        raise RuntimeError("a bug in the task")

    with monkeypatch.context() as patch:
        patch.setattr(LogitError, "run", fail)
        broken = run(config, tmp_path / "out", registry)
    assert broken.status == broken.tasks["logit_error"].status == "failed"
    assert "RuntimeError: a bug in the task" in (broken.tasks["logit_error"].error or "")
    assert broken.tasks["perplexity"].status == broken.baselines["tqmse"].tasks["perplexity"].status == "ok"
    assert run(config, tmp_path / "out", registry).status == "ok"


def test_baseline_that_broke_is_tried_again(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configuration(registry, "baselines=[tqmse]")
    measured = LogitError.run

    def fail(self: LogitError, session: Session) -> TaskResult:
        if session.quantizer.name == "tqmse":
            raise RuntimeError("a bug in the baseline")
        return measured(self, session)

    with monkeypatch.context() as patch:
        patch.setattr(LogitError, "run", fail)
        broken = run(config, tmp_path / "out", registry)
    assert (broken.status, broken.baselines["tqmse"].status) == ("ok", "failed")
    again = run(config, tmp_path / "out", registry)
    assert again.baselines["tqmse"].status == "ok"
    assert reused(again)["blockgtq logit_error"]


def test_running_out_of_memory_is_a_result(registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhaust(self: LogitError, session: Session) -> TaskResult:
        raise MemoryError("cannot allocate 1 TiB")

    monkeypatch.setattr(LogitError, "run", exhaust)
    result = run(configuration(registry, "baselines=[]"), tmp_path / "out", registry)
    assert result.status == result.tasks["logit_error"].status == "oom"
    assert result.tasks["logit_error"].error == "cannot allocate 1 TiB"
    assert result.tasks["perplexity"].status == "ok"


@pytest.mark.parametrize(
    ("metric", "error", "message"),
    [
        (float("nan"), NonFiniteError, "'perplexity' on quantizer 'blockgtq': perplexity has NaN or infinity"),
        ([1.0, float("inf")], NonFiniteError, "perplexity has NaN or infinity"),
        (object(), PluginError, "task 'perplexity' must return plain JSON data as metrics; perplexity"),
    ],
    ids=["NaN", "infinity in a list", "an object"],
)
def test_metric_that_no_report_could_show_ends_the_run_by_name(
    registry: Registry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    metric: object,
    error: type[Exception],
    message: str,
) -> None:
    def measure(self: Perplexity, session: Session) -> TaskResult:
        return TaskResult({"perplexity": metric}, 1, "tokens", "packed")

    monkeypatch.setattr(Perplexity, "run", measure)
    with pytest.raises(error, match=message):
        run(configuration(registry, "baselines=[]", tasks=["perplexity"]), tmp_path / "out", registry)


def test_changed_plugin_is_never_served_its_old_scores(idle_plugin: Path, tmp_path: Path) -> None:
    registry = load_registry()
    config = configuration(registry, "quantizer=idle", "baselines=[]", tasks=["perplexity"])
    first, same = (run(config, tmp_path / name, registry) for name in ("1", "2"))
    idle_plugin.write_text(idle_plugin.read_text() + "\n# a change that could matter\n")
    source_digest.cache_clear()  # as in a new process
    changed = run(config, tmp_path / "3", registry)
    assert [result.tasks["perplexity"].reused for result in (first, same, changed)] == [False, True, False]
    assert changed.run_id != first.run_id
    assert run(config, tmp_path / "1", registry).run_id == changed.run_id


def test_formats_that_differ_and_score_the_same_to_the_last_bit_are_flagged(idle_plugin: Path, tmp_path: Path) -> None:
    """FIELD-CASES 18. Float16 values do not enter the logit error, so these two agree; who reads must know it."""
    registry = load_registry()
    config = configuration(registry, "quantizer=padded", "baselines=[other-values]", tasks=["logit_error"])
    result = run(config, tmp_path / "out", registry)
    notes = result.baselines["other-values"].tasks["logit_error"].notes
    assert [note.split(":")[0] for note in notes] == ["identical to padded"]
    assert read_result(tmp_path / "out" / "result.json") == result


def test_equal_formats_are_not_flagged(idle_plugin: Path, tmp_path: Path) -> None:
    registry = load_registry()
    config = configuration(registry, "quantizer=idle", "baselines=[fp16]", tasks=["perplexity"])
    result = run(config, tmp_path / "out", registry)
    assert result.tasks["perplexity"].metrics["nll"] == result.baselines["fp16"].tasks["perplexity"].metrics["nll"]
    assert result.baselines["fp16"].tasks["perplexity"].notes == []


def test_quantizer_that_returns_dense_gets_another_verdict_than_one_that_works(
    idle_plugin: Path, tmp_path: Path
) -> None:
    registry = load_registry()
    result = run(configuration(registry, "quantizer=idle", "baselines=[blockgtq]"), tmp_path / "out", registry)
    working = result.baselines["blockgtq"]
    assert result.compression is not None and working.compression is not None
    assert result.compression.ratio < 1.01 < 3 < working.compression.ratio
    errors = [each.tasks["logit_error"].metrics["mean"] for each in (result, working)]
    assert errors[1] > 20 * errors[0]
    assert result.cache is not None and working.cache is not None
    assert {layer.key_format for layer in result.cache.engagement} == {"dense"}
    assert {layer.key_format for layer in working.cache.engagement} == {"rotated_codebook"}


def test_format_for_another_model_is_the_plugins_error(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls = registry.quantizer("fp16").value
    original = cls.fit

    def fit_narrow(self: object, calibration: object, geometry: object) -> object:
        layers = tuple(dataclasses.replace(layer, head_dim=16) for layer in geometry.layers)  # type: ignore[attr-defined]
        return original(self, calibration, dataclasses.replace(geometry, layers=layers))  # type: ignore[arg-type,type-var]

    monkeypatch.setattr(cls, "fit", fit_narrow)
    with pytest.raises(
        PluginError, match="'fp16', layer 0: its key format has 2 KV heads of 16 dims, the model 2 of 32"
    ):
        run(configuration(registry, "quantizer=fp16", "baselines=[]"), tmp_path / "out", registry)


def test_folder_that_cannot_be_written_is_refused_before_the_model_loads(registry: Registry, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = configuration(registry, "model=local", "model.path=/absent")
    with pytest.raises(ResultError, match=r"cannot write to .*file/out.*hydra\.run\.dir=DIR"):
        run(config, tmp_path / "file" / "out", registry)
