"""Arithmetic problems: their grammar, the numbers they stand for, how they are drawn, and which are held out.

    expression := term (("+" | "-") term)*        term := factor ("*" factor)*
    factor := number | "(" expression ")"         number := 1 to 12 ASCII digits

Guarantees: values are exact integers; a text is read by this grammar or refused with ValueError, it is never evaluated
as code; length, depth and digits are bounded before anything is computed, so no text costs more than microseconds;
whether a problem is held out depends on its text only, so no seed can mix training and evaluation.
Not covered: division, words, spaces inside a problem.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable

from soloist.types import Record

OPERATORS = "+-*"
HELD_OUT_SHARE = 1 / 8

# far above what the generator makes, far below what costs anything
_LONGEST = 200
_DEEPEST = 20
_TOKEN = re.compile(r"[0-9]+|[-+*()]")
_INTEGER = re.compile(r"[ \t\r\n]*([+-]?[0-9]{1,30})[ \t\r\n]*")
# checked before the pattern is tried: a text of megabytes is not read at all
_LONGEST_ANSWER = 100
_ATTEMPTS = 10_000


class Difficulty(Record, frozen=True, kw_only=True):
    """What problems are drawn from.

    Example: `Difficulty(operands=(2, 2, 3), largest=99)` has two operands in two thirds of the problems.
    """

    operands: tuple[int, ...]
    """Numbers of operands; each entry is equally likely."""
    largest: int
    """Operands are uniform over 1 … largest."""
    operators: str = OPERATORS
    """Each is equally likely."""
    parentheses: bool = False
    """Put one pair around two or more neighbouring operands, but not around all."""

    def family(self, operands: int) -> str:
        """Kind of a problem, for statistics: `2 operands`."""
        return f"{operands} operands" + (", parentheses" if self.parentheses and operands > 2 else "")


PRESETS = {
    "default": Difficulty(operands=(2, 2, 3), largest=99),
    "hard": Difficulty(operands=(4,), largest=999, parentheses=True),
}


def draw_problem(
    numbers: random.Random, difficulty: Difficulty, accept: Callable[[str], bool]
) -> tuple[str, int] | None:
    """A problem that `accept` likes, and its number of operands; None if none is found in 10 000 draws.

    The number of operands is drawn once and kept while the rest is drawn again, so refusing problems doesn't change how
    often each number occurs.
    """
    operands = numbers.choice(difficulty.operands)
    for _ in range(_ATTEMPTS):
        problem = _compose(numbers, difficulty, operands)
        if accept(problem):
            return problem, operands
    return None


def is_held_out(problem: str) -> bool:
    """Whether a problem belongs to evaluation: one in eight does, by the hash of its text."""
    # not Python's hash(), which differs from process to process
    return hashlib.sha256(canonical(problem).encode("utf-8", "replace")).digest()[0] < 256 * HELD_OUT_SHARE


def canonical(problem: str) -> str:
    """The text that decides whether two problems are the same: without spaces."""
    return "".join(problem.split())


def evaluate(problem: str) -> int:
    """The exact value of a problem. Raises ValueError for a text outside the grammar or its bounds."""
    if len(problem) > _LONGEST:
        raise ValueError(f"the problem has {len(problem)} characters, at most {_LONGEST} are read")
    tokens = _TOKEN.findall(problem)
    # the pattern skips what it doesn't know; the comparison finds that out
    if "".join(tokens) != problem:
        raise ValueError(f"{problem!r} holds something other than digits, + - * and parentheses")
    reader = _Reader(tokens)
    value = reader.expression(0)
    if reader.peek():
        raise ValueError(f"{problem!r} goes on with {reader.peek()!r} after its end")
    return value


def parse_integer(text: str) -> int | None:
    """The number in an answer: spaces, an optional sign, 1 to 30 ASCII digits, spaces. None for any other text."""
    if len(text) > _LONGEST_ANSWER:
        return None
    match = _INTEGER.fullmatch(text)
    return int(match.group(1)) if match else None


def _compose(numbers: random.Random, difficulty: Difficulty, operands: int) -> str:
    parts = [str(numbers.randint(1, difficulty.largest)) for _ in range(operands)]
    signs = [numbers.choice(difficulty.operators) for _ in range(operands - 1)]
    if difficulty.parentheses and operands > 2:
        # a pair around everything or around one operand would change nothing
        length = numbers.randint(2, operands - 1)
        first = numbers.randint(0, operands - length)
        parts[first] = "(" + parts[first]
        parts[first + length - 1] += ")"
    return "".join(part + sign for part, sign in zip(parts, [*signs, ""], strict=True))


class _Reader:
    """Recursive descent over the tokens of one problem."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._at = 0

    def peek(self) -> str:
        """Next token; empty at the end."""
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def take(self) -> str:
        """Next token, which is then behind us."""
        token = self.peek()
        self._at += 1
        return token

    def expression(self, depth: int) -> int:
        """Sum of terms."""
        value = self.term(depth)
        while self.peek() in ("+", "-"):
            value = value + self.term(depth) if self.take() == "+" else value - self.term(depth)
        return value

    def term(self, depth: int) -> int:
        """Product of factors."""
        value = self.factor(depth)
        while self.peek() == "*":
            self.take()
            value *= self.factor(depth)
        return value

    def factor(self, depth: int) -> int:
        """Number, or an expression in parentheses."""
        token = self.take()
        if token.isdigit():
            if len(token) > 12:
                raise ValueError(f"a number has {len(token)} digits, at most 12 are read")
            return int(token)
        if token != "(":
            raise ValueError(f"{token!r} stands where a number or '(' is expected")
        if depth >= _DEEPEST:
            raise ValueError(f"parentheses are nested deeper than {_DEEPEST}")
        value = self.expression(depth + 1)
        closing = self.take()
        if closing != ")":
            raise ValueError(f"{closing!r} stands where ')' is expected")
        return value
