"""A plugin's dataclass as a node of the configuration, and a node turned back into the dataclass."""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from omegaconf import MISSING, DictConfig, OmegaConf

from kvbench.errors import ConfigurationError, KvbenchError

T = TypeVar("T")
RESERVED = frozenset({"name", "_target_"})  # "name" says which quantizer a node is; Hydra acts on "_target_"


def options_class(cls: type, named: bool = True) -> type:
    """A mutable dataclass with the fields of the frozen dataclass ``cls``, types and defaults kept.

    ``named`` puts a field ``name`` first, which says what a node is where its place does not. OmegaConf makes a
    frozen dataclass read-only, so the configuration needs a class of its own. Raises TypeError where a field cannot
    be held by a configuration.
    """
    hints = typing.get_type_hints(cls)
    specifications: list[Any] = []
    if named:
        specifications.append(("name", str, dataclasses.field(default=cls.name)))  # type: ignore[attr-defined]
    for field in dataclasses.fields(cls):
        if field.name in RESERVED:
            raise TypeError(f"an option cannot be called '{field.name}'")
        specifications.append((field.name, hints[field.name], _default(field)))
    options = dataclasses.make_dataclass(f"{cls.__name__}Options", specifications)
    try:
        OmegaConf.structured(options)
    except Exception as error:  # OmegaConf's own errors, and whatever a default factory raises
        raise TypeError(f"an option has a type that Hydra cannot hold: {str(error).splitlines()[0]}") from error
    return options


def _default(field: "dataclasses.Field[Any]") -> Any:
    if field.default is not dataclasses.MISSING:
        return dataclasses.field(default=field.default, metadata=field.metadata)
    if field.default_factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=field.default_factory, metadata=field.metadata)
    return dataclasses.field(default=MISSING, metadata=field.metadata)


def build(kind: str, cls: type[T], node: DictConfig | Mapping[str, Any]) -> T:
    """An instance of ``cls`` with the values of ``node``, of which ``name`` is left out.

    Raises ConfigurationError where ``cls`` refuses a value, or an option without a default was not given.
    """
    values = OmegaConf.to_container(
        OmegaConf.create(dict(node)) if not isinstance(node, DictConfig) else node, resolve=True
    )
    assert isinstance(values, dict)
    name = values.pop("name", getattr(cls, "name", cls.__name__))
    missing = [str(key) for key, value in values.items() if value == MISSING]
    if missing:
        raise ConfigurationError(
            f"{kind} '{name}' needs a value for {', '.join(missing)}: give {kind}.{missing[0]}=VALUE."
        )
    hints = typing.get_type_hints(cls)
    arguments = {
        str(key): tuple(value) if typing.get_origin(hints.get(str(key))) is tuple and value is not None else value
        for key, value in values.items()
    }
    try:
        return cls(**arguments)
    except KvbenchError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{kind} '{name}' refuses its options: {error}") from error
