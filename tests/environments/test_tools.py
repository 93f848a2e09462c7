"""Tools: specifications from typed functions, and calls that are checked before anything runs."""

from __future__ import annotations

import json
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from soloist.environments.base import ToolCall
from soloist.environments.tools import Toolbox
from soloist.errors import RolloutError

ran: list[Any] = []


@pytest.fixture(autouse=True)
def nothing_ran() -> None:
    ran.clear()


async def python(code: str) -> str:
    """Run Python code.

    This paragraph is for people.
    """
    ran.append(code)
    return f"ran {code}"


async def search(query: str, limit: Annotated[int, Field(description="at most")] = 3, exact: bool = False) -> str:
    """Search."""
    ran.append((query, limit, exact))
    return query


async def broken(code: str) -> str:
    """Break."""
    raise OSError(f"disk gone while {code}")


def test_a_specification_is_in_openai_function_format_and_has_no_noise() -> None:
    specs = Toolbox(python, search).specs
    assert json.dumps(specs[0]) == (
        '{"type": "function", "function": {"name": "python", "description": "Run Python code.", "parameters": '
        '{"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}}}'
    )
    properties = specs[1]["function"]["parameters"]["properties"]
    assert properties["limit"] == {"default": 3, "description": "at most", "type": "integer"}
    assert specs[1]["function"]["parameters"]["required"] == ["query"]


async def test_a_valid_call_runs_with_its_arguments() -> None:
    tools = Toolbox(python, search)
    answer = await tools.answer(ToolCall(name="search", arguments={"query": "a", "limit": 5}))
    assert answer.executed
    assert answer.message == {"role": "tool", "name": "search", "content": "a"}
    assert ran == [("a", 5, False)]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({}, "TypeError: python: argument 'code' is missing"),
        ({"cod": "1"}, "TypeError: python: argument 'code' is missing; argument 'cod' is unknown"),
        ({"code": "1", "timeout": 5}, "TypeError: python: argument 'timeout' is unknown"),
        ({"code": 5}, "TypeError: python: argument 'code': Input should be a valid string, found int"),
        ({"code": None}, "TypeError: python: argument 'code': Input should be a valid string, found NoneType"),
        ({"code": ["1"]}, "TypeError: python: argument 'code': Input should be a valid string, found list"),
    ],
)
async def test_wrong_arguments_are_named_and_nothing_runs(arguments: dict[str, Any], complaint: str) -> None:
    answer = await Toolbox(python).answer(ToolCall(name="python", arguments=arguments))
    assert answer.message["content"] == complaint
    assert not answer.executed
    assert ran == []


async def test_numbers_are_not_made_of_texts_or_truth_values() -> None:
    tools = Toolbox(search)
    for wrong in ("5", True, 2.5):
        answer = await tools.answer(ToolCall(name="search", arguments={"query": "a", "limit": wrong}))
        assert "argument 'limit'" in answer.message["content"]
    assert ran == []


async def test_an_unparsable_call_is_answered_and_not_executed() -> None:
    """RB-065: on a parse failure the tool must not run with empty arguments."""
    call = ToolCall(name="python", arguments={"code": "1"}, error="SyntaxError: the call is not valid JSON")
    answer = await Toolbox(python).answer(call)
    assert answer.message == {"role": "tool", "name": "python", "content": "SyntaxError: the call is not valid JSON"}
    assert not answer.executed
    assert ran == []


async def test_an_unknown_tool_is_named_with_the_known_ones() -> None:
    answer = await Toolbox(python, search).answer(ToolCall(name="shell" * 100, arguments={"code": "1"}))
    assert answer.message["content"].startswith("NameError: no tool 'shellshell")
    assert answer.message["content"].endswith("there is python, search")
    assert len(answer.message["content"]) < 100


async def test_a_tool_that_breaks_is_a_failure_of_the_environment() -> None:
    with pytest.raises(RolloutError, match="tool broken raised OSError: disk gone while x") as caught:
        await Toolbox(broken).answer(ToolCall(name="broken", arguments={"code": "x"}))
    assert caught.value.boundary == "environment"


async def test_a_failure_of_the_machinery_keeps_its_boundary() -> None:
    async def lost(code: str) -> str:
        raise RolloutError("sandbox", "no worker")

    with pytest.raises(RolloutError) as caught:
        await Toolbox(lost).answer(ToolCall(name="lost", arguments={"code": "x"}))
    assert caught.value.boundary == "sandbox"
    assert caught.value.reason == "no worker"


def test_a_parameter_without_a_type_is_refused_at_definition() -> None:
    async def loose(code) -> str:  # type: ignore[no-untyped-def]
        return str(code)

    with pytest.raises(TypeError, match="tool loose: parameter 'code' needs a type annotation"):
        Toolbox(loose)
    with pytest.raises(TypeError):
        Toolbox(loose, python)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    name=st.sampled_from(["python", "search", "", "x"]), arguments=st.dictionaries(st.text(), json_values, max_size=3)
)
async def test_any_call_gets_an_answer(name: str, arguments: dict[str, Any]) -> None:
    """R14: whatever JSON the model writes, the rollout goes on."""
    answer = await Toolbox(python, search).answer(ToolCall(name=name, arguments=arguments))
    assert isinstance(answer.message["content"], str)
    assert len(answer.message["content"]) < 1000
