"""`soloist fates`: what became of every rollout that was started, the sums that must hold, and why one was not trained.

    attempts = running + scored + trained + failed + dropped + lost      tasks = open + trained + quarantined + uniform

Reads the ledger only, during a run or after it. Not covered: what a rollout said (`report/rollouts.py`).
"""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

from soloist.errors import UserError
from soloist.report.text import printable
from soloist.runtime.ledger_rows import (
    StoredRollout,
    read_counts,
    read_lineages,
    read_rollouts,
    read_steps,
    read_tasks,
)

ATTEMPT_STATES = ("running", "scored", "trained", "failed", "dropped", "lost")
TASK_STATES = ("open", "trained", "quarantined", "uniform")
REASON_CHARS = 90


def describe_fates(folder: Path, *, every: bool = False) -> list[str]:
    """The table of fates, the sums and the lineages of a run; with `every`, a line for each attempt, too.

    Raises RunError when the ledger can't be read.
    """
    path = folder / "ledger.sqlite"
    attempts: Counter[tuple[str, str]] = Counter()
    tokens: Counter[tuple[str, str]] = Counter()
    listed = []
    for row in read_rollouts(path, payloads=False):
        kind = (row.fate or row.state, _short(row.reason))
        attempts[kind] += 1
        tokens[kind] += row.action_tokens
        if every:
            listed.append(_attempt(row))
    lines = [f"{'fate':<10} {'attempts':>9} {'tokens':>9}  reason"]
    for (fate, reason), count in sorted(
        attempts.items(), key=lambda pair: (ATTEMPT_STATES.index(pair[0][0]), -pair[1])
    ):
        lines.append(f"{fate:<10} {count:>9} {tokens[fate, reason]:>9}  {reason}".rstrip())
    counts = read_counts(path)
    lines += ["", _sum("attempts", counts["attempts"], ATTEMPT_STATES), _sum("tasks", counts["tasks"], TASK_STATES)]
    lines.append(f"refused results (late, or twice): {counts['refused']['results']}")
    lines.append(f"steps committed: {len(read_steps(path))}, lineages: {_lineages(path)}")
    return [*lines, *([""] if listed else []), *listed]


def explain_rollout(folder: Path, rollout_id: str) -> list[str]:
    """All attempts at one rollout, and in one sentence why it was trained or not.

    Raises UserError for an id that the run never started.
    """
    path = folder / "ledger.sqlite"
    rows = [row for row in read_rollouts(path, payloads=False) if row.rollout_id == rollout_id]
    if not rows:
        raise UserError(
            f"no rollout {printable(rollout_id)!r} in {path}; ids are r0, r1, … in the order of their tasks, and "
            "`soloist fates RUN --every` lists them"
        )
    state, reason = read_tasks(path, [rows[0].unit])[rows[0].unit]
    rows.sort(key=lambda row: row.attempt)
    return [*map(_attempt, rows), _verdict(rows, state, reason)]


def _verdict(rows: list[StoredRollout], task_state: str, task_reason: str) -> str:
    last = rows[-1]
    trained = next((row for row in rows if row.fate == "trained"), None)
    if trained is not None:
        return f"{last.rollout_id} was trained at step {trained.step} (attempt {trained.attempt})"
    if task_state == "quarantined":
        return (
            f"{last.rollout_id} was not trained: task {last.task_id} was given up after {len(rows)} attempts "
            f"({_short(task_reason)})"
        )
    if task_state == "uniform":
        return (
            f"{last.rollout_id} was not trained: {_short(task_reason)} in its group, which teaches nothing, so "
            "the next task took its place (advantage.drop_uniform_groups)"
        )
    if last.fate is None and last.state == "scored":
        return f"{last.rollout_id} waits to be trained: attempt {last.attempt} is scored, its step was not taken yet"
    if last.fate is None:
        return f"{last.rollout_id} is under way, or was when the run ended; a resumed run plays it again"
    again = "it is played again when the run goes on"
    return f"{last.rollout_id} was not trained so far: attempt {last.attempt} was {last.fate}; {again}"


def _attempt(row: StoredRollout) -> str:
    began = datetime.fromtimestamp(row.leased_at, UTC).strftime("%Y-%m-%d %H:%M:%S")
    took = f", ended after {row.ended_at - row.leased_at:.1f} s" if row.ended_at is not None else ""
    version = "" if row.oldest_version is None else f", oldest version {row.oldest_version}"
    reward = "" if row.reward is None else f", reward {row.reward:g}"
    step = "" if row.step is None else f" at step {row.step}"
    reason = f" ({_short(row.reason)})" if row.reason else ""
    return (
        f"{row.rollout_id} attempt {row.attempt} of life {row.life}: {row.fate or row.state}{step}{reason}; "
        f"leased {began}{took}, {row.action_tokens} tokens{version}{reward}"
    )


def _sum(name: str, counts: dict[str, int], states: tuple[str, ...]) -> str:
    parts = " + ".join(f"{counts.get(state, 0)} {state}" for state in states)
    return f"{name}: {sum(counts.values())} = {parts}"


def _lineages(path: Path) -> str:
    found = read_lineages(path)
    return f"{len(found)}" + "".join(f"; {one.lineage} from step {one.first_step}: {one.reason}" for one in found[1:])


def _short(reason: str) -> str:
    text = printable(reason, keep_newlines=False)
    return text if len(text) <= REASON_CHARS else text[: REASON_CHARS - 1] + "…"
