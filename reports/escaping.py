"""Texts that come from results, made safe to show: names of models, plugins and tasks may hold anything.

A name must not run as markup, drive a terminal, reverse the text around it, or push a table off the page.
"""

import html
import re
import unicodedata

NAME_LIMIT = 60
"""Characters of a name where it heads a row, a column or a page; in HTML the whole is in the tooltip."""

_UNSHOWABLE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
_JOINERS = "\u200c\u200d"  # invisible, but emoji sequences and Persian are spelled with them
_MARKDOWN_PUNCTUATION = re.compile(r"([\\`*{}\[\]|#~!$])|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")


def visible(text: str, keep: str = "") -> str:
    """``text`` with control, bidi-formatting and surrogate characters spelled out as ``\\xNN``, ``\\uNNNN``.

    Characters in ``keep`` stay as they are.
    """
    if text.isprintable():  # nearly every text is, and a comparison has a hundred thousand
        return text
    return "".join(
        character
        if character in keep or character in _JOINERS or unicodedata.category(character) not in _UNSHOWABLE
        else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def shorten(text: str, limit: int) -> str:
    """:func:`visible` text of at most ``limit`` characters, the last an ellipsis where something was cut."""
    shown = visible(text)
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def html_text(text: str) -> str:
    """Any text as HTML content or as a quoted attribute."""
    return html.escape(visible(text))


def html_preformatted(text: str) -> str:
    """Text of several lines as the content of a ``<pre>``."""
    return html.escape(visible(text, keep="\n\t"))


def html_name(text: str, limit: int | None = None) -> str:
    """A name as HTML content, isolated so that right-to-left script does not reorder what surrounds it.

    Past ``limit`` characters it is cut, with the whole name as tooltip.
    """
    if limit is not None and len(visible(text)) > limit:
        return f'<bdi title="{html_text(text)}">{html.escape(shorten(text, limit))}</bdi>'
    return f"<bdi>{html_text(text)}</bdi>"


def markdown_text(text: str) -> str:
    """Any text as inline Markdown, in a table cell too: no markup, no HTML, no autolink."""
    escaped = _MARKDOWN_PUNCTUATION.sub(r"\\\g<0>", visible(text))
    escaped = escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return escaped.replace("://", "&#58;//")


def markdown_block(text: str, language: str = "") -> str:
    """Text as a fenced Markdown code block that nothing in the text can close."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{visible(text, keep=chr(10) + chr(9))}\n{fence}"
