"""A headless Chromium for the tests that look at reports as a reader does, and figures that are drawn once."""

import json
import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from kvbench.reports import figure

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="session")
def chromium() -> "Iterator[Browser]":
    """The machine's own Chromium; tests are skipped without one."""
    program = next((path for path in map(shutil.which, NAMES) if path), None)
    if program is None:
        pytest.skip(f"no Chromium is installed: none of {', '.join(NAMES)} is on the PATH")
    playwright = pytest.importorskip("playwright.sync_api")
    # Chromium refuses its sandbox to root, as whom containers run.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=arguments)
        yield browser
        browser.close()


@pytest.fixture(scope="session", autouse=True)
def drawn_once() -> Iterator[None]:
    """Many tests render the same example: each of its figures is drawn once, which takes a twentieth of a second."""
    drawn: dict[str, str] = {}
    draw = figure.picture

    def picture(spec: dict[str, Any]) -> str:
        key = json.dumps(spec)
        if key not in drawn:
            drawn[key] = draw(spec)
        return drawn[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figure, "picture", picture)
        yield
