"""Task files: every mistake is one sentence that names file, line and field."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soloist.environments.task_files import LONGEST_PROBLEM, Row, read_rows
from soloist.errors import UserError


def written(folder: Path, text: str | bytes) -> str:
    path = folder / "tasks.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def test_an_answer_may_be_a_number_or_a_text(tmp_path: Path) -> None:
    """RB-061: 42 and "42" are the same answer."""
    text = '{"problem": "6*7", "answer": 42}\n\n{"problem": "6*7", "answer": "42", "source": "x"}\n'
    assert read_rows(written(tmp_path, text)) == [
        Row(line=1, problem="6*7", answer="42"),
        Row(line=3, problem="6*7", answer="42"),
    ]
    big = read_rows(written(tmp_path, '{"problem": "p", "answer": ' + "9" * 40 + "}"))
    assert big[0].answer == "9" * 40


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no task found"),
        ("\n \n", "no task found"),
        ('{"problem": "1", "answer": 1}\n{"problem":', "line 2: .* is not JSON"),
        ("[1, 2]", r"line 1: found list \[1, 2\], expected an object with problem and answer"),
        ("null", "line 1: found null None, expected an object"),
        ('"text"', "line 1: found str 'text'"),
        ('{"answer": 1}', "line 1: field 'problem' is missing, expected a text; found the fields"),
        ('{"problem": "1"}', "line 1: field 'answer' is missing, expected an integer or a text"),
        ('{"problem": 5, "answer": 1}', "field 'problem' is int 5, expected a text"),
        ('{"problem": "1", "answer": 1.5}', "field 'answer' is float 1.5, expected an integer or a text"),
        ('{"problem": "1", "answer": null}', "field 'answer' is null None, expected"),
        ('{"problem": "1", "answer": true}', "field 'answer' is bool True, expected"),
        ('{"problem": "1", "answer": NaN}', "field 'answer' is float nan, expected"),
        ('{"problem": "1", "answer": [1]}', r"field 'answer' is list \[1\], expected"),
        ('{"problem": " ", "answer": 1}', "problem has 1 characters, expected 1 to 4000"),
        ('{"problem": "' + "x" * (LONGEST_PROBLEM + 1) + '", "answer": 1}', "problem has 4001 characters"),
        ('{"problem": "\\ud800", "answer": 1}', "field 'problem' holds half of a surrogate pair"),
        ('{"problem": "1", "answer": "\\udfff"}', "field 'answer' holds half of a surrogate pair"),
        ('{"problem": "1", "answer": ' + "9" * 5000 + "}", "line 1: .* is not JSON"),
        ("[" * 100_000, "line 1: .* is not JSON"),
    ],
)
def test_a_bad_row_is_refused_by_line_and_field(tmp_path: Path, text: str, complaint: str) -> None:
    """RB-081, RB-086 and R14: refused before any work starts, with what was found and what was expected."""
    path = written(tmp_path, text)
    with pytest.raises(UserError, match=complaint) as caught:
        read_rows(path)
    assert path in str(caught.value)
    assert len(str(caught.value)) < 400
    assert str(caught.value).isprintable()


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"can't be read .No such file"):
        read_rows(str(tmp_path / "missing.jsonl"))
    with pytest.raises(UserError, match=r"can't be read .Is a directory"):
        read_rows(str(tmp_path))
    with pytest.raises(UserError, match="byte 3 is not UTF-8"):
        read_rows(written(tmp_path, b'{"p\xff": 1}'))


lines = st.text(max_size=40) | st.builds(
    lambda row: json.dumps(row), st.dictionaries(st.sampled_from(["problem", "answer"]), st.integers() | st.text())
)


@given(st.lists(lines, max_size=4))
def test_any_file_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "tasks.jsonl"
    path.write_text("\n".join(texts), encoding="utf-8", errors="replace")
    rows, complaint = [], ""
    try:
        rows = read_rows(str(path))
    except UserError as error:
        complaint = str(error)
    assert bool(rows) != bool(complaint)
    assert all(row.problem.strip() for row in rows)
    assert not complaint or str(path) in complaint
