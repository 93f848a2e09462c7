"""The statements that change a ledger, each a function of a connection inside a transaction. Tables: `ledger_rows.py`.

Guarantees: a result is taken only while its lease is in force (`end`), a place is trained once (`mark_trained`), steps
are committed in order and once (`insert_step`).
Not covered: transactions, queue and thread (`ledger.py`).
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from soloist.runtime.ledger_rows import LEDGER_SCHEMA, TABLES, check_schema, encode
from soloist.types import Rollout

_START = """
INSERT INTO rollouts (life, rollout_id, attempt, unit, place, task_id, leased_at, expires_at, state)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, 'running')
"""
# The fence: the attempt must exist, be of this life, and still hold its lease.
_END = """
UPDATE rollouts SET state = ?, status = ?, fate = ?, boundary = ?, reason = ?, ended_at = ?, oldest_version = ?,
    action_tokens = ?, reward = ?, payload = ?, expires_at = coalesce(?, expires_at)
WHERE rollout_id = ? AND attempt = ? AND life = ? AND state = 'running' AND fate IS NULL
"""
_RENEW = "UPDATE rollouts SET expires_at = ? WHERE rollout_id = ? AND attempt = ? AND fate IS NULL"
_EXPIRE = """
UPDATE rollouts SET fate = 'dropped', reason = ?, ended_at = ?
WHERE rollout_id = ? AND attempt = ? AND state = 'running' AND fate IS NULL
"""
_DROP = """
UPDATE rollouts SET fate = ?, boundary = ?, reason = ?
WHERE rollout_id = ? AND attempt = ? AND state = 'scored' AND fate IS NULL
"""
_LOSE = """
UPDATE rollouts SET fate = 'lost', reason = 'the run ended while it was under way', ended_at = ?
WHERE state != 'scored' AND fate IS NULL
"""
_TRAIN = "UPDATE rollouts SET state = 'trained', fate = 'trained', step = ?, position = ? WHERE lease = ?"
_FORGET = "UPDATE rollouts SET payload = NULL WHERE payload IS NOT NULL AND "

Key = tuple[str, int]
"""(rollout_id, attempt)."""
StepRow = tuple[int, int, float, str, str]
"""(step, lineage, committed_at, state_hash, record)."""


def begin_life(db: sqlite3.Connection, path: Path, now: float) -> tuple[int, int]:
    """Create the tables of an empty file, mark what ran as lost, and return (life, lineage).

    Raises RunError for a ledger of another schema.
    """
    # A file that an earlier crash left empty counts as fresh.
    if not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        for statement in filter(str.strip, TABLES.split(";")):
            db.execute(statement)
        db.execute("INSERT INTO meta VALUES ('schema', ?), ('life', '0')", (str(LEDGER_SCHEMA),))
        db.execute("INSERT INTO lineages VALUES (1, 0, 'the run began', ?)", (now,))
    check_schema(db, path)
    db.execute("UPDATE meta SET value = value + 1 WHERE key = 'life'")
    # Whoever ran those is gone: there is one writer at a time, and its players died with it.
    db.execute(_LOSE, (now,))
    life = db.execute("SELECT value FROM meta WHERE key = 'life'").fetchone()[0]
    return int(life), int(db.execute("SELECT max(lineage) FROM lineages").fetchone()[0])


def start(db: sqlite3.Connection, rollout: Rollout, unit: int, life: int, expires_at: float) -> bool:
    """A lease, and its task when it is new. Raises sqlite3.IntegrityError when the place has a holder already."""
    key = (rollout.rollout_id, rollout.attempt)
    db.execute("INSERT INTO tasks (unit, task_id) VALUES (?, ?) ON CONFLICT DO NOTHING", (unit, rollout.task_id))
    db.execute(_START, (life, *key, unit, rollout.place, rollout.task_id, rollout.started_at, expires_at))
    return True


def renew(db: sqlite3.Connection, expiries: dict[Key, float]) -> None:
    """Later ends of leases that are in force."""
    db.executemany(_RENEW, [(expires_at, *key) for key, expires_at in expiries.items()])


def end(
    db: sqlite3.Connection,
    rollout: Rollout,
    fate: str | None,
    reason: str,
    life: int,
    now: float,
    expires_at: float | None,
) -> bool:
    """An attempt's result, and the end of its lease if that was renewed since the last write.

    False: the lease isn't in force (late, twice, of another life); the result is noted as refused.
    """
    key = (rollout.rollout_id, rollout.attempt)
    state = "scored" if fate is None else rollout.state
    boundary = rollout.failure.boundary if rollout.failure is not None else None
    figures = (rollout.oldest_version, rollout.action_tokens, rollout.reward, encode(rollout))
    row = (state, rollout.status, fate, boundary, reason, now, *figures, expires_at, *key, life)
    if db.execute(_END, row).rowcount == 1:
        return True
    query = "SELECT life, state, coalesce(fate, 'no fate') FROM rollouts WHERE rollout_id = ? AND attempt = ?"
    found = db.execute(query, key).fetchone()
    why = "on record as {1} of life {0} with {2}".format(*found) if found else "no such lease"
    db.execute("INSERT INTO refused VALUES (?, ?, ?, ?)", (*key, now, why))
    return False


def expire(db: sqlite3.Connection, key: Key, reason: str, now: float) -> bool:
    """The end of a lease; a result that came before stays."""
    return db.execute(_EXPIRE, (reason, now, *key)).rowcount == 1


def drop(db: sqlite3.Connection, key: Key, fate: str, boundary: str | None, reason: str) -> bool:
    """The fate of a scored attempt that won't be trained."""
    return db.execute(_DROP, (fate, boundary, reason, *key)).rowcount == 1


def quarantine(db: sqlite3.Connection, unit: int, reason: str) -> bool:
    """A task that is given up."""
    return db.execute("UPDATE tasks SET state = 'quarantined', reason = ? WHERE unit = ?", (reason, unit)).rowcount == 1


def pass_over(db: sqlite3.Connection, unit: int, keys: list[Key], reason: str) -> bool:
    """A task that is done without being trained, together with its rollouts: all of it or nothing."""
    for key in keys:
        drop(db, key, "dropped", None, "uniform")
    return db.execute("UPDATE tasks SET state = 'uniform', reason = ? WHERE unit = ?", (reason, unit)).rowcount == 1


def commit_step(db: sqlite3.Connection, row: StepRow, keys: list[Key]) -> None:
    """A step and the fate of its rollouts. Raises ValueError for a step out of turn and rollouts that aren't scored."""
    step, due = row[0], db.execute("SELECT coalesce(max(step) + 1, 0) FROM steps").fetchone()[0]
    if step < due:
        raise ValueError(f"step {step} is already committed; the next one is {due}")
    if step > due:
        raise ValueError(f"step {step} can't be committed before step {due}")
    for position, key in enumerate(keys):
        _mark_trained(db, key, step, position)
    insert_step(db, row)


def insert_step(db: sqlite3.Connection, row: StepRow) -> None:
    """The record of a step."""
    db.execute("INSERT INTO steps VALUES (?, ?, ?, ?, ?)", row)


def insert_lineage(db: sqlite3.Connection, lineage: int, first_step: int, reason: str, now: float) -> None:
    """The beginning of a lineage."""
    db.execute("INSERT INTO lineages VALUES (?, ?, ?, ?)", (lineage, first_step, reason, now))


def seal(db: sqlite3.Connection, step: int, lineage: int, state_hash: str, folder: str, now: float) -> None:
    """A complete snapshot; one of the same step replaces it."""
    db.execute("INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?, ?, ?)", (step, lineage, state_hash, folder, now))


def forget_payloads(db: sqlite3.Connection, before_step: int) -> None:
    """Payloads of steps < `before_step`, and of attempts that ended untrained before those of later steps began."""
    db.execute(f"{_FORGET} step < ?", (before_step,))
    # The plus keeps SQLite from walking all leases from the first one on until a step fits; by step it reads a few.
    oldest = "SELECT coalesce(min(+lease), 0) FROM rollouts WHERE step >= ?"
    db.execute(f"{_FORGET} step IS NULL AND fate IS NOT NULL AND lease < ({oldest})", (before_step,))


def _mark_trained(db: sqlite3.Connection, key: Key, step: int, position: int) -> None:
    # By id alone: another attempt of the same rollout must not be trained either.
    before = db.execute("SELECT step FROM rollouts WHERE rollout_id = ? AND state = 'trained'", key[:1]).fetchone()
    if before:
        raise ValueError(f"rollout {key[0]} was trained at step {before[0]}, step {step} must not train it again")
    query = (
        "SELECT lease, unit FROM rollouts WHERE rollout_id = ? AND attempt = ? AND state = 'scored' AND fate IS NULL"
    )
    found = db.execute(query, key).fetchone()
    if found is None:
        raise ValueError(f"rollout {key[0]} attempt {key[1]} of step {step} isn't on record as scored; end it first")
    db.execute(_TRAIN, (step, position, found[0]))
    # A group is trained in one step, so the task is done with the first of its members.
    db.execute("UPDATE tasks SET state = 'trained' WHERE unit = ?", (found[1],))
