"""The ledger: exactly once, before or not at all, readable by others, through crashes at every fault point."""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from soloist.errors import RunError
from soloist.runtime.ledger import Ledger, read_rollouts, read_steps
from soloist.seams import installed_faults
from soloist.types import Failure, Rollout, Segment, VersionSpan


def scored(name: str, attempt: int = 0, version: int = 3, **changes: Any) -> Rollout:
    segment = Segment(
        token_ids=[7, 8, 9],
        action_mask=[False, True, True],
        rollout_log_probs=[None, -0.25, -1.5],
        version_spans=[VersionSpan(version=version, start=1, end=3)],
    )
    fields: dict[str, Any] = {
        "rollout_id": name,
        "task_id": f"task of {name}",
        "group_id": name,
        "attempt": attempt,
        "place": int(name[1:]),
        "environment": "numbers",
        "state": "scored",
        "status": "completed",
        "segments": [segment],
        "score": 0.5,
    }
    return Rollout(**{**fields, **changes})


def running(name: str, attempt: int = 0) -> Rollout:
    return scored(name, attempt, state="running", status=None, segments=[], score=None)


def by_id(path: Path) -> dict[str, tuple[str, str | None, int | None]]:
    return {row.rollout_id: (row.state, row.fate, row.step) for row in read_rollouts(path, payloads=False)}


async def test_a_rollout_comes_back_from_the_disk_as_it_was(tmp_path: Path) -> None:
    ledger = await Ledger.open(tmp_path / "ledger.sqlite")
    rollout = scored("r7", attempt=2)
    await ledger.started(running("r7", attempt=2))
    await ledger.ended(rollout)
    (row,) = read_rollouts(tmp_path / "ledger.sqlite")
    assert row.rollout == rollout
    assert (row.state, row.fate, row.attempt, row.place) == ("scored", None, 2, 7)
    assert (row.oldest_version, row.action_tokens, row.reward) == (3, 2, 0.5)
    await ledger.close()


async def test_a_step_and_its_rollouts_are_on_record_together_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = await Ledger.open(path)
    rollouts = [scored("r2"), scored("r0"), scored("r1")]
    for rollout in rollouts:
        await ledger.ended(rollout)
    await ledger.commit(0, rollouts[:2], {"version": 1, "rng": "ab", "state_hash": "cd"})
    assert by_id(path) == {
        "r0": ("trained", "trained", 0),
        "r1": ("scored", None, None),
        "r2": ("trained", "trained", 0),
    }
    (step,) = await ledger.steps()
    assert (step.step, step.rollout_ids) == (0, ["r2", "r0"])
    assert step.record == {"version": 1, "rng": "ab", "state_hash": "cd"}
    assert read_steps(path) == [step]
    trained = [row.rollout for row in read_rollouts(path, step=0)]
    assert [(r.state, r.trained_step) for r in trained if r is not None] == [("trained", 0)] * 2
    await ledger.close()


async def test_a_rollout_is_trained_once_and_a_step_committed_once(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = await Ledger.open(path)
    for name in ("r0", "r1"):
        await ledger.ended(scored(name))
    await ledger.commit(0, [scored("r0")], {})
    with pytest.raises(ValueError, match="rollout r0 was trained at step 0, step 1 must not"):
        await ledger.commit(1, [scored("r1"), scored("r0")], {})
    with pytest.raises(ValueError, match="step 0 is already committed"):
        await ledger.commit(0, [scored("r1")], {})
    with pytest.raises(ValueError, match="rollout r1 was trained at step 1, step 1"):
        await ledger.commit(1, [scored("r1"), scored("r1")], {})
    with pytest.raises(ValueError, match="r5 attempt 0 of step 1 isn't on record as scored"):
        await ledger.commit(1, [scored("r5")], {})
    assert by_id(path) == {"r0": ("trained", "trained", 0), "r1": ("scored", None, None)}, "refusals changed nothing"
    assert [step.step for step in await ledger.steps()] == [0]
    await ledger.close()


async def test_failures_and_drops_keep_their_reason_and_are_never_trained(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = await Ledger.open(path)
    failure = Failure(boundary="sandbox", reason="no bwrap")
    lost = scored("r0", status="failed", failure=failure, score=None, state="finished")
    await ledger.ended(lost)
    await ledger.ended(scored("r1"))
    await ledger.ended(scored("r1"), fate="dropped", reason="stale")
    rows = {row.rollout_id: row for row in read_rollouts(path)}
    assert (rows["r0"].fate, rows["r0"].reason, rows["r0"].reward) == ("failed", "sandbox: no bwrap", None)
    assert (rows["r1"].fate, rows["r1"].reason, rows["r1"].action_tokens) == ("dropped", "stale", 2)
    for rollout in (lost, scored("r1")):
        with pytest.raises(ValueError, match="isn't on record as scored"):
            await ledger.commit(0, [rollout], {})
    with pytest.raises(ValueError, match="r2 is still running"):
        await ledger.ended(running("r2"))
    await ledger.close()


async def test_starts_are_written_together(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = await Ledger.open(path)
    for number in range(63):
        await ledger.started(running(f"r{number}"))
    assert by_id(path) == {}
    await ledger.started(running("r63"))
    assert len(by_id(path)) == 64
    await ledger.started(running("r64"))
    await ledger.close()
    assert len(by_id(path)) == 65, "closing writes what is queued"


async def test_many_ends_at_once_share_writes_and_do_not_block_the_event_loop(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = await Ledger.open(path)
    threads: list[int] = []
    with installed_faults(lambda name: threads.append(threading.get_ident())):
        await asyncio.gather(*(ledger.ended(scored(f"r{number}")) for number in range(50)))
    assert len(by_id(path)) == 50
    assert threading.get_ident() not in threads
    assert len(set(threads)) == 1, "one writer"
    await ledger.close()


async def test_a_rollback_forgets_steps_and_makes_their_rollouts_untrained(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = await Ledger.open(path)
    for step in range(3):
        await ledger.ended(scored(f"r{step}"))
        await ledger.commit(step, [scored(f"r{step}")], {})
    assert await ledger.rollback(1) == ["r1", "r2"]
    assert [step.step for step in await ledger.steps()] == [0]
    rows = list(read_rollouts(path, state="scored"))
    assert [row.rollout for row in rows] == [scored("r1"), scored("r2")]
    await ledger.commit(1, [scored("r2")], {})
    assert by_id(path)["r2"] == ("trained", "trained", 1)
    await ledger.close()


async def test_a_new_life_marks_what_ran_as_lost_and_may_try_the_same_places(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    first = await Ledger.open(path)
    await first.started(running("r0"))
    await first.ended(scored("r1"))
    await first.close()
    second = await Ledger.open(path)
    assert by_id(path)["r0"] == ("running", "lost", None)
    await second.started(running("r0"))
    await second.ended(scored("r0", version=5))
    await second.commit(0, [scored("r1"), scored("r0")], {})
    rows = [(row.life, row.rollout_id, row.fate) for row in read_rollouts(path)]
    assert rows == [(1, "r0", "lost"), (1, "r1", "trained"), (2, "r0", "trained")]
    await second.close()


async def test_of_two_lives_that_scored_the_same_attempt_the_newest_is_trained(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    for version in (1, 2):
        ledger = await Ledger.open(path)
        await ledger.ended(scored("r0", version=version))
        if version == 2:
            await ledger.commit(0, [scored("r0", version=version)], {})
        await ledger.close()
    assert [(row.life, row.state, row.oldest_version) for row in read_rollouts(path)] == [
        (1, "scored", 1),
        (2, "trained", 2),
    ]
    with pytest.raises(ValueError, match="rollout r0 was trained at step 0"):
        await reopen_and_commit(path, 1, scored("r0", version=1))


async def reopen_and_commit(path: Path, step: int, rollout: Rollout) -> None:
    ledger = await Ledger.open(path)
    try:
        await ledger.commit(step, [rollout], {})
    finally:
        await ledger.close()


async def test_a_trained_rollout_is_not_changed_by_a_late_message(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = await Ledger.open(path)
    await ledger.ended(scored("r0"))
    await ledger.commit(0, [scored("r0")], {})
    await ledger.ended(scored("r0", score=9.0), fate="dropped", reason="late")
    (row,) = read_rollouts(path)
    assert (row.fate, row.reward, row.reason) == ("trained", 0.5, "")
    await ledger.close()


@pytest.mark.parametrize("point", ["before", "after"])
async def test_a_commit_that_fails_is_there_whole_or_not_at_all(tmp_path: Path, point: str) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = await Ledger.open(path)
    await ledger.ended(scored("r0"))

    def fail(name: str) -> None:
        if name == f"ledger:commit:{point}":
            raise OSError("no space")

    with installed_faults(fail), pytest.raises(OSError, match="no space"):
        await ledger.commit(0, [scored("r0")], {})
    trained = point == "after"
    assert by_id(path)["r0"][0] == ("trained" if trained else "scored")
    assert len(read_steps(path)) == trained
    await ledger.close()


async def test_rollouts_of_a_failed_write_stay_queued(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = await Ledger.open(path)

    def fail(name: str) -> None:
        if name == "ledger:rollouts:before":
            raise OSError("disk")

    with installed_faults(fail):
        outcomes = await asyncio.gather(*(ledger.ended(scored(f"r{n}")) for n in range(3)), return_exceptions=True)
    assert all(isinstance(outcome, OSError) for outcome in outcomes)
    assert by_id(path) == {}
    await ledger.commit(0, [scored("r0"), scored("r1"), scored("r2")], {})
    assert {state for state, _, _ in by_id(path).values()} == {"trained"}
    await ledger.close()


CRASHING_RUN = """
import asyncio, os, sys
from pathlib import Path
from test_ledger import scored, running
from soloist.runtime.ledger import Ledger
from soloist.seams import installed_faults

async def run(path, kill_at):
    seen = 0
    def plan(name):
        nonlocal seen
        seen += 1
        if seen == kill_at:
            os._exit(9)
    with installed_faults(plan):
        ledger = await Ledger.open(path)
        first = len(await ledger.steps())
        for step in range(first, 6):
            names = [f"r{2 * step}", f"r{2 * step + 1}"]
            for name in names:
                await ledger.started(running(name))
                await ledger.ended(scored(name))
            await ledger.commit(step, [scored(name) for name in names], {"version": step + 1})
            print(step, flush=True)
        await ledger.close()

asyncio.run(run(Path(sys.argv[1]), int(sys.argv[2])))
"""


@pytest.mark.parametrize("seed", range(2))
def test_killed_at_random_fault_points_every_committed_step_survives(tmp_path: Path, seed: int) -> None:
    path, rng = tmp_path / "ledger.sqlite", random.Random(seed)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    told: list[int] = []
    for life in range(12):
        kill_at = rng.randint(3, 12) if life < 4 else 10**9
        done = subprocess.run(
            [sys.executable, "-c", CRASHING_RUN, str(path), str(kill_at)],
            capture_output=True, text=True, env=environment, check=False,
        )  # fmt: skip
        told += map(int, done.stdout.split())
        steps = read_steps(path) if path.exists() else []
        assert set(told) <= {step.step for step in steps}, "a commit that returned is on disk"
        if done.returncode == 0:
            break
        assert done.returncode == 9, done.stderr
    assert [step.step for step in read_steps(path)] == list(range(6))
    trained = [row.rollout_id for row in read_rollouts(path, state="trained")]
    assert sorted(trained) == sorted(f"r{n}" for n in range(12)), "each rollout once"


async def test_a_ledger_of_another_schema_is_refused_by_writer_and_reader(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    await (await Ledger.open(path)).close()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE meta SET value = '0' WHERE key = 'schema'")
    db.close()
    with pytest.raises(RunError, match="has schema 0, this version of soloist reads 1"):
        await Ledger.open(path)
    with pytest.raises(RunError, match="has schema 0"):
        list(read_rollouts(path))


async def test_a_file_that_is_no_ledger_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with pytest.raises(RunError, match="no ledger at"):
        read_steps(path)
    path.write_bytes(b"not a database, but long enough to look at" * 30)
    with pytest.raises(RunError, match="can't be opened as a ledger"):
        await Ledger.open(path)
    with pytest.raises(RunError, match="can't be read as a ledger"):
        read_steps(path)


async def test_closing_twice_is_safe_and_writing_afterwards_is_an_error(tmp_path: Path) -> None:
    ledger = await Ledger.open(tmp_path / "ledger.sqlite")
    await ledger.close()
    await ledger.close()
    with pytest.raises(RuntimeError, match="after shutdown"):
        await ledger.ended(scored("r0"))
