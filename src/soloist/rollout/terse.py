"""The renderer for tiny models: Qwen3's chat and tool format with a tool list of a few tokens and no thinking.

    <|im_start|>system\\npython(code)<|im_end|>\\n<|im_start|>user\\n23+45*2<|im_end|>\\n<|im_start|>assistant\\n

Guarantees: turns, tool calls and tool responses are those of the stock Qwen3 renderer, which does the work; a full
rendering starts with every earlier rendering of the same conversation, so the next turn can always extend the ids of
the last one. Not covered: types and descriptions of tools (the model learns them from demonstrations), and reasoning,
which is left out of assistant messages when a conversation is rendered anew.
"""

from __future__ import annotations

from typing import Any, Literal

from renderers.base import ParsedResponse, RenderedTokens, extract_message_tool_names
from renderers.configs import BaseRendererConfig, Qwen3RendererConfig
from renderers.qwen3 import Qwen3Renderer


class TerseRendererConfig(BaseRendererConfig):  # type: ignore[misc]  # the package ships no types
    """Nothing to configure; the `renderers` package asks for a class."""

    name: Literal["terse"] = "terse"


class TerseRenderer:
    """A renderer of the `renderers` package's protocol."""

    config_class = TerseRendererConfig
    is_prefix_stable = True
    effective_thinking_retention = "all"

    def __init__(self, tokenizer: Any, config: TerseRendererConfig | None = None) -> None:
        """Wrap the stock renderer. The tokenizer needs Qwen3's markers, or an AssertionError names the missing one."""
        self.config = config or TerseRendererConfig()
        # nothing is taken out of the history, so a new user message may extend it just as a tool result may
        self._stock = Qwen3Renderer(tokenizer, Qwen3RendererConfig(thinking_retention="all"))

    def render(
        self, messages: list[Any], *, tools: list[Any] | None = None, add_generation_prompt: bool = False
    ) -> RenderedTokens:
        """Ids of a conversation, and which of them a model would have sampled."""
        if not messages:
            raise ValueError("no messages to render")
        given_system = messages[0]["role"] == "system"
        opening = _opening(messages[0]["content"] if given_system else "", tools or [])
        body = messages[1:] if given_system else messages
        # Qwen3 puts an empty thinking block into an assistant message that follows the last question, so another
        # question is appended, and its tokens are left out again
        conversation = [*opening, *body, {"role": "user", "content": ""}]
        rendered = self._stock.render(conversation, add_generation_prompt=add_generation_prompt)
        shift = len(messages) - len(body) - len(opening)
        kept = [k for k, owner in enumerate(rendered.message_indices) if owner != len(conversation) - 1]
        owners = [rendered.message_indices[k] for k in kept]
        return RenderedTokens(
            token_ids=[rendered.token_ids[k] for k in kept],
            message_indices=[max(owner + shift, -1) if owner >= 0 else -1 for owner in owners],
            sampled_mask=[rendered.sampled_mask[k] for k in kept],
            is_content=[rendered.is_content[k] for k in kept] if rendered.is_content else [],
            message_roles=[message["role"] for message in messages],
            message_tool_names=extract_message_tool_names(messages),
        )

    def render_ids(
        self, messages: list[Any], *, tools: list[Any] | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        """Only the ids of `render`."""
        ids: list[int] = self.render(messages, tools=tools, add_generation_prompt=add_generation_prompt).token_ids
        return ids

    def parse_response(
        self, token_ids: list[int], *, tools: list[Any] | None = None, prompt_ids: list[int] | None = None
    ) -> ParsedResponse:
        """Text and tool calls of sampled ids, as Qwen3 writes them."""
        return self._stock.parse_response(token_ids, tools=tools, prompt_ids=prompt_ids)

    def get_stop_token_ids(self) -> list[int]:
        """Ids that end a turn."""
        ids: list[int] = self._stock.get_stop_token_ids()
        return ids

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Any],
        *,
        tools: list[Any] | None = None,
    ) -> RenderedTokens | None:
        """Previous ids, the new messages and the next generation prompt; None if that can't be told."""
        return self._stock.bridge_to_next_turn(previous_prompt_ids, previous_completion_ids, new_messages, tools=tools)


def _opening(system: str, tools: list[Any]) -> list[dict[str, str]]:
    """The system message: what the conversation brings, then one line for each tool."""
    lines = [system] if system else []
    for tool in tools:
        function = tool.get("function", tool)
        lines.append(f"{function['name']}({', '.join(function['parameters'].get('properties', {}))})")
    return [{"role": "system", "content": "\n".join(lines)}] if lines else []
