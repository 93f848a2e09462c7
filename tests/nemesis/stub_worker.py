"""The stub engine: speaks the local engine's protocol, but its tokens are hashes of the weights file.

Token i of a request depends on (weights, seed, key, position) alone, so a run in deterministic mode is the same however
often the process dies. Loads take effect between two tokens, so rollouts span versions. Started by `standin.py`.
"""

from __future__ import annotations

import hashlib
import select
import socket
import sys
from pathlib import Path

from soloist.engines.local import messages
from soloist.types import Completion, GenerateRequest, VersionSpan

VOCABULARY = 128
STOP = 0


def sampled(weights: bytes, seed: int, key: int, position: int) -> tuple[int, float]:
    """One token and its log-probability: both a function of what is named, and of nothing else."""
    digest = hashlib.sha256(weights + f"/{seed}/{key}/{position}".encode()).digest()
    token = STOP if digest[0] < 40 else 1 + digest[1] % (VOCABULARY - 1)
    return token, -(1 + int.from_bytes(digest[2:4])) / 32768


class Request:
    """One request under way."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.spans: list[VersionSpan] = []
        self.aborted = False

    def step(self, weights: bytes, version: int) -> str:
        """Sample one token; says how the request ended, or nothing."""
        if self.aborted:
            return "abort"
        asked = self.request.sampling
        place = len(self.tokens)
        token, log_prob = sampled(weights, asked.seed, self.request.key, len(self.request.prompt_ids) + place)
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        start = self.spans.pop().start if self.spans and self.spans[-1].version == version else place
        self.spans.append(VersionSpan(version=version, start=start, end=place + 1))
        if token in asked.stop_token_ids:
            return "stop"
        return "length" if len(self.tokens) >= asked.max_new_tokens else ""


class Stub:
    """Serves one parent over one socket."""

    def __init__(self, channel: socket.socket, token_seconds: float) -> None:
        self._channel = channel
        self._token_seconds = token_seconds
        self._frames = messages.FrameBuffer()
        self._incoming = bytearray(1 << 20)
        self._weights, self._version = b"", 0
        self._running: dict[str, Request] = {}
        self._sampled = 0

    def serve(self) -> None:
        """Until the socket ends or `Close` comes."""
        while True:
            wait = self._token_seconds if self._running else None
            if select.select([self._channel], [], [], wait)[0]:
                size = self._channel.recv_into(self._incoming)
                if not size:
                    return
                for payload in self._frames.feed(bytes(self._incoming[:size])):
                    self._obey(messages.unpack_order(payload))
            self._step()

    def _obey(self, order: messages.Order) -> None:
        match order:
            case messages.Start():
                self._send(messages.Ready(vocab_size=VOCABULARY))
            case messages.Generate(request=request):
                self._running[request.request_id] = Request(request)
            case messages.Cancel(request_id=name):
                self._running.pop(name, None)
            case messages.Abort(rollout_ids=names):
                for one in self._running.values():
                    one.aborted |= names is None or one.request.rollout_id in names
            case messages.Load(weights=weights):
                self._load(weights.path, weights.version, weights.sha256)
            case messages.AskHealth():
                self._send(messages.Health(counters=self._counters()))
            case messages.Close():
                raise SystemExit

    def _load(self, path: str, version: int, sha256: str) -> None:
        data = Path(path).read_bytes()
        if hashlib.sha256(data).hexdigest() != sha256:
            self._send(messages.NotLoaded(version=version, reason=f"{path} has another hash"))
            return
        self._weights, self._version = data, version
        self._send(messages.Loaded(version=version))

    def _step(self) -> None:
        for name, one in list(self._running.items()):
            self._sampled += 1
            ending = one.step(self._weights, self._version)
            if not ending:
                continue
            del self._running[name]
            completion = Completion(
                token_ids=one.tokens, log_probs=one.log_probs, finish_reason=ending, version_spans=one.spans
            )
            self._send(messages.Completed(request_id=name, completion=completion, counters=self._counters()))

    def _counters(self) -> messages.Counters:
        return messages.Counters(
            version=self._version, running=len(self._running), waiting=0, tokens=self._sampled, busy_s=0.0
        )

    def _send(self, reply: messages.Reply) -> None:
        self._channel.sendall(messages.pack_frame(reply))


if __name__ == "__main__":
    Stub(socket.socket(fileno=int(sys.argv[1])), float(sys.argv[2])).serve()
