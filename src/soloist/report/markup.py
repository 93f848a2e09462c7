"""HTML that can only show: escaped text of bounded length, tables, pictures inside the page.

Guarantees: text that comes through `text` is shown as it is spelled, with control and direction characters as escapes,
and is never longer than its limit; a page loads nothing and runs nothing, which its content policy says again.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence

from soloist.report.text import printable

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
SHORT, LONG = 200, 2000
"""Characters of a label and of a message."""


def text(value: object, limit: int = SHORT, *, keep_newlines: bool = False) -> str:
    """Anything as escaped text, cut to `limit` characters with a mark of how much is left out."""
    whole = str(value)
    left_out = len(whole) - limit
    # Cut before escaping: half an entity, or a mark inside a tag, would be worse than what is cut.
    shown = html.escape(printable(whole[:limit], keep_newlines=keep_newlines))
    return f'{shown}<span class="cut">… {left_out:,} more characters</span>' if left_out > 0 else shown


def attribute(value: object, limit: int = LONG) -> str:
    """Anything as the value of a quoted attribute: escaped on one line, without markup, cut with `…`."""
    whole = str(value)
    shown = html.escape(printable(whole[:limit], keep_newlines=False))
    return f"{shown}…" if len(whole) > limit else shown


def number(value: object, digits: int = 3) -> str:
    """A figure for people, `–` when there is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:.{digits}f}"


def percent(value: object, digits: int = 1) -> str:
    """A share as a percentage, `–` when there is none."""
    return f"{100 * value:.{digits}f} %" if isinstance(value, int | float) else "–"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table of text; numbers stand right."""
    top = "".join(f"<th>{text(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def details(summary: str, content: str) -> str:
    """Something that opens on a click, without a script."""
    return f"<details><summary>{text(summary)}</summary>{content}</details>"


def picture(png: bytes, alt: str) -> str:
    """A PNG inside the page."""
    return f'<img alt="{attribute(alt)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'
