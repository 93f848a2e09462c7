"""Weights are read and verified beside decoding; only the swap itself stands between two steps.

    main thread   asks for a load, goes on decoding, collects what is verified and swaps it in
    one thread    reads the file, hashes it, checks names, shapes, types and finite numbers, alters them if ordered

Guarantees: loads come back in the order in which they were asked for; nothing of the model changes here; `collect`
never waits; the descriptor of `fileno` becomes readable when something can be collected.
Not covered: the swap (`ContinuousBatch.swap`).
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from soloist.engines.local.alteration import altered
from soloist.engines.local.messages import Alteration
from soloist.models.loading import TensorTable, read_weights
from soloist.types import WeightsRef

CLOSE_SECONDS = 1.0
EXACT = Alteration()


@dataclass(frozen=True)
class Verified:
    """What became of a load: tensors that fit the model, or the reason why there are none."""

    weights: WeightsRef
    tensors: dict[str, Tensor] | None
    reason: str = ""


def verify(weights: WeightsRef, expected: TensorTable, alteration: Alteration = EXACT) -> Verified:
    """Read and check a weights file, and alter it as ordered. Everything that can fail about a load fails here."""
    if weights.version < 0:
        return Verified(weights, None, f"version is {weights.version}; versions count policy updates from 0")
    try:
        tensors = read_weights(Path(weights.path), expected, weights.sha256)
        return Verified(weights, altered(tensors, weights.version, alteration))
    except (ValueError, OSError) as error:
        return Verified(weights, None, str(error))


class Loads:
    """The loads that are under way."""

    def __init__(self, expected: TensorTable, alteration: Alteration = EXACT) -> None:
        self._expected = expected
        self._alteration = alteration
        self._asked: queue.SimpleQueue[WeightsRef | None] = queue.SimpleQueue()
        self._done: deque[Verified] = deque()
        self._bell, self._ring = os.pipe()
        self.pending = 0
        """Loads that were asked for and not collected yet."""
        # A daemon, so that a file system that hangs can't keep the process from ending.
        self._thread = threading.Thread(target=self._work, name="weights reader", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """For `select`."""
        return self._bell

    def ask(self, weights: WeightsRef) -> None:
        """Begin to read and verify."""
        self.pending += 1
        self._asked.put(weights)

    def _work(self) -> None:
        while (weights := self._asked.get()) is not None:
            self._done.append(verify(weights, self._expected, self._alteration))
            os.write(self._ring, b".")

    def collect(self) -> list[Verified]:
        """What is verified by now."""
        found = []
        while self._done:
            found.append(self._done.popleft())
            os.read(self._bell, 1)
        self.pending -= len(found)
        return found

    def close(self) -> None:
        """End the thread after what it reads now, unless that hangs."""
        self._asked.put(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            # It would ring a bell that by then belongs to somebody else.
            return
        os.close(self._bell)
        os.close(self._ring)
