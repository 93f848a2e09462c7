"""What the parent waits for: requests, loads and pings without an answer, and what the answers said.

Guarantees: every waiting caller is answered once, by the child, by a hand-over to a fresh child, or by the reason why
nobody will; completions are checked at the door; `version` and `weights` are those of the last load that succeeded,
also when its caller had given up. Not covered: processes, deadlines and restarts (`engine`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from soloist.engines.door import check_completion
from soloist.engines.local.messages import (
    Completed,
    Counters,
    FrameError,
    Generate,
    Health,
    Load,
    Loaded,
    NotLoaded,
    Order,
    Refused,
    Reply,
)
from soloist.errors import RolloutError, RunError
from soloist.types import Completion, GenerateRequest, WeightsRef

_T = TypeVar("_T")
NOTHING_YET = Counters(version=0, running=0, waiting=0, tokens=0, busy_s=0.0)


@dataclass
class _Waiting:
    """A request without an answer."""

    request: GenerateRequest
    answer: asyncio.Future[Completion]
    aborted: bool = False


@dataclass
class _Swap:
    """A load without an answer. It stays listed when its caller gives up, since the answer still counts."""

    weights: WeightsRef
    answer: asyncio.Future[None]


class Desk:
    """Open questions to a child, and its answers."""

    def __init__(self, name: str, vocab_size: int | None) -> None:
        self.name = name
        self.vocab_size = vocab_size
        self.version = 0
        self.weights: WeightsRef | None = None
        self.counters = NOTHING_YET
        """What the present child said last."""
        self.tokens_before = 0
        """Tokens of earlier children."""
        self.busy_before_s = 0.0
        self._newest_version = 0
        self._requests: dict[str, _Waiting] = {}
        self._swaps: deque[_Swap] = deque()
        self._pings: list[asyncio.Future[None]] = []

    def __len__(self) -> int:
        """Requests without an answer."""
        return len(self._requests)

    def ask(self, request: GenerateRequest) -> asyncio.Future[Completion]:
        """List a request. Raises RolloutError when its id is in use."""
        if request.request_id in self._requests:
            raise RolloutError("engine", f"request id {request.request_id} is in use; ids must be unique")
        waiting = _Waiting(request, asyncio.get_running_loop().create_future())
        self._requests[request.request_id] = waiting
        return waiting.answer

    def forget(self, request_id: str) -> bool:
        """Take a request off the list. True when it was still unanswered."""
        return self._requests.pop(request_id, None) is not None

    def ask_load(self, weights: WeightsRef) -> asyncio.Future[None]:
        """List a load."""
        swap = _Swap(weights, asyncio.get_running_loop().create_future())
        self._swaps.append(swap)
        return swap.answer

    def ask_health(self) -> asyncio.Future[None]:
        """List a ping; the next sign of life answers all of them."""
        ping: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pings = [*(waiting for waiting in self._pings if not waiting.done()), ping]
        return ping

    def mark_aborted(self, rollout_ids: Sequence[str] | None) -> None:
        """Remember who is to be aborted, so that a fresh child does not begin them again."""
        for waiting in self._requests.values():
            waiting.aborted = waiting.aborted or rollout_ids is None or waiting.request.rollout_id in rollout_ids

    def answer_aborted(self) -> None:
        """Answer aborted requests with nothing sampled: no child holds them any more."""
        for request_id in [key for key, waiting in self._requests.items() if waiting.aborted]:
            # What an earlier child had sampled is gone with it.
            nothing = Completion(token_ids=[], log_probs=[], finish_reason="abort", version_spans=[])
            _answer(self._requests.pop(request_id).answer, nothing)

    def hand_over(self) -> list[Order]:
        """What a fresh child must be told: loads that somebody still waits for, then the requests."""
        self._swaps = deque(swap for swap in self._swaps if not swap.answer.done())
        self.answer_aborted()
        loads: list[Order] = [Load(weights=swap.weights) for swap in self._swaps]
        return loads + [Generate(request=waiting.request) for waiting in self._requests.values()]

    def child_gone(self) -> None:
        """Close the books on a child that is gone."""
        self.tokens_before += self.counters.tokens
        self.busy_before_s += self.counters.busy_s
        self.counters = NOTHING_YET

    def fail_all(self, reason: str) -> None:
        """Tell everybody that no answer will come."""
        requests, self._requests = self._requests, {}
        swaps, self._swaps = self._swaps, deque()
        for waiting in requests.values():
            _fail(waiting.answer, RolloutError("engine", reason))
        for swap in swaps:
            _fail(swap.answer, RunError(reason))

    def take(self, reply: Reply) -> None:
        """Deliver an answer. Raises FrameError for one that no question belongs to."""
        match reply:
            case Completed(request_id=request_id, completion=completion, counters=counters):
                self.counters = counters
                self._complete(request_id, completion)
            case Refused(request_id=request_id, reason=reason):
                # Unknown ids belong to callers who gave up.
                waiting = self._requests.pop(request_id, None)
                if waiting:
                    _fail(waiting.answer, RolloutError("engine", f"request {request_id}: {reason}"))
            case Loaded() | NotLoaded():
                self._swapped(reply)
            case Health(counters=counters):
                self.counters = counters
                for ping in self._pings:
                    _answer(ping, None)
            case _:
                raise FrameError(f"a running child said {type(reply).__name__}")

    def _complete(self, request_id: str, completion: Completion) -> None:
        waiting = self._requests.pop(request_id, None)
        if waiting is None:
            return
        try:
            check_completion(
                completion, waiting.request, vocab_size=self.vocab_size, newest_version=self._newest_version
            )
        except RolloutError as error:
            _fail(waiting.answer, error)
        else:
            _answer(waiting.answer, completion)

    def _swapped(self, reply: Loaded | NotLoaded) -> None:
        # The child answers loads in the order of the loads, so the oldest question is the one.
        if not self._swaps or self._swaps[0].weights.version != reply.version:
            raise FrameError(f"the child answered a load of version {reply.version} that nobody asked for")
        swap = self._swaps.popleft()
        if isinstance(reply, NotLoaded):
            _fail(swap.answer, RunError(f"engine '{self.name}' keeps version {self.version}: {reply.reason}"))
            return
        self.weights = swap.weights
        self.version = swap.weights.version
        # A lower version may follow a higher one (a new lineage); tokens of both may still come in.
        self._newest_version = max(self._newest_version, self.version)
        _answer(swap.answer, None)


def _answer(future: asyncio.Future[_T], value: _T) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[_T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
