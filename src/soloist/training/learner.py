"""The learner: K value updates, advantages, one policy update, weights out. One device; it packs rollouts itself.

Micro-batches are packed rows where models allow it (tried at the start, `models/packed.py`), else padded rows.

A step has two passes. The statistics pass (`_begin`, `Estimators.advantages`, `Objective`) makes everything that
depends on the whole step: aggregation weights, value targets, advantages, old log-probabilities, quantiles. The loss
pass goes over micro-batches and only sums, so micro-batches, packing and order do not change the update (methods §1.1,
§9).

Guarantees: a non-finite loss or gradient never reaches an optimizer and names its rollouts; frozen parameters keep
their bits; `version` counts policy updates and is stored with the state. Estimators without a critic have no value
model: `update_value` is not called then.
Not covered: threads (`learner_thread.py`) and where rollouts come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from soloist.algorithms.advantages import value_targets
from soloist.algorithms.aggregation import aggregation_weights
from soloist.algorithms.losses import Sums, metrics_of
from soloist.algorithms.shaping import overlong_penalty
from soloist.algorithms.values import value_loss
from soloist.config import RunConfig
from soloist.environments.base import keyed_random
from soloist.metrics import mean
from soloist.models.frozen import FrozenStates
from soloist.models.loading import DTYPES, save_weights
from soloist.models.packed import packs
from soloist.models.rows import MicroBatch
from soloist.models.value import ValueModel, freeze_parameters
from soloist.training.estimators import Estimators
from soloist.training.fingerprint import fingerprint
from soloist.training.objective import Objective
from soloist.training.pack import (
    RolloutArrays,
    StepBatch,
    micro_batches,
    minibatches,
    pack,
    rollout_arrays,
    states_after_the_end,
)
from soloist.training.random_state import load_random_state, random_state
from soloist.training.samples import TokenTable
from soloist.training.step import Metrics, Step
from soloist.training.trainee import Trainee
from soloist.types import Rollout, Segment, Turn, WeightsRef

READY_LIMIT = 4096  # rollouts prepared ahead of their step

State = dict[str, tuple[dict[str, Tensor], dict[str, Any]]]
Source = tuple[list[Segment], list[Turn], float | None]
"""What a rollout's arrays are made from."""


class Learner:
    """Owns policy, value model and both optimizers.

    Example: `learner.update_value(rollouts)` K times, `learner.update_policy(rollouts)`, `learner.publish(folder)`.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        value: ValueModel | None,
        config: RunConfig,
        reference: PreTrainedModel | None = None,
    ) -> None:
        """`value` is None for estimators without a critic; `reference` is needed when `loss.kl_coef` is above 0."""
        self.policy = policy
        self.value = value
        self.config = config
        self.version = 0
        self.tokens: TokenTable | None = None
        self.frozen = [] if value is None else freeze_parameters(value, config.value.freeze)
        on_non_finite = config.health.on_non_finite
        self._actor = Trainee("policy", policy, config.policy, on_non_finite=on_non_finite)
        self._critic = None if value is None else Trainee("value", value, config.value, on_non_finite=on_non_finite)
        self._objective = Objective(policy, reference, config)
        self._estimators = Estimators(config.advantage)
        self._packed = packs(policy) and (value is None or packs(value.backbone))
        self._step: Step | None = None
        self._ready: dict[str, tuple[Source, RolloutArrays]] = {}

    # --- the step ---------------------------------------------------------------------------------------------------

    def update_value(self, rollouts: Sequence[Rollout]) -> Metrics:
        """One optimizer step of the value model: MSE to the targets. Raises RunError on a non-finite gradient."""
        assert self.value is not None, "this estimator has no value model"
        assert self._critic is not None
        step = self._begin(rollouts)
        batch = step.batch
        weights_T = aggregation_weights("token-mean", batch.rollout_T, batch.rollouts)
        before_T = torch.zeros_like(batch.rewards_T)
        total = torch.zeros((), device=before_T.device)
        for micro in step.micros:
            values_t = self.value.values(micro, step.recall)
            before_T[micro.tokens_t] = values_t.detach()
            loss = value_loss(values_t, step.targets_T[micro.tokens_t], weights_T[micro.tokens_t])
            loss.backward()
            total += loss.detach()
        norm, lr = self._critic.step(before_T, batch.rollout_T, batch.rollout_ids, self.version)
        metrics: Metrics = {"critic/loss": float(total), "critic/grad_norm": norm, "critic/lr": lr}
        return metrics | step.first_look(before_T)

    def update_policy(self, rollouts: Sequence[Rollout]) -> Metrics:
        """Advantages, then the policy's loss over minibatches and epochs; `version` grows by one.

        Raises RunError on a non-finite loss or gradient, before the optimizer has touched anything.
        """
        step, settings = self._begin(rollouts), self.config.policy
        if settings.reset_optimizer_at_publish and self.version % self.config.publish_every == 0:
            self._actor.forget_moments()
        advantages_T = self._advantages(step)
        old_T, reference_T = self._objective.old_log_probs(step), self._objective.reference_log_probs(step)
        self._remember(step)
        sums: list[Sums] = []
        updates: list[Metrics] = []
        for _ in range(settings.epochs):
            for members in minibatches(step.batch, settings.minibatches):
                updates.append(self._policy_step(step, members, advantages_T, old_T, reference_T, sums))
        self.version += 1
        self.tokens = step.token_table(advantages_T)
        self._step = None
        averages = {name: mean(update[name] or 0.0 for update in updates) for name in updates[0]}
        return metrics_of(sums) | averages | _advantage_metrics(advantages_T) | self._estimators.metrics(step.batch)

    def _policy_step(
        self,
        step: Step,
        members: list[int],
        advantages_T: Tensor,
        old_T: Tensor | None,
        reference_T: Tensor | None,
        sums: list[Sums],
    ) -> Metrics:
        """One optimizer step on the rollouts `members`; their token terms are weighted over this set alone."""
        batch, loss = step.batch, self.config.loss
        # Dr. GRPO's constant is the longest that a rollout may be.
        fixed_length = loss.fixed_length or self.config.rollout.max_tokens
        weights_T = step.weights_of(members, loss.loss_agg_mode or "token-mean", fixed_length)
        micros = step.micros if self.config.policy.minibatches == 1 else self._micro_batches(batch, members)
        total, log_probs_T, parts = self._objective.backward(
            step, micros, weights_T, advantages_T, old_T, reference_T, self.version
        )
        sums += parts
        norm, lr = self._actor.step(log_probs_T, batch.rollout_T, batch.rollout_ids, self.version)
        return {"actor/pg_loss": float(total), "actor/grad_norm": norm, "actor/lr": lr}

    # --- statistics of the whole step -------------------------------------------------------------------------------

    def _begin(self, rollouts: Sequence[Rollout]) -> Step:
        """Pack the step once; the K value updates and the policy update share it."""
        ids = [rollout.rollout_id for rollout in rollouts]
        if self._step is not None and self._step.batch.rollout_ids == ids:
            return self._step
        arrays = self._arrays(rollouts)
        batch = pack(rollouts, self.config.model.device, self._scores(rollouts), arrays)
        recall = None if self.value is None else FrozenStates(self.value.backbone)
        step = Step(batch, arrays, self._micro_batches(batch), recall)
        if self.value is not None:
            self._make_targets(step)
        self._step = step
        return step

    def _make_targets(self, step: Step) -> None:
        """What the value model is fitted to, from its values before the K updates where they count."""
        batch, advantage = step.batch, self.config.advantage
        if advantage.bootstrap_truncated:
            ends = states_after_the_end(batch, self.config.token_budget, packed=self._packed)
            step.bootstrap_R = self.values(ends, batch.rollouts)
        if advantage.order == "advantages_first" or self.config.value.lambda_value < 1:
            step.values_T = self.values(step.micros, batch.tokens, step.recall)
        step.targets_T = value_targets(
            batch.rewards_T,
            step.values_T if step.values_T is not None else torch.zeros_like(batch.rewards_T),
            batch.lengths_R,
            gamma=advantage.gamma,
            lam=self.config.value.lambda_value,
            bootstrap_R=step.bootstrap_R,
        )
        if advantage.order == "value_first":
            step.values_T = None

    def _advantages(self, step: Step) -> Tensor:
        """By the estimator of the config, with the fresh critic (or, as set, the critic before its updates), [T]."""
        if self.value is not None and step.values_T is None:
            step.values_T = self.values(step.micros, step.batch.tokens, step.recall)
        return self._estimators.advantages(step, step.values_T)

    def _remember(self, step: Step) -> None:
        def log_probs(micros: Sequence[MicroBatch], tokens: int) -> Tensor:
            return self._objective.log_probs(self.policy, micros, step.batch.rewards_T.new_zeros(tokens))

        self._estimators.learn(step.batch, step.arrays, log_probs, self.config.token_budget, self._packed)

    @torch.no_grad()
    def values(self, micros: Sequence[MicroBatch], tokens: int, recall: FrozenStates | None = None) -> Tensor:
        """V of the state before each selected token of the micro-batches, float32 [T], 0 elsewhere; no gradient."""
        assert self.value is not None, "this estimator has no value model"
        values_T = torch.zeros(tokens, device=self.config.model.device)
        for micro in micros:
            values_T[micro.tokens_t] = self.value.values(micro, recall)
        return values_T

    def prepare(self, rollout: Rollout) -> None:
        """Make a rollout's arrays now, so that the step it will be trained in has only to join them.

        For any thread. What can't be trained is left for `update_value` to refuse.
        """
        try:
            arrays = rollout_arrays(rollout)
        except ValueError:
            return
        # Not the rollout itself: one that is never trained would keep its messages and notes in memory.
        self._ready[rollout.rollout_id] = (rollout.segments, rollout.turns, rollout.score), arrays
        if len(self._ready) > READY_LIMIT:  # rollouts that were dropped for their age are never asked for
            for rollout_id in list(self._ready)[: READY_LIMIT // 2]:
                self._ready.pop(rollout_id, None)

    def _arrays(self, rollouts: Sequence[Rollout]) -> list[RolloutArrays]:
        arrays = []
        for rollout in rollouts:
            known = self._ready.pop(rollout.rollout_id, None)
            ready = known is not None and _same_source(known[0], rollout)
            arrays.append(known[1] if known is not None and ready else rollout_arrays(rollout))
        return arrays

    def _micro_batches(self, batch: StepBatch, members: list[int] | None = None) -> list[MicroBatch]:
        return micro_batches(batch, self.config.token_budget, members, packed=self._packed)

    def _scores(self, rollouts: Sequence[Rollout]) -> list[float]:
        """Final rewards of the rollouts, shuffled and shaped as set."""
        scores = [rollout.score or 0.0 for rollout in rollouts]
        buffer, limit = self.config.advantage.overlong_buffer, self.config.rollout.max_tokens
        if buffer:
            lengths = [sum(len(segment.token_ids) for segment in rollout.segments) for rollout in rollouts]
            prices = overlong_penalty(torch.tensor(lengths), limit=limit, buffer=buffer).tolist()
            scores = [score + price for score, price in zip(scores, prices, strict=True)]
        if self.config.shuffle_rewards:
            keyed_random(self.config.seed, "shuffle", self.version).shuffle(scores)
        return scores

    @torch.no_grad()
    def log_prob_errors(self, rollouts: Sequence[Rollout]) -> list[float]:
        """|π/μ − 1| of every action token under the present weights: 0 when engine and learner agree."""
        batch = pack(rollouts, self.config.model.device)
        log_probs_T = self._objective.log_probs(self.policy, self._micro_batches(batch), batch.rewards_T)
        found: list[float] = torch.expm1(log_probs_T - batch.rollout_log_probs_T).abs().tolist()
        return found

    # --- what SPO asks for ------------------------------------------------------------------------------------------

    def start_rates(self, scores: Mapping[str, Sequence[float]]) -> None:
        """Begin SPO's success rates from scores of the SFT policy, by task; only before the first step."""
        if self.version == 0:
            self._estimators.start(scores)

    def task_weight(self, task_id: str) -> float:
        """How often a task is drawn, relative to others; for any thread."""
        return self._estimators.task_weight(task_id)

    # --- weights and state ------------------------------------------------------------------------------------------

    def publish(self, folder: Path) -> WeightsRef:
        """Write the policy's weights as `folder/model.safetensors`, visible whole or not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "model.safetensors"
        digest = save_weights(self.policy, path, DTYPES[self.config.engine.dtype])
        return WeightsRef(path=str(path), version=self.version, sha256=digest)

    def state(self) -> State:
        """A copy of everything with memory, as named (tensors, JSON) parts."""
        return {**self._trained_state(), "rng": random_state()}

    def fingerprint(self) -> str:
        """A hash of weights, optimizers and counters. Random states are left out: others draw from them, too."""
        return fingerprint(self._trained_state(copied=False))

    def _trained_state(self, copied: bool = True) -> State:
        counters = {"version": self.version, "policy_updates": self._actor.updates, "value_updates": 0}
        state: State = {
            "policy": (self._actor.tensors(copied=copied), counters),
            "policy_optimizer": self._actor.optimizer_state(),
            "estimators": self._estimators.state(),
        }
        if self._critic is not None:
            counters["value_updates"] = self._critic.updates
            state |= {"value": (self._critic.tensors(copied=copied), {})}
            state |= {"value_optimizer": self._critic.optimizer_state()}
        return state

    def load_state(self, state: State) -> None:
        """Take back what `state` gave. Raises KeyError, RuntimeError or ValueError when it belongs to another model."""
        tensors, counters = state["policy"]
        self._actor.load(tensors, state["policy_optimizer"], int(counters["policy_updates"]))
        if self._critic is not None:
            self._critic.load(state["value"][0], state["value_optimizer"], int(counters["value_updates"]))
        # Snapshots from before estimators had a memory have no such part.
        if "estimators" in state:
            self._estimators.load_state(*state["estimators"])
        self.version = int(counters["version"])
        load_random_state(state["rng"])
        self._step = None


def _same_source(known: Source, rollout: Rollout) -> bool:
    """Whether arrays were made from these tokens and rewards; the buffer marks rollouts on copies."""
    segments, turns, score = known
    return segments is rollout.segments and turns is rollout.turns and score == rollout.score


def _advantage_metrics(advantages_T: Tensor) -> Metrics:
    return {
        "advantage/mean": float(advantages_T.mean()),
        "advantage/std": float(advantages_T.std(correction=0)),
        "advantage/zero_frac": float((advantages_T == 0).float().mean()),
    }
