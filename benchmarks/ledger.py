"""What share of a training step does the ledger cost, at 64 and at 1,024 rollouts a step?

    cost of a step = seconds that the loop waits for `commit` + processor seconds of all else that the ledger does
                     (encoding, compressing, SQLite, thread hops), since it shares the process with the learner

The step time is that of the `calculator` recipe's model on this machine: K = 2 value updates and one policy update on
rollouts of the same shape as the ledger gets (two turns, about 90 tokens, 18 of them sampled), one thread, in processor
seconds: what the step takes when the machine does nothing else. A larger
model takes longer for a step and pays the same for its ledger, so this is the dearest case that we have.
Rollouts end one by one, spread evenly over the step, as players deliver them; nothing shares a sync then, which is the
dearest case, too. The same loop without a ledger is timed in turns with it and subtracted. `fastest` is the other end:
rollouts a second when 64 players deliver as fast as the ledger takes them.
"""

from __future__ import annotations

import asyncio
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import torch
from harness import write_results

from soloist.config_files import load_config
from soloist.models.loading import load_policy
from soloist.models.tiny import build_tiny
from soloist.models.value import ValueModel
from soloist.runtime.ledger import Ledger
from soloist.training.learner import Learner
from soloist.types import Rollout, Sampling, Segment, Turn, VersionSpan

SIZES = {64: 8, 1024: 2}
"""Rollouts of a step → pairs of steps (with and without a ledger) that are timed."""
PLAYERS = 64


def rollout(place: int, state: str = "scored") -> Rollout:
    """One of the calculator's: problem, tool call, its result, answer."""
    actions = [False] * 52 + [True] * 13 + [False] * 20 + [True] * 5
    ids = [(place * 31 + i * 7) % 90 + 5 for i in range(len(actions))]
    spans = [VersionSpan(version=0, start=52, end=65), VersionSpan(version=0, start=85, end=90)]
    log_probs = [-((place * 17 + i * 13) % 997) / 700 if action else None for i, action in enumerate(actions)]
    return Rollout(
        rollout_id=f"r{place}",
        task_id=f"calculator/train/{place}",
        group_id=f"g{place}",
        place=place,
        environment="calculator",
        family="2",
        state=state,  # type: ignore[arg-type]
        status="completed",
        terminated=True,
        segments=[Segment(token_ids=ids, action_mask=actions, rollout_log_probs=log_probs, version_spans=spans)],
        turns=[
            Turn(segment=0, start=52, end=65, finish_reason="stop", sampled_at=1.8e9, observed_at=1.8e9 + 0.01),
            Turn(segment=0, start=85, end=90, finish_reason="stop", sampled_at=1.8e9 + 0.2),
        ],
        messages=[
            {"role": "user", "content": "17+4*23"},
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "python"}}]},
            {"role": "tool", "name": "python", "content": "109"},
            {"role": "assistant", "content": "109"},
        ],
        score=float(place % 2),
        sampling=Sampling(stop_token_ids=(5,)),
        engine="local-0",
        info={"tool_calls": 1, "tool_errors": 0, "sandbox": "monty", "success": True},
        started_at=1.8e9,
        finished_at=1.8e9 + 0.3,
        scored_at=1.8e9 + 0.31,
    )


def learner_seconds(size: int, folder: Path) -> float:
    """One step of the recipe's learner on `size` rollouts, processor seconds of its one thread."""
    config = load_config("calculator")
    torch.set_num_threads(1)
    build_tiny(config.model, 0, folder / "model")
    policy = load_policy(folder / "model")
    learner = Learner(policy, ValueModel.from_policy(policy), config)
    rollouts = [rollout(place) for place in range(size)]

    def step() -> None:
        for _ in range(config.value.updates_per_step):
            learner.update_value(rollouts)
        learner.update_policy(rollouts)

    if size <= 64:
        step()
    return min(processor_seconds(step) for _ in range(5 if size <= 64 else 1))


def processor_seconds(work: Callable[[], None]) -> float:
    """Of one call. Others on the machine make a step longer by the clock, which would flatter the ledger."""
    before = time.process_time()
    work()
    return time.process_time() - before


async def deliver(ledger: Ledger | None, step: int, size: int, step_seconds: float) -> tuple[float, float]:
    """One step's worth of calls, spread over the step. Returns (seconds of the commit, processor seconds in all)."""
    before, began = _processor_seconds(), time.perf_counter()
    rollouts = [rollout(step * size + number) for number in range(size)]
    for number, one in enumerate(rollouts):
        if ledger is not None:
            await ledger.started(one, unit=one.place, expires_at=time.time() + 180)
            await ledger.ended(one)
        await asyncio.sleep(max(0.0, began + (number + 1) * step_seconds / size - time.perf_counter()))
    committing = time.perf_counter()
    if ledger is not None:
        await ledger.commit(step, rollouts, {"version": step, "losses": {}}, state_hash="0" * 64)
    return time.perf_counter() - committing, _processor_seconds() - before


async def cost_of(size: int, pairs: int, step_seconds: float, folder: Path) -> dict[str, Any]:
    """Seconds that the ledger adds to a step."""
    ledger = await Ledger.open(folder / f"{size}.sqlite")
    commits: list[float] = []
    work: list[float] = []
    try:
        for step in range(pairs):
            commit, with_ledger = await deliver(ledger, step, size, step_seconds)
            _, without = await deliver(None, step, size, step_seconds)
            commits.append(commit)
            # The commit's own processor time is part of its seconds already; counted twice, it errs upwards.
            work.append(max(0.0, with_ledger - without))
    finally:
        await ledger.close()
    commit, processor = statistics.median(commits), statistics.median(work)
    return {
        "step_s": round(step_seconds, 3),
        "commit_s": round(commit, 5),
        "processor_s": round(processor, 5),
        "share": round((commit + processor) / step_seconds, 5),
        "share_waited_for": round(commit / step_seconds, 5),
    }


async def fastest(folder: Path, rollouts: int = 4096) -> float:
    """Rollouts a second that the ledger takes from many players at once."""
    ledger = await Ledger.open(folder / "fastest.sqlite")

    async def player(first: int) -> None:
        for place in range(first, rollouts, PLAYERS):
            one = rollout(place)
            await ledger.started(one, unit=place, expires_at=time.time() + 180)
            await ledger.ended(one)

    began = time.perf_counter()
    try:
        await asyncio.gather(*(player(first) for first in range(PLAYERS)))
        return rollouts / (time.perf_counter() - began)
    finally:
        await ledger.close()


def _processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Measure both sizes and write `results/ledger.json`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        figures: dict[str, Any] = {}
        for size, pairs in SIZES.items():
            step_seconds = learner_seconds(size, folder / f"{size}")
            figures[f"rollouts_{size}"] = asyncio.run(cost_of(size, pairs, step_seconds, folder))
        figures["fastest_rollouts_per_s"] = round(asyncio.run(fastest(folder)))
        figures["limit"] = 0.02
    write_results("ledger", figures)


if __name__ == "__main__":
    main()
