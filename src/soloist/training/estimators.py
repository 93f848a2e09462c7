"""Advantages of a step by the estimator of the config, and what estimators remember from step to step.

    values    skip_observation_gae, step_gae_mean, step_gae_last    from the value model
    groups    group_relative, group_mean                            from the rollouts of the same group
    memory    running_mean, spo                                     from earlier rewards (`algorithms/baselines.py`)
    alone     reinforce_pp                                          the returns themselves, whitened

Guarantees: advantages read the memory as it was before the step, so that neither order nor a repeated step matters;
the memory is part of the learner's state.
Not covered: the value model and its targets (`learner.py`), which tasks are played (`setup.py` asks `task_weight`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from soloist.algorithms.advantages import (
    gae_over_rollouts,
    length_adaptive_lambda,
    on_tokens,
    returns_to_go,
    sums_of_runs,
)
from soloist.algorithms.baselines import RunningMeans, SuccessRates
from soloist.algorithms.group_advantages import group_mean, group_relative, uniform_groups
from soloist.algorithms.masked import whiten
from soloist.algorithms.step_gae import step_gae
from soloist.config import AdvantageConfig
from soloist.errors import RunError
from soloist.estimators import ADV_ESTIMATORS
from soloist.models.rows import MicroBatch, build_micro_batches
from soloist.training.pack import RolloutArrays, StepBatch
from soloist.training.step import Step

WINDOWS = {"global": 128, "task": 8}
"""Rewards in a running mean (SAO: section 4.5 and ablation)."""

LogProbs = Callable[[Sequence[MicroBatch], int], Tensor]
"""log π of the tokens of micro-batches, [T], at the present weights."""


class Estimators:
    """The advantage estimator of a run.

    Example: `advantages_T = estimators.advantages(step, values_T)`, then `estimators.learn(…)` once the step counts.
    """

    def __init__(self, config: AdvantageConfig) -> None:
        self._config = config
        self._running: RunningMeans | None = None
        self._rates: SuccessRates | None = None
        self._answers: dict[str, RolloutArrays] = {}  # the last one of each task, for SPO's drift
        if config.adv_estimator == "running_mean":
            over = config.running_mean_over
            self._running = RunningMeans(per_task=over == "task", window=config.running_mean_window or WINDOWS[over])
        if config.adv_estimator == "spo":
            self._rates = SuccessRates()

    def advantages(self, step: Step, values_T: Tensor | None) -> Tensor:
        """A of every trainable token, float32 [T], detached; `values_T` where the estimator has a critic.

        Raises RunError for rewards that the estimator can't work with.
        """
        try:
            advantages_T = self._with_values(step, values_T) if values_T is not None else self._without(step.batch)
        except ValueError as error:
            raise RunError(f"adv_estimator = '{self._config.adv_estimator}': {error}") from error
        if self._config.whiten or ADV_ESTIMATORS[self._config.adv_estimator].whitens:
            return whiten(advantages_T, torch.ones_like(advantages_T, dtype=torch.bool))
        return advantages_T

    def metrics(self, batch: StepBatch) -> dict[str, float | None]:
        """What the estimator could do with the step's rewards."""
        if not ADV_ESTIMATORS[self._config.adv_estimator].groups:
            return {}
        return {"group/uniform_frac": float(uniform_groups(_rewards(batch), batch.group_R).float().mean())}

    def learn(
        self, batch: StepBatch, arrays: Sequence[RolloutArrays], log_probs: LogProbs, token_budget: int, packed: bool
    ) -> None:
        """Remember the step's rewards. Call it before the policy changes: SPO measures how far it moved since."""
        rewards = _rewards(batch).tolist()
        if self._running is not None:
            self._running.update(batch.task_ids, rewards)
        if self._rates is not None:
            known = {task: self._answers[task] for task in batch.task_ids if task in self._answers}
            drifts = _drifts(known, log_probs, token_budget, packed, str(batch.rewards_T.device))
            self._rates.update(batch.task_ids, rewards, drifts)
            # In canonical order, so that of two rollouts of one task in a step the same one stays, whichever came last.
            named = sorted(zip(batch.task_ids, batch.rollout_ids, arrays, strict=True), key=lambda entry: entry[:2])
            self._answers |= {task: own for task, _, own in named}

    def start(self, scores: Mapping[str, Sequence[float]]) -> None:
        """Begin SPO from rewards of the SFT policy, by task."""
        for task_id, own in scores.items():
            if self._rates is not None:
                self._rates.start(task_id, own)

    def task_weight(self, task_id: str) -> float:
        """How often a task is drawn, relative to others: SPO's preference for what is neither sure nor hopeless."""
        return 1.0 if self._rates is None else self._rates.weight(task_id)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything remembered, as tensors and JSON."""
        memory = self._running or self._rates
        tensors = {
            f"{task}/{name}": torch.from_numpy(np.ascontiguousarray(array))
            for task, answer in sorted(self._answers.items())
            for name, array in _columns(answer).items()
        }
        return tensors, {"memory": None if memory is None else memory.state()}

    def load_state(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Take back what `state` gave."""
        memory = self._running or self._rates
        if memory is not None and state["memory"] is not None:
            memory.load_state(state["memory"])
        tasks = sorted({name.rpartition("/")[0] for name in tensors})
        self._answers = {
            task: _answer({name: tensors[f"{task}/{name}"].numpy() for name in _COLUMNS}) for task in tasks
        }

    # Advantages.

    def _with_values(self, step: Step, values_T: Tensor) -> Tensor:
        settings, batch = self._config, step.batch
        if settings.adv_estimator != "skip_observation_gae":
            return step_gae(
                batch.rewards_T,
                values_T,
                batch.lengths_R,
                batch.turn_T,
                gamma=settings.gamma,
                alpha=settings.length_adaptive_alpha,
                lam=settings.lambda_policy,
                value_of="mean" if settings.adv_estimator == "step_gae_mean" else "last",
                bootstrap_R=step.bootstrap_R,
            )
        lam: float | Tensor | None = settings.lambda_policy
        if lam is None:
            lam = length_adaptive_lambda(batch.lengths_R, settings.length_adaptive_alpha)
        return gae_over_rollouts(
            batch.rewards_T, values_T, batch.lengths_R, gamma=settings.gamma, lam=lam, bootstrap_R=step.bootstrap_R
        )

    def _without(self, batch: StepBatch) -> Tensor:
        if self._config.adv_estimator == "reinforce_pp":
            return returns_to_go(batch.rewards_T, batch.lengths_R, gamma=self._config.gamma)
        rewards_R = _rewards(batch)
        memory = self._running or self._rates
        if memory is not None:
            found = memory.advantages(batch.task_ids, rewards_R.tolist())
            advantages_R = torch.tensor(found, dtype=torch.float64, device=rewards_R.device)
        elif self._config.adv_estimator == "group_relative":
            advantages_R = group_relative(rewards_R, batch.group_R)
        else:
            advantages_R = group_mean(rewards_R, batch.group_R)
        return on_tokens(advantages_R, batch.rollout_T).to(torch.float32)


def _rewards(batch: StepBatch) -> Tensor:
    """Reward of each rollout, all turns and the end together, float64 [R]."""
    return sums_of_runs(batch.rewards_T, batch.lengths_R)


def _drifts(
    answers: Mapping[str, RolloutArrays], log_probs: LogProbs, token_budget: int, packed: bool, device: str
) -> dict[str, float]:
    """Token-mean of |log μ − log π_θ| on the last answer of each task, nats."""
    if not answers:
        return {}
    parts = list(answers.values())
    counts = np.array([len(part.sequences) for part in parts])
    lengths = np.array([len(part.segment_T) for part in parts])
    segment_T = np.concatenate([part.segment_T for part in parts]) + np.repeat(np.cumsum(counts) - counts, lengths)
    micros = build_micro_batches(
        [sequence for part in parts for sequence in part.sequences],
        segment_T,
        np.concatenate([part.position_T for part in parts]),
        names=np.arange(len(segment_T)),
        token_budget=token_budget,
        packed=packed,
        device=device,
    )
    recorded_T = torch.from_numpy(np.concatenate([part.log_probs_T for part in parts])).to(device)
    moved_T = (log_probs(micros, len(segment_T)) - recorded_T).abs()
    means = sums_of_runs(moved_T, torch.from_numpy(lengths).to(device)).cpu() / torch.from_numpy(lengths)
    return dict(zip(answers, means.tolist(), strict=True))


_COLUMNS = ("token_ids", "ends", "segments", "positions", "log_probs")


def _columns(answer: RolloutArrays) -> dict[str, np.ndarray[Any, Any]]:
    """An answer as plain arrays: its sequences end to end, and where each of them ends."""
    ends = np.cumsum([len(sequence) for sequence in answer.sequences])
    arrays = (np.concatenate(answer.sequences), ends, answer.segment_T, answer.position_T, answer.log_probs_T)
    return dict(zip(_COLUMNS, arrays, strict=True))


def _answer(columns: Mapping[str, Any]) -> RolloutArrays:
    token_ids, ends, segments, positions, log_probs = (columns[name] for name in _COLUMNS)
    nothing = np.zeros(len(segments), dtype=np.int64)
    return RolloutArrays(
        sequences=np.split(token_ids, ends[:-1]),
        segment_T=segments,
        position_T=positions,
        log_probs_T=log_probs,
        versions_T=nothing,
        turn_T=nothing,
        rewards_T=np.zeros(len(segments)),
    )
