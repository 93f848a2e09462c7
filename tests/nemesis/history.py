"""What the checker knows: the facts about a run that come from outside, and the tables of its ledger."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass(kw_only=True)
class Facts:
    """What the checker knows about a run from outside: its settings and what was done to it.

    Example: `Facts(steps=10, size=4, group=1, epoch=12, max_staleness=1, on_stale="wait", …)`.
    """

    steps: int
    size: int
    """Rollouts of a step."""
    group: int
    epoch: int
    """Rows of the task file; 0 when tasks are drawn without end."""
    max_staleness: int
    on_stale: str
    publish_every: int
    checkpoint_every: int
    value_updates: int
    attempts: int
    seed: int
    pruned: bool = False
    """Whether rollouts are forgotten once no snapshot needs them."""
    numeric: bool = True
    """Whether the learner is the stand-in, whose arithmetic can be repeated."""
    lag: int | None = None
    """Exact age of every rollout, once there are so many versions."""
    drop_uniform: bool = False
    """Whether groups of equal rewards are left out."""
    stopped: bool = False
    """Whether a process stood still for longer than a lease; only then may leases run out."""
    damaged: list[int] = field(default_factory=list)
    """Snapshots that the harness damaged itself."""


def read_tables(path: Path) -> tuple[dict[str, list[Row]], str]:
    """All tables of a ledger, and what is wrong with it; empty when there is none."""
    if not path.is_file() or not path.stat().st_size:
        return {}, ""
    with tempfile.TemporaryDirectory() as copy:
        # Opening a database replays its log and may write; the run's own files stay as the crash left them.
        for one in (path, path.with_name(f"{path.name}-wal")):
            if one.exists():
                shutil.copyfile(one, Path(copy) / one.name)
        db = sqlite3.connect(Path(copy) / path.name)
        db.row_factory = sqlite3.Row
        try:
            names = [row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            state = db.execute("PRAGMA integrity_check").fetchone()[0]
            tables = {name: [dict(row) for row in db.execute(f"SELECT * FROM {name}")] for name in names}
        except sqlite3.DatabaseError as error:
            return {}, f"the ledger can't be read: {error}"
        finally:
            db.close()
    return tables, "" if state == "ok" else f"integrity check of the ledger: {state}"
