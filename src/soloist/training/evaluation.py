"""Plays many tasks with fixed weights: held-out evaluation, and the rollouts of value pretraining.

Guarantees: the weights do not change while it runs, and the result says which version it measured; a failed rollout is
tried again and, if it stays failed, left out of the mean and counted; too many failures raise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from soloist.config import RunConfig
from soloist.errors import RunError
from soloist.metrics import mean
from soloist.rollout.play import EpisodePlayer, new_rollout
from soloist.seams import Clock
from soloist.types import Rollout, Sampling, Task


async def play_tasks(
    episodes: EpisodePlayer,
    tasks: Sequence[Task],
    *,
    sampling: Sampling,
    config: RunConfig,
    clock: Clock,
    prefix: str,
    progress: Callable[[int, Sequence[Rollout]], None] = lambda done, rollouts: None,
) -> list[Rollout]:
    """One rollout of each task (repeat a task to sample it often), in the order of `tasks`.

    Raises RunError when the share of rollouts that stay failed exceeds `health.max_failed_ratio`.
    """
    results: dict[int, Rollout] = {}
    waiting = iter(enumerate(tasks))

    async def work() -> None:
        for place, task in waiting:
            for attempt in range(config.rollout.attempts):
                name = f"{prefix}{place}"
                fresh = new_rollout(
                    rollout_id=name if attempt == 0 else f"{name}+{attempt}",
                    group_id=name,
                    place=place,
                    attempt=attempt,
                    task=task,
                    sampling=sampling,
                    now=clock.now(),
                )
                results[place] = await episodes.play(fresh, task)
                if results[place].trainable:
                    break
            progress(len(results), list(results.values()))

    async with asyncio.TaskGroup() as group:
        for number in range(min(config.engine.slots * config.engine.count, len(tasks))):
            group.create_task(work(), name=f"{prefix}player {number}")
    rollouts = [results[place] for place in range(len(tasks))]
    _refuse_failures(rollouts, config.health.max_failed_ratio)
    return rollouts


def _refuse_failures(rollouts: Sequence[Rollout], limit: float) -> None:
    reasons = [f"{r.failure.boundary}: {r.failure.reason}" for r in rollouts if r.failure is not None]
    if len(reasons) > limit * len(rollouts):
        common = max(set(reasons), key=reasons.count)
        raise RunError(
            f"{len(reasons)} of {len(rollouts)} rollouts failed, above health.max_failed_ratio = {limit:g}; "
            f"{reasons.count(common)} of them with '{common}'"
        )


async def evaluate(
    episodes: EpisodePlayer,
    tasks: Sequence[Task],
    *,
    config: RunConfig,
    stop_token_ids: tuple[int, ...],
    clock: Clock,
    version: int,
    progress: Callable[[int, Sequence[Rollout]], None] = lambda done, rollouts: None,
) -> dict[str, Any]:
    """avg@k over `tasks` with `eval.samples` rollouts each: success rate, by family, failures, version."""
    sampling = Sampling(
        temperature=config.eval.temperature,
        max_new_tokens=config.rollout.max_new_tokens,
        stop_token_ids=stop_token_ids,
        seed=config.seed + 1_000_003,
    )
    repeated = [task for task in tasks for _ in range(config.eval.samples)]
    rollouts = await play_tasks(
        episodes, repeated, sampling=sampling, config=config, clock=clock, prefix="e", progress=progress
    )
    scored = [rollout for rollout in rollouts if rollout.trainable]
    families = sorted({rollout.family for rollout in scored})
    return {
        "avg": mean(rollout.reward or 0.0 for rollout in scored),
        "by_family": {
            family: mean(rollout.reward or 0.0 for rollout in scored if rollout.family == family) for family in families
        },
        "problems": len(tasks),
        "samples": config.eval.samples,
        "failed": len(rollouts) - len(scored),
        "version": version,
    }
