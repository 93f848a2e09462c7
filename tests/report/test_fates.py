"""`soloist fates`: every started rollout is in the table, the sums hold, each has a reason that a person can read."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from soloist.cli import main
from soloist.report.fates import describe_fates, explain_rollout
from soloist.runtime.ledger import Ledger
from soloist.types import Failure, Rollout, Segment, VersionSpan


def record(place: int, attempt: int = 0, **changes: object) -> Rollout:
    segment = Segment(
        token_ids=[7, 8],
        action_mask=[False, True],
        rollout_log_probs=[None, -0.25],
        version_spans=[VersionSpan(version=0, start=1, end=2)],
    )
    fields = {
        "rollout_id": f"r{place}", "task_id": f"t{place}", "group_id": f"g{place}", "attempt": attempt, "place": place,
        "environment": "numbers", "state": "scored", "status": "completed", "segments": [segment], "score": 0.5,
        "started_at": 1_790_000_000.0,
    }  # fmt: skip
    return Rollout(**{**fields, **changes})


def broken(place: int, attempt: int, reason: str) -> Rollout:
    failure = Failure(boundary="sandbox", reason=reason)
    return record(place, attempt, state="finished", status="failed", score=None, segments=[], failure=failure)


async def write(path: Path) -> None:
    """Two lives with every fate there is."""
    ledger = await Ledger.open(path)

    async def lease(place: int, attempt: int = 0) -> None:
        await ledger.started(record(place, attempt), unit=place, expires_at=0.0)

    for place in range(6):
        await lease(place)
    for place in (0, 1, 5):
        await ledger.ended(record(place))
    await ledger.ended(broken(2, 0, "no \x1b[31mbwrap"))
    await lease(2, 1)
    await ledger.ended(broken(2, 1, "no bwrap"))
    ledger.quarantined(2, "sandbox: no bwrap")
    ledger.expired("r3", 0, "lease expired while it waited for its score")
    await ledger.ended(record(3))
    ledger.dropped(record(5), "dropped", "stale")
    await ledger.commit(0, [record(0)], {})
    await ledger.close()
    ledger = await Ledger.open(path)
    await ledger.started(record(3, 1), unit=3, expires_at=0.0)
    await ledger.ended(record(6, 0))
    await ledger.close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    asyncio.run(write(tmp_path / "ledger.sqlite"))
    return tmp_path


def test_the_table_holds_every_attempt_and_the_sums_hold(run: Path) -> None:
    """R5: attempts and tasks by what became of them; nothing is missing and nothing is left over."""
    lines = describe_fates(run)
    rows = [line.split(maxsplit=3) for line in lines[1 : lines.index("")]]
    assert [(row[0], row[1], row[3] if row[3:] else "") for row in rows] == [
        ("running", "1", ""),
        ("scored", "1", ""),
        ("trained", "1", ""),
        ("failed", "1", "sandbox: no \\x1b[31mbwrap"),
        ("failed", "1", "sandbox: no bwrap"),
        ("dropped", "1", "lease expired while it waited for its score"),
        ("dropped", "1", "stale"),
        ("lost", "1", "the run ended while it was under way"),
    ]
    assert lines[-4] == "attempts: 8 = 1 running + 1 scored + 1 trained + 2 failed + 2 dropped + 1 lost"
    assert lines[-3] == "tasks: 6 = 4 open + 1 trained + 1 quarantined + 0 uniform"
    assert lines[-2] == "refused results (late, or twice): 2"
    assert lines[-1] == "steps committed: 1, lineages: 1"
    assert len(describe_fates(run, every=True)) == len(lines) + 1 + 8


@pytest.mark.parametrize(
    ("rollout_id", "attempts", "verdict"),
    [
        ("r0", 1, "r0 was trained at step 0 (attempt 0)"),
        ("r1", 1, "r1 waits to be trained: attempt 0 is scored, its step was not taken yet"),
        ("r2", 2, "r2 was not trained: task t2 was given up after 2 attempts (sandbox: no bwrap)"),
        ("r3", 2, "r3 is under way, or was when the run ended; a resumed run plays it again"),
        ("r4", 1, "r4 was not trained so far: attempt 0 was lost; it is played again when the run goes on"),
        ("r5", 1, "r5 was not trained so far: attempt 0 was dropped; it is played again when the run goes on"),
    ],
)
def test_every_rollout_says_why_it_was_trained_or_not(
    run: Path, rollout_id: str, attempts: int, verdict: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = explain_rollout(run, rollout_id)
    assert (len(lines), lines[-1]) == (attempts + 1, verdict)
    assert all(line.startswith(f"{rollout_id} attempt {n} of life ") for n, line in enumerate(lines[:-1]))
    assert main(["fates", str(run), "--rollout", rollout_id]) == 0
    assert capsys.readouterr().out == "\n".join(lines) + "\n"


def test_an_unknown_rollout_or_run_is_refused_in_one_sentence(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fates", str(run), "--rollout=r99"]) == 2
    assert "no rollout 'r99' in " in capsys.readouterr().err
    assert main(["fates", "nothing", "--runs_dir", str(run)]) == 2
    assert "no run 'nothing'" in capsys.readouterr().err
    assert main(["fates", str(run)]) == 0
    assert capsys.readouterr().out.startswith("fate        attempts    tokens  reason\n")
