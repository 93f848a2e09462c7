"""Task files: JSON lines with a problem and its answer, read completely and checked before anything starts.

Guarantees: every mistake is a `UserError` with file, line, field, what was found and what was expected. An answer may
be a number or a text: `42` and `"42"` are the same, kept as the text `42`.
Not covered: whether an answer is right, or can be read by the environment's scoring (that is found when it is scored,
and is then a failure of the scorer, not a wrong answer).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from soloist.errors import UserError
from soloist.types import Record

LONGEST_PROBLEM = 4000
"""Characters; whether a prompt fits the model is for the token budgets to say."""


class Row(Record, frozen=True, kw_only=True):
    """One line of a task file.

    Example: `{"problem": "3+4*2", "answer": 11}` becomes `Row(line=1, problem="3+4*2", answer="11")`.
    """

    line: int
    problem: str
    answer: str


def read_rows(path: str) -> list[Row]:
    """All rows; blank lines are skipped. Raises UserError for what can't be read or used, and for an empty file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"environment.tasks = {path!r} can't be read ({error.strerror}); give a JSON-lines file"
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8") from None
    rows = [_row(path, n, line) for n, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not rows:
        raise UserError(f'{path}: no task found; give one object a line, such as {{"problem": "3+4*2", "answer": 11}}')
    return rows


def _row(path: str, line: int, text: str) -> Row:
    where = f"{path}, line {line}"
    try:
        found = json.loads(text)
    # ValueError is invalid JSON and also an integer of more than 4300 digits
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: {_short(text)} is not JSON ({error}); write one object a line") from None
    if not isinstance(found, dict):
        raise UserError(f"{where}: found {_kind(found)} {_short(found)}, expected an object with problem and answer")
    problem = _field(where, found, "problem", (str,), "a text")
    answer = _field(where, found, "answer", (int, str), "an integer or a text")
    if not problem.strip() or len(problem) > LONGEST_PROBLEM:
        raise UserError(
            f"{where}: problem has {len(problem)} characters, expected 1 to {LONGEST_PROBLEM}, not all blank"
        )
    return Row(line=line, problem=problem, answer=str(answer))


def _field(where: str, row: dict[str, Any], name: str, kinds: tuple[type, ...], expected: str) -> Any:
    if name not in row:
        raise UserError(
            f"{where}: field {name!r} is missing, expected {expected}; found the fields {_short(sorted(row))}"
        )
    value = row[name]
    # true is an int to Python, and never meant as an answer
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise UserError(f"{where}: field {name!r} is {_kind(value)} {_short(value)}, expected {expected}")
    # it could be neither tokenized nor stored
    try:
        str(value).encode()
    except UnicodeEncodeError:
        raise UserError(f"{where}: field {name!r} holds half of a surrogate pair: {_short(value)}") from None
    return value


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__


def _short(value: object) -> str:
    # whatever a file holds, the message stays one printable line
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."
