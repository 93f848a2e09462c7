"""Frames between parent and child: they survive any chopping, and nothing but our own messages passes."""

import ast
import contextlib
import pickle
import struct
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import soloist.engines
from soloist.engines.local import messages
from soloist.engines.local.messages import (
    MAX_FRAME_BYTES,
    Abort,
    Completed,
    Counters,
    FrameBuffer,
    FrameError,
    Generate,
    Load,
    pack_frame,
    unpack_order,
    unpack_reply,
)
from soloist.types import Completion, GenerateRequest, Sampling, VersionSpan, WeightsRef

ORDERS = [
    Generate(
        request=GenerateRequest(
            request_id="r", rollout_id="ü", prompt_ids=[1, 2], sampling=Sampling(stop_token_ids=(3,)), key=-5, slot=2
        )
    ),
    Abort(rollout_ids=None),
    Abort(rollout_ids=["a", "b"]),
    Load(weights=WeightsRef(path="/w", version=3, sha256="ab")),
]
REPLY = Completed(
    request_id="r",
    completion=Completion(
        token_ids=[4],
        log_probs=[-0.1234567890123],
        finish_reason="stop",
        version_spans=[VersionSpan(version=3, start=0, end=1)],
    ),
    counters=Counters(version=3, running=1, waiting=0, tokens=9, busy_s=0.5),
)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60))
def test_messages_survive_a_stream_that_is_cut_anywhere(sizes: list[int]) -> None:
    stream = b"".join(pack_frame(order) for order in ORDERS)
    buffer, received = FrameBuffer(), []
    for size in [*sizes, len(stream)]:
        piece, stream = stream[:size], stream[size:]
        received += [unpack_order(payload) for payload in buffer.feed(piece)]
    assert received == ORDERS
    assert list(buffer.feed(b"")) == []


def test_log_probabilities_pass_the_wire_bit_by_bit() -> None:
    (payload,) = FrameBuffer().feed(pack_frame(REPLY))
    received = unpack_reply(payload)
    assert received == REPLY
    assert isinstance(received, Completed)
    assert received.completion.log_probs[0].hex() == REPLY.completion.log_probs[0].hex()


@given(st.binary(max_size=200))
def test_garbage_is_a_frame_error_and_nothing_else(garbage: bytes) -> None:
    """Reliability S2: fuzzed decoders refuse, they never crash."""
    for unpack in (unpack_order, unpack_reply):
        with contextlib.suppress(FrameError):
            assert msgspec.msgpack.encode(unpack(garbage)), "whatever passes is one of our own messages"
        with pytest.raises(FrameError, match=str(len(garbage) + 1)):
            unpack(b"\xc1" + garbage)


def test_a_pickle_or_a_message_with_extra_or_wrong_fields_is_refused() -> None:
    """Reliability S2: no pickle is ever loaded; S17: a peer can't smuggle fields in."""
    good = msgspec.msgpack.decode(pack_frame(REPLY)[4:])
    for bad in (
        pickle.dumps(REPLY.completion.token_ids),
        msgspec.msgpack.encode(good | {"extra": 1}),
        msgspec.msgpack.encode(good | {"completion": good["completion"] | {"log_probs": [None]}}),
        msgspec.msgpack.encode(good | {"completion": good["completion"] | {"token_ids": ["4"]}}),
        msgspec.msgpack.encode(good | {"type": "start"}),
    ):
        with pytest.raises(FrameError, match="no reply"):
            unpack_reply(bad)


def test_an_oversize_frame_is_refused_before_it_is_read_or_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = FrameBuffer()
    with pytest.raises(FrameError, match=str(MAX_FRAME_BYTES + 1)):
        list(buffer.feed(struct.pack(">I", MAX_FRAME_BYTES + 1)))
    monkeypatch.setattr(messages, "MAX_FRAME_BYTES", 50)
    with pytest.raises(FrameError, match="limit of 50"):
        pack_frame(REPLY)


def test_no_file_of_the_engines_imports_pickle_or_evaluates_text() -> None:
    """Reliability S2: a static ban, so that it can't creep in."""
    files = list(Path(soloist.engines.__file__).parent.rglob("*.py"))
    assert len(files) > 10
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
            if isinstance(node, ast.ImportFrom):
                names = {node.module or ""}
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                names = {node.func.id}
            assert not names & {"pickle", "cloudpickle", "dill", "marshal", "shelve", "eval", "exec"}, file
