"""The ledger: exactly once, before or not at all, readable by others, through crashes at every fault point."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from soloist.errors import RunError
from soloist.runtime import ledger_changes as changes
from soloist.runtime.ledger import Ledger, read_counts, read_lineages, read_rollouts, read_steps
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


async def lease(ledger: Ledger, *rollouts: Rollout) -> None:
    """Lease the places of these rollouts, one task each."""
    for rollout in rollouts:
        fresh = running(rollout.rollout_id, rollout.attempt)
        await ledger.started(fresh, unit=rollout.place, expires_at=1000.0)


async def end(ledger: Ledger, *rollouts: Rollout) -> None:
    """Lease and end these rollouts."""
    for rollout in rollouts:
        await lease(ledger, rollout)
        assert await ledger.ended(rollout)


def by_id(path: Path) -> dict[str, tuple[str, str | None, int | None]]:
    return {row.rollout_id: (row.state, row.fate, row.step) for row in read_rollouts(path, payloads=False)}


async def test_a_rollout_comes_back_from_the_disk_as_it_was(tmp_path: Path) -> None:
    ledger = await Ledger.open(tmp_path / "ledger.sqlite")
    rollout = scored("r7", attempt=2)
    await end(ledger, rollout)
    (row,) = read_rollouts(tmp_path / "ledger.sqlite")
    assert row.rollout == rollout
    assert (row.state, row.fate, row.attempt, row.place) == ("scored", None, 2, 7)
    assert (row.oldest_version, row.action_tokens, row.reward) == (3, 2, 0.5)
    assert (row.lease, row.life, row.unit, row.expires_at) == (1, 1, 7, 1000.0)
    await ledger.close()


async def test_a_step_and_its_rollouts_are_on_record_together_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = await Ledger.open(path)
    rollouts = [scored("r2"), scored("r0"), scored("r1")]
    await end(ledger, *rollouts)
    await ledger.commit(0, rollouts[:2], {"version": 0, "losses": {}}, state_hash="cd")
    assert by_id(path) == {
        "r0": ("trained", "trained", 0),
        "r1": ("scored", None, None),
        "r2": ("trained", "trained", 0),
    }
    (step,) = await ledger.steps()
    assert (step.step, step.rollout_ids, step.attempts) == (0, ["r2", "r0"], [0, 0])
    assert (step.record, step.state_hash, step.lineage) == ({"version": 0, "losses": {}}, "cd", 1)
    assert [r.rollout_id for r in await ledger.rollouts_of(0)] == ["r2", "r0"]
    assert read_steps(path) == [step]
    trained = [row.rollout for row in read_rollouts(path, step=0)]
    assert [(r.state, r.trained_step) for r in trained if r is not None] == [("trained", 0)] * 2
    await ledger.close()


async def test_a_rollout_is_trained_once_and_a_step_committed_once(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = await Ledger.open(path)
    await end(ledger, scored("r0"), scored("r1"))
    await ledger.commit(0, [scored("r0")], {})
    with pytest.raises(ValueError, match="rollout r0 was trained at step 0, step 1 must not"):
        await ledger.commit(1, [scored("r1"), scored("r0")], {})
    with pytest.raises(ValueError, match="step 0 is already committed"):
        await ledger.commit(0, [scored("r1")], {})
    with pytest.raises(ValueError, match="step 2 can't be committed before step 1"):
        await ledger.commit(2, [scored("r1")], {})
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
    await end(ledger, lost, scored("r1"))
    ledger.dropped(scored("r1"), "dropped", "stale")
    ledger.quarantined(0, "sandbox: no bwrap")
    for rollout in (lost, scored("r1")):
        with pytest.raises(ValueError, match="isn't on record as scored"):
            await ledger.commit(0, [rollout], {})
    frontier = await ledger.frontier()
    rows = {row.rollout_id: row for row in read_rollouts(path)}
    assert (rows["r0"].fate, rows["r0"].boundary, rows["r0"].reason) == ("failed", "sandbox", "sandbox: no bwrap")
    assert (rows["r1"].fate, rows["r1"].reason, rows["r1"].action_tokens) == ("dropped", "stale", 2)
    assert (frontier.quarantined, frontier.open_units, frontier.tries) == ({0: "sandbox: no bwrap"}, [1], {1: 1})
    with pytest.raises(ValueError, match="r2 is still running"):
        await ledger.ended(running("r2"))
    await ledger.close()


async def test_starts_are_written_together(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = await Ledger.open(path)
    for number in range(63):
        await lease(ledger, scored(f"r{number}"))
    assert by_id(path) == {}
    await lease(ledger, scored("r63"))
    assert len(by_id(path)) == 64
    await lease(ledger, scored("r64"))
    await ledger.close()
    assert len(by_id(path)) == 65, "closing writes what is queued"


async def test_many_ends_at_once_share_writes_and_do_not_block_the_event_loop(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = await Ledger.open(path)
    threads: list[int] = []
    await lease(ledger, *(scored(f"r{number}") for number in range(50)))
    with installed_faults(lambda name: threads.append(threading.get_ident())):
        await asyncio.gather(*(ledger.ended(scored(f"r{number}")) for number in range(50)))
    assert len(by_id(path)) == 50
    assert threading.get_ident() not in threads
    assert len(set(threads)) == 1, "one writer"
    await ledger.close()


def counted_writes(names: list[str]) -> Any:
    """Note each transaction of the ledger that reached the disk."""
    return installed_faults(lambda name: names.append(name) if name.endswith(":after") else None)


async def test_patient_results_share_one_write_and_none_is_acknowledged_before_it(tmp_path: Path) -> None:
    """One sync of the disk for all that end within the patience; each still answers only when it is on disk."""
    path = tmp_path / "ledger.sqlite"
    ledger = await Ledger.open(path)
    await lease(ledger, *(scored(f"r{number}") for number in range(9)))
    names: list[str] = []
    with counted_writes(names):
        patient = [asyncio.create_task(ledger.ended(scored(f"r{number}"), patience_s=60.0)) for number in range(8)]
        await asyncio.sleep(0.02)
        assert not any(task.done() for task in patient)
        assert by_id(path) == {}
        assert await ledger.ended(scored("r8")), "one without patience takes the others along"
        assert await asyncio.gather(*patient) == [True] * 8
    assert names == ["ledger:rollouts:after"]
    assert {state for state, _, _ in by_id(path).values()} == {"scored"}
    await ledger.close()


@pytest.mark.parametrize("what", ["hurry", "commit", "close", "time"])
async def test_patience_ends_when_somebody_needs_the_result(tmp_path: Path, what: str) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = await Ledger.open(path)
    await end(ledger, scored("r0"))
    await lease(ledger, scored("r1"))
    patient = asyncio.create_task(ledger.ended(scored("r1"), patience_s=0.01 if what == "time" else 60.0))
    await asyncio.sleep(0)
    if what == "hurry":
        ledger.hurry()
    elif what == "commit":
        await ledger.commit(0, [scored("r0")], {})
    elif what == "close":
        await ledger.close()
    assert await asyncio.wait_for(patient, 5.0)
    assert by_id(path)["r1"] == ("scored", None, None)
    await ledger.close()


async def test_a_shared_write_that_fails_is_told_to_all_and_a_caller_who_gave_up_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = await Ledger.open(path)
    await lease(ledger, *(scored(f"r{number}") for number in range(3)))

    def fail(name: str) -> None:
        if name == "ledger:rollouts:before":
            raise OSError("disk")

    patient = [asyncio.create_task(ledger.ended(scored(f"r{number}"), patience_s=60.0)) for number in range(3)]
    await asyncio.sleep(0)
    patient[0].cancel()
    with installed_faults(fail):
        ledger.hurry()
        outcomes = await asyncio.gather(*patient, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [asyncio.CancelledError, OSError, OSError]
    assert by_id(path) == {}
    await ledger.close()
    assert {state for state, _, _ in by_id(path).values()} == {"scored"}, "it stayed queued and was tried again"


async def test_a_sign_of_life_goes_on_record_with_the_result_that_follows(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = await Ledger.open(path)
    await lease(ledger, scored("r0"), scored("r1"))
    ledger.renewed(running("r0"), 5000.0)
    assert await ledger.ended(scored("r0"))
    assert await ledger.ended(scored("r1"))
    assert {row.rollout_id: row.expires_at for row in read_rollouts(path)} == {"r0": 5000.0, "r1": 1000.0}
    await ledger.close()


def test_a_step_costs_the_same_however_long_the_history_is() -> None:
    """R13: instructions of SQLite's machine for a step and its pruning, early and late in a run."""
    ticks: list[int] = []
    costs: list[int] = []
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        changes.begin_life(db, Path("in memory"), 0.0)
        db.set_progress_handler(lambda: ticks.append(1), 10)
        for step in range(400):
            ticks.clear()
            names = [f"r{4 * step + member}" for member in range(4)]
            for name in names:
                changes.start(db, running(name), int(name[1:]), 1, 0.0)
                changes.renew(db, {(name, 0): 1.0})
                assert changes.end(db, scored(name), None, "", 1, 0.0, None)
            changes.drop(db, (names[3], 0), "dropped", None, "stale")
            changes.commit_step(db, (step, 1, 0.0, "", "{}"), [(name, 0) for name in names[:3]])
            changes.forget_payloads(db, step - 5)
            costs.append(len(ticks))
        kept = db.execute("SELECT count(*) FROM rollouts WHERE payload IS NOT NULL").fetchone()[0]
    assert kept <= 4 * 7
    assert sum(costs[380:]) <= 1.1 * sum(costs[20:40])


async def test_a_new_life_marks_what_ran_as_lost_and_goes_on_with_higher_attempts(tmp_path: Path) -> None:
    """RB-119: what died with its process is lost, not the task's fault, and never mistaken for the next attempt."""
    path = tmp_path / "ledger.sqlite"
    first = await Ledger.open(path)
    await lease(first, scored("r0"))
    await end(first, scored("r1"))
    await first.close()
    second = await Ledger.open(path)
    assert (second.life, by_id(path)["r0"]) == (2, ("running", "lost", None))
    frontier = await second.frontier()
    assert (frontier.attempts, frontier.tries, frontier.next_unit) == ({0: 1, 1: 1}, {0: 0, 1: 0}, 2)
    assert frontier.scored == [scored("r1")]
    assert not await second.ended(scored("r0")), "a result of the life before is refused"
    await end(second, scored("r0", attempt=1, version=5))
    await second.commit(0, [scored("r1"), scored("r0", attempt=1)], {})
    rows = [(row.life, row.rollout_id, row.attempt, row.fate) for row in read_rollouts(path)]
    assert rows == [(1, "r0", 0, "lost"), (1, "r1", 0, "trained"), (2, "r0", 1, "trained")]
    await second.close()


async def test_late_and_repeated_results_are_refused_and_kept_on_record(tmp_path: Path) -> None:
    """RB-119: the fence; an attempt's result counts once, and only while its lease is in force."""
    path = tmp_path / "ledger.sqlite"
    ledger = await Ledger.open(path)
    await lease(ledger, scored("r0"), scored("r1"))
    ledger.expired("r0", 0, "lease expired")
    await lease(ledger, scored("r0", attempt=1))
    assert await ledger.ended(scored("r1"))
    outcomes = await asyncio.gather(
        ledger.ended(scored("r0")),
        ledger.ended(scored("r0", attempt=1)),
        ledger.ended(scored("r0", attempt=1, score=9.0)),
        ledger.ended(scored("r1", score=9.0)),
        ledger.ended(scored("r8")),
    )
    assert outcomes == [False, True, False, False, False]
    await ledger.commit(0, [scored("r0", attempt=1)], {})
    assert not await ledger.ended(scored("r0", attempt=1, score=9.0), fate="dropped", reason="late")
    rows = {(row.rollout_id, row.attempt): row for row in read_rollouts(path)}
    assert (rows["r0", 0].fate, rows["r0", 0].reason, rows["r0", 0].rollout) == ("dropped", "lease expired", None)
    assert (rows["r0", 1].fate, rows["r0", 1].reward, rows["r0", 1].reason) == ("trained", 0.5, "")
    assert rows["r1", 0].reward == 0.5
    assert read_counts(path) == {
        "attempts": {"dropped": 1, "scored": 1, "trained": 1},
        "tasks": {"open": 1, "trained": 1},
        "refused": {"results": 5},
    }
    await ledger.close()


async def test_a_place_can_not_have_two_attempts_that_live_or_one_after_it_was_trained(tmp_path: Path) -> None:
    """Exactly once is a constraint of the database, not only of the code that writes it."""
    path = tmp_path / "ledger.sqlite"
    for trained in (False, True):
        ledger = await Ledger.open(path)
        if not trained:
            await end(ledger, scored("r0"))
        else:
            await ledger.commit(0, [scored("r0")], {})
        await lease(ledger, scored("r0", attempt=1))
        with pytest.raises(sqlite3.IntegrityError, match=r"rollouts\.place"):
            await ledger.ended(scored("r0", attempt=1))
        with pytest.raises(sqlite3.IntegrityError):
            await ledger.close()
    assert {row.attempt for row in read_rollouts(path)} == {0}


async def test_signs_of_life_move_the_end_of_a_lease(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = await Ledger.open(path)
    await lease(ledger, scored("r0"), scored("r1"))
    for expires_at in (2000.0, 3000.0):
        ledger.renewed(running("r0"), expires_at)
    assert await ledger.ended(scored("r1"))
    assert {row.rollout_id: row.expires_at for row in read_rollouts(path)} == {"r0": 3000.0, "r1": 1000.0}
    await ledger.close()


async def test_payloads_are_forgotten_before_a_step_and_never_of_what_may_be_trained(tmp_path: Path) -> None:
    """R13: `keep_rollouts` bounds the file; what a resume needs stays, and what is gone is said when asked for."""
    path = tmp_path / "ledger.sqlite"
    ledger = await Ledger.open(path)
    for step in range(4):
        await end(ledger, scored(f"r{2 * step}"), scored(f"r{2 * step + 1}"))
        ledger.dropped(scored(f"r{2 * step + 1}"), "dropped", "stale")
        await ledger.commit(step, [scored(f"r{2 * step}")], {})
    await end(ledger, scored("r8"))
    await ledger.prune(2)
    kept = {row.rollout_id for row in read_rollouts(path) if row.rollout is not None}
    assert kept == {"r4", "r5", "r6", "r7", "r8"}
    assert [row.fate for row in read_rollouts(path)].count("trained") == 4, "rows stay"
    assert [r.rollout_id for r in await ledger.rollouts_of(2)] == ["r4"]
    with pytest.raises(RunError, match=r"step 1 can't be trained again: the tokens of 1 of its 1 rollouts.*r2.*keep_"):
        await ledger.rollouts_of(1)
    await ledger.close()


async def test_a_lineage_begins_where_results_differ_and_the_chain_follows_it(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = await Ledger.open(path)
    for step in range(3):
        await end(ledger, scored(f"r{step}"))
        await ledger.commit(step, [scored(f"r{step}")], {"version": step}, state_hash=f"a{step}")
    await ledger.begin_lineage(1, "step 1 gave other bits")
    before = await ledger.steps()
    await ledger.recommit(before[1], "b1")
    assert [(one.step, one.lineage, one.state_hash) for one in read_steps(path)] == [
        (0, 1, "a0"), (1, 2, "b1"), (2, 1, "a2"),
    ]  # fmt: skip
    assert [(one.lineage, one.first_step) for one in read_lineages(path)] == [(1, 0), (2, 1)]
    assert (await ledger.steps())[1].rollout_ids == ["r1"], "the rollouts stay trained by the step"
    await ledger.close()
    again = await Ledger.open(path)
    assert again.lineage == 2
    await again.close()


@pytest.mark.parametrize("point", ["before", "after"])
async def test_a_commit_that_fails_is_there_whole_or_not_at_all(tmp_path: Path, point: str) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = await Ledger.open(path)
    await end(ledger, scored("r0"))

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

    await lease(ledger, *(scored(f"r{n}") for n in range(3)))
    with installed_faults(fail):
        outcomes = await asyncio.gather(*(ledger.ended(scored(f"r{n}")) for n in range(3)), return_exceptions=True)
    assert all(isinstance(outcome, OSError) for outcome in outcomes)
    assert by_id(path) == {}
    await ledger.commit(0, [scored("r0"), scored("r1"), scored("r2")], {})
    assert {state for state, _, _ in by_id(path).values()} == {"trained"}
    await ledger.close()


async def test_a_full_disk_is_a_sentence_and_the_ledger_goes_on_when_there_is_room(tmp_path: Path) -> None:
    """R3: SQLite's own "disk is full"; what was not written stays queued, what was is whole."""
    path = tmp_path / "ledger.sqlite"
    ledger = await Ledger.open(path)
    await end(ledger, scored("r0"))

    def limit(pages: int) -> None:
        ledger._db.execute(f"PRAGMA max_page_count = {pages}")

    await ledger._thread.call(limit, 1)
    big = scored("r1", info={"noise": [random.random() for _ in range(40_000)]})
    await lease(ledger, big)
    with pytest.raises(RunError, match=r"can't be written .*full.*; mend the disk and go on with --resume"):
        await ledger.ended(big)
    assert set(by_id(path)) == {"r0"}
    await ledger._thread.call(limit, 100_000)
    await ledger.commit(0, [scored("r0"), big], {})
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
        frontier = await ledger.frontier()
        done = {rollout.rollout_id: rollout.attempt for rollout in frontier.scored}
        attempts = frontier.attempts
        for step in range(first, 6):
            names = [f"r{2 * step}", f"r{2 * step + 1}"]
            for name in names:
                if name in done:
                    continue
                attempt = attempts.get(int(name[1:]), 0)
                await ledger.started(running(name, attempt), unit=int(name[1:]), expires_at=0.0)
                assert await ledger.ended(scored(name, attempt))
                done[name] = attempt
            await ledger.commit(step, [scored(name, done[name]) for name in names], {"version": step + 1})
            print(step, flush=True)
        await ledger.close()

asyncio.run(run(Path(sys.argv[1]), int(sys.argv[2])))
"""


@pytest.mark.parametrize("seed", range(2))
def test_killed_at_random_fault_points_every_committed_step_survives(tmp_path: Path, seed: int) -> None:
    path, rng = tmp_path / "ledger.sqlite", random.Random(seed)
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths}
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
    with pytest.raises(RunError, match="has schema 0, this version of soloist reads 2"):
        await Ledger.open(path)
    with pytest.raises(RunError, match="has schema 0"):
        list(read_rollouts(path))


async def test_a_ledger_of_the_first_release_is_refused_in_words_and_left_as_it_was(tmp_path: Path) -> None:
    """R18: written by version 0.1 with schema 1, before leases had epochs; nothing of it is changed."""
    path = tmp_path / "ledger.sqlite"
    shutil.copyfile(Path(__file__).parent / "data" / "ledger_schema_1.sqlite", path)
    with pytest.raises(RunError, match="has schema 1, this version of soloist reads 2; use the version that wrote it"):
        await Ledger.open(path)
    with pytest.raises(RunError, match="has schema 1"):
        read_steps(path)
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT rollout_id, state, step FROM rollouts").fetchall() == [("r0", "trained", 0)]


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
