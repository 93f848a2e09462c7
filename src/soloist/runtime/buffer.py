"""The rollout buffer: the only place where players and the learner wait for each other.

    players   lease ──► play ──► put                 wait for: a place (woken by put, take, wake)
    learner                       take ──► train     waits for: a full current step (woken by put)
    publisher (lag only)          served ──► load    waits for: full steps of the engines' version (woken by put)

States of an attempt: running → finished → scored → trained, or failed, or dropped (drawn in `places.py`).
Invariant, whenever no call is running: attempts = running + finished + scored + trained + dropped + failed, and no step
holds more than `rollouts_per_step` rollouts. All changes happen synchronously between two awaits and end with one
signal that wakes every waiter, so there is no lock to hold and no wake-up to lose.

Guarantees: a wait for full steps is reported after `stall_report_seconds`, again after as many more, and ends the run
after `stall_limit_seconds`; too many failures end it with the dominant reason; the first error wakes everybody.
Not covered: deadlines of episodes (the player's), durability (`ledger.py`). A player's wait for a place is reported
after `stall_limit_seconds` without any change, but doesn't end the run: a long optimizer step looks the same. Time in
which this process itself stood still (stopped, starved) is told and is nobody's stall; leases may expire by it.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

from soloist.config import RunConfig
from soloist.errors import RunError
from soloist.runtime.exact_lag import ExactLag
from soloist.runtime.leases import Journal, Lease, NoJournal
from soloist.runtime.ledger_rows import Frontier
from soloist.runtime.places import Places
from soloist.runtime.staleness import Admission
from soloist.runtime.tasks import TaskSource
from soloist.seams import Clock, SystemClock
from soloist.types import Rollout

_STANDSTILL_POLLS = 10
"""So many polls late, a waiter was not running; less is a busy machine."""


class RolloutBuffer:
    """Leases places to players, takes their rollouts back and hands full steps to the learner.

    Example: `lease = await buffer.lease(lambda: engine.version)` and `await buffer.put(lease, rollout)` in a player,
    `rollouts = await buffer.take(version=step)` in the loop, `buffer.wake()` after the engines loaded new weights.
    """

    def __init__(
        self,
        config: RunConfig,
        source: TaskSource,
        *,
        clock: Clock | None = None,
        on_stall: Callable[[str], None] = lambda report: None,
        on_abort: Callable[[list[str]], None] = lambda rollout_ids: None,
        on_hunger: Callable[[], None] = lambda: None,
        journal: Journal | None = None,
        sort_by_place: bool | None = None,
        poll_seconds: float = 1.0,
        awake: Clock | None = None,
    ) -> None:
        """`sort_by_place` follows `config.deterministic` when None; waiters look at the clock every `poll_seconds`.

        `on_hunger` is called whenever somebody begins to wait while the learner waits for a step. `awake` is real
        time, whatever `clock` is: by it a waiter sees that this process stood still.
        """
        self._health = config.health
        self._clock = clock or SystemClock()
        self._places = Places(config, source, self._clock, on_abort, journal or NoJournal())
        self._on_stall = on_stall
        self._on_hunger = on_hunger
        self._sorted = config.deterministic if sort_by_place is None else sort_by_place
        self._poll_seconds = poll_seconds
        self._awake = awake or SystemClock()
        self._noticed_at = -math.inf
        self._standstills: deque[tuple[float, float]] = deque(maxlen=100)  # (seen at, seconds), by `clock` and `awake`
        self._changed = asyncio.Event()
        self._error: Exception | None = None
        self._taking = False
        self._queue_size = 0
        self._moved_at = self._spoke_at = self._clock.monotonic()

    @property
    def admission(self) -> Admission | ExactLag:
        """Which step comes next and who may enter it."""
        return self._places.admission

    async def lease(self, version: Callable[[], int]) -> Lease:
        """Wait for a place and lease it. `version` is asked at each try: that of the engine that will serve.

        Raises the error that ended the run.
        """
        while True:
            self._raise_error()
            # Asked anew: the engine may have loaded while this player waited.
            lease = self._places.try_lease(version())
            if lease is not None:
                return lease
            await self._change()
            self._report_idle_learner()

    async def put(self, lease: Lease, rollout: Rollout) -> None:
        """Take an ended rollout back; a result that nobody awaits any more is ignored and counted as late.

        Raises RunError when too many attempts failed or a version stamp is impossible (the run is over then), and
        ValueError for a rollout that isn't the lease's or hasn't ended.
        """
        self._raise_error()
        try:
            self._places.settle(lease, rollout)
        except RunError as error:
            self._end(error)
        self._stop_if_failing()
        self.wake()

    async def take(self, version: int) -> list[Rollout]:
        """Wait until the step that trains `version` is full; its rollouts in order of occupation (or of place).

        Raises RunError for a version out of turn, after `stall_limit_seconds`, for a broken staleness bound, and the
        error that ended the run.
        """
        if version != self.admission.step:
            raise RunError(f"take(version={version}), but step {self.admission.step} comes next; take steps in order")
        self._queue_size = self._places.scored_count()
        await self._until(self.admission.ready)
        try:
            rollouts = self._places.consume()
        except RunError as error:
            self._end(error)
        self.wake()
        return sorted(rollouts, key=lambda rollout: rollout.place) if self._sorted else rollouts

    async def served(self, version: int) -> None:
        """Wait until no step needs engines of `version` any more: at once, but for a run with a `lag`.

        Raises RunError after `stall_limit_seconds`, and the error that ended the run.
        """
        await self._until(lambda: not self.admission.needs(version))

    def wake(self) -> None:
        """Wake all waiters because something changed. Call it after engines loaded a new version."""
        self._moved_at = self._clock.monotonic()
        # A fresh event for the next round: whoever waits on the old one is woken exactly once.
        self._changed.set()
        self._changed = asyncio.Event()

    def fail(self, error: Exception) -> None:
        """End the run: everybody who waits or comes later gets `error`. The first error wins."""
        # Later errors are mostly consequences; the first one says what broke.
        self._error = self._error or error
        self.wake()

    def close(self) -> None:
        """No more leases and steps; whoever waits gets a RunError."""
        self.fail(RunError(f"the buffer was closed before step {self.admission.step}"))

    def note(self, lease: Lease, waiting_for: str, finished: bool = False) -> bool:
        """A sign of life: what a rollout waits for, for stall reports; renews its lease. False when that is over.

        `finished` once its result is at hand: such a lease does not expire any more.
        """
        return self._places.note(lease, waiting_for, finished)

    @property
    def hungry(self) -> bool:
        """Whether the learner waits for a step, so that every moment until a rollout is put counts."""
        return self._taking

    def holds(self, lease: Lease) -> bool:
        """Whether the lease is still in force."""
        return self._places.holds(lease)

    def refused(self) -> None:
        """Count a result that the ledger's fence turned away."""
        self._places.tally.late += 1

    def expire(self) -> None:
        """End leases without a sign of life, so that others can play their places. Waiters do it, too."""
        told = self._places.expire()
        if told:
            others = f" and {len(told) - 1} others" if told[1:] else ""
            self._on_stall(f"given up without a sign of life, to be played again: {told[0]}{others}")
            self.wake()

    def conservation(self) -> dict[str, int]:
        """Attempts by state; `attempts` equals the sum of the others."""
        return self._places.conservation()

    def check_conservation(self) -> None:
        """Raise AssertionError unless every attempt and every task is counted exactly once."""
        self._places.check_conservation()

    def fates(self) -> dict[str, int]:
        """Failed and dropped attempts by boundary or reason, and the late results that were ignored."""
        return {**self._places.tally.reasons, "late": self._places.tally.late}

    def step_metrics(self) -> dict[str, float | None]:
        """Metrics of the step taken last and of all attempts that ended since the last call."""
        return {**self._places.step_metrics(), "queue/size": float(self._queue_size)}

    def report(self) -> str:
        """One line about everything under way."""
        return self._places.describe()

    def state(self) -> dict[str, Any]:
        """JSON-able: the next step and the task source, for people; the ledger is what a resume reads."""
        return self._places.state()

    def restore(self, frontier: Frontier) -> None:
        """Continue where a ledger says: untrained rollouts are back, open tasks are leased again, first.

        Raises ValueError after a lease.
        """
        self._places.restore(frontier)

    # Waiting, and what may end it.

    async def _until(self, full: Callable[[], bool]) -> None:
        """Wait for steps that fill, with reports and a limit."""

        def done() -> bool:
            self._raise_error()
            return full()

        began = self._spoke_at = self._clock.monotonic()
        self._taking = True
        try:
            while not done():
                await self._change()
                # A step that filled at the last moment is not a stall.
                if not done():
                    self._report_stall(began)
        finally:
            self._taking = False

    async def _change(self) -> None:
        """Until the next signal, or until it is time to look at the clock."""
        # Bound before the first await: a signal between a failed try and this wait can't be missed.
        changed = self._changed
        if self._taking:
            self._on_hunger()
        began = self._awake.monotonic()
        try:
            async with asyncio.timeout(self._poll_seconds):
                await changed.wait()
        except TimeoutError:
            self._notice_standstill(began)
            self.expire()
        else:
            self._notice_standstill(began)

    def _notice_standstill(self, began: float) -> None:
        now = self._awake.monotonic()
        lost = now - began - self._poll_seconds
        # All waiters see the same one; those that began before it was noticed come too late.
        if lost < _STANDSTILL_POLLS * self._poll_seconds or began < self._noticed_at:
            return
        self._noticed_at = now
        self._standstills.append((self._clock.monotonic(), lost))
        self._spoke_at += lost
        self._on_stall(f"this process stood still for {lost:.1f} s; that is nobody's stall")

    def _report_stall(self, began: float) -> None:
        now = self._clock.monotonic()
        # What nobody could have done anything in does not count against the limit.
        began += sum(lost for seen_at, lost in self._standstills if seen_at >= began)
        report = f"no full step for {now - began:.1f} s"
        if now - began >= self._health.stall_limit_seconds:
            limit = f"health.stall_limit_seconds = {self._health.stall_limit_seconds:g}"
            self._end(RunError(f"{report}, the limit ({limit}): {self.report()}"))
        if now - self._spoke_at >= self._health.stall_report_seconds:
            self._spoke_at = now
            self._on_stall(f"{report}: {self.report()}")

    def _report_idle_learner(self) -> None:
        now = self._clock.monotonic()
        quiet = now - max(self._moved_at, self._spoke_at)
        if not self._taking and quiet >= self._health.stall_limit_seconds:
            self._spoke_at = now
            self._on_stall(f"players wait and the learner has not asked for a step for {quiet:.1f} s: {self.report()}")

    def _stop_if_failing(self) -> None:
        tally, limit = self._places.tally, self._health.max_failed_ratio
        share = tally.failed_share()
        if share is not None and share > limit:
            self._end(
                RunError(
                    f"{share:.0%} of the last rollouts failed, above health.max_failed_ratio = {limit:g}; mend what "
                    f"breaks at this boundary: {tally.dominant_failure()}"
                )
            )

    def _end(self, error: RunError) -> NoReturn:
        self.fail(error)
        raise error

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
