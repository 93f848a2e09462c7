"""The child's main loop, run in this process over a real socket pair."""

import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from soloist.config import ModelConfig
from soloist.engines.local import worker
from soloist.engines.local.messages import (
    Abort,
    AskHealth,
    Cancel,
    Close,
    Completed,
    FrameBuffer,
    Generate,
    Health,
    Load,
    NotLoaded,
    Ready,
    Refused,
    Release,
    Reply,
    Start,
    pack_frame,
    unpack_reply,
)
from soloist.models.tiny import build_tiny
from soloist.types import GenerateRequest, Sampling, WeightsRef


def start_order(folder: Path) -> Start:
    return Start(
        model_folder=str(folder),
        dtype="float32",
        device="cpu",
        threads=1,
        slots=2,
        max_length=32,
        recompute=False,
        fixed_shapes=False,
    )


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Our end of the pair; the worker's end is in its argv, as after a real start."""
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(sys, "argv", ["worker", str(theirs.detach())])
    before = signal.getsignal(signal.SIGINT)
    yield ours
    signal.signal(signal.SIGINT, before)
    ours.close()


def replies(parent: socket.socket) -> list[Reply]:
    """Everything that the worker said before it ended."""
    buffer, received = FrameBuffer(), []
    while data := parent.recv(1 << 16):
        received += [unpack_reply(payload) for payload in buffer.feed(data)]
    return received


def test_a_whole_life_from_start_to_close(parent: socket.socket, tmp_path: Path) -> None:
    folder = build_tiny(ModelConfig(hidden_size=32, layers=1, heads=2, mlp_size=48), 0, tmp_path / "m")
    good = GenerateRequest(request_id="q", rollout_id="q", prompt_ids=[3], sampling=Sampling(max_new_tokens=4))
    orders = [
        start_order(folder),
        Load(weights=WeightsRef(path="/nowhere", version=1, sha256="")),
        Generate(request=GenerateRequest(request_id="bad", rollout_id="b", prompt_ids=[], sampling=Sampling())),
        Generate(request=good),
        Cancel(request_id="unknown"),
        Release(rollout_id="unknown"),
        AskHealth(),
    ]
    parent.sendall(b"".join(pack_frame(order) for order in orders))

    def hang_up_when_answered() -> None:
        buffer = FrameBuffer()
        while not any(isinstance(reply, Completed) for reply in said):
            said.extend(unpack_reply(payload) for payload in buffer.feed(parent.recv(1 << 16)))
        parent.sendall(pack_frame(Abort(rollout_ids=None)) + pack_frame(Close()))

    said: list[Reply] = []
    other_end = threading.Thread(target=hang_up_when_answered)
    other_end.start()
    worker.main()
    other_end.join()
    assert [type(reply) for reply in said] == [Ready, NotLoaded, Refused, Health, Completed]
    assert replies(parent) == []
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_the_worker_ends_quietly_when_its_socket_ends(parent: socket.socket) -> None:
    """R12, RB-134: the second safety line, for systems without a parent-death signal."""
    parent.shutdown(socket.SHUT_WR)
    worker.main()
    assert replies(parent) == []


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (b"\xff" * 64, "announces 4294967295 bytes"),
        (b"\x00\x00\x00\x01\xc1", "1 bytes are no order"),
        (pack_frame(AskHealth()), "the first order is AskHealth, expected Start"),
        (pack_frame(start_order(Path("/nowhere"))), "/nowhere: found nothing, expected a model folder"),
    ],
)
def test_nonsense_and_bad_folders_end_the_worker_with_one_sentence(
    parent: socket.socket, sent: bytes, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parent.sendall(sent)
    with pytest.raises(SystemExit) as caught:
        worker.main()
    assert caught.value.code == 2
    assert words in capsys.readouterr().err
    assert replies(parent) == []
