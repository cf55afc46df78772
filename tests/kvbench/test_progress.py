"""Progress bars: on a terminal, and nowhere else."""

import pytest

from kvbench.progress import announce, track


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_is_shown_on_a_terminal_only(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    else:
        monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert list(track([1, 2, 3], "reading runs")) == [1, 2, 3]
    announce("bundling Vega")
    said = capsys.readouterr()
    assert said.out == ""
    assert ("reading runs" in said.err, "bundling Vega ..." in said.err) == (terminal, terminal)
