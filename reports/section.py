"""The plugin contract for report sections."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from kvbench.results import Result


class ReportSection(ABC):
    """One section of a report. A section that does not apply to a result returns an empty string.

    HTML is inserted as it is: escape every name that comes from a result (``html.escape``).
    """

    name: ClassVar[str]
    title: ClassVar[str]

    @abstractmethod
    def html(self, result: "Result") -> str:
        """The section's body as an HTML fragment, without its heading."""

    def markdown(self, result: "Result") -> str:
        """The section's body as Markdown, without its heading."""
        return ""

    def compare(self, results: "Sequence[Result]") -> str:
        """The section's body in a comparison of several runs (``kvbench report``), as an HTML fragment."""
        return ""
