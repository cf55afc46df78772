"""The command ``kvbench``: subcommands by name, everything else is the Hydra application.

Exit codes: 0 done, 1 a run or cell failed or kvbench has a defect, 2 bad input, 130 interrupted.
"""

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import kvbench
from kvbench.errors import KvbenchError

FULL_ERROR = "HYDRA_FULL_ERROR"
INTERRUPTED = 130  # as shells report a process ended by SIGINT


def plugins(arguments: Sequence[str]) -> int:
    """What is installed, and what failed to load."""
    from kvbench.plugin_list import main

    return main(arguments)


def doctor(arguments: Sequence[str]) -> int:
    """Versions, devices, the attention baseline, the default model."""
    from kvbench.doctor import main

    return main(arguments)


def report(arguments: Sequence[str]) -> int:
    """All runs under some folders as one comparison."""
    from kvbench.reports.command import main

    return main(arguments)


def bench(arguments: Sequence[str]) -> int:
    """The kernels against the best fp16 attention, on a GPU."""
    from kvbench.bench import main

    return main(arguments)


def new_plugin(arguments: Sequence[str]) -> int:
    """The beginnings of a plugin."""
    from kvbench.new_plugin import main

    return main(arguments)


SUBCOMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "plugins": plugins,
    "new-plugin": new_plugin,
    "doctor": doctor,
    "report": report,
    "bench": bench,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line ``arguments`` (default: ``sys.argv``) and return the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    wants_traceback = os.environ.get(FULL_ERROR) == "1"
    try:
        if given and given[0] in SUBCOMMANDS:
            return SUBCOMMANDS[given[0]](given[1:])
        if given == ["--version"]:
            print(f"kvbench {kvbench.__version__}")
            return 0
        if "--help" in given or "-h" in given:
            from kvbench.registry import load_registry
            from kvbench.usage import help_text

            print(help_text(load_registry()))
            return 0
        return _application(given)
    except KvbenchError as error:
        if wants_traceback:
            traceback.print_exc()
        print(f"kvbench: {_two_lines(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output went away, as 'head' does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        traceback.print_exc()
        what = " ".join(f"{type(error).__name__}: {error}".split())
        print(f"kvbench: a defect in kvbench or a plugin, please report it: {what}", file=sys.stderr)
        return 1


def _application(arguments: list[str]) -> int:
    from kvbench.application import run_application
    from kvbench.cells import SweepFailed, result_error
    from kvbench.command_line import check_flags, flags_first
    from kvbench.input_errors import user_error
    from kvbench.registry import load_registry

    ordered = flags_first(arguments)
    check_flags(ordered, SUBCOMMANDS)
    registry = load_registry()
    try:
        with _hydra_raises(ordered):
            job = run_application(registry)
    except SweepFailed:
        return 1
    except Exception as error:
        said = user_error(error, registry)
        if said is None:
            raise
        raise said from error
    if job.error is not None:
        raise job.error
    result = job.result
    if result is not None and result.status != "ok":
        reason = result_error(result) or "the report says more"
        print(f"kvbench: the run ended with status '{result.status}': {reason}", file=sys.stderr)
        return 1
    return 0


@contextmanager
def _hydra_raises(arguments: list[str]) -> Iterator[None]:
    """Hydra reads ``arguments``, and raises its errors instead of printing them and exiting."""
    argv, full_error = sys.argv, os.environ.get(FULL_ERROR)
    sys.argv = [argv[0], *arguments]
    os.environ[FULL_ERROR] = "1"
    try:
        yield
    finally:
        sys.argv = argv
        del os.environ[FULL_ERROR]
        if full_error is not None:
            os.environ[FULL_ERROR] = full_error


def _two_lines(text: str) -> str:
    lines = [line.rstrip() for line in text.strip().splitlines() if line.strip()]
    return "\n".join([lines[0], " ".join(lines[1:])][: len(lines)]) if lines else "unknown error"
