"""Any task of lm-eval, its log-likelihoods and its generations read from the packed cache."""

import contextlib
import hashlib
import importlib.util
import io
import json
import logging
import math
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kvbench.errors import ConfigurationError, unknown_name
from kvbench.task import Task, TaskResult

if TYPE_CHECKING:
    from kvbench.session import Session

# Of what lm-eval returns, the parts that do not depend on when and where it ran.
KEPT = ("results", "groups", "group_subtasks", "configs", "versions", "n-shot", "higher_is_better", "n-samples")


@dataclass(frozen=True)
class LmEval(Task):
    """Tasks of EleutherAI's lm-eval by name, those of a local folder of task files too.

    Metrics are named ``<task>.<metric>``; ``lm_eval`` holds lm-eval's own results.
    """

    name: ClassVar[str] = "lm_eval"

    tasks: list[str] = field(default_factory=list, metadata={"help": "names of lm-eval tasks, groups or tags"})
    num_fewshot: int | None = field(default=None, metadata={"help": "examples in the prompt; null: the task's own"})
    limit: int | None = field(default=None, metadata={"help": "documents a task, the first ones; null: all"})
    include_path: str | None = field(default=None, metadata={"help": "folder of further task files"})
    apply_chat_template: bool = field(default=False, metadata={"help": "put prompts in the model's chat template"})
    batch_size: int = field(default=1, metadata={"help": "requests read together; 1: what they share is read once"})
    seed: int = field(default=1234, metadata={"help": "seed of everything lm-eval draws"})

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ConfigurationError("task.lm_eval.tasks names no task: give task.lm_eval.tasks=[NAME,...].")
        if importlib.util.find_spec("lm_eval") is None:
            raise ConfigurationError(
                "task=lm_eval needs the package lm-eval, which is not installed: pip install 'kvbench[lm-eval]'."
            )
        if self.batch_size < 1 or (self.limit is not None and self.limit < 1):
            raise ConfigurationError("task.lm_eval.batch_size and limit must be 1 or more.")
        if self.include_path is not None and not Path(self.include_path).expanduser().is_dir():
            raise ConfigurationError(f"task.lm_eval.include_path={self.include_path} is not a folder.")

    def inputs(self) -> dict[str, str]:
        """lm-eval's version, and the files of ``include_path``; data that tasks fetch from elsewhere is not known."""
        from kvbench.identity import package_versions

        found = package_versions(("lm-eval", "datasets"))
        if self.include_path is not None:
            total = hashlib.sha256()
            folder = Path(self.include_path).expanduser()
            for file in sorted(file for file in folder.rglob("*") if file.is_file()):
                total.update(f"{file.relative_to(folder)}\0".encode() + file.read_bytes())
            found["include_path"] = total.hexdigest()
        return found

    def run(self, session: "Session") -> TaskResult:
        import lm_eval

        from kvbench.lm_eval_model import KvbenchLM

        with quiet_in_a_pipe():
            found = lm_eval.simple_evaluate(
                model=KvbenchLM(session=session, batch_size=self.batch_size),
                tasks=self.tasks,
                num_fewshot=self.num_fewshot,
                limit=self.limit,
                task_manager=task_manager(self.tasks, self.include_path),
                apply_chat_template=self.apply_chat_template,
                random_seed=self.seed,
                numpy_random_seed=self.seed,
                torch_random_seed=self.seed,
                fewshot_random_seed=self.seed,
            )
        own = plain({key: found[key] for key in KEPT if key in found})
        return TaskResult(
            metrics={**scalars(own["results"]), "lm_eval": own},
            n=sum(len(samples) for samples in found["samples"].values()),
            unit="documents",
            path=session.path,
            samples=paired_samples(found["samples"]),
        )


def task_manager(tasks: list[str], include_path: str | None) -> Any:
    """lm-eval's index of tasks; its own thousands of files are read only where the folder's do not do.

    Raises ConfigurationError for a task that is in neither.
    """
    from lm_eval.tasks import TaskManager

    if include_path is not None:
        local = TaskManager(include_path=include_path, include_defaults=False)
        if all(task in local.all_tasks for task in tasks):
            return local
    manager = TaskManager(include_path=include_path)
    for task in tasks:
        if not manager.match_tasks([task]):
            raise ConfigurationError(unknown_name("lm-eval task", task, near(task, manager.all_tasks)))
    return manager


def near(name: str, known: list[str]) -> list[str]:
    """The names that begin as ``name`` does: lm-eval knows thousands."""
    alike = [other for other in known if other[:4].lower() == name[:4].lower()]
    return alike[:20] or ["run 'lm-eval ls tasks' for all"]


def scalars(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """lm-eval's ``{task: {"acc,none": 0.5}}`` as ``{"task.acc": 0.5}``; filters other than none stay in the name."""
    found = {}
    for task, metrics in results.items():
        for key, value in metrics.items():
            if isinstance(value, int | float) and not isinstance(value, bool) and key != "sample_len":
                metric, _, name = key.partition(",")
                found[f"{task}.{metric}" if name in ("", "none") else f"{task}.{metric}.{name}"] = float(value)
    return found


def paired_samples(samples: Mapping[str, list[Mapping[str, Any]]]) -> dict[str, list[float]]:
    """Each task's numeric metrics document by document, for comparison pair by pair."""
    found: dict[str, list[float]] = {}
    for task, documents in samples.items():
        for document in sorted(documents, key=lambda document: document["doc_id"]):
            for metric in document.get("metrics", []):
                value = document.get(metric)
                if isinstance(value, int | float) and math.isfinite(value):
                    found.setdefault(f"{task}.{metric}", []).append(float(value))
    return found


def plain(data: Any) -> Any:
    """``data`` as JSON would give it back; functions by their source or name, NaN and infinity as null."""
    from lm_eval.utils import handle_non_serializable

    text = json.dumps(data, default=handle_non_serializable)
    return json.loads(text, parse_constant=lambda constant: None)


@contextlib.contextmanager
def quiet_in_a_pipe() -> Iterator[None]:
    """lm-eval reports what it does; where nobody watches, only its errors are kept."""
    if sys.stderr.isatty():
        yield
        return
    loggers = [logging.getLogger(name) for name in ("lm_eval", "lm-eval")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    error_output = os.dup(2)
    try:
        with contextlib.redirect_stderr(io.StringIO()), Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), 2)  # it also asks git for a version, which complains outside a repository
            yield
    finally:
        os.dup2(error_output, 2)
        os.close(error_output)
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
