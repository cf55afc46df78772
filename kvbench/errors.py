"""Errors that are the user's to mend: the command line prints them in at most two lines and exits with code 2."""

import difflib
from collections.abc import Iterable


class KvbenchError(Exception):
    """Something the user can mend. The message says what was given, what is allowed, and what to do."""


class ConfigurationError(KvbenchError):
    """An option has a value that is not allowed, or options contradict each other."""


class ModelError(KvbenchError):
    """A model cannot be found, fetched or loaded, or its geometry cannot be served."""


class CorpusError(KvbenchError):
    """A text is missing, unreadable or too short."""


class PluginError(KvbenchError):
    """A plugin cannot be loaded or breaks its contract."""


class NonFiniteError(KvbenchError):
    """NaN or infinity where only finite numbers make sense; the message names the tensor and layer."""


class EngagementError(KvbenchError):
    """A layer did not read its keys and values from packed storage as it should have; the message names the layer."""


class ResultError(KvbenchError):
    """A result does not satisfy the schema, or cannot be written or read."""


def unknown_name(kind: str, given: str, known: Iterable[str]) -> str:
    """One sentence for a name that is not registered: what was given, a near miss if any, what is allowed."""
    names = sorted(known)
    near = difflib.get_close_matches(given, names, n=1)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    return f"unknown {kind} '{given}'.{hint} Available: {', '.join(names) or 'none'}."
