"""The tokenizer of tiny models: single characters, plus one token for each fragment of the Qwen3 chat and tool format.

Guarantees: printable ASCII and newline come back from `decode(encode(text))` exactly; every digit is a token of its
own; the markers have the names and kinds (special or not) that Qwen3 has, so the stock Qwen3 renderer works with it.
Not covered: other characters, which become `<|unk|>`; tokenizers of real models (`loading.load_tokenizer`).
"""

from __future__ import annotations

import re

from tokenizers import AddedToken, Regex, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

UNKNOWN = "<|unk|>"
PAD = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Added but not special, as in Qwen3: a decoding that skips special tokens keeps them."""

CHARACTERS = (*map(chr, range(32, 127)), "\n")

WORDS = ("system", "user", "assistant", "python", "code")

TOOL_CALL_FRAGMENTS = ('{"name": "', '", "arguments": {"', '", "arguments": {"code": "', '": "', '"}}')

# The fixed text around the tool list of a Qwen3 prompt is 600 characters long; as single characters it would be most of
# what a tiny model reads. The pieces end where the format has a marker or the name of something.
TOOL_LIST_FRAGMENTS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>",
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within ",
    " XML tags:\n",
    '{"name": <function-name>, "arguments": <args-json-object>}',
    '{"type": "function", "function": {"name": "',
    '", "description": "',
    '", "parameters": {"type": "object", "properties": {"',
    '": {"type": "string"',
    '}}, "required": ["',
    '"]}}}',
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A new tokenizer, the same every time; made in memory, without network or files.

    Example: `<tool_call>\\n{"name": "python", "arguments": {"code": "1+2"}}\\n</tool_call>` has 11 tokens.
    """
    fragments = (*WORDS, *TOOL_CALL_FRAGMENTS, *TOOL_LIST_FRAGMENTS)
    vocabulary = {token: i for i, token in enumerate((UNKNOWN, *CHARACTERS, *fragments))}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=UNKNOWN))
    # alternatives are tried in order, so the longest fragment has to stand first; what fits none is one character
    longest_first = sorted(fragments, key=lambda fragment: (-len(fragment), fragment))
    pattern = "|".join([*map(re.escape, longest_first), r"[\s\S]"])
    tokenizer.pre_tokenizer = Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in (PAD, TURN_START, TURN_END)])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKERS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=UNKNOWN,
        eos_token=TURN_END,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
    )
