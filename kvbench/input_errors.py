"""Hydra's and OmegaConf's errors, said to the user: what was given, what is allowed, what to do, in two lines."""

import difflib
import re
import traceback
from typing import Any

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from kvbench.errors import ConfigurationError, KvbenchError
from kvbench.registry import Registry

# How OmegaConf's messages on a value of the wrong type end, and what to say instead.
ENDINGS = {
    "to Integer": "a whole number",
    "to Float": "a number",
    "a valid bool": "true or false",
}
HELP = "'kvbench --help' lists options and choices."


def user_error(error: BaseException, registry: Registry) -> KvbenchError | None:
    """The error in words for the user, or None where it is no error of theirs but a defect."""
    if isinstance(error, KvbenchError):
        return error
    if isinstance(error, MissingConfigException):
        return ConfigurationError(_missing_choice(error, registry))
    if isinstance(error, OverrideParseException):
        return ConfigurationError(
            f"cannot read '{error.override}': {_reason(error.message)}.\n"
            "Write KEY=VALUE, and quote it for the shell where it has spaces, brackets or commas: 'task=[perplexity]'."
        )
    cause = next((each for each in _chain(error) if isinstance(each, OmegaConfBaseException)), None)
    if isinstance(cause, ConfigAttributeError | ConfigKeyError):
        return ConfigurationError(_unknown_key(cause, registry))
    if isinstance(cause, ValidationError):
        return ConfigurationError(_bad_value(cause))
    if isinstance(cause, MissingMandatoryValue):
        return ConfigurationError(f"a value is missing: give {cause.full_key}=VALUE. {HELP}")
    if isinstance(error, HydraException | OmegaConfBaseException) or _raised_by_hydra(error):
        return ConfigurationError(_two_lines(str(error)))
    if isinstance(error, OSError):
        # The job keeps its own errors, so this is Hydra making the run's folder.
        where = error.filename or "the output folder"
        return ConfigurationError(
            f"cannot write {where}: {error.strerror or error}. Choose another folder with hydra.run.dir=DIR."
        )
    return None


def _raised_by_hydra(error: BaseException) -> bool:
    """Whether a bare ValueError is Hydra's word on the command line, as for ``quantizer=null``."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return isinstance(error, ValueError) and str(frames[-1].f_globals.get("__name__", "")).startswith("hydra.")


def _chain(error: BaseException) -> list[BaseException]:
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or current.__context__
    return chain


def _missing_choice(error: MissingConfigException, registry: Registry) -> str:
    group, _, name = (error.missing_cfg_file or "").rpartition("/")
    if not group:
        return _two_lines(str(error))
    options = [str(option) for option in error.options or ()]
    if (group, name) == ("hydra/launcher", "joblib"):
        return "the joblib launcher is not installed: pip install 'kvbench[joblib]', or use hydra.launcher.jobs=N."
    if group == "task":  # Hydra says nothing of a list's options
        options = list(registry.tasks)
    return registry.unknown(group, name, options)


def _unknown_key(error: OmegaConfBaseException, registry: Registry) -> str:
    """A key that is not in the configuration: near misses in the same node."""
    full_key = str(error.full_key or error.key)
    parent, _, key = full_key.rpartition(".")
    if parent == "task" and key in registry.tasks:
        return f"task '{key}' is not selected: add it with task=[...,{key}], or leave task.{key} out."
    known = _keys(error.parent_node)
    near = difflib.get_close_matches(key, known, n=1)
    prefix = f"{parent}." if parent else ""
    hint = f" Did you mean '{prefix}{near[0]}'?" if near else ""
    where = f"in {parent}" if parent else "at the top"
    return f"unknown option '{full_key}'.{hint}\nAvailable {where}: {', '.join(sorted(known)) or 'none'}."


def _keys(node: Any) -> list[str]:
    return [str(key) for key in node if key != "hydra"] if isinstance(node, DictConfig) else []


def _bad_value(error: ValidationError) -> str:
    text = str(error.msg or error).splitlines()[0]
    expected = next((words for ending, words in ENDINGS.items() if re.search(f" {ending}( \\(|$)", text)), None)
    if expected and error.full_key and "'" in text:
        given = text.split("'")[1]
        return f"{error.full_key}={given} is not allowed: it must be {expected}."
    if "is not a ListConfig" in text:
        return f"{error.full_key} must be a list: write {error.full_key}=[A,B]."
    return f"{error.full_key or 'an option'}: {text}"


def _reason(message: str) -> str:
    lines = [line.strip() for line in message.splitlines()]
    kept = [line for line in lines if line and not line.startswith(("See http", "^", "Error parsing override"))]
    return (
        kept[0].removeprefix("LexerNoViableAltException: ").partition(" expecting ")[0].rstrip(".")
        if kept
        else "not an override"
    )


def _two_lines(text: str) -> str:
    several = re.match(r"Ambiguous value for argument '(.*)'", text)
    if several:
        return f"'{several[1]}' holds several values: add -m for a sweep over them, or write a list, KEY=[A,B]."
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "\n".join(lines[:2])
