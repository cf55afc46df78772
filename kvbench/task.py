"""The plugin contract for tasks: what is measured about a quantizer on a model."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from kvbench.session import Session

CachePath = Literal["packed", "peer", "simulated"]
"""How keys and values reached attention."""


@dataclass(frozen=True)
class TaskResult:
    """What a task measured.

    ``path`` is ``"packed"`` where keys and values were read from kvbench's packed storage, ``"peer"`` where they went
    through another library's cache, ``"simulated"`` where they were quantized and dequantized without being stored.
    ``metrics`` is plain JSON data; ``n`` counts the samples behind it and ``unit`` says what one is ("tokens",
    "windows", ...). ``samples`` holds the values behind a metric, in an order that is the same for every quantizer, so
    that quantizers can be compared pair by pair.
    """

    metrics: dict[str, Any]
    n: int
    unit: str
    path: CachePath
    notes: tuple[str, ...] = ()
    samples: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Task(ABC):
    """Base of every task: a frozen dataclass whose fields are its options, ``task.<name>.<field>``."""

    name: ClassVar[str]

    def inputs(self) -> dict[str, str]:
        """Digests, by name, of what the task reads beside model and corpus. A changed input is measured anew."""
        return {}

    @abstractmethod
    def run(self, session: "Session") -> TaskResult:
        """Measure ``session.quantizer`` on ``session.model``. Must be deterministic for a given session."""
