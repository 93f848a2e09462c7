"""The tiny models' tokenizer: exact round trips, and the Qwen3 format in few tokens through the stock renderer."""

from __future__ import annotations

import string
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from renderers.qwen3 import Qwen3Renderer
from transformers import PreTrainedTokenizerFast

from soloist.errors import UserError
from soloist.models.loading import load_tokenizer
from soloist.models.tokenizer import (
    MARKERS,
    PAD,
    TOOL_CALL_FRAGMENTS,
    TURN_END,
    TURN_START,
    UNKNOWN,
    WORDS,
    build_tokenizer,
)

PRINTABLE = "".join(chr(code) for code in range(32, 127)) + "\n"
PIECES = st.one_of(
    st.text(alphabet=PRINTABLE, max_size=12),
    st.sampled_from([PAD, TURN_START, TURN_END, *MARKERS, *WORDS, *TOOL_CALL_FRAGMENTS, " "]),
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "python",
            "description": "Run it.",
            "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
        },
    }
]
CALL = '<tool_call>\n{"name": "python", "arguments": {"code": "23+45*2"}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


@given(pieces=st.lists(PIECES, max_size=8))
@settings(max_examples=200, deadline=None)
def test_text_of_printable_ascii_and_markers_comes_back_exactly(
    tokenizer: PreTrainedTokenizerFast, pieces: list[str]
) -> None:
    text = "".join(pieces)
    ids = encode(tokenizer, text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.unk_token_id not in ids
    assert "".join(tokenizer.convert_ids_to_tokens(ids)) == text


@given(text=st.text(alphabet=PRINTABLE + "é→\t", max_size=30))
@settings(max_examples=100, deadline=None)
def test_offsets_tile_the_text(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    offsets = encoding["offset_mapping"]
    assert [start for start, _ in offsets] == [0, *(end for _, end in offsets)][: len(offsets)]
    assert (offsets[-1][1] if offsets else 0) == len(text)


def test_spaces_around_markers_and_before_punctuation_are_kept(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "  <tool_call>  <|im_end|> \n . , ! 's  </think> "
    assert tokenizer.decode(encode(tokenizer, text)) == text
    assert tokenizer.decode(encode(tokenizer, text), skip_special_tokens=True) == text.replace(TURN_END, "")


def test_digits_and_operators_are_tokens_of_their_own(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "1234567890+-*/()" + string.ascii_letters
    assert tokenizer.convert_ids_to_tokens(encode(tokenizer, text)) == list(text)
    assert len(set(encode(tokenizer, string.digits))) == 10


def test_other_characters_become_the_unknown_token_one_each(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = encode(tokenizer, "a→é\tb")
    assert ids[1:4] == [tokenizer.unk_token_id] * 3
    assert tokenizer.decode(ids) == f"a{UNKNOWN * 3}b"


def test_special_tokens_have_qwen3s_names_kinds_and_roles(tokenizer: PreTrainedTokenizerFast) -> None:
    added = {token.content: token.special for token in tokenizer.added_tokens_decoder.values()}
    assert {name: added[name] for name in (PAD, TURN_START, TURN_END)} == {PAD: True, TURN_START: True, TURN_END: True}
    assert {name: added[name] for name in MARKERS} == dict.fromkeys(MARKERS, False)
    assert (tokenizer.eos_token, tokenizer.pad_token) == (TURN_END, PAD)
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))


def test_the_frame_of_a_tool_call_costs_eight_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = tokenizer.convert_ids_to_tokens(encode(tokenizer, CALL))
    assert tokens[:5] == ["<tool_call>", "\n", '{"name": "', "python", '", "arguments": {"code": "']
    assert tokens[5:12] == list("23+45*2")
    assert tokens[12:] == ['"}}', "\n", "</tool_call>"]


def test_a_saved_tokenizer_loads_as_the_same_one(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert encode(loaded, CALL) == encode(tokenizer, CALL)
    assert (loaded.eos_token_id, loaded.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)


@pytest.mark.parametrize("content", [None, "{", '{"version": "1.0"}'])
def test_a_folder_without_a_sound_tokenizer_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=r"expected tokenizer\.json") as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_stock_qwen3_renderer_renders_a_tool_conversation_shortly(tokenizer: PreTrainedTokenizerFast) -> None:
    renderer = Qwen3Renderer(tokenizer)
    call = {"type": "function", "function": {"name": "python", "arguments": {"code": "23+45*2"}}}
    messages = [
        {"role": "user", "content": "23+45*2"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "python", "content": "113"},
    ]
    rendered = renderer.render(messages, tools=TOOLS, add_generation_prompt=True)
    text = tokenizer.decode(rendered.token_ids)
    assert f"<|im_start|>assistant\n{CALL}<|im_end|>\n" in text
    assert "<tool_response>\n113\n</tool_response>" in text
    assert tokenizer.unk_token_id not in rendered.token_ids
    assert len(rendered.token_ids) < 90
    contents = [t for t, own in zip(rendered.token_ids, rendered.is_content, strict=True) if own]
    assert tokenizer.decode(contents).startswith("23+45*2")


def test_the_stock_qwen3_renderer_parses_a_sampled_tool_call(tokenizer: PreTrainedTokenizerFast) -> None:
    parsed = Qwen3Renderer(tokenizer).parse_response(encode(tokenizer, CALL + TURN_END))
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [("python", {"code": "23+45*2"})]
    assert parsed.content == ""


def test_an_observation_is_bridged_onto_the_sampled_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    renderer = Qwen3Renderer(tokenizer)
    prompt = renderer.render_ids([{"role": "user", "content": "1+1"}], tools=TOOLS, add_generation_prompt=True)
    action = encode(tokenizer, CALL + TURN_END)
    bridged = renderer.bridge_to_next_turn(prompt, action, [{"role": "tool", "name": "python", "content": "113"}])
    assert bridged is not None
    assert bridged.token_ids[: len(prompt) + len(action)] == prompt + action
    assert tokenizer.decode(bridged.token_ids).endswith("113\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
