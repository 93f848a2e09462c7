"""Messages to token ids and sampled ids to actions, through the `renderers` package.

Guarantees: ids that the policy sampled are never made into text and tokenized again: the next prompt is the previous
ids with newly rendered ones behind, or None, and then the caller seals the segment and renders anew; what the model
wrote wrongly becomes a `ToolCall` with an `error`, never an exception and never a call with other arguments; text of
users and tools cannot contain the markers of the chat format; what breaks in between is `RolloutError("renderer", …)`.
Not covered: time limits of foreign chat templates, which only the renderer named `default` executes; images.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from renderers.base import MODEL_RENDERER_MAP, ToolCallParseStatus, create_renderer
from renderers.configs import config_from_name
from renderers.custom import load_custom_renderer

from soloist.environments.base import Action, ToolCall
from soloist.errors import RolloutError, UserError
from soloist.rollout.terse import TerseRenderer
from soloist.types import Message

_EXPLANATIONS = {
    ToolCallParseStatus.INVALID_JSON: "the call is not valid JSON",
    ToolCallParseStatus.UNCLOSED_BLOCK: "the call is not closed",
    ToolCallParseStatus.MISSING_NAME: "the call names no tool",
    ToolCallParseStatus.MALFORMED_STRUCTURE: "the call is malformed",
    ToolCallParseStatus.UNKNOWN_TOOL: "the call names an unknown tool",
}
_DEEPEST = 20
"""Lists and objects within each other in the arguments of a call."""


class Rendering:
    """One renderer with one tokenizer.

    Example: `ids = rendering.prompt(messages, tools)`; of a sampled completion, `rendering.parse(ids, completion)` is
    the action and, after the observation, `rendering.extend(ids, completion, observation, tools)` the next prompt.
    """

    def __init__(self, renderer: Any, tokenizer: Any) -> None:
        """`renderer` follows the package's protocol; `tokenizer` is the one that it was made with."""
        self.renderer = renderer
        self._tokenizer = tokenizer
        self.stop_token_ids: tuple[int, ...] = tuple(i for i in renderer.get_stop_token_ids() if i is not None)
        # fragments of tiny tokenizers are ordinary text, markers look like <this>
        names = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
        markers = sorted((name for name in names if re.fullmatch(r"<\S+>", name)), key=len, reverse=True)
        self._markers = re.compile("|".join(map(re.escape, markers)) or r"(?!)")

    def prompt(self, messages: list[Message], tools: list[dict[str, Any]]) -> list[int]:
        """Ids of a conversation up to where the model goes on. Raises RolloutError("renderer", …)."""
        with _failing_as_renderer():
            safe = self._without_markers(messages)
            return list(self.renderer.render_ids(safe, tools=tools or None, add_generation_prompt=True))

    def text_of(self, token_id: int) -> str:
        """One token as text, for people; a part of a character shows as its replacement."""
        return str(self._tokenizer.decode([token_id]))

    def parse(
        self, prompt_ids: list[int], completion_ids: list[int], tools: list[dict[str, Any]] | None = None
    ) -> Action:
        """What sampled ids say. Calls that can't be read have an `error`; half surrogate pairs are replaced by `?`."""
        with _failing_as_renderer():
            try:
                parsed = self.renderer.parse_response(completion_ids, tools=tools, prompt_ids=prompt_ids)
                calls = [_tool_call(call) for call in parsed.tool_calls]
            except (ValueError, RecursionError) as error:
                # such as numbers of 5000 digits or 10 000 nested lists in the arguments of a call
                broken = ToolCall(name="", error=f"SyntaxError: the call can't be read ({type(error).__name__})")
                return Action(text="", tool_calls=[broken])
            return Action(text=parsed.content or "", tool_calls=calls)

    def extend(
        self,
        prompt_ids: list[int],
        completion_ids: list[int],
        new_messages: list[Message],
        tools: list[dict[str, Any]],
    ) -> list[int] | None:
        """The next prompt: `prompt_ids + completion_ids + rendered new messages`, or None if it would not start so.

        It is None when the format rewrites its history (thinking that a later prompt leaves out), when the completion
        can't be continued, and when new messages hold one of the assistant.
        """
        with _failing_as_renderer():
            safe = self._without_markers(new_messages)
            bridged = self.renderer.bridge_to_next_turn(prompt_ids, completion_ids, safe, tools=tools or None)
        if bridged is None:
            return None
        # compared, not trusted: a bridge may trim or rewrite, and wrong context would be trained without a sign
        ids = list(bridged.token_ids)
        sampled = [*prompt_ids, *completion_ids]
        return ids if ids[: len(sampled)] == sampled and len(ids) > len(sampled) else None

    def assistant_message(self, action: Action) -> Message:
        """An action as a message, for the conversation on record and for rendering it anew."""
        message: Message = {"role": "assistant", "content": action.text}
        if action.tool_calls:
            functions = [{"name": call.name, "arguments": call.arguments} for call in action.tool_calls]
            message["tool_calls"] = [{"type": "function", "function": function} for function in functions]
        return message

    def training_tokens(self, messages: list[Message], tools: list[dict[str, Any]]) -> tuple[list[int], list[bool]]:
        """Ids of a demonstration, and which of them to train: what a model would sample, its end of turn included.

        Headers of turns and the newline after them are not sampled. Raises UserError for a renderer that doesn't know.
        """
        with _failing_as_renderer():
            rendered = self.renderer.render(self._without_markers(messages), tools=tools or None)
        if len(rendered.sampled_mask) != len(rendered.token_ids):
            raise UserError(
                f"renderer {type(self.renderer).__name__} doesn't say which of the {len(rendered.token_ids)} tokens a "
                "model samples, so demonstrations can't be trained; set model.renderer to the model's own renderer"
            )
        roles, owners = rendered.message_roles, rendered.message_indices
        # some renderers mark tokens of other roles as sampled, or of no message at all
        mask = [
            bool(sampled) and owner >= 0 and roles[owner] == "assistant"
            for sampled, owner in zip(rendered.sampled_mask, owners, strict=True)
        ]
        return list(rendered.token_ids), mask

    def _without_markers(self, messages: list[Message]) -> list[Message]:
        """Messages whose text by users and tools has a space in each marker: `<|im_end|>` becomes `< |im_end|>`.

        A tool prints what a model wrote and a task is a row of data; neither may open or close a turn.
        """
        return [self._defused(message) if message.get("role") in ("user", "tool") else message for message in messages]

    def _defused(self, message: Message) -> Message:
        content = message.get("content")
        if not isinstance(content, str):
            return message
        return {**message, "content": self._markers.sub(lambda found: "< " + found.group()[1:], content)}


def build_renderer(tokenizer: Any, name: str = "auto") -> Rendering:
    """The renderer that `model.renderer` names. Raises UserError for an unknown name or an unfit tokenizer.

    `auto` takes the stock renderer of a known model's tokenizer, and `terse` for a tokenizer without a chat template.
    """
    try:
        return Rendering(_create(tokenizer, name), tokenizer)
    except UserError:
        raise
    except Exception as error:  # a foreign renderer may load files and fail in its own ways
        kind = type(error).__name__
        raise UserError(f"model.renderer = {name!r} can't be used with this tokenizer ({kind}: {error})") from error


def _create(tokenizer: Any, name: str) -> Any:
    if name == "terse":
        return TerseRenderer(tokenizer)
    if name == "auto":
        model = getattr(tokenizer, "name_or_path", "")
        if model in MODEL_RENDERER_MAP:
            # by the exact name: a fine-tune may have another template under the same architecture
            return create_renderer(tokenizer, config_from_name(MODEL_RENDERER_MAP[model]))
        if not getattr(tokenizer, "chat_template", None):
            return TerseRenderer(tokenizer)
        known = ", ".join(sorted(set(MODEL_RENDERER_MAP.values())))
        raise UserError(f"model.renderer = 'auto' doesn't know the model {model!r}; name its format, one of: {known}")
    try:
        config = config_from_name(name)
    except ValueError:
        # stock names may hold a dot too, such as qwen3.5
        if "." not in name:
            raise
        custom = load_custom_renderer(name)
        return custom(tokenizer, custom.config_class())
    return create_renderer(tokenizer, config)


def _tool_call(parsed: Any) -> ToolCall:
    """A parsed call as a record; wrong in any way means an `error` and no arguments."""
    name = _whole(parsed.name) if isinstance(parsed.name, str) else ""
    # repairing a call would execute something that the model did not write
    if parsed.status != ToolCallParseStatus.OK:
        return ToolCall(name=name, error=f"SyntaxError: {_EXPLANATIONS.get(parsed.status, str(parsed.status))}")
    if not name:
        return ToolCall(name="", error=f"SyntaxError: the name of the tool is a {type(parsed.name).__name__}")
    if not isinstance(parsed.arguments, dict):
        kind = type(parsed.arguments).__name__
        return ToolCall(name=name, error=f"SyntaxError: the arguments of {name[:40]} are a {kind}, not an object")
    return ToolCall(name=name, arguments=_whole(parsed.arguments))


def _whole(value: Any, depth: int = 0) -> Any:
    """A JSON value that can be stored and read again, or ValueError.

    JSON escapes can make halves of surrogate pairs; they become `?`.
    """
    if depth > _DEEPEST:
        raise ValueError(f"arguments are nested deeper than {_DEEPEST}")
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [_whole(item, depth + 1) for item in value]
    if isinstance(value, dict):
        return {_whole(key): _whole(item, depth + 1) for key, item in value.items()}
    # JSON readers refuse or round what doesn't fit a machine word
    if isinstance(value, int) and value.bit_length() > 63:
        raise ValueError(f"a number of {value.bit_length()} bits; 63 can be stored")
    return value


@contextmanager
def _failing_as_renderer() -> Iterator[None]:
    """Give every error the renderer's boundary; which kinds a foreign renderer raises can't be known."""
    try:
        yield
    except (RolloutError, UserError):
        raise
    except Exception as error:
        raise RolloutError("renderer", f"{type(error).__name__}: {error}") from error
