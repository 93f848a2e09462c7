"""Text from outside is printed as text: nothing in it can steer a terminal."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soloist.errors import UserError
from soloist.report.text import one_sentence, printable


@given(st.text())
def test_what_is_printable_holds_no_character_that_steers(text: str) -> None:
    shown = printable(text, keep_newlines=False)
    assert not [c for c in shown if unicodedata.category(c).startswith(("C", "Zl", "Zp"))]
    assert printable(shown, keep_newlines=False) == shown
    assert shown.encode("utf-8").decode("utf-8") == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J\x1b]0;owned\x07", "\\x1b[2J\\x1b]0;owned\\x07"),
        ("a\rb\tc\x00", "a\\rb\\tc\\x00"),
        ("abc\u202edef", "abc\\u202edef"),
        ("lone \ud800 surrogate", "lone \\ud800 surrogate"),
        ("line\u2028break", "line\\u2028break"),
        ("Zahlen: 3 × 4 = 12 ✓ é 漢", "Zahlen: 3 × 4 = 12 ✓ é 漢"),
    ],
)
def test_escapes_stand_for_the_characters_that_steer(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(f"{text}\n") == f"{shown}\n"


def test_an_error_becomes_one_line() -> None:
    assert one_sentence(UserError("first\n  second \x1b[31m")) == "first second \\x1b[31m"
    assert one_sentence(KeyError()) == "KeyError"
