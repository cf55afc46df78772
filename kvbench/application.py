"""The Hydra application behind ``kvbench KEY=VALUE ...``: its configuration groups, and the job they describe."""

import contextlib
import io
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvbench.configuration import Config
from kvbench.errors import ConfigurationError, KvbenchError
from kvbench.options import options_class
from kvbench.registry import Registry, load_registry
from kvbench.sweep import CELL_LOG, register_sweep_plugins

if TYPE_CHECKING:
    from kvbench.results import Result


def store_configuration(registry: Registry) -> None:
    """Put the schema and one node a quantizer, task and plugin model into Hydra's ConfigStore."""
    store = ConfigStore.instance()
    store.store(name="schema", node=Config, provider="kvbench")
    for name, quantizer in registry.quantizers.items():
        store.store(group="quantizer", name=name, node=options_class(quantizer.value), provider=quantizer.distribution)
    for name, task in registry.tasks.items():
        node = options_class(task.value, named=False)
        store.store(group="task", name=name, node=node, package=f"task.{name}", provider=task.distribution)
    for name, model in registry.models.items():
        store.store(group="model", name=name, node=model.value, provider=model.distribution)


def run_application(registry: Registry) -> "Job":
    """Do what ``sys.argv`` says, by Hydra: run a job or a sweep, or print what was asked for.

    Returns the job, with its result or error where it ran. Raises Hydra's errors, which are about the command line
    or the output folder, and SweepFailed after a sweep in which a cell failed.
    """
    store_configuration(registry)
    register_sweep_plugins()
    job = Job()
    hydra.main(version_base="1.3", config_path="pkg://kvbench.conf", config_name="config")(job)()
    return job


@dataclass
class Job:
    """The function that Hydra calls with a configuration: in this process for a run, in a worker for a sweep.

    It keeps its error for its caller: Hydra adds lines of its own to errors that a job raises.
    """

    result: "Result | None" = None
    error: Exception | None = field(default=None, repr=False)

    def __call__(self, config: DictConfig) -> dict[str, Any]:
        settings = HydraConfig.get()
        directory = Path(settings.runtime.output_dir)
        if settings.mode == RunMode.MULTIRUN:
            return _run_as_cell(config, directory)
        try:
            self.result = run_job(config, directory)
        except Exception as error:
            self.error = error
        return {}


def run_job(config: DictConfig, directory: Path) -> "Result":
    """Benchmark what ``config`` says, leave result and reports in ``directory``, and print the summary."""
    registry = load_registry()
    check_choices(config, registry)
    for notice in registry.notices():
        print(f"kvbench: warning: {notice}", file=sys.stderr)
    # These import torch and transformers: only once the options are known to be good.
    from kvbench.reports.terminal import print_summary
    from kvbench.reports.write import write_reports
    from kvbench.results import write_text_atomically
    from kvbench.run import run

    result = run(config, directory, registry)
    write_text_atomically(directory / "config.yaml", OmegaConf.to_yaml(config, resolve=True))
    write_reports(result, directory, [section.value for section in registry.report_sections.values()])
    print_summary(result, directory=directory)
    return result


def check_choices(config: DictConfig, registry: Registry) -> None:
    """Raise ConfigurationError for the first wrong choice or option, before anything slow happens."""
    try:
        own = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
        OmegaConf.to_container(own, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigurationError(f"{error.full_key}: {error.msg}".splitlines()[0]) from error
    registry.build_quantizer(config.quantizer)
    for name, node in config.task.items():
        registry.build_task(str(name), node)
    if not config.task:
        raise ConfigurationError(f"no task was chosen: give task=[NAME,...] of {', '.join(sorted(registry.tasks))}.")
    for name in config.baselines:
        registry.quantizer(name)


def _run_as_cell(config: DictConfig, directory: Path) -> dict[str, Any]:
    """Run a job inside a launcher's worker process, its output in a log; an error becomes part of the outcome."""
    log = io.StringIO()
    error = None
    try:
        with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            run_job(config, directory)
    except Exception as caught:
        error = str(caught) if isinstance(caught, KvbenchError) else f"{type(caught).__name__}: {caught}"
        traceback.print_exc(file=log)
        print(f"kvbench: cell {directory.name} failed: {error.splitlines()[0]}", file=sys.stderr)
    with contextlib.suppress(OSError):
        (directory / CELL_LOG).write_text(log.getvalue(), encoding="utf-8")
    return {"error": error}
