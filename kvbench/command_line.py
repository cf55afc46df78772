"""What is done to a command line before Hydra reads it."""

from collections.abc import Iterable, Sequence
from typing import NoReturn

from hydra._internal.utils import get_args_parser

from kvbench.errors import ConfigurationError, unknown_name


def flags_first(arguments: Sequence[str]) -> list[str]:
    """The arguments with overrides moved behind the flags, so that ``kvbench a=1 -m b=2,3`` may be written.

    argparse, which Hydra uses, takes overrides in one row only.
    """
    overrides = [each for each in arguments if _is_override(each)]
    return [each for each in arguments if not _is_override(each)] + overrides


def _is_override(argument: str) -> bool:
    return argument.startswith("~") or ("=" in argument and not argument.startswith("-"))


def check_flags(arguments: Sequence[str], subcommands: Iterable[str]) -> None:
    """Raise ConfigurationError for flags that Hydra does not know, or a word that is no override."""
    parser = get_args_parser()

    def refuse(message: str) -> NoReturn:
        raise ConfigurationError(f"{message}.\nWrite kvbench [FLAGS] KEY=VALUE ...; 'kvbench --help' explains.")

    parser.error = refuse  # type: ignore[method-assign]
    if any(each in ("--version", "-h", "--help") for each in arguments):
        return
    parsed = parser.parse_args(list(arguments))
    for word in parsed.overrides:
        if not _is_override(word):
            near = unknown_name("command", word, subcommands)
            raise ConfigurationError(f"{near}\nOptions are written KEY=VALUE; 'kvbench --help' explains.")
