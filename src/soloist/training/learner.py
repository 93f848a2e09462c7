"""The learner: K value updates, advantages, one policy update, weights out. One device; it packs rollouts itself.

Micro-batches are packed rows where models allow it (tried at the start, `models/packed.py`), else padded rows.

A step has two passes. The statistics pass (`_begin`, `_advantages`) makes everything that depends on the whole step:
aggregation weights, value targets, advantages. The loss pass goes over micro-batches and only sums, so micro-batches,
packing and order do not change the update (methods §1.1, §9).

Guarantees: a non-finite loss or gradient never reaches an optimizer and names its rollouts; frozen parameters keep
their bits; `version` counts policy updates and is stored with the state.
Not covered: threads (`learner_thread.py`) and where rollouts come from.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from soloist.algorithms.advantages import gae_over_rollouts, length_adaptive_lambda, value_targets
from soloist.algorithms.aggregation import LossAggregation, aggregation_weights
from soloist.algorithms.gradients import clip_by_global_norm_
from soloist.algorithms.losses import POLICY_LOSSES, metrics_of
from soloist.algorithms.masked import whiten
from soloist.algorithms.values import explained_variance, skill, value_loss
from soloist.config import LossConfig, RunConfig
from soloist.environments.base import keyed_random
from soloist.errors import RunError
from soloist.metrics import mean
from soloist.models.frozen import FrozenStates
from soloist.models.loading import DTYPES, save_weights
from soloist.models.optimizers import WarmupSchedule, build_optimizer, load_optimizer_state, optimizer_state
from soloist.models.packed import packs
from soloist.models.policy import action_log_probs
from soloist.models.rows import MicroBatch
from soloist.models.value import ValueModel, freeze_parameters
from soloist.seams import fault_point
from soloist.training.fingerprint import fingerprint
from soloist.training.pack import (
    RolloutArrays,
    StepBatch,
    micro_batches,
    minibatches,
    pack,
    per_rollout,
    rollout_arrays,
    states_after_the_end,
)
from soloist.training.random_state import load_random_state, random_state
from soloist.training.samples import TokenTable, taught
from soloist.types import Rollout, WeightsRef

READY_LIMIT = 4096  # rollouts prepared ahead of their step

Metrics = dict[str, float | None]
State = dict[str, tuple[dict[str, Tensor], dict[str, Any]]]

_log = logging.getLogger("soloist.learner")


class Learner:
    """Owns policy, value model and both optimizers.

    Example: `learner.update_value(rollouts)` K times, `learner.update_policy(rollouts)`, `learner.publish(folder)`.
    """

    def __init__(self, policy: torch.nn.Module, value: ValueModel, config: RunConfig) -> None:
        self.policy = policy
        self.value = value
        self.config = config
        self.version = 0
        self.frozen = freeze_parameters(value, config.value.freeze)
        self._policy_optimizer = build_optimizer(
            policy.parameters(), config.policy.lr, config.policy.weight_decay, eps=config.policy.adam_eps
        )
        self._value_optimizer = build_optimizer(value.parameters(), config.value.lr, config.value.weight_decay)
        self._policy_schedule = WarmupSchedule(peak=config.policy.lr, warmup=config.policy.warmup_steps)
        self._value_schedule = WarmupSchedule(peak=config.value.lr, warmup=config.value.warmup_steps)
        self._policy_updates = 0
        self._value_updates = 0
        self._step: _Step | None = None
        self.tokens: TokenTable | None = None
        self._packed = packs(policy) and packs(value.backbone)
        self._ready: dict[str, tuple[Rollout, RolloutArrays]] = {}

    # --- the step ---------------------------------------------------------------------------------------------------

    def update_value(self, rollouts: Sequence[Rollout]) -> Metrics:
        """One optimizer step of the value model: MSE to the targets. Raises RunError on a non-finite gradient."""
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
        lr = self._value_schedule.apply(self._value_optimizer, self._value_updates)
        norm = self._apply(self.value, self._value_optimizer, self.config.value.max_grad_norm, before_T, step)
        self._value_updates += 1
        metrics: Metrics = {"critic/loss": float(total), "critic/grad_norm": norm, "critic/lr": lr}
        return metrics | step.first_look(before_T)

    def update_policy(self, rollouts: Sequence[Rollout]) -> Metrics:
        """Advantages, then the policy's loss over minibatches and epochs; `version` grows by one.

        Raises RunError on a non-finite loss or gradient, before the optimizer has touched anything.
        """
        step = self._begin(rollouts)
        advantages_T = self._advantages(step)
        sums: list[dict[str, Tensor]] = []
        updates: list[Metrics] = []
        for _ in range(self.config.policy.epochs):
            for members in minibatches(step.batch, self.config.policy.minibatches):
                updates.append(self._policy_step(step, advantages_T, members, sums))
        self.version += 1
        self.tokens = step.token_table(advantages_T, self.config.loss)
        self._step = None
        averages = {name: mean(update[name] or 0.0 for update in updates) for name in updates[0]}
        return metrics_of(sums) | averages | _advantage_metrics(advantages_T)

    def _policy_step(
        self, step: _Step, advantages_T: Tensor, members: list[int], sums: list[dict[str, Tensor]]
    ) -> Metrics:
        """One optimizer step on the rollouts `members`; their token terms are weighted over this set alone."""
        batch, loss_config = step.batch, self.config.loss
        weights_T = _weights_of(batch, members, loss_config.loss_agg_mode, loss_config.fixed_length)
        whole_step = self.config.policy.minibatches == 1
        micros = step.micros if whole_step else self._micro_batches(batch, members)
        log_probs_T, temperature = torch.zeros_like(batch.rewards_T), self.config.rollout.temperature
        total = torch.zeros((), device=log_probs_T.device)
        for micro in micros:
            log_probs_t, entropy_t = action_log_probs(self.policy, micro, temperature)
            log_probs_T[micro.tokens_t] = log_probs_t.detach()
            loss, metrics = POLICY_LOSSES[loss_config.policy_loss](
                log_probs_t,
                batch.rollout_log_probs_T[micro.tokens_t],
                advantages_T[micro.tokens_t],
                weights_T[micro.tokens_t],
                eps_low=loss_config.eps_low,
                eps_high=loss_config.eps_high,
            )
            loss.backward()
            total += loss.detach()
            sums.append(metrics | {"actor/entropy": entropy_t.sum()})
        step.note_log_probs(micros, log_probs_T)
        lr = self._policy_schedule.apply(self._policy_optimizer, self._policy_updates)
        norm = self._apply(self.policy, self._policy_optimizer, self.config.policy.max_grad_norm, log_probs_T, step)
        self._policy_updates += 1
        return {"actor/pg_loss": float(total), "actor/grad_norm": norm, "actor/lr": lr}

    # --- statistics of the whole step -------------------------------------------------------------------------------

    def _begin(self, rollouts: Sequence[Rollout]) -> _Step:
        """Pack the step once; the K value updates and the policy update share it."""
        ids = [rollout.rollout_id for rollout in rollouts]
        if self._step is not None and self._step.batch.rollout_ids == ids:
            return self._step
        batch = self._pack(rollouts)
        step = _Step(batch, self._micro_batches(batch), FrozenStates(self.value.backbone))
        advantage = self.config.advantage
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
        self._step = step
        return step

    def _advantages(self, step: _Step) -> Tensor:
        """Skip-observation GAE with the fresh critic (or, as set, the critic before its updates), shape [T]."""
        settings, batch = self.config.advantage, step.batch
        values_T = step.values_T if step.values_T is not None else self.values(step.micros, batch.tokens, step.recall)
        step.values_T = values_T
        lam: float | Tensor | None = settings.lambda_policy
        if lam is None:
            lam = length_adaptive_lambda(batch.lengths_R, settings.length_adaptive_alpha)
        advantages_T = gae_over_rollouts(
            batch.rewards_T,
            values_T,
            batch.lengths_R,
            gamma=settings.gamma,
            lam=lam,
            bootstrap_R=step.bootstrap_R,
        )
        if settings.whiten:
            return whiten(advantages_T, torch.ones_like(advantages_T, dtype=torch.bool))
        return advantages_T

    @torch.no_grad()
    def values(self, micros: Sequence[MicroBatch], tokens: int, recall: FrozenStates | None = None) -> Tensor:
        """V of the state before each selected token of the micro-batches, float32 [T], 0 elsewhere; no gradient."""
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
        self._ready[rollout.rollout_id] = rollout, arrays
        if len(self._ready) > READY_LIMIT:  # rollouts that were dropped for their age are never asked for
            for rollout_id in list(self._ready)[: READY_LIMIT // 2]:
                self._ready.pop(rollout_id, None)

    def _pack(self, rollouts: Sequence[Rollout]) -> StepBatch:
        arrays = []
        for rollout in rollouts:
            known, own = self._ready.pop(rollout.rollout_id, (None, None))
            arrays.append(own if own is not None and _same_tokens(known, rollout) else rollout_arrays(rollout))
        return pack(rollouts, self.config.model.device, self._shuffled_scores(rollouts), arrays)

    def _micro_batches(self, batch: StepBatch, members: list[int] | None = None) -> list[MicroBatch]:
        return micro_batches(batch, self.config.token_budget, members, packed=self._packed)

    def _shuffled_scores(self, rollouts: Sequence[Rollout]) -> list[float] | None:
        if not self.config.shuffle_rewards:
            return None
        scores = [rollout.score or 0.0 for rollout in rollouts]
        keyed_random(self.config.seed, "shuffle", self.version).shuffle(scores)
        return scores

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _apply(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, limit: float, outputs_T: Tensor, step: _Step
    ) -> float:
        """Clip and step; returns the norm before clipping. Nothing non-finite passes."""
        norm = float(clip_by_global_norm_(model.parameters(), limit))
        if norm != norm or norm in (float("inf"), float("-inf")):
            optimizer.zero_grad(set_to_none=True)
            bad = (~outputs_T.isfinite()).nonzero().flatten().tolist()
            names = sorted({step.batch.rollout_ids[int(step.batch.rollout_T[token])] for token in bad})
            report = (
                f"the gradient norm is {norm} at version {self.version}; nothing was updated. Rollouts with non-finite "
                f"outputs: {', '.join(names) or 'none, so the loss itself overflowed'}"
            )
            if self.config.health.on_non_finite == "stop":
                raise RunError(report)
            _log.warning("this update is skipped: %s", report)
            return norm
        fault_point("optimizer:before")
        optimizer.step()
        fault_point("optimizer:after")
        optimizer.zero_grad(set_to_none=True)
        return norm

    @torch.no_grad()
    def log_prob_errors(self, rollouts: Sequence[Rollout]) -> list[float]:
        """|π/μ − 1| of every action token under the present weights: 0 when engine and learner agree."""
        batch = pack(rollouts, self.config.model.device)
        errors_T = torch.zeros_like(batch.rewards_T)
        for micro in self._micro_batches(batch):
            log_probs_t, _ = action_log_probs(self.policy, micro, self.config.rollout.temperature)
            errors_T[micro.tokens_t] = torch.expm1(log_probs_t - batch.rollout_log_probs_T[micro.tokens_t]).abs()
        found: list[float] = errors_T.tolist()
        return found

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
        counters = {
            "version": self.version,
            "policy_updates": self._policy_updates,
            "value_updates": self._value_updates,
        }
        return {
            "policy": (_tensors(self.policy, copied), counters),
            "value": (_tensors(self.value, copied), {}),
            "policy_optimizer": optimizer_state(self._policy_optimizer, self.policy.named_parameters()),
            "value_optimizer": optimizer_state(self._value_optimizer, self.value.named_parameters()),
        }

    def load_state(self, state: State) -> None:
        """Take back what `state` gave. Raises KeyError or RuntimeError when it belongs to another model."""
        tensors, counters = state["policy"]
        _assign(self.policy, tensors)
        _assign(self.value, state["value"][0])
        load_optimizer_state(self._policy_optimizer, self.policy.named_parameters(), *state["policy_optimizer"])
        load_optimizer_state(self._value_optimizer, self.value.named_parameters(), *state["value_optimizer"])
        self.version = int(counters["version"])
        self._policy_updates = int(counters["policy_updates"])
        self._value_updates = int(counters["value_updates"])
        load_random_state(state["rng"])
        self._step = None


class _Step:
    """What the updates of one step share."""

    def __init__(self, batch: StepBatch, micros: list[MicroBatch], recall: FrozenStates) -> None:
        self.batch = batch
        self.micros = micros
        self.recall = recall
        self.bootstrap_R = torch.zeros(batch.rollouts, device=batch.rewards_T.device)
        self.targets_T = torch.zeros_like(batch.rewards_T)
        self.values_T: Tensor | None = None
        self.log_probs_T = torch.full_like(batch.rewards_T, torch.nan)
        self._looked = False

    def note_log_probs(self, micros: Sequence[MicroBatch], log_probs_T: Tensor) -> None:
        """Keep each token's first log-probability of the step; later epochs have moved on."""
        for micro in micros:
            first_t = self.log_probs_T[micro.tokens_t]
            self.log_probs_T[micro.tokens_t] = torch.where(first_t.isnan(), log_probs_T[micro.tokens_t], first_t)

    def token_table(self, advantages_T: Tensor, loss: LossConfig) -> TokenTable:
        """What the update saw of each token, for the report."""
        assert self.values_T is not None
        log_ratio_T = self.log_probs_T - self.batch.rollout_log_probs_T
        return TokenTable(
            lengths_R=self.batch.lengths_R.tolist(),
            log_ratio_T=log_ratio_T,
            advantages_T=advantages_T,
            values_T=self.values_T,
            in_band_T=taught(log_ratio_T, advantages_T, loss),
        )

    def first_look(self, values_T: Tensor) -> Metrics:
        """How well the critic predicted rollouts that it had not trained on yet; only at the first of the K updates."""
        if self._looked:
            return {}
        self._looked = True
        return {
            "critic/explained_var": explained_variance(values_T, self.targets_T),
            "critic/skill": skill(per_rollout(values_T, self.batch), per_rollout(self.targets_T, self.batch)),
        }


def _same_tokens(known: Rollout | None, rollout: Rollout) -> bool:
    """Whether two records of one id hold the same tokens and rewards; the buffer marks rollouts on copies."""
    same = known is not None and known.segments is rollout.segments and known.turns is rollout.turns
    return same and known is not None and known.score == rollout.score


def _weights_of(batch: StepBatch, members: list[int], mode: LossAggregation, fixed_length: int) -> Tensor:
    """Aggregation weights over the rollouts `members`; 0 for all other tokens."""
    if len(members) == batch.rollouts:
        return aggregation_weights(mode, batch.rollout_T, batch.rollouts, fixed_length)
    inside_T = torch.isin(batch.rollout_T, torch.tensor(members, device=batch.rollout_T.device))
    weights_T = torch.zeros_like(batch.rewards_T)
    weights_T[inside_T] = aggregation_weights(mode, batch.rollout_T[inside_T], batch.rollouts, fixed_length)
    return weights_T


def _advantage_metrics(advantages_T: Tensor) -> Metrics:
    return {
        "advantage/mean": float(advantages_T.mean()),
        "advantage/std": float(advantages_T.std(correction=0)),
        "advantage/zero_frac": float((advantages_T == 0).float().mean()),
    }


def _tensors(module: torch.nn.Module, copied: bool) -> dict[str, Tensor]:
    found = {name: parameter.detach() for name, parameter in module.named_parameters()}
    return {name: tensor.clone() for name, tensor in found.items()} if copied else found


@torch.no_grad()
def _assign(module: torch.nn.Module, tensors: dict[str, Tensor]) -> None:
    for name, parameter in module.named_parameters():
        parameter.copy_(tensors[name])
