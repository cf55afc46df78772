"""Both reports are written whole, beside the result."""

from pathlib import Path

import pytest

from kvbench.errors import ResultError
from kvbench.reports.html import render_html
from kvbench.reports.markdown import render_markdown
from kvbench.reports.write import write_reports

from .example_results import result


def test_both_reports_are_written_and_nothing_else(tmp_path: Path) -> None:
    markdown, html = write_reports(result(), tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["report.html", "report.md"]
    assert markdown.read_text(encoding="utf-8") == render_markdown(result())
    assert html.read_text(encoding="utf-8") == render_html(result())


def test_a_folder_that_cannot_be_written_is_the_users_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ResultError, match=r"cannot write .*report\.md"):
        write_reports(result(), tmp_path / "file")
