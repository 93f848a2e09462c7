"""Baselines that remember instead of predict: running means of rewards, and SPO's success rates (methods.md §1.6, §8).

    A = R − baseline,   the baseline made from earlier steps only

Guarantees: `advantages` reads and `update` writes; a step that is repeated after a crash between the two counts once.
Rollouts of one step have no order: whatever order they arrive in, advantages and state are the same, bit for bit. State
is plain JSON, sorted, and floats survive it exactly; memory grows with the number of tasks, not of steps.
Not covered: drawing tasks by `SuccessRates.weight`, measuring the drift, giving advantages to tokens (`on_tokens`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from soloist.algorithms.masked import whiten

OVERALL_WINDOW = 128

PRIOR_WEIGHT = 8.0
DRIFT_HALF_LIFE = 0.06
RHO_MIN, RHO_MAX = 0.875, 0.96
EXPLORATION = 0.05
# What R − p of equal cases may differ by; whitening would turn it into advantages of ±1.
ROUNDING = 1e-12


class RunningMeans:
    """A = R − mean of the last n rewards: of the same task, or of all tasks (SAO, arXiv 2607.07508, §4.5 and ablation).

    SAO has n = 8 per task and n = 128 over all. Open: a task without history is measured by the mean over all tasks (of
    the last 128 when per task), and the very first step by its own mean. Where the window cuts through a step, that
    step's rewards count with their mean, as they would on average over all orders of arrival: picking some of them by
    any rule, such as the largest, would bias the baseline.
    Example: `means = RunningMeans(per_task=False, window=128); a = means.advantages(ids, rewards)`; then `update`.
    """

    def __init__(self, *, per_task: bool, window: int) -> None:
        """`window` is n, in rewards. Raises ValueError unless it is 1 or more."""
        if window < 1:
            raise ValueError(f"a running mean needs a window of 1 reward or more, found {window}")
        self.per_task = per_task
        self.window = window
        self._overall = _Window(OVERALL_WINDOW if per_task else window)
        self._tasks: dict[str, _Window] = {}

    def baseline(self, task_ids: Sequence[str], rewards: Sequence[float]) -> list[float]:
        """The mean that each rollout of a step is measured by; `rewards` are needed by the very first step only.

        One number per rollout, in units of the reward. Raises ValueError when lengths differ or a reward is not finite.
        """
        _by_task(task_ids, rewards)
        if not rewards:
            return []
        fallback = self._overall.mean() if self._overall.entries else _mean([(1, reward) for reward in rewards])
        return [self._tasks[task].mean() if task in self._tasks else fallback for task in task_ids]

    def advantages(self, task_ids: Sequence[str], rewards: Sequence[float]) -> list[float]:
        """A = R − baseline of each rollout of a step; changes nothing. Raises ValueError as `baseline` does."""
        baselines = self.baseline(task_ids, rewards)
        return [float(reward) - baseline for reward, baseline in zip(rewards, baselines, strict=True)]

    def update(self, task_ids: Sequence[str], rewards: Sequence[float]) -> None:
        """Remember the rewards of a trained step. Raises ValueError as `baseline` does, and then remembers nothing."""
        by_task = _by_task(task_ids, rewards)
        self._overall.add([reward for own in by_task.values() for reward in own])
        if self.per_task:
            for task, own in by_task.items():
                self._tasks.setdefault(task, _Window(self.window)).add(own)

    def state(self) -> dict[str, Any]:
        """Everything that decides the next advantages, as JSON: entries [rewards, their mean], the oldest first."""
        tasks = {task: self._tasks[task].state() for task in sorted(self._tasks)}
        return {"overall": self._overall.state(), "tasks": tasks}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` gave. A smaller window than it was made with keeps the newest rewards."""
        self._overall = _Window(self._overall.size, state["overall"])
        tasks = state["tasks"].items() if self.per_task else ()
        self._tasks = {task: _Window(self.window, entries) for task, entries in tasks}


class SuccessRates:
    """A = whitened R − p, p = a/(a + b) the success rate of the task (SPO, arXiv 2509.13232; R within 0 … 1).

        after a reward   a ← ρ·a + R,   b ← ρ·b + 1 − R,   ρ = 2^(−D/0.06) within [0.875, 0.96]

    D is the token-mean of |log π_old − log π_θ| on the task's previous answer, in nats: the further the policy moved,
    the faster old rewards are forgotten. Open: p is ½ with weight 8 until `start` or a reward says otherwise; whitening
    is by mean and std over the rollouts of a step, each once; without D, as at a task's first reward, ρ is 0.96, which
    keeps most of what is known. Several rewards of a task in one step share one ρ and count with their mean, as they
    would on average over all orders: a ← ρ^m·a + R̄·(1 + ρ + … + ρ^(m−1)).
    Example: `rates.start("t1", [1, 0]); a = rates.advantages(ids, rewards); rates.update(ids, rewards, {"t1": 0.02})`.
    """

    def __init__(self) -> None:
        self._counts: dict[str, tuple[float, float]] = {}

    def start(self, task_id: str, scores: Sequence[float]) -> None:
        """a = 8·(Σs + ½)/(n + 1), b = 8·(Σ(1 − s) + ½)/(n + 1) from n scores that were sampled before training.

        No scores give a = b = 4. Raises ValueError for a score outside 0 … 1, and for a task that has a rate already.
        """
        if task_id in self._counts:
            raise ValueError(f"task {task_id} has a success rate already; start it once, before its first reward")
        _by_task([task_id] * len(scores), scores, within_one=True)
        scale = PRIOR_WEIGHT / (len(scores) + 1)
        successes, failures = math.fsum(scores), math.fsum(1.0 - score for score in scores)
        self._counts[task_id] = scale * (successes + 0.5), scale * (failures + 0.5)

    def rate(self, task_id: str) -> float:
        """p = a/(a + b), within 0 … 1; ½ for a task that nothing is known about."""
        a, b = self._known(task_id)
        return a / (a + b)

    def weight(self, task_id: str) -> float:
        """sqrt(p·(1 − p)) + 0.05: how often the task is drawn, relative to others. Surest tasks are drawn least."""
        p = self.rate(task_id)
        return math.sqrt(p * (1.0 - p)) + EXPLORATION

    def advantages(self, task_ids: Sequence[str], rewards: Sequence[float]) -> list[float]:
        """(R − p − mean) / std over the rollouts of a step, all 0 when R − p does not vary; changes nothing.

        Raises ValueError when lengths differ or a reward lies outside 0 … 1.
        """
        _by_task(task_ids, rewards, within_one=True)
        raw = [float(reward) - self.rate(task) for task, reward in zip(task_ids, rewards, strict=True)]
        if not raw or max(raw) - min(raw) < ROUNDING:
            return [0.0] * len(raw)
        # Sorted, so that the sums within do not depend on the order of arrival.
        order = sorted(range(len(raw)), key=raw.__getitem__)
        sorted_R = torch.tensor([raw[index] for index in order], dtype=torch.float64)
        whitened = whiten(sorted_R, torch.ones_like(sorted_R, dtype=torch.bool)).tolist()
        advantage_of = dict(zip(order, whitened, strict=True))
        return [advantage_of[index] for index in range(len(raw))]

    def update(self, task_ids: Sequence[str], rewards: Sequence[float], drifts: Mapping[str, float]) -> None:
        """Count the rewards of a step that was trained; `drifts` holds D of the tasks for which it is known.

        Raises ValueError when lengths differ, a reward lies outside 0 … 1 or a D is negative, and then changes nothing.
        """
        by_task = _by_task(task_ids, rewards, within_one=True)
        rhos = {task: forgetting(drifts.get(task)) for task in by_task}
        for task, own in by_task.items():
            a, b = self._known(task)
            kept = rhos[task] ** len(own)
            added, mean = (1.0 - kept) / (1.0 - rhos[task]), _mean([(1, reward) for reward in own])
            self._counts[task] = kept * a + added * mean, kept * b + added * (1.0 - mean)

    def state(self) -> dict[str, Any]:
        """Everything that decides the next advantages, as JSON: [a, b] of each known task."""
        return {"counts": {task: list(self._counts[task]) for task in sorted(self._counts)}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` gave, in place of everything known."""
        self._counts = {task: (float(a), float(b)) for task, (a, b) in state["counts"].items()}

    def _known(self, task_id: str) -> tuple[float, float]:
        return self._counts.get(task_id, (PRIOR_WEIGHT / 2, PRIOR_WEIGHT / 2))


def forgetting(drift: float | None) -> float:
    """ρ = 2^(−D/0.06) within [0.875, 0.96], the share of a count that survives a reward; 0.96 when D is unknown.

    Raises ValueError for a D that is negative or NaN.
    """
    if drift is None:
        return RHO_MAX
    if not drift >= 0:
        raise ValueError(f"drift must be 0 nats or more, found {drift}; it is a mean of absolute differences")
    return min(max(math.exp2(-drift / DRIFT_HALF_LIFE), RHO_MIN), RHO_MAX)


class _Window:
    """The last `size` rewards, as what each step brought: (number of rewards, their mean), the oldest first."""

    def __init__(self, size: int, entries: Iterable[Sequence[float]] = ()) -> None:
        self.size = size
        self.entries = deque((int(count), float(mean)) for count, mean in entries)
        self._cut()

    def add(self, rewards: list[float]) -> None:
        """The rewards of one step, in any order."""
        if rewards:
            self.entries.append((len(rewards), _mean([(1, reward) for reward in rewards])))
            self._cut()

    def mean(self) -> float:
        """Of a window that is not empty."""
        return _mean(self.entries)

    def state(self) -> list[list[float]]:
        return [list(entry) for entry in self.entries]

    def _cut(self) -> None:
        excess = sum(count for count, _ in self.entries) - self.size
        while excess > 0:
            count, mean = self.entries.popleft()
            if count > excess:
                self.entries.appendleft((count - excess, mean))
            excess -= count


def _mean(entries: Iterable[tuple[int, float]]) -> float:
    """Σ count·x / Σ count, the same for every order; the mean of equal numbers is that number."""
    listed = list(entries)
    numbers = [number for _, number in listed]
    mean = math.fsum(count * number for count, number in listed) / sum(count for count, _ in listed)
    # Rounding could leave the range, and the rest R − mean of equal rewards would be blown up by whitening.
    return min(max(mean, min(numbers)), max(numbers))


def _by_task(task_ids: Sequence[str], rewards: Sequence[float], *, within_one: bool = False) -> dict[str, list[float]]:
    """Rewards of each task. Raises ValueError when lengths differ or a reward is not finite, or outside 0 … 1."""
    if len(task_ids) != len(rewards):
        raise ValueError(f"found {len(task_ids)} tasks and {len(rewards)} rewards; pass one of each per rollout")
    by_task: dict[str, list[float]] = {}
    for task, reward in zip(task_ids, rewards, strict=True):
        if not math.isfinite(reward):
            raise ValueError(f"task {task} has reward {reward}; failed rollouts must not reach a baseline")
        if within_one and not 0.0 <= reward <= 1.0:
            raise ValueError(
                f"task {task} has reward {reward}, but success rates need rewards within 0 … 1; "
                "rescale them or take a running mean"
            )
        by_task.setdefault(task, []).append(float(reward))
    return by_task
