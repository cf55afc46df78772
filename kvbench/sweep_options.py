"""Sweeps over quantizers that do not share all options: ``-m quantizer=int,fp8 quantizer.k_bits=2,4``."""

from collections.abc import Collection, Mapping, Sequence

GROUP = "quantizer"


def leave_out_foreign_options(
    combinations: Sequence[Sequence[str]], options: Mapping[str, Collection[str]]
) -> list[list[str]]:
    """The combinations of overrides without those that only other quantizers of the sweep have an option for.

    ``options`` maps quantizers to the names of their options. An option that no quantizer of the sweep has stays, to be
    refused as unknown. Combinations that become equal are kept once.
    """
    swept = {name for name in map(_quantizer, combinations) if name in options}
    shared = {option for name in swept for option in options[name]}
    kept: list[list[str]] = []
    for combination in combinations:
        own = options.get(_quantizer(combination), shared)
        cell = [override for override in combination if _option(override) not in shared.difference(own)]
        if cell not in kept:
            kept.append(cell)
    return kept


def _quantizer(combination: Sequence[str]) -> str:
    """The quantizer that a combination chooses; empty where it leaves the default."""
    chosen = [override.partition("=")[2] for override in combination if override.partition("=")[0] == GROUP]
    return chosen[-1] if chosen else ""


def _option(override: str) -> str:
    """The quantizer's option that an override sets; empty for any other."""
    key = override.partition("=")[0].lstrip("+")
    return key.removeprefix(f"{GROUP}.") if key.startswith(f"{GROUP}.") else ""
