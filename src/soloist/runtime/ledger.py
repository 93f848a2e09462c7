"""The ledger: every rollout and every step of a run on disk, in one SQLite file with one writer.

    started ──► (renewed) ──► ended ──► commit        in this order in one queue, whoever calls
                   └► expired    └► dropped           a result after `expired`, or a second one, is refused

A *life* is one opening of the ledger by a run. Attempts that a life left running are `lost` when the next one opens it.

Guarantees: a step and the fate of its rollouts are written in one transaction, and `commit` returns when that is on
disk; no rollout is trained by two steps and no step is committed twice; an attempt's result is taken once, and only
while its lease is in force (the fence); what `ended` accepts is on disk when it returns.
SQLite runs in write-ahead mode, so readers never block the writer, with `synchronous = FULL`: a committed step
must survive a power cut, because its weights are published next. Calls that arrive during a write share the next
one, so the disk is synced once for many rollouts; `ended` can be told to wait for company for a moment, since a write
for one rollout costs nearly as much as one for ten. One thread writes; the event loop never waits for the disk.
Starts, renewals and expiries wait in memory for the next write: a crash forgets them together with what they led to.
Not covered: the tables (`ledger_rows.py`), when a lease expires (`places.py`), what is done after a crash
(`training/recovery.py`).
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from soloist.errors import RunError
from soloist.runtime import ledger_changes as changes
from soloist.runtime.health import WorkerThread
from soloist.runtime.ledger_rows import (
    LEDGER_SCHEMA,
    Fate,
    Frontier,
    Lineage,
    StoredRollout,
    StoredStep,
    read_counts,
    read_lineages,
    read_rollouts,
    read_step_rollouts,
    read_steps,
    select_chain,
    select_frontier,
    select_lineages,
    step_rollouts,
)
from soloist.seams import Clock, SystemClock, fault_point
from soloist.types import Rollout

__all__ = [
    "LEDGER_SCHEMA",
    "Fate",
    "Frontier",
    "Ledger",
    "Lineage",
    "StoredRollout",
    "StoredStep",
    "read_counts",
    "read_lineages",
    "read_rollouts",
    "read_step_rollouts",
    "read_steps",
]

T = TypeVar("T")

_STARTED_AT_ONCE = 64
_WAL_LIMIT_BYTES = 64 * 2**20


@dataclass
class _Write:
    """One change in the queue, and whether it took effect, known once it is on disk."""

    apply: Callable[[sqlite3.Connection], bool]
    accepted: bool = False


class Ledger:
    """The one writer of a run's ledger.

    Example: `ledger = await Ledger.open(folder / "ledger.sqlite"); await ledger.started(rollout, unit=7,
    expires_at=now + 180)`, `await ledger.ended(rollout)`, `await ledger.commit(step, rollouts, {}, state_hash="ab")`.
    """

    def __init__(self, path: Path, clock: Clock | None = None) -> None:
        """Use `Ledger.open`."""
        self.path = path
        self.life = 0
        """Number of this opening."""
        self.lineage = 1
        """The lineage that the next step belongs to."""
        self._clock = clock or SystemClock()
        self._thread = WorkerThread("ledger")
        self._queue: deque[_Write] = deque()
        self._renewals: dict[changes.Key, float] = {}
        self._next_write: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()
        self._connection: sqlite3.Connection | None = None
        self._closed = False

    @classmethod
    async def open(cls, path: Path, clock: Clock | None = None) -> Ledger:
        """Open or create a ledger and begin a new life. Raises RunError for another schema or a foreign file."""
        ledger = cls(path, clock)
        try:
            await ledger._thread.call(ledger._connect)
        except BaseException:
            await ledger.close()
            raise
        return ledger

    # Rollouts.

    async def started(self, rollout: Rollout, *, unit: int, expires_at: float) -> None:
        """Note a lease. Cheap: it reaches the disk with the next write, or together with 63 others."""
        self._later(lambda db: changes.start(db, rollout, unit, self.life, expires_at))
        if len(self._queue) >= _STARTED_AT_ONCE:
            await self._thread.call(self._flush)

    def renewed(self, rollout: Rollout, expires_at: float) -> None:
        """Note a sign of life; it reaches the disk with the next write."""
        self._renewals[rollout.rollout_id, rollout.attempt] = expires_at

    async def ended(
        self,
        rollout: Rollout,
        fate: Literal["failed", "dropped"] | None = None,
        reason: str = "",
        *,
        patience_s: float = 0.0,
    ) -> bool:
        """Store an attempt's result with its whole record: scored when `fate` is None, else why it won't be trained.

        Returns when it is on disk, which `patience_s` may put off so that others share the write; `hurry` and `commit`
        end the patience. False: the result came late or twice and was refused; what is on record stays.
        """
        if fate is None and rollout.failure is not None:
            fate = "failed"
        if rollout.failure is not None and not reason:
            reason = f"{rollout.failure.boundary}: {rollout.failure.reason}"
        if fate is None and rollout.state == "running":
            raise ValueError(f"rollout {rollout.rollout_id} is still running; it ends with a score or with a fate")
        now = self._clock.now()
        # Its last sign of life goes along; left to itself it would take a statement more.
        expires_at = self._renewals.pop((rollout.rollout_id, rollout.attempt), None)
        write = self._later(lambda db: changes.end(db, rollout, fate, reason, self.life, now, expires_at))
        await self._shared_write(patience_s)
        return write.accepted

    def hurry(self) -> None:
        """Write what waits for company now: somebody needs it."""
        self._hurry.set()

    def expired(self, rollout_id: str, attempt: int, reason: str) -> None:
        """The lease ran out: from here on the attempt's result is refused. On disk with the next write."""
        now = self._clock.now()
        self._later(lambda db: changes.expire(db, (rollout_id, attempt), reason, now))

    def dropped(self, rollout: Rollout, fate: str, reason: str, boundary: str | None = None) -> None:
        """A scored rollout won't be trained after all. On disk with the next write; a crash before brings it back."""
        key = (rollout.rollout_id, rollout.attempt)
        self._later(lambda db: changes.drop(db, key, fate, boundary, reason))

    def quarantined(self, unit: int, reason: str) -> None:
        """The task is given up. On disk with the next write."""
        self._later(lambda db: changes.quarantine(db, unit, reason))

    def uniform(self, unit: int, rollouts: Sequence[Rollout]) -> None:
        """All rewards of the group are equal: its task is done untrained. On disk, as a whole, with the next write."""
        keys = [(rollout.rollout_id, rollout.attempt) for rollout in rollouts]
        reason = f"all rewards are {rollouts[0].reward:g}"
        self._later(lambda db: changes.pass_over(db, unit, keys, reason))

    # Steps.

    async def commit(
        self, step: int, rollouts: Sequence[Rollout], record: Mapping[str, Any], *, state_hash: str = ""
    ) -> None:
        """Record in one transaction that `step` trained these rollouts in this order. Call it before publishing.

        Raises ValueError, with nothing changed, for a step out of turn, or a rollout that is trained already,
        twice in the list, or not on record as scored.
        """
        keys = [(rollout.rollout_id, rollout.attempt) for rollout in rollouts]
        names = {"rollout_ids": [key[0] for key in keys], "attempts": [key[1] for key in keys]}
        # Serialised here, so that a record that is no JSON fails before anything is written.
        row = (step, self.lineage, self._clock.now(), state_hash, json.dumps({**names, "record": dict(record)}))
        await self._change("commit", lambda db: changes.commit_step(db, row, keys))

    async def recommit(self, step: StoredStep, state_hash: str) -> None:
        """Record in the present lineage that a committed step, trained again, led to another state."""
        record = {"rollout_ids": step.rollout_ids, "attempts": step.attempts, "record": step.record}
        row = (step.step, self.lineage, self._clock.now(), state_hash, json.dumps(record))
        await self._change("lineage", lambda db: changes.insert_step(db, row))

    async def begin_lineage(self, first_step: int, reason: str) -> None:
        """Begin a lineage: steps from `first_step` on have other results than those on record."""
        number, now = self.lineage + 1, self._clock.now()
        await self._change("lineage", lambda db: changes.insert_lineage(db, number, first_step, reason, now))
        self.lineage = number

    async def sealed(self, step: int, state_hash: str, folder: str) -> None:
        """Note that the snapshot after `step` updates is complete on disk."""
        row = (step, self.lineage, state_hash, folder, self._clock.now())
        await self._change("sealed", lambda db: changes.seal(db, *row))

    async def prune(self, before_step: int) -> None:
        """Forget the payloads of steps < `before_step`, and of attempts that ended untrained before those."""
        await self._change("prune", lambda db: changes.forget_payloads(db, before_step))

    # Reading.

    async def steps(self) -> list[StoredStep]:
        """The chain of committed steps."""
        return await self._thread.call(lambda: select_chain(self._db))

    async def lineages(self) -> list[Lineage]:
        """All lineages in order."""
        return await self._thread.call(lambda: select_lineages(self._db))

    async def rollouts_of(self, step: int) -> list[Rollout]:
        """Rollouts of a committed step in trained order. Raises RunError when their payloads are gone."""
        return await self._thread.call(lambda: step_rollouts(self._db, step))

    async def frontier(self) -> Frontier:
        """Where the run stands, everything queued included."""
        await self._thread.call(self._flush)
        return await self._thread.call(lambda: select_frontier(self._db))

    async def close(self) -> None:
        """Write what is queued and close. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self.hurry()
        if self._next_write is not None:
            # Its callers hear of an error; `_disconnect` then tries once more.
            await asyncio.wait({self._next_write})
        try:
            await self._thread.call(self._disconnect)
        finally:
            await self._thread.close()

    # The queue, and the ledger's thread.

    def _later(self, apply: Callable[[sqlite3.Connection], bool]) -> _Write:
        write = _Write(apply)
        self._queue.append(write)
        return write

    async def _shared_write(self, patience_s: float) -> None:
        """Until everything queued so far is on disk: with the write that others wait for already, or with a new one."""
        if self._next_write is None:
            self._hurry.clear()
            self._next_write = asyncio.create_task(self._write_in(patience_s), name="ledger write")
            # Callers that were cancelled don't hear of its error, and the queue is tried again anyway.
            self._next_write.add_done_callback(lambda task: task.cancelled() or task.exception())
        if not patience_s:
            self.hurry()
        await asyncio.shield(self._next_write)

    async def _write_in(self, patience_s: float) -> None:
        if patience_s:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._hurry.wait(), patience_s)
        # From here on whoever comes needs another write, for this one may have seen the queue already.
        self._next_write = None
        await self._thread.call(self._flush)

    async def _change(self, name: str, write: Callable[[sqlite3.Connection], None]) -> None:
        """Write the queue and then `write`, in one transaction: one sync of the disk for both."""
        self.hurry()
        await self._thread.call(self._write_queue, name, write)

    @property
    def _db(self) -> sqlite3.Connection:
        if self._connection is None:
            raise RunError(f"ledger {self.path} is closed")
        return self._connection

    def _connect(self) -> None:
        def note(numbers: tuple[int, int]) -> None:
            self.life, self.lineage = numbers

        try:
            db = self._connection = sqlite3.connect(self.path, isolation_level=None)
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")
            db.execute(f"PRAGMA journal_size_limit = {_WAL_LIMIT_BYTES}")
            self._transaction("open", lambda db: changes.begin_life(db, self.path, self._clock.now()), note)
        except sqlite3.DatabaseError as error:
            raise RunError(f"{self.path} can't be opened as a ledger ({error}); move it away or restore it") from error

    def _disconnect(self) -> None:
        if self._connection is not None:
            try:
                self._flush()
            finally:
                self._connection.close()
                self._connection = None

    def _flush(self) -> None:
        if self._queue:
            self._write_queue("rollouts", lambda db: None)

    def _write_queue(self, name: str, more: Callable[[sqlite3.Connection], None]) -> None:
        """Write everything queued, and `more`; on failure it stays queued, so that no later call is fooled."""
        # Everything that arrived meanwhile goes along; the calls behind this one then find nothing to do.
        writes = [self._queue[index] for index in range(len(self._queue))]
        renewals = dict(self._renewals)

        def apply(db: sqlite3.Connection) -> list[bool]:
            accepted = [write.apply(db) for write in writes]
            changes.renew(db, renewals)
            more(db)
            return accepted

        def note(outcomes: list[bool]) -> None:
            for accepted in outcomes:
                self._queue.popleft().accepted = accepted
            for key, expires_at in renewals.items():
                if self._renewals.get(key) == expires_at:
                    del self._renewals[key]

        self._transaction(name, apply, note)

    def _transaction(self, name: str, write: Callable[[sqlite3.Connection], T], committed: Callable[[T], None]) -> None:
        """`committed` gets what `write` returned as soon as it is on disk, and only then."""
        db = self._db
        try:
            db.execute("BEGIN IMMEDIATE")
            found = write(db)
            fault_point(f"ledger:{name}:before")
            db.execute("COMMIT")
        except sqlite3.OperationalError as error:
            _undo(db)
            raise RunError(f"{self.path} can't be written ({error}); mend the disk and go on with --resume") from error
        except BaseException:
            _undo(db)
            raise
        committed(found)
        fault_point(f"ledger:{name}:after")


def _undo(db: sqlite3.Connection) -> None:
    """Forget the open transaction, if the database has not done so itself."""
    if db.in_transaction:
        # A disk that failed once may fail here too; the next opening of the file rolls back then.
        with suppress(sqlite3.OperationalError):
            db.execute("ROLLBACK")
