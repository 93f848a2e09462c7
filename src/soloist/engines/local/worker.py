"""The child's main loop: between two decode steps it reads orders, in between it answers.

Guarantees: the process ends when the socket ends, whatever else happens; an order that is no message of the protocol
ends it too (its parent is the only peer, so that is a bug and not a peer to argue with); SIGINT is left to the parent.
Not covered: starting it (`child`), deciding what a crash means (`engine`).
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from soloist.engines.local.alteration import altered
from soloist.engines.local.batch import Answer, ContinuousBatch
from soloist.engines.local.loads import Loads, Verified, verify
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
from soloist.models.loading import assign_weights, load_policy, own_tensors, parameter_table

_READ_BYTES = 1 << 20


class ParentGoneError(Exception):
    """The other end of the socket is closed."""


class Worker:
    """Serves one parent over one socket."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._frames = FrameBuffer()
        # One for all: a fresh megabyte for each read, cut down to a few bytes, leaves holes that make the heap grow.
        self._incoming = bytearray(_READ_BYTES)

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
        loads = Loads(parameter_table(batch.runner.model), start.alteration)
        self._send([Ready(vocab_size=batch.runner.vocab_size)])
        try:
            self._serve(batch, loads, orders)
        finally:
            loads.close()

    def _serve(self, batch: ContinuousBatch, loads: Loads, orders: list[Order]) -> None:
        while True:
            for order in orders:
                if isinstance(order, Close):
                    return
                self._obey(batch, loads, order)
            # Orders and loads take effect between two steps and nowhere else: no token comes from a mix of weights.
            for verified in loads.collect():
                self._swap(batch, verified)
            self._answer(batch, batch.step() if batch.busy else [])
            orders = self._receive(wait=not batch.busy, loads=loads)

    def _receive(self, *, wait: bool, loads: Loads | None = None) -> list[Order]:
        """Orders that have arrived; waits for them, or for a load, only when there is nothing else to do."""
        watched: list[socket.socket | Loads] = [self._channel] if loads is None else [self._channel, loads]
        readable, _, _ = select.select(watched, [], [], None if wait else 0)
        if self._channel not in readable:
            return []
        size = self._channel.recv_into(self._incoming)
        if not size:
            raise ParentGoneError
        # A broken frame raises from here: the stream has lost its place and can't be followed any further.
        return [unpack_order(payload) for payload in self._frames.feed(bytes(self._incoming[:size]))]

    def _send(self, replies: Iterable[Reply]) -> None:
        """All in one write: requests of equal length end in the same step."""
        frames = b"".join(pack_frame(reply) for reply in replies)
        if not frames:
            return
        try:
            self._channel.sendall(frames)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ParentGoneError from error

    def _obey(self, batch: ContinuousBatch, loads: Loads, order: Order) -> None:
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
            case Load(weights=weights) if batch.busy or loads.pending:
                loads.ask(weights)
            case Load(weights=weights):
                # Nobody is kept waiting, so there is nothing to gain from a thread.
                self._swap(batch, verify(weights, parameter_table(batch.runner.model), batch.alteration))
            case AskHealth():
                self._send([Health(counters=batch.counters)])
            case _:
                raise FrameError(f"{type(order).__name__} is no order for a running worker")

    def _swap(self, batch: ContinuousBatch, verified: Verified) -> None:
        version = verified.weights.version
        if verified.tensors is None:
            self._send([NotLoaded(version=version, reason=verified.reason)])
            return
        batch.swap(verified.tensors, version)
        self._send([Loaded(version=version)])

    def _answer(self, batch: ContinuousBatch, answers: Sequence[Answer]) -> None:
        counters = batch.counters
        self._send(
            Refused(request_id=answer.request_id, reason=answer.reason)
            if answer.completion is None
            else Completed(request_id=answer.request_id, completion=answer.completion, counters=counters)
            for answer in answers
        )


def build_batch(start: Start) -> ContinuousBatch:
    """Model, cache and scheduler as ordered. Raises UserError or ValueError for a model that can't be served."""
    torch.set_num_threads(start.threads)
    if start.cores:
        _stay_on(start.cores)
    model = load_policy(Path(start.model_folder), start.dtype, start.device)
    # Before the runner joins projections: nothing that is computed may come from other weights.
    assign_weights(model, altered(own_tensors(model), 0, start.alteration))
    runner = ModelRunner(
        model,
        slots=start.slots,
        max_length=start.max_length,
        vocab_size=start.vocab_size,
        fixed_shapes=start.fixed_shapes,
        cuda_graphs=start.cuda_graphs,
    )
    return ContinuousBatch(
        runner, recompute=start.recompute, prefill_chunk=start.prefill_chunk, alteration=start.alteration
    )


def _stay_on(cores: Sequence[int]) -> None:
    try:
        os.sched_setaffinity(0, cores)
    except (OSError, AttributeError) as error:
        raise UserError(
            f"engine.cores is {list(cores)}, which this machine refuses ({error}); name cores of it, or leave it empty"
        ) from error


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
