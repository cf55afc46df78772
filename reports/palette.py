"""The colours of reports, by name: for light pages and files, and for dark pages.

Text and its background differ by at least 4.5 : 1, lines of a picture and the page by at least 3 : 1 (WCAG AA).
Code widths run from pale to strong against the page in both schemes.
"""

from typing import Any

LIGHT = {
    "page": "#ffffff", "surface": "#f4f6f8", "ink": "#16191d", "muted": "#545c66", "rule": "#d5dae0",
    "accent": "#0a5bc4", "warn": "#6b4a00", "warn-page": "#fff3d1", "bad": "#b3261e",
    "series-1": "#0a5bc4", "series-2": "#c2500a", "series-3": "#7a3fb0", "series-4": "#0b7d69", "series-5": "#a8326d",
    "series-reference": "#6a727c",
    "width-1": "#dbe8f4", "width-2": "#b0d1e6", "width-3": "#7dbad1", "width-4": "#469dbf",
    "width-5": "#2a7db1", "width-6": "#285a9e", "width-7": "#2b3a80", "width-8": "#1d1b50", "width-other": "#b9a36a",
    "use-codes": "#2a7db1", "use-norms": "#d9822b", "use-padding": "#98a1ab",
    "on-pale": "#16191d", "on-middle": "#0b0d10", "on-strong": "#ffffff",
}  # fmt: skip

DARK = {
    "page": "#14171a", "surface": "#1e2226", "ink": "#e8eaed", "muted": "#a8b0ba", "rule": "#3a4048",
    "accent": "#7db4ff", "warn": "#ffd98a", "warn-page": "#3a2f10", "bad": "#ff9a90",
    "series-1": "#7db4ff", "series-2": "#ffab66", "series-3": "#cfa6f5", "series-4": "#5fd3bb", "series-5": "#f48fb6",
    "series-reference": "#a0a8b2",
    "width-1": "#223149", "width-2": "#235078", "width-3": "#28709c", "width-4": "#3a94b4",
    "width-5": "#62b5c0", "width-6": "#95d1c9", "width-7": "#c8e8d3", "width-8": "#f6f9e2", "width-other": "#8a7a4a",
    "use-codes": "#62a8e0", "use-norms": "#f0a860", "use-padding": "#78828d",
    "on-pale": "#ffffff", "on-middle": "#0b0d10", "on-strong": "#0b0d10",
}  # fmt: skip


def colour(name: str) -> str:
    """The colour as a page's stylesheet knows it, which follows the reader's light or dark setting."""
    if name not in LIGHT:
        raise KeyError(name)
    return f"var(--{name})"


def variables(colours: dict[str, str]) -> str:
    """The colours as custom properties of CSS."""
    return " ".join(f"--{name}: {value};" for name, value in colours.items())


_WRITTEN = {colour(name): value for name, value in LIGHT.items()}


def painted(part: Any) -> Any:
    """``part`` of a specification with every :func:`colour` replaced by the light one, for files."""
    if isinstance(part, dict):
        return {key: painted(value) for key, value in part.items()}
    if isinstance(part, list):
        return [painted(value) for value in part]
    return _WRITTEN.get(part, part) if isinstance(part, str) else part
