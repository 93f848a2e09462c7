"""Arithmetic problems: exact values, one grammar, and a held-out set that no seed can mix with training."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soloist.environments.arithmetic import PRESETS, Difficulty, draw_problem, evaluate, is_held_out, parse_integer

PAYLOADS = [
    "__import__('os').system('touch marker')",
    "().__class__.__base__.__subclasses__()",
    "[open('marker','w')]",
    "[1][0]",
    "f'{7*6}'",
    "eval('42')",
    "42#",
    "42;1",
    "4 2",
    "42.0",
    "4.2e1",
    "0x2a",
    "1_000",
    "４２",
    "٤٢",
    "²",
    "½",
    "−42",
    "\\boxed{42}",
    "answer: 42",
    "42\x00",
    "42\u00a0",
    "\u202e42",
    "nan",
    "inf",
    "-inf",
    "True",
    "--42",
    "+-42",
    "+",
    "",
    " ",
    "9" * 31,
    "9" * 5_000_000,
    " " * 5_000_000 + "42",
    "8000000!",
    "7**7**7**7",
    "7^7^7^7",
    "((((((((((42))))))))))",
    "\ud800",
]
"""S7 and S8: injections, Unicode digits, other notations, and texts made to cost time or memory."""


OUTSIDE = [
    *PAYLOADS[:2],
    *("", "+", "1+", "*2", "()", "(1", "1)", "1(2)", "-1", "1--1", "1/2", "2**3", "1 + 2", "1\n+2", "１+2"),
    *("1" * 13, "1+" * 150 + "1", "(" * 21 + "1" + ")" * 21, "(" * 10_000 + "1" + ")" * 10_000),
]


def reference(problem: str) -> int:
    """Python's own arithmetic. Only for problems that this test has drawn."""
    return int(eval(problem))


problems = st.recursive(
    st.integers(0, 999).map(str),
    lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map("".join) | inner.map(lambda text: f"({text})"),
    max_leaves=12,
).filter(lambda text: len(text) <= 200)


@given(problems)
def test_values_are_those_of_python(problem: str) -> None:
    assert evaluate(problem) == reference(problem)
    assert evaluate(f"({problem})*2" if len(problem) < 190 else problem) in (2 * reference(problem), reference(problem))


def test_multiplication_binds_first_and_subtraction_goes_left() -> None:
    assert evaluate("2+3*4") == 14
    assert evaluate("10-4-3") == 3
    assert evaluate("2*(3+4)-5") == 9
    assert evaluate("999*999*999*999") == 996005996001


@pytest.mark.parametrize("text", OUTSIDE)
def test_a_text_outside_the_grammar_or_its_bounds_is_refused(text: str) -> None:
    """RB-193: 10 000 brackets are refused before anything is computed."""
    with pytest.raises(ValueError, match=r".+") as caught:
        evaluate(text)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("payload", PAYLOADS)
def test_no_payload_is_a_number(payload: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RB-191, RB-192, RB-194: model text is data; the cost does not depend on it."""
    monkeypatch.chdir(tmp_path)
    started = time.process_time()
    assert parse_integer(payload) is None
    assert time.process_time() - started < 0.5
    assert not list(tmp_path.iterdir())


@given(
    st.integers(-(10**30) + 1, 10**30 - 1), st.sampled_from(["", " ", "\n", "\t "]), st.sampled_from(["", " ", "\r\n"])
)
def test_integers_come_back_from_their_text(number: int, before: str, after: str) -> None:
    assert parse_integer(f"{before}{number}{after}") == number
    assert parse_integer(f"{before}{number}{after}.") is None


def test_sign_and_leading_zeros_are_allowed() -> None:
    assert parse_integer("+7") == 7
    assert parse_integer("-0") == 0
    assert parse_integer("007") == 7


@given(st.text(max_size=30))
def test_reading_an_answer_never_fails(text: str) -> None:
    number = parse_integer(text)
    assert number is None or str(abs(number)) in text
    assert number is None or text.strip(" \t\r\n").isascii()


def test_the_default_has_two_operands_in_two_thirds_of_the_problems() -> None:
    difficulty = PRESETS["default"]
    drawn = [draw_problem(random.Random(n), difficulty, lambda problem: not is_held_out(problem)) for n in range(3000)]
    counts = Counter(found[1] for found in drawn if found)
    assert set(counts) == {2, 3}
    assert abs(counts[2] / 3000 - 2 / 3) < 0.03
    numbers = [int(n) for found in drawn if found for n in found[0].replace("-", "+").replace("*", "+").split("+")]
    assert (min(numbers), max(numbers)) == (1, 99)
    signs = Counter(character for found in drawn if found for character in found[0] if not character.isdigit())
    assert max(signs.values()) < 1.1 * min(signs.values())


@given(st.integers(0, 10**6))
def test_hard_problems_have_four_operands_and_parentheses_that_matter(seed: int) -> None:
    found = draw_problem(random.Random(seed), PRESETS["hard"], lambda problem: True)
    assert found is not None
    problem, operands = found
    assert operands == 4
    assert problem.count("(") == problem.count(")") == 1
    assert not (problem.startswith("(") and problem.endswith(")"))
    assert evaluate(problem) == reference(problem)


def test_one_problem_in_eight_is_held_out_whatever_the_spaces() -> None:
    texts = [f"{a}+{b}" for a in range(1, 100) for b in range(1, 100)]
    share = sum(map(is_held_out, texts)) / len(texts)
    assert abs(share - 1 / 8) < 0.01
    assert all(is_held_out(text) == is_held_out(text.replace("+", " + ")) for text in texts[:200])


def test_a_search_without_result_ends() -> None:
    tiny = Difficulty(operands=(2,), largest=1, operators="+")
    assert draw_problem(random.Random(0), tiny, lambda problem: problem != "1+1") is None
    assert draw_problem(random.Random(0), tiny, lambda problem: True) == ("1+1", 2)
