"""The child's main loop: between two decode steps it reads orders, in between it answers.

Guarantees: the process ends when the socket ends, whatever else happens; an order that is no message of the protocol
ends it too (its parent is the only peer, so that is a bug and not a peer to argue with); SIGINT is left to the parent.
Not covered: starting it (`child`), deciding what a crash means (`engine`).
"""

from __future__ import annotations

import select
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from soloist.engines.local.batch import Answer, ContinuousBatch
from soloist.engines.local.messages import (
    Abort,
    AskHealth,
    Cancel,
    Close,
    Completed,
    FrameBuffer,
    FrameError,
    Generate,
    Health,
    Load,
    Loaded,
    NotLoaded,
    Order,
    Ready,
    Refused,
    Release,
    Reply,
    Start,
    pack_frame,
    unpack_order,
)
from soloist.engines.local.model_runner import ModelRunner
from soloist.errors import UserError
from soloist.models.loading import load_policy

_READ_BYTES = 1 << 20


class ParentGoneError(Exception):
    """The other end of the socket is closed."""


class Worker:
    """Serves one parent over one socket."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._frames = FrameBuffer()

    def serve(self) -> None:
        """Start as the first order says, then serve until `Close`. Raises ParentGoneError and FrameError."""
        # More orders may come with the first one; they wait until the model is built.
        orders: list[Order] = []
        while not orders:
            orders = self._receive(wait=True)
        start, *orders = orders
        if not isinstance(start, Start):
            raise FrameError(f"the first order is {type(start).__name__}, expected Start")
        batch = build_batch(start)
        self._send(Ready(vocab_size=batch.runner.vocab_size))
        while True:
            for order in orders:
                if isinstance(order, Close):
                    return
                self._obey(batch, order)
            # Orders take effect here, between two steps, and nowhere else: no token comes from a mix of weights.
            self._answer(batch, batch.step() if batch.busy else [])
            orders = self._receive(wait=not batch.busy)

    def _receive(self, *, wait: bool) -> list[Order]:
        """Orders that have arrived; waits for bytes only when there is nothing else to do."""
        readable, _, _ = select.select([self._channel], [], [], None if wait else 0)
        if not readable:
            return []
        data = self._channel.recv(_READ_BYTES)
        if not data:
            raise ParentGoneError
        # A broken frame raises from here: the stream has lost its place and can't be followed any further.
        return [unpack_order(payload) for payload in self._frames.feed(data)]

    def _send(self, reply: Reply) -> None:
        try:
            self._channel.sendall(pack_frame(reply))
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ParentGoneError from error

    def _obey(self, batch: ContinuousBatch, order: Order) -> None:
        match order:
            case Generate(request=request):
                answer = batch.submit(request)
                self._answer(batch, [answer] if answer else [])
            case Abort(rollout_ids=rollout_ids):
                self._answer(batch, batch.abort(rollout_ids))
            case Cancel(request_id=request_id):
                batch.cancel(request_id)
            case Release(rollout_id=rollout_id):
                batch.release(rollout_id)
            case Load():
                self._load(batch, order)
            case AskHealth():
                self._send(Health(counters=batch.counters))
            case _:
                raise FrameError(f"{type(order).__name__} is no order for a running worker")

    def _load(self, batch: ContinuousBatch, order: Load) -> None:
        try:
            batch.load(order.weights)
        except (ValueError, OSError) as error:
            self._send(NotLoaded(version=order.weights.version, reason=str(error)))
            return
        self._send(Loaded(version=order.weights.version))

    def _answer(self, batch: ContinuousBatch, answers: Sequence[Answer]) -> None:
        for answer in answers:
            if answer.completion is None:
                self._send(Refused(request_id=answer.request_id, reason=answer.reason))
                continue
            self._send(Completed(request_id=answer.request_id, completion=answer.completion, counters=batch.counters))


def build_batch(start: Start) -> ContinuousBatch:
    """Model, cache and scheduler as ordered. Raises UserError or ValueError for a model that can't be served."""
    torch.set_num_threads(start.threads)
    runner = ModelRunner(
        load_policy(Path(start.model_folder), start.dtype, start.device),
        slots=start.slots,
        max_length=start.max_length,
        vocab_size=start.vocab_size,
        fixed_shapes=start.fixed_shapes,
    )
    return ContinuousBatch(runner, recompute=start.recompute)


def main() -> None:
    """Entry point of the child, `worker SOCKET_FD`. Exits with 0 after `Close` or the parent's end, 2 for bad input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        try:
            Worker(channel).serve()
        except ParentGoneError:
            return
        except (UserError, FrameError, ValueError) as error:
            print(error, file=sys.stderr)
            raise SystemExit(2) from error


if __name__ == "__main__":
    main()
