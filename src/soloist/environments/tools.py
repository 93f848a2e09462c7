"""Tools: typed Python functions become specifications for the prompt and calls with checked arguments.

Guarantees: a tool runs only with arguments of the declared types, none missing and none extra; anything else the model
asks for (an unknown tool, a call that could not be parsed, wrong arguments) is answered with a text that names it, and
nothing is executed. Not covered: what the tool does (`sandbox.py`), MCP servers.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from soloist.environments.base import ToolCall
from soloist.errors import RolloutError
from soloist.types import Message, Record

ToolFunction = Callable[..., Awaitable[str]]


class ToolAnswer(Record, frozen=True, kw_only=True):
    """The answer to one call.

    Example: `ToolAnswer(message={"role": "tool", "name": "python", "content": "7"}, executed=True)`.
    """

    message: Message
    executed: bool
    """False when the call was refused: unknown tool, unparsable, or wrong arguments."""


class Toolbox:
    """The tools of an environment.

    Example: `Toolbox(python)` with `async def python(code: str) -> str: "Run Python code."`.
    """

    def __init__(self, *functions: ToolFunction) -> None:
        """Read name, parameters (types, defaults) and docstring of each function. Raises TypeError without a type."""
        self._functions = {function.__name__: function for function in functions}
        self._arguments = {name: _arguments_of(function) for name, function in self._functions.items()}
        self.specs = [_specification(function, self._arguments[name]) for name, function in self._functions.items()]

    async def answer(self, call: ToolCall) -> ToolAnswer:
        """Execute a call, or say why not. Raises RolloutError("environment", …) when the tool itself breaks."""
        refusal = self._refusal(call)
        if refusal:
            return ToolAnswer(message=_message(call.name, refusal), executed=False)
        try:
            content = await self._functions[call.name](**call.arguments)
        # a sandbox that is gone has a boundary of its own
        except RolloutError:
            raise
        except Exception as error:
            reason = f"tool {call.name} raised {type(error).__name__}: {error}"
            raise RolloutError("environment", reason) from error
        return ToolAnswer(message=_message(call.name, content), executed=True)

    def _refusal(self, call: ToolCall) -> str:
        """Why a call can't be executed; empty if it can."""
        if call.error:
            return call.error
        if call.name not in self._functions:
            return f"NameError: no tool {call.name[:40]!r}; there is {', '.join(self._functions)}"
        try:
            self._arguments[call.name].model_validate(call.arguments)
        except ValidationError as error:
            wrong = "; ".join(_complaint(detail) for detail in error.errors()[:4])
            return f"TypeError: {call.name}: {wrong}"
        return ""


def _message(name: str, content: str) -> Message:
    return {"role": "tool", "name": name, "content": content}


def _arguments_of(function: ToolFunction) -> type[BaseModel]:
    """A strict model of a function's parameters."""
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if name not in hints:
            # without a type nothing could be checked
            raise TypeError(f"tool {function.__name__}: parameter {name!r} needs a type annotation")
        default = ... if parameter.default is inspect.Parameter.empty else parameter.default
        fields[name] = (hints[name], default)
    # strict: a model that writes "5" for a number shall learn to write 5
    return create_model(function.__name__, __config__=ConfigDict(extra="forbid", strict=True), **fields)


def _specification(function: ToolFunction, arguments: type[BaseModel]) -> dict[str, Any]:
    """OpenAI function format; only what a model needs to see."""
    schema = arguments.model_json_schema()
    properties = {
        name: {key: value for key, value in field.items() if key != "title"}
        for name, field in schema.get("properties", {}).items()
    }
    # defaults and descriptions stay; titles repeat the names
    parameters = {"type": "object", "properties": properties, "required": schema.get("required", [])}
    description = inspect.cleandoc(function.__doc__ or "").split("\n\n")[0]
    return {
        "type": "function",
        "function": {"name": function.__name__, "description": description, "parameters": parameters},
    }


def _complaint(detail: Any) -> str:
    """One wrong argument in words; the value itself is not repeated, it may be long."""
    name = ".".join(str(part) for part in detail["loc"])[:40]
    if detail["type"] == "missing":
        return f"argument {name!r} is missing"
    if detail["type"] == "extra_forbidden":
        return f"argument {name!r} is unknown"
    return f"argument {name!r}: {detail['msg']}, found {type(detail['input']).__name__}"
