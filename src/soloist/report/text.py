"""Text from models, tools and data files, made safe to print.

Guarantees: nothing that `printable` returns can move a cursor, change a colour, reorder a line or break an encoder.
Not covered: rich's markup; print what comes from here with `markup=False`.
"""

from __future__ import annotations

import unicodedata


def printable(text: str, *, keep_newlines: bool = True) -> str:
    r"""The text with every character that isn't plainly visible as its escape (`\x1b`, `\u202e`, `\ud800`).

    Newlines stay unless `keep_newlines` is False; tabs are escaped like the rest.
    """
    return "".join(_shown(character, keep_newlines) for character in text)


def one_sentence(error: BaseException) -> str:
    """The message of an error on one line, safe to print."""
    return printable(" ".join(str(error).split()), keep_newlines=False) or type(error).__name__


def _shown(character: str, keep_newlines: bool) -> str:
    if character == "\n" and keep_newlines:
        return character
    # Cc, Cf, Cs, Co and Cn have no shape of their own on paper; Zl and Zp are line breaks in disguise.
    category = unicodedata.category(character)
    if category.startswith("C") or category in ("Zl", "Zp"):
        return character.encode("unicode_escape").decode("ascii")
    return character
