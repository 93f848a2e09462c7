"""What share of a training step does the ledger cost, at 64 and at 1,024 rollouts a step?

    cost of a step = seconds that the loop waits for `commit` + processor seconds of all else that the ledger does
                     (encoding, compressing, SQLite, thread hops), since it shares the process with the learner

The step time is that of the `calculator` recipe's model on this machine: K = 2 value updates and one policy update on
rollouts of the same shape as the ledger gets (two turns, about 90 tokens, 18 of them sampled), one thread, in processor
seconds: what the step takes when the machine does nothing else. A larger
model takes longer for a step and pays the same for its ledger, so this is the dearest case that we have.
Rollouts end one by one, spread evenly over the step, with as many under way as the recipe has players and six signs of
life for each, as the loop delivers them while the learner computes: results are gathered for `SHARED_WRITE_S`. `alone`
is the same without gathering, which is what the ledger does while the learner waits. The same loop without a ledger is
timed beside them and subtracted. `fastest` is the other end: rollouts a second when 64 players deliver as fast
as the ledger takes them.
"""

from __future__ import annotations

import asyncio
import resource
import statistics
import sys
import tempfile
import time
from collections import Counter
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
from soloist.seams import installed_faults
from soloist.training.learner import Learner
from soloist.training.run import SHARED_WRITE_S
from soloist.types import Rollout, Sampling, Segment, Turn, VersionSpan

Rollouts = list[Rollout]
SIZES = {64: 8, 1024: 2}
"""Rollouts of a step → steps of each kind that are timed."""
PLAYERS = 64
"""Of `fastest`."""
UNDER_WAY = 6
"""Rollouts under way; each gives a sign of life whenever another ends, so this is also the number of signs."""


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


async def deliver(ledger: Ledger | None, step: int, size: int, step_seconds: float, patience_s: float) -> Rollouts:
    """The rollouts that end while one step is computed, spread over its seconds."""
    began = time.perf_counter()
    rollouts = [rollout(step * size + number) for number in range(size)]
    records = []
    for number, one in enumerate(rollouts):
        if ledger is not None:
            under_way = [*rollouts[number + 1 : number + UNDER_WAY]]
            for other in rollouts[:UNDER_WAY] if not number else under_way[UNDER_WAY - 2 :]:
                await ledger.started(other, unit=other.place, expires_at=time.time() + 180)
            for other in (one, *under_way):
                ledger.renewed(other, time.time() + 180)
            records.append(asyncio.create_task(ledger.ended(one, patience_s=patience_s)))
        await asyncio.sleep(max(0.0, began + (number + 1) * step_seconds / size - time.perf_counter()))
    if not all(await asyncio.gather(*records)):
        raise RuntimeError("the ledger refused a result of the benchmark")
    return rollouts


async def cost_of(
    size: int, pairs: int, step_seconds: float, without_s: float, path: Path, patience_s: float
) -> dict[str, Any]:
    """Seconds that the ledger adds to a step. While a step's rollouts are delivered, the step before is computed."""
    commits: list[float] = []
    work: list[float] = []
    writes: Counter[str] = Counter()
    ledger = await Ledger.open(path)
    try:
        taken = await deliver(ledger, 0, size, 0.0, patience_s)
        with installed_faults(lambda name: writes.update([name])):
            for step in range(pairs):
                before = _processor_seconds()
                delivered = await deliver(ledger, step + 1, size, step_seconds, patience_s)
                # The commit's own processor time is part of its seconds.
                work.append(_processor_seconds() - before)
                began = time.perf_counter()
                await ledger.commit(step, taken, {"version": step, "losses": {}}, state_hash="0" * 64)
                commits.append(time.perf_counter() - began)
                taken = delivered
    finally:
        await ledger.close()
    commit, processor = statistics.median(commits), max(0.0, statistics.median(work) - without_s)
    return {
        "step_s": round(step_seconds, 3),
        "commit_s": round(commit, 5),
        "processor_s": round(processor, 5),
        "share": round((commit + processor) / step_seconds, 5),
        "share_waited_for": round(commit / step_seconds, 5),
        "rollouts_per_write": round(size * pairs / writes["ledger:rollouts:after"], 1),
    }


async def without(size: int, pairs: int, step_seconds: float) -> float:
    """Processor seconds of the same loop without a ledger."""
    taken = []
    for step in range(pairs):
        before = _processor_seconds()
        await deliver(None, step, size, step_seconds, 0.0)
        taken.append(_processor_seconds() - before)
    return statistics.median(taken)


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
            idle_s = asyncio.run(without(size, pairs, step_seconds))
            for case, patience_s in (("", SHARED_WRITE_S), ("_alone", 0.0)):
                work = cost_of(size, pairs, step_seconds, idle_s, folder / f"{size}{case}.sqlite", patience_s)
                figures[f"rollouts_{size}{case}"] = asyncio.run(work)
        figures["fastest_rollouts_per_s"] = round(asyncio.run(fastest(folder)))
        figures["limit"] = 0.02
    write_results("ledger", figures)


if __name__ == "__main__":
    main()
