"""What stands in a ledger: its tables, their rows as records, and reading them without disturbing the writer.

    meta       schema, life                       a *life* is one opening by a run: the epoch of its leases
    tasks      unit → state, reason               the frontier: each index, open | trained | quarantined | uniform
    rollouts   lease → attempt, fate, payload     one row for each attempt; a lease never changes hands
    refused    late and duplicated results        turned away by the fence
    steps      step, lineage → record             what each optimizer step was made from, and the hash of what came out
    lineages   lineage → first step, reason       a new one begins where training again gave other bits
    snapshots  step → hash, folder                snapshots that are complete on disk

Invariants, after every transaction: a place has at most one attempt that is live or trained (a unique index); an
attempt is live exactly while it has no fate; rows of step s in order of `position` are the rollouts of its record.
The *chain* is, for each step, the record of the highest lineage: the steps that the weights in use contain.
Not covered: writing (`ledger.py`).
"""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import msgspec

from soloist.errors import RunError
from soloist.types import Record, Rollout

LEDGER_SCHEMA = 2
Fate = Literal["trained", "failed", "dropped", "lost"]

TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE tasks (
    unit INTEGER PRIMARY KEY, task_id TEXT NOT NULL, state TEXT NOT NULL DEFAULT 'open', reason TEXT NOT NULL DEFAULT ''
);
CREATE INDEX tasks_left ON tasks (unit) WHERE state != 'trained';
CREATE TABLE rollouts (
    lease INTEGER PRIMARY KEY, life INTEGER NOT NULL, rollout_id TEXT NOT NULL, attempt INTEGER NOT NULL,
    unit INTEGER NOT NULL, place INTEGER NOT NULL, task_id TEXT NOT NULL,
    leased_at REAL NOT NULL, expires_at REAL NOT NULL, ended_at REAL,
    state TEXT NOT NULL, status TEXT, fate TEXT, boundary TEXT, reason TEXT NOT NULL DEFAULT '',
    step INTEGER, position INTEGER, oldest_version INTEGER, action_tokens INTEGER NOT NULL DEFAULT 0,
    reward REAL, payload BLOB,
    UNIQUE (rollout_id, attempt)
);
CREATE UNIQUE INDEX one_holder_of_a_place ON rollouts (place) WHERE fate IS NULL OR fate = 'trained';
CREATE INDEX rollouts_live ON rollouts (lease) WHERE fate IS NULL;
CREATE INDEX rollouts_by_unit ON rollouts (unit);
CREATE INDEX rollouts_by_step ON rollouts (step, position);
CREATE INDEX rollouts_stored ON rollouts (step) WHERE payload IS NOT NULL;
CREATE TABLE refused (
    rollout_id TEXT NOT NULL, attempt INTEGER NOT NULL, at REAL NOT NULL, reason TEXT NOT NULL
);
CREATE TABLE steps (
    step INTEGER NOT NULL, lineage INTEGER NOT NULL, committed_at REAL NOT NULL, state_hash TEXT NOT NULL,
    record TEXT NOT NULL,
    PRIMARY KEY (step, lineage)
);
CREATE TABLE lineages (
    lineage INTEGER PRIMARY KEY, first_step INTEGER NOT NULL, reason TEXT NOT NULL, started_at REAL NOT NULL
);
CREATE TABLE snapshots (
    step INTEGER PRIMARY KEY, lineage INTEGER NOT NULL, state_hash TEXT NOT NULL, folder TEXT NOT NULL,
    sealed_at REAL NOT NULL
);
"""
_CHAIN = """
SELECT step, max(lineage), committed_at, state_hash, record FROM steps GROUP BY step ORDER BY step
"""
_DONE = "SELECT unit FROM tasks WHERE state != 'open'"


class StoredRollout(Record, frozen=True, kw_only=True):
    """One attempt.

    Example: `StoredRollout(lease=8, life=1, rollout_id="r7", attempt=0, place=7, state="trained", fate="trained", …)`.
    """

    lease: int
    """Number of the attempt among all of the run: later leases are higher, through all lives."""
    life: int
    """The opening of the ledger that issued the lease."""
    rollout_id: str
    attempt: int
    """Attempts at this place before, in all lives."""
    unit: int
    """Index of the task."""
    place: int
    task_id: str
    leased_at: float
    """Wall-clock seconds."""
    expires_at: float
    """End of the lease as last renewed, wall-clock seconds."""
    ended_at: float | None
    state: str
    """How far it came: running, finished, scored, trained."""
    status: str | None
    fate: Fate | None
    """None while the attempt is running or waits to be trained."""
    boundary: str | None
    """What a failed one broke at."""
    reason: str
    step: int | None
    position: int | None
    """Rank in its step, from 0."""
    oldest_version: int | None
    action_tokens: int
    reward: float | None
    rollout: Rollout | None
    """The whole record; None before it ended, when payloads were not asked for or are no longer kept."""


_COLUMNS = ", ".join(name for name in StoredRollout.__struct_fields__ if name != "rollout")


class StoredStep(Record, frozen=True, kw_only=True):
    """What one optimizer step was made from.

    Example: `StoredStep(step=3, lineage=1, rollout_ids=["r9", "r7"], state_hash="ab…", record={"version": 3}, …)`.
    """

    step: int
    lineage: int
    committed_at: float
    """Wall-clock seconds."""
    state_hash: str
    """Of everything that the learner remembers after the step."""
    rollout_ids: list[str]
    """In the order in which they were trained."""
    attempts: list[int]
    """Attempt of each."""
    record: dict[str, Any]
    """What the caller committed: version, losses."""


class Lineage(Record, frozen=True, kw_only=True):
    """A chain of steps from `first_step` on; before that step it shares the steps of the lineage before.

    Example: `Lineage(lineage=2, first_step=7, reason="step 7 gave hash 3f… instead of 9a…", started_at=1790000000.0)`.
    """

    lineage: int
    first_step: int
    reason: str
    started_at: float
    """Wall-clock seconds."""


class Frontier(Record, frozen=True, kw_only=True):
    """Where a run stands: what comes next, what must be played again, what waits to be trained.

    Example: `Frontier(step=5, next_unit=40, open_units=[38], attempts={38: 1}, scored=[rollout], …)`.
    """

    step: int = 0
    """Step that is trained next: all before it are committed."""
    next_unit: int = 0
    """Task index that is handed out next."""
    open_units: list[int] = []
    """Indices handed out that are neither trained nor given up."""
    quarantined: dict[int, str] = {}
    """Indices given up, with the reason."""
    uniform: int = 0
    """Tasks that were done without being trained, as the rewards of their group were equal."""
    attempts: dict[int, int] = {}
    """Attempts so far at each place of the open units."""
    tries: dict[int, int] = {}
    """Those of them that failed or were dropped; what a crash ended isn't the task's fault."""
    scored: list[Rollout] = []
    """Finished but untrained rollouts, by place."""
    dropped: int = 0
    """Attempts dropped so far."""


def encode(rollout: Rollout) -> bytes:
    """A payload."""
    # Level 1: on random tokens with log-probabilities, levels 6 and 9 took 3-5 times as long to save 0.3 % more.
    return zlib.compress(msgspec.msgpack.encode(rollout), 1)


def decode(payload: bytes, step: int | None = None) -> Rollout:
    """The rollout of a payload, marked as trained when it has a step. Raises ValueError when it is damaged."""
    try:
        rollout = msgspec.msgpack.decode(zlib.decompress(payload), type=Rollout)
    except (zlib.error, msgspec.MsgspecError) as error:
        raise ValueError(f"a payload of {len(payload)} bytes is damaged ({error})") from error
    return rollout if step is None else msgspec.structs.replace(rollout, state="trained", trained_step=step)


def read_rollouts(
    path: Path, *, step: int | None = None, state: str | None = None, payloads: bool = True
) -> Iterator[StoredRollout]:
    """Rows of a ledger in order of life and place, without disturbing its writer; all, or of one step or one state.

    Raises RunError when the file is missing or of another schema.
    """
    conditions = {"step": step, "state": state}
    wanted = {column: value for column, value in conditions.items() if value is not None}
    where = " AND ".join(f"{column} = ?" for column in wanted) or "1"
    with closing(open_read_only(path)) as db:
        payload = "payload" if payloads else "NULL"
        query = f"SELECT {_COLUMNS}, {payload} FROM rollouts WHERE {where} ORDER BY life, place, attempt"
        for *values, blob in db.execute(query, tuple(wanted.values())):
            columns = dict(zip(_COLUMNS.split(", "), values, strict=True))
            yield StoredRollout(**columns, rollout=None if blob is None else decode(blob, columns["step"]))


def read_steps(path: Path) -> list[StoredStep]:
    """The chain of a ledger, without disturbing its writer. Raises RunError like `read_rollouts`."""
    with closing(open_read_only(path)) as db:
        return select_chain(db)


def read_lineages(path: Path) -> list[Lineage]:
    """All lineages in order. Raises RunError like `read_rollouts`."""
    with closing(open_read_only(path)) as db:
        return select_lineages(db)


def read_counts(path: Path) -> dict[str, dict[str, int]]:
    """Attempts by fate, tasks by state, refused results. Raises RunError like `read_rollouts`."""
    with closing(open_read_only(path)) as db:
        attempts = db.execute("SELECT coalesce(fate, state), count(*) FROM rollouts GROUP BY 1")
        tasks = db.execute("SELECT state, count(*) FROM tasks GROUP BY 1")
        late = db.execute("SELECT count(*) FROM refused").fetchone()[0]
        return {"attempts": dict(attempts.fetchall()), "tasks": dict(tasks.fetchall()), "refused": {"results": late}}


def read_tasks(path: Path, units: Sequence[int]) -> dict[int, tuple[str, str]]:
    """(state, reason) of these tasks. Raises RunError like `read_rollouts`."""
    with closing(open_read_only(path)) as db:
        query = "SELECT state, reason FROM tasks WHERE unit = ?"
        return {unit: db.execute(query, (unit,)).fetchone() for unit in units}


def read_step_rollouts(path: Path, step: int) -> list[Rollout]:
    """Rollouts of a committed step in trained order. Raises RunError like `read_rollouts` and `step_rollouts`."""
    with closing(open_read_only(path)) as db:
        return step_rollouts(db, step)


def step_rollouts(db: sqlite3.Connection, step: int) -> list[Rollout]:
    """Rollouts of a committed step in the order in which they were trained.

    Raises RunError when payloads are missing (`keep_rollouts`) or damaged.
    """
    rows = db.execute("SELECT rollout_id, payload FROM rollouts WHERE step = ? ORDER BY position", (step,)).fetchall()
    gone = [name for name, payload in rows if payload is None]
    if gone:
        raise RunError(
            f"step {step} can't be trained again: the tokens of {len(gone)} of its {len(rows)} rollouts are no longer "
            f"kept (first: {gone[0]}); keep_rollouts says how long they stay"
        )
    try:
        return [decode(payload, step) for _, payload in rows]
    except ValueError as error:
        raise RunError(f"step {step} can't be trained again: {error}; restore the ledger from a copy") from error


def select_chain(db: sqlite3.Connection) -> list[StoredStep]:
    """The chain, on an open connection."""
    return [
        StoredStep(step=step, lineage=lineage, committed_at=at, state_hash=state_hash, **json.loads(text))
        for step, lineage, at, state_hash, text in db.execute(_CHAIN)
    ]


def select_lineages(db: sqlite3.Connection) -> list[Lineage]:
    """All lineages in order, on an open connection."""
    query = "SELECT lineage, first_step, reason, started_at FROM lineages ORDER BY lineage"
    return [
        Lineage(lineage=lineage, first_step=first, reason=reason, started_at=at)
        for lineage, first, reason, at in db.execute(query)
    ]


def select_frontier(db: sqlite3.Connection) -> Frontier:
    """Where the run stands, on an open connection."""
    tasks = db.execute("SELECT unit, state, reason FROM tasks WHERE state != 'trained' ORDER BY unit").fetchall()
    next_unit, known = db.execute("SELECT coalesce(max(unit) + 1, 0), count(*) FROM tasks").fetchone()
    open_units = [unit for unit, state, _ in tasks if state == "open"]
    if known < next_unit:
        # Leases are queued in order, so there is no hole; but a skipped prompt would be silent, so it is looked for.
        open_units = sorted({*open_units, *range(next_unit)} - {row[0] for row in db.execute(_DONE)})
    attempts: dict[int, int] = {}
    tries: dict[int, int] = {}
    for unit in open_units:
        query = """SELECT place, max(attempt) + 1, sum(fate IN ('failed', 'dropped') AND fate IS NOT NULL)
                   FROM rollouts WHERE unit = ? GROUP BY place"""
        for place, attempt, tried in db.execute(query, (unit,)):
            attempts[place], tries[place] = attempt, tried or 0
    scored = db.execute("SELECT payload FROM rollouts WHERE fate IS NULL AND state = 'scored' ORDER BY place")
    return Frontier(
        step=db.execute("SELECT coalesce(max(step) + 1, 0) FROM steps").fetchone()[0],
        next_unit=next_unit,
        open_units=open_units,
        quarantined={unit: reason for unit, state, reason in tasks if state == "quarantined"},
        uniform=sum(state == "uniform" for _, state, _ in tasks),
        attempts=attempts,
        tries=tries,
        scored=[decode(payload) for (payload,) in scored],
        dropped=db.execute("SELECT count(*) FROM rollouts WHERE fate = 'dropped'").fetchone()[0],
    )


def open_read_only(path: Path) -> sqlite3.Connection:
    """A connection that can't change anything. Raises RunError for a missing file, another schema, a foreign file."""
    if not path.is_file():
        raise RunError(f"no ledger at {path}; name a run folder that has been trained")
    # Read-only by URI, or a report would create or lock what it only wants to look at.
    db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
    try:
        check_schema(db, path)
    except (sqlite3.DatabaseError, RunError) as error:
        db.close()
        if isinstance(error, RunError):
            raise
        raise RunError(f"{path} can't be read as a ledger ({error})") from error
    return db


def check_schema(db: sqlite3.Connection, path: Path) -> None:
    """Raise RunError for a ledger that another version of soloist wrote."""
    named = db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone()
    row = db.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone() if named else None
    found = row[0] if row else None
    if found != str(LEDGER_SCHEMA):
        raise RunError(
            f"ledger {path} has schema {found}, this version of soloist reads {LEDGER_SCHEMA}; use the version that "
            "wrote it, or start a run in a new folder"
        )
