"""``kvbench -m``: every cell of a sweep in a process of its own, and one summary at the end.

Hydra's sweeper stops at the first cell that cannot be composed and reports only the first that fails; its basic
launcher runs all cells in one process. The two classes here replace them. The sweeper works with any Hydra launcher
(``hydra/launcher=joblib``); the launcher is the default one.
"""

import contextlib
import dataclasses
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from kvbench.cells import Cell, CellOutcome, SweepFailed, name_cells, print_cells, read_outcome, write_summary
from kvbench.errors import ConfigurationError, KvbenchError
from kvbench.input_errors import user_error
from kvbench.registry import Registry, load_registry
from kvbench.sweep_options import leave_out_foreign_options

PLUGINS = "hydra_plugins.kvbench"  # the module whose subclasses Hydra accepts
CELL_LOG = "cell.log"
# Options of the sweep itself, which a cell's own process must not repeat.
SWEEP_ONLY = (
    "hydra.mode",
    "hydra.sweep",
    "hydra.run.dir",
    "hydra/sweeper",
    "hydra.sweeper",
    "hydra/launcher",
    "hydra.launcher",
)


@dataclass
class SweeperOptions:
    _target_: str = f"{PLUGINS}.CellSweeper"
    # Swept beside the command line's, which go first: an experiment's own sweep. ${...} is resolved in each cell.
    params: dict[str, str] | None = None


@dataclass
class LauncherOptions:
    _target_: str = f"{PLUGINS}.CellLauncher"
    jobs: int = 1


def register_sweep_plugins() -> None:
    """Make ``hydra/sweeper=kvbench`` and ``hydra/launcher=kvbench`` known to Hydra."""
    from hydra_plugins import kvbench

    # Hydra finds plugins by listing folders, and an editable install's are not where it looks.
    for plugin in (kvbench.CellSweeper, kvbench.CellLauncher):
        Plugins.instance().register(plugin)
    store = ConfigStore.instance()
    store.store(group="hydra/sweeper", name="kvbench", node=SweeperOptions, provider="kvbench")
    store.store(group="hydra/launcher", name="kvbench", node=LauncherOptions, provider="kvbench")


class CellSweeper(Sweeper):
    """All combinations of the swept values; a cell that fails does not stop the others."""

    def __init__(self, params: dict[str, str] | None = None) -> None:
        super().__init__()
        self.params = params or {}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config = config
        self.hydra_context = hydra_context
        # As written: what a value refers to is the cell's, not this process's.
        written = OmegaConf.to_container(config.hydra.sweeper, resolve=False)
        assert isinstance(written, dict)
        self.params = written.get("params") or {}
        self.cell_launcher = Plugins.instance().instantiate_launcher(hydra_context, task_function, config)

    def sweep(self, arguments: list[str]) -> list[CellOutcome]:
        """Run all cells and write the summary.

        Raises ConfigurationError where no cell can run, and SweepFailed where some cell failed.
        """
        # Imported late: Hydra executes the modules of its plugins anew when it starts.
        from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

        assert self.config is not None and self.hydra_context is not None
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        given = {override.key_or_group for override in parser.parse_overrides(arguments)}
        arguments = [*arguments, *(f"{key}={values}" for key, values in self.params.items() if key not in given)]
        (combinations,) = BasicSweeper.split_arguments(parser.parse_overrides(arguments), None)
        registry = load_registry()
        options = {
            name: [field.name for field in dataclasses.fields(entry.value)]
            for name, entry in registry.quantizers.items()
        }
        cells = name_cells(leave_out_foreign_options(combinations, options))
        errors: dict[str, str] = {}
        launchable = [cell for cell in cells if self._composes(cell, registry, errors)]
        if not launchable:
            raise ConfigurationError(next(iter(errors.values())))
        directory = Path(str(self.config.hydra.sweep.dir)).absolute()
        directory.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self.config, directory / "multirun.yaml")
        for notice in registry.notices():
            print(f"kvbench: warning: {notice}", file=sys.stderr)
        for name, error in errors.items():
            _report_failure(name, error)
        started = time.time()
        try:
            self._launch(launchable, errors, directory, started)
        finally:
            outcomes = [_outcome(cell, directory, errors.get(cell.name), started) for cell in cells]
            write_summary(outcomes, directory)
            print_cells(outcomes)
            print(f"summary: {directory / 'summary.md'}")
        if any(outcome.failed for outcome in outcomes):
            raise SweepFailed
        return outcomes

    def _composes(self, cell: Cell, registry: Registry, errors: dict[str, str]) -> bool:
        """Check a cell's options here: a wrong one must not take a launcher down, nor wait for its turn."""
        from kvbench.application import check_choices  # which imports this module

        assert self.hydra_context is not None and self.config is not None
        try:
            config = self.hydra_context.config_loader.load_sweep_config(self.config, list(cell.overrides))
            check_choices(config, registry)
        except Exception as error:
            said = user_error(error, registry)
            if said is None:
                raise
            errors[cell.name] = str(said)
        return cell.name not in errors

    def _launch(self, cells: Sequence[Cell], errors: dict[str, str], directory: Path, started: float) -> None:
        jobs = [[*cell.overrides, f"hydra.sweep.subdir={quoted(cell.name)}"] for cell in cells]
        try:
            returns = self.cell_launcher.launch(jobs, initial_job_idx=0)
        except Exception as error:  # a worker that died takes joblib's whole batch with it
            unfinished = [cell for cell in cells if not _has_result(directory / cell.name, started)]
            errors.update({cell.name: f"{type(error).__name__}: {error}" for cell in unfinished})
            _report_failure("the launcher", str(error))
            return
        for cell, returned in zip(cells, returns, strict=True):
            reason = _job_error(returned)
            if reason is not None:
                errors[cell.name] = reason


class CellLauncher(Launcher):
    """Runs each cell as ``kvbench OVERRIDES hydra.run.dir=CELL`` in a child process, ``jobs`` at a time."""

    def __init__(self, jobs: int = 1) -> None:
        if jobs < 1:
            raise ConfigurationError(f"hydra.launcher.jobs={jobs} is not allowed: it must be 1 or more.")
        self.jobs = jobs
        self.config: DictConfig | None = None
        self.hydra_context: HydraContext | None = None
        self.processes: set[subprocess.Popen[bytes]] = set()
        self.lock = threading.Lock()

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config, self.hydra_context = config, hydra_context

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        cells = [(list(overrides), self._directory(overrides)) for overrides in job_overrides]
        with ThreadPoolExecutor(max_workers=self.jobs) as pool:
            futures = [pool.submit(self._run, *cell, f"[{i}/{len(cells)}] ") for i, cell in enumerate(cells, 1)]
            try:
                return [future.result() for future in futures]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self._stop()
                raise

    def _directory(self, overrides: Sequence[str]) -> Path:
        assert self.config is not None and self.hydra_context is not None
        sweep = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides)).hydra.sweep
        return Path(str(sweep.dir)).absolute() / str(sweep.subdir)

    def _run(self, overrides: list[str], directory: Path, progress: str) -> JobReturn:
        if sys.stdout.isatty():
            print(f"{progress}{directory.name} ...", flush=True)
        start = time.monotonic()
        own = [each for each in overrides if not each.startswith(SWEEP_ONLY)]
        error = self._call([*own, f"hydra.run.dir={quoted(str(directory))}"], directory)
        if error is None:
            print(f"{progress}{directory.name}: ok, {time.monotonic() - start:.0f} s", flush=True)
        else:
            _report_failure(directory.name, error, progress)
        returned = JobReturn(overrides=overrides, status=JobStatus.COMPLETED)
        returned.return_value = {"error": error}
        return returned

    def _call(self, overrides: list[str], directory: Path) -> str | None:
        """Run a child to its end, its output in the cell's log; why it failed, if it did."""
        assert self.config is not None
        # -P: the working directory must not shadow installed packages, as it does not for the command itself.
        command = [sys.executable, "-P", "-m", "kvbench", *_flags(self.config), *overrides]
        directory.mkdir(parents=True, exist_ok=True)
        log = directory / CELL_LOG
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
            with self.lock:
                self.processes.add(process)
            try:
                code = process.wait()
            finally:
                with self.lock:
                    self.processes.discard(process)
        return None if code == 0 else _child_error(code, log)

    def _stop(self) -> None:
        with self.lock:
            for process in self.processes:
                with contextlib.suppress(OSError):
                    process.send_signal(signal.SIGTERM)


def _flags(config: DictConfig) -> list[str]:
    """What else the sweep was started with that concerns its cells: Hydra's flags and ``hydra.*`` options."""
    flags: list[str] = []
    if config.hydra.job.config_name:
        flags += ["--config-name", str(config.hydra.job.config_name)]
    for source in config.hydra.runtime.config_sources:
        if source.provider == "command-line":
            flags += ["--config-dir", str(source.path)]
    flags += [each for each in config.hydra.overrides.hydra if not each.lstrip("+~").startswith(SWEEP_ONLY)]
    return flags


def _outcome(cell: Cell, directory: Path, error: str | None, started: float) -> CellOutcome:
    """A cell's outcome: what its result says, unless it failed after or without one."""
    if error is not None and _has_result(directory / cell.name, started):
        outcome = read_outcome(cell, directory / cell.name)
        if outcome.status != "ok":
            return outcome
    return read_outcome(cell, directory / cell.name, error)


def _has_result(folder: Path, started: float) -> bool:
    """Whether the cell wrote a result since ``started``; an earlier sweep into the same folder does not count."""
    result = folder / "result.json"
    return result.exists() and result.stat().st_mtime >= started


def _job_error(returned: JobReturn) -> str | None:
    if returned.status == JobStatus.FAILED:
        error: Any = returned._return_value
        return str(error) if isinstance(error, KvbenchError) else f"{type(error).__name__}: {error}"
    value = returned.return_value
    return value.get("error") if isinstance(value, dict) else None


def _child_error(code: int, log: Path) -> str:
    """Why a child failed: the last lines of its output, or the signal that ended it."""
    if code < 0:
        hint = " (out of memory?)" if -code == signal.SIGKILL else ""
        return f"ended by signal {signal.Signals(-code).name}{hint}; its output is in {log}"
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    said = [index for index, line in enumerate(lines) if line.startswith("kvbench: ")]
    # An error meant for the user is at most two lines, the first marked; a traceback's last line says what it was.
    kept = lines[said[-1] :][:2] if code == 2 and said else lines[-1:]
    return "\n".join(kept).removeprefix("kvbench: ") or f"exit code {code} without a word"


def _report_failure(name: str, error: str, prefix: str = "") -> None:
    print(
        f"{prefix}{name}: failed: {error.splitlines()[0] if error else 'no reason given'}", file=sys.stderr, flush=True
    )


def quoted(text: str) -> str:
    """``text`` as a quoted value of Hydra's override grammar, with nothing in it interpolated."""
    # A backslash means itself there, unless a quote follows it.
    escaped = re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + (match[2] and "\\'"), text)
    return "'" + escaped.replace("${", "\\${") + "'"
