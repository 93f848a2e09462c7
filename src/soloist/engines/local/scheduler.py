"""Which request sits in which slot, and whose prefix a slot keeps. Pure bookkeeping: no torch, no clock.

Invariant: every slot is in exactly one of three states, free, `running` (a request is decoded) or `kept` (idle, holding
the prefix of a rollout that may come back). Requests wait in order of arrival; a later one passes an earlier one only
when that one wants a fixed slot that is busy. Prefixes are shared between turns of one rollout, never between rollouts.
Not covered: what the tokens are (`ModelRunner`) and when steps happen (`ContinuousBatch`).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from soloist.types import GenerateRequest


@dataclass
class Kept:
    """The prefix that an idle slot keeps for a rollout."""

    rollout_id: str
    token_ids: list[int]
    cached: int
    """Tokens whose keys and values are stored; the last sampled token never was an input."""
    version: int
    """Oldest weights that computed any of them."""


@dataclass
class Seat:
    """A running request and its slot."""

    request: GenerateRequest
    slot: int
    reused: int
    """Prompt tokens whose keys and values were there already."""
    version: int
    """Oldest weights that computed any key or value of this slot."""
    forget: bool = field(default=False)
    """The rollout was released meanwhile: keep nothing when the request ends."""


def common_prefix(left: list[int], right: list[int]) -> int:
    """Number of equal leading tokens."""
    # The usual case, a history that was only extended, at the speed of a list comparison.
    if left == right[: len(left)]:
        return len(left)
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


class SlotTable:
    """Seats requests. `reuse` False forgets every prefix, which makes a completion depend on its request only."""

    def __init__(self, slots: int, *, reuse: bool = True) -> None:
        self.slots = slots
        self.reuse = reuse
        self.waiting: deque[GenerateRequest] = deque()
        self.running: dict[int, Seat] = {}
        self.kept: OrderedDict[int, Kept] = OrderedDict()
        """Least recently used first."""
        self._free = list(range(slots))

    @property
    def highest(self) -> int:
        """One past the highest running slot: decoding computes rows 0 … highest−1."""
        return max(self.running, default=-1) + 1

    def submit(self, request: GenerateRequest) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def admit(self, version: int) -> list[Seat]:
        """Seat as many waiting requests as possible; `version` is that of the weights in use."""
        seats: list[Seat] = []
        left_over: deque[GenerateRequest] = deque()
        while self.waiting:
            request = self.waiting.popleft()
            seat = self._seat(request, version)
            if seat is not None:
                seats.append(seat)
                continue
            left_over.append(request)
            # No slot for anybody; but one that waits for its own slot holds up nobody else.
            if request.slot is None:
                break
        left_over.extend(self.waiting)
        self.waiting = left_over
        return seats

    def _seat(self, request: GenerateRequest, version: int) -> Seat | None:
        slot, reused, oldest = self._own_prefix(request, version)
        if slot is None:
            slot = self._take(request.slot)
        if slot is None:
            return None
        # Either its own prefix, which now runs, or that of the rollout that gives way.
        self.kept.pop(slot, None)
        seat = Seat(request=request, slot=slot, reused=reused, version=oldest)
        self.running[slot] = seat
        return seat

    def _own_prefix(self, request: GenerateRequest, version: int) -> tuple[int | None, int, int]:
        """The slot with the longest usable prefix of this rollout: slot, reusable tokens, their oldest version."""
        best: tuple[int | None, int, int] = (None, 0, version)
        for slot, kept in self.kept.items():
            if kept.rollout_id != request.rollout_id or request.slot not in (None, slot):
                continue
            common = common_prefix(kept.token_ids, request.prompt_ids)
            # A continued rollout goes on with its cache, whatever weights made it. A rewritten or restarted one is new
            # work, so old weights must not speak in it.
            usable = common if common == len(kept.token_ids) or kept.version == version else 0
            # The last prompt token is computed in any case: its output predicts the first new token.
            reused = min(usable, kept.cached, len(request.prompt_ids) - 1)
            if best[0] is None or reused > best[1]:
                best = (slot, reused, kept.version if reused else version)
        return best

    def _take(self, wanted: int | None) -> int | None:
        """A free slot, the lowest first, else the least recently used idle one, else None."""
        if wanted is not None:
            if wanted in self.running:
                return None
            if wanted in self._free:
                self._free.remove(wanted)
                heapq.heapify(self._free)
            return wanted
        if self._free:
            return heapq.heappop(self._free)
        return next(iter(self.kept), None)

    def finish(self, slot: int, token_ids: list[int], cached: int) -> None:
        """A request ended; keep its slot for the rollout's next turn."""
        seat = self.running.pop(slot)
        # With 0 cached tokens there is nothing to come back for.
        if not self.reuse or seat.forget or cached == 0:
            heapq.heappush(self._free, slot)
            return
        self.kept[slot] = Kept(
            rollout_id=seat.request.rollout_id, token_ids=token_ids, cached=cached, version=seat.version
        )

    def vacate(self, slot: int) -> None:
        """A request failed or was cancelled; its slot holds nothing of use."""
        del self.running[slot]
        heapq.heappush(self._free, slot)

    def release(self, rollout_id: str) -> None:
        """Forget the prefixes of a rollout, also the one that a running request would leave."""
        for slot in [slot for slot, kept in self.kept.items() if kept.rollout_id == rollout_id]:
            del self.kept[slot]
            heapq.heappush(self._free, slot)
        # A caller may give up on a rollout whose request still runs; its slot must not stay reserved for ever.
        for seat in self.running.values():
            seat.forget = seat.forget or seat.request.rollout_id == rollout_id

    def withdraw(self, request_id: str) -> int | None:
        """Take a request out of the queue, or say in which slot it runs (None when it is unknown or was waiting)."""
        for request in self.waiting:
            if request.request_id == request_id:
                self.waiting.remove(request)
                return None
        return next((slot for slot, seat in self.running.items() if seat.request.request_id == request_id), None)

    def renewed(self, version: int) -> None:
        """All caches were computed anew with these weights."""
        for seat in self.running.values():
            seat.version = version
        for kept in self.kept.values():
            kept.version = version
