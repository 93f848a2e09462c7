"""The ledger: every rollout and every step of a run on disk, in one SQLite file.

    meta      key, value                                           the schema version
    rollouts  life, rollout_id, attempt → state, fate, payload     one row for each attempt
    steps     step → record                                        what each optimizer step was made from

A *life* is one opening of the ledger by a run. Attempts that a life left running are marked `lost` by the next one; a
resumed run may try the same places again without touching the rows of an earlier life.

Guarantees: a step and the fate of its rollouts are written in one transaction, and `commit` returns when that is on
disk; no rollout is trained by two steps and no step is committed twice; everything `ended` is on disk when its call
returns. SQLite runs in write-ahead mode, so readers never block the writer, with `synchronous = FULL`: a committed step
must survive a power cut, because its weights are published next. Calls that arrive during a write share the next
one, so the disk is synced once for many rollouts. One thread writes; the event loop never waits for the disk.
Not covered: when to roll back or to restore (`training/checkpoint.py`), and how long payloads stay.
"""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import msgspec

from soloist.errors import RunError
from soloist.runtime.health import WorkerThread
from soloist.seams import fault_point
from soloist.types import Record, Rollout

LEDGER_SCHEMA = 1
Fate = Literal["trained", "failed", "dropped", "lost"]

_STARTED_AT_ONCE = 64
_TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE rollouts (
    life INTEGER NOT NULL, rollout_id TEXT NOT NULL, attempt INTEGER NOT NULL,
    task_id TEXT NOT NULL, place INTEGER NOT NULL,
    state TEXT NOT NULL, status TEXT, fate TEXT, reason TEXT NOT NULL DEFAULT '',
    step INTEGER, oldest_version INTEGER, action_tokens INTEGER NOT NULL DEFAULT 0, reward REAL, payload BLOB,
    PRIMARY KEY (life, rollout_id, attempt)
);
CREATE INDEX rollouts_by_id ON rollouts (rollout_id, state);
CREATE INDEX rollouts_by_step ON rollouts (step);
CREATE TABLE steps (step INTEGER PRIMARY KEY, record TEXT NOT NULL);
"""
_UPSERT = """
INSERT INTO rollouts (life, rollout_id, attempt, task_id, place, state, status, fate, reason,
                      oldest_version, action_tokens, reward, payload)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (life, rollout_id, attempt) DO UPDATE SET
    state = excluded.state, status = excluded.status, fate = excluded.fate, reason = excluded.reason,
    oldest_version = excluded.oldest_version, action_tokens = excluded.action_tokens, reward = excluded.reward,
    payload = excluded.payload
WHERE rollouts.state != 'trained'
"""
_ROLLBACK = "UPDATE rollouts SET state = 'scored', fate = NULL, step = NULL WHERE state = 'trained' AND step >= ?"
_NEWEST_SCORED = """
SELECT rowid FROM rollouts WHERE rollout_id = ? AND attempt = ? AND state = 'scored' AND fate IS NULL
ORDER BY life DESC LIMIT 1
"""


class StoredRollout(Record, frozen=True, kw_only=True):
    """One row of the ledger.

    Example: `StoredRollout(life=1, rollout_id="r7", attempt=0, place=7, state="trained", fate="trained", …)`.
    """

    life: int
    rollout_id: str
    attempt: int
    task_id: str
    place: int
    state: str
    status: str | None
    fate: Fate | None
    """None while the attempt is running or waits to be trained."""
    reason: str
    step: int | None
    oldest_version: int | None
    action_tokens: int
    reward: float | None
    rollout: Rollout | None
    """The whole record; None before it ended, or when payloads were not asked for."""


_COLUMNS = ", ".join(name for name in StoredRollout.__struct_fields__ if name != "rollout")


class StoredStep(Record, frozen=True, kw_only=True):
    """What one optimizer step was made from.

    Example: `StoredStep(step=3, rollout_ids=["r9", "r7"], record={"version": 4, "state_hash": "ab…"})`.
    """

    step: int
    rollout_ids: list[str]
    """In the order in which they were trained."""
    record: dict[str, Any]
    """What the caller committed: version, digest of the random state, hash of the learner's state."""


class Ledger:
    """The one writer of a run's ledger.

    Example: `ledger = await Ledger.open(folder / "ledger.sqlite"); await ledger.ended(rollout)`,
    `await ledger.commit(step, rollouts, {"version": step + 1})`.
    """

    def __init__(self, path: Path) -> None:
        """Use `Ledger.open`."""
        self.path = path
        self._thread = WorkerThread("ledger")
        self._queue: deque[tuple[Any, ...]] = deque()
        self._life = 0
        self._connection: sqlite3.Connection | None = None
        self._closed = False

    @classmethod
    async def open(cls, path: Path) -> Ledger:
        """Open or create a ledger and begin a new life. Raises RunError for another schema or a foreign file."""
        ledger = cls(path)
        try:
            await ledger._thread.call(ledger._connect)
        except BaseException:
            await ledger.close()
            raise
        return ledger

    async def started(self, rollout: Rollout) -> None:
        """Note that an attempt began. Cheap: it reaches the disk with the next write, or together with 63 others."""
        self._queue.append(self._row(rollout, None, "", with_payload=False))
        if len(self._queue) >= _STARTED_AT_ONCE:
            await self._thread.call(self._flush)

    async def ended(self, rollout: Rollout, fate: Literal["failed", "dropped"] | None = None, reason: str = "") -> None:
        """Store an attempt with its whole record: scored when `fate` is None (to be trained), else why it won't be.

        Returns when it is on disk. A trained rollout isn't changed any more.
        """
        if fate is None and rollout.failure is not None:
            fate = "failed"
        if rollout.failure is not None and not reason:
            reason = f"{rollout.failure.boundary}: {rollout.failure.reason}"
        if fate is None and rollout.state == "running":
            raise ValueError(f"rollout {rollout.rollout_id} is still running; it ends with a score or with a fate")
        await self._thread.call(self._encode_and_flush, rollout, fate, reason)

    async def commit(self, step: int, rollouts: Sequence[Rollout], record: Mapping[str, Any]) -> None:
        """Record in one transaction that `step` trained these rollouts in this order. Call it before publishing.

        Raises ValueError, with nothing changed, for a step that is on record, or a rollout that is trained already,
        twice in the list, or not on record as scored.
        """
        # Serialised here, so that a record that is no JSON fails before anything is written.
        keys = [(rollout.rollout_id, rollout.attempt) for rollout in rollouts]
        text = json.dumps({"rollout_ids": [rollout_id for rollout_id, _ in keys], "record": dict(record)})
        await self._thread.call(self._commit, step, keys, text)

    async def rollback(self, step: int) -> list[str]:
        """Forget steps ≥ `step`, on resume from an older checkpoint, and return the ids of their rollouts.

        Those are scored and untrained again, with their payloads.
        """
        return await self._thread.call(self._rollback, step)

    async def steps(self) -> list[StoredStep]:
        """All committed steps in order."""
        return await self._thread.call(lambda: list(_select_steps(self._db)))

    async def close(self) -> None:
        """Write what is queued and close. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        try:
            await self._thread.call(self._disconnect)
        finally:
            await self._thread.close()

    # In the ledger's thread.

    @property
    def _db(self) -> sqlite3.Connection:
        if self._connection is None:
            raise RunError(f"ledger {self.path} is closed")
        return self._connection

    def _connect(self) -> None:
        try:
            db = self._connection = sqlite3.connect(self.path, isolation_level=None)
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")
            # A file that an earlier crash left empty counts as fresh.
            fresh = not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            self._transaction("open", lambda db: self._begin_life(db, fresh))
        except sqlite3.DatabaseError as error:
            raise RunError(f"{self.path} can't be opened as a ledger ({error}); move it away or restore it") from error

    def _begin_life(self, db: sqlite3.Connection, fresh: bool) -> None:
        if fresh:
            for statement in filter(str.strip, _TABLES.split(";")):
                db.execute(statement)
            db.execute("INSERT INTO meta VALUES ('schema', ?), ('life', '0')", (str(LEDGER_SCHEMA),))
        _check_schema(db, self.path)
        db.execute("UPDATE meta SET value = value + 1 WHERE key = 'life'")
        self._life = int(db.execute("SELECT value FROM meta WHERE key = 'life'").fetchone()[0])
        # Whoever wrote those rows is gone: there is one writer at a time.
        db.execute("UPDATE rollouts SET fate = 'lost' WHERE state = 'running' AND fate IS NULL")

    def _disconnect(self) -> None:
        if self._connection is not None:
            try:
                self._flush()
            finally:
                self._connection.close()
                self._connection = None

    def _row(self, rollout: Rollout, fate: str | None, reason: str, with_payload: bool) -> tuple[Any, ...]:
        # Level 1: on random tokens with log-probabilities, levels 6 and 9 took 3-5 times as long to save 0.3 % more.
        payload = zlib.compress(msgspec.msgpack.encode(rollout), 1) if with_payload else None
        state = "scored" if with_payload and fate is None else rollout.state
        return (
            self._life,
            rollout.rollout_id,
            rollout.attempt,
            rollout.task_id,
            rollout.place,
            state,
            rollout.status,
            fate,
            reason,
            rollout.oldest_version,
            rollout.action_tokens,
            rollout.reward,
            payload,
        )

    def _encode_and_flush(self, rollout: Rollout, fate: str | None, reason: str) -> None:
        self._queue.append(self._row(rollout, fate, reason, with_payload=True))
        self._flush()

    def _flush(self) -> None:
        """Write everything queued in one transaction; on failure it stays queued, so that no later call is fooled."""
        # Everything that arrived meanwhile goes along; the calls behind this one then find nothing to do.
        rows = [self._queue.popleft() for _ in range(len(self._queue))]
        if not rows:
            return
        try:
            self._transaction("rollouts", lambda db: db.executemany(_UPSERT, rows))
        except BaseException:
            self._queue.extendleft(reversed(rows))
            raise

    def _commit(self, step: int, keys: list[tuple[str, int]], text: str) -> None:
        self._flush()

        def write(db: sqlite3.Connection) -> None:
            if db.execute("SELECT 1 FROM steps WHERE step = ?", (step,)).fetchone():
                raise ValueError(f"step {step} is already committed; roll back to it before training it again")
            for rollout_id, attempt in keys:
                _mark_trained(db, rollout_id, attempt, step)
            db.execute("INSERT INTO steps VALUES (?, ?)", (step, text))

        self._transaction("commit", write)

    def _rollback(self, step: int) -> list[str]:
        self._flush()
        found = self._db.execute("SELECT rollout_id FROM rollouts WHERE step >= ? ORDER BY step, place", (step,))
        ids = [rollout_id for (rollout_id,) in found]

        def write(db: sqlite3.Connection) -> None:
            db.execute(_ROLLBACK, (step,))
            db.execute("DELETE FROM steps WHERE step >= ?", (step,))

        self._transaction("rollback", write)
        return ids

    def _transaction(self, name: str, write: Callable[[sqlite3.Connection], object]) -> None:
        db = self._db
        db.execute("BEGIN IMMEDIATE")
        try:
            write(db)
            fault_point(f"ledger:{name}:before")
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise
        fault_point(f"ledger:{name}:after")


def read_rollouts(
    path: Path, *, step: int | None = None, state: str | None = None, payloads: bool = True
) -> Iterator[StoredRollout]:
    """Rows of a ledger in order of life and place, without disturbing its writer; all, or of one step or one state.

    Raises RunError when the file is missing or of another schema.
    """
    conditions = {"step": step, "state": state}
    wanted = {column: value for column, value in conditions.items() if value is not None}
    where = " AND ".join(f"{column} = ?" for column in wanted) or "1"
    with closing(_open_read_only(path)) as db:
        payload = "payload" if payloads else "NULL"
        query = f"SELECT {_COLUMNS}, {payload} FROM rollouts WHERE {where} ORDER BY life, place, attempt"
        for *values, blob in db.execute(query, tuple(wanted.values())):
            columns = dict(zip(_COLUMNS.split(", "), values, strict=True))
            yield StoredRollout(**columns, rollout=_decode(blob, columns["step"]))


def read_steps(path: Path) -> list[StoredStep]:
    """All committed steps of a ledger in order, without disturbing its writer. Raises RunError like `read_rollouts`."""
    with closing(_open_read_only(path)) as db:
        return list(_select_steps(db))


def _open_read_only(path: Path) -> sqlite3.Connection:
    if not path.is_file():
        raise RunError(f"no ledger at {path}; name a run folder that has been trained")
    # Read-only by URI, or a report would create or lock what it only wants to look at.
    db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
    try:
        _check_schema(db, path)
    except (sqlite3.DatabaseError, RunError) as error:
        db.close()
        if isinstance(error, RunError):
            raise
        raise RunError(f"{path} can't be read as a ledger ({error})") from error
    return db


def _check_schema(db: sqlite3.Connection, path: Path) -> None:
    named = db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone()
    row = db.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone() if named else None
    found = row[0] if row else None
    if found != str(LEDGER_SCHEMA):
        raise RunError(
            f"ledger {path} has schema {found}, this version of soloist reads {LEDGER_SCHEMA}; use the version that "
            "wrote it, or start a run in a new folder"
        )


def _mark_trained(db: sqlite3.Connection, rollout_id: str, attempt: int, step: int) -> None:
    # By id alone: another attempt of the same rollout must not be trained either.
    before = db.execute(
        "SELECT step FROM rollouts WHERE rollout_id = ? AND state = 'trained'", (rollout_id,)
    ).fetchone()
    if before:
        raise ValueError(f"rollout {rollout_id} was trained at step {before[0]}, step {step} must not train it again")
    scored = db.execute(_NEWEST_SCORED, (rollout_id, attempt)).fetchone()
    if scored is None:
        raise ValueError(
            f"rollout {rollout_id} attempt {attempt} of step {step} isn't on record as scored; end it first"
        )
    db.execute("UPDATE rollouts SET state = 'trained', fate = 'trained', step = ? WHERE rowid = ?", (step, scored[0]))


def _select_steps(db: sqlite3.Connection) -> Iterator[StoredStep]:
    for step, text in db.execute("SELECT step, record FROM steps ORDER BY step"):
        yield StoredStep(step=step, **json.loads(text))


def _decode(blob: bytes | None, step: int | None) -> Rollout | None:
    if blob is None:
        return None
    rollout = msgspec.msgpack.decode(zlib.decompress(blob), type=Rollout)
    return rollout if step is None else msgspec.structs.replace(rollout, state="trained", trained_step=step)
