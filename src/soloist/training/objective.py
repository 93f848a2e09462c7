"""The policy's objective: the loss method of the config over the micro-batches of one optimizer step.

    loss = Σ_t w_t · ( method's term + kl_coef · k3(π_θ ‖ π_ref) − entropy_coef · H_t )

    statistics    a pass without gradient, only for methods that need the whole optimizer step (sequence ratios,
                  quantiles, second moments)
    loss          a pass with gradient over micro-batches, which only sums

Guarantees: micro-batches, packing and order don't change the update. The divergence is Schulman's k3 of the reference
against π_θ, exp(x) − 1 − x with x = log π_ref − log π_θ, as in GRPO (arXiv 2402.03300, eq 4).
Not covered: advantages (`estimators.py`), the optimizer (`trainee.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from soloist.algorithms.losses import LossInputs, Sums, policy_loss, teaches
from soloist.algorithms.ratios import k3_divergence
from soloist.algorithms.step_statistics import StepStatistics, needs_statistics, step_statistics
from soloist.config import RunConfig
from soloist.methods import LOSS_METHODS, Setting
from soloist.models.policy import action_log_probs
from soloist.models.rows import MicroBatch
from soloist.training.step import Step


class Objective:
    """Makes one optimizer step's gradients of the policy.

    Example: `objective = Objective(policy, reference, config)`, `old_T = objective.old_log_probs(step)`, then
    `loss, log_probs_T, sums = objective.backward(step, micros, weights_T, advantages_T, old_T, version)`.
    """

    def __init__(self, policy: PreTrainedModel, reference: PreTrainedModel | None, config: RunConfig) -> None:
        """`reference` is read when `loss.kl_coef` is above 0."""
        self._policy = policy
        self._reference = reference
        self._loss = config.loss
        self._temperature = config.rollout.temperature
        self._method = LOSS_METHODS[config.loss.policy_loss]
        self._settings: dict[str, Setting] = {name: getattr(config.loss, name) for name in self._method.settings}
        # One update a step is made at the very weights that would be recomputed with.
        self._recomputes = config.loss.old_log_probs == "recompute"
        self._several = config.policy.epochs * config.policy.minibatches > 1

    def old_log_probs(self, step: Step) -> Tensor | None:
        """log π_old of all tokens, [T]; None where it is π_θ itself, at the start of the step's only update."""
        if not self._recomputes:
            return step.batch.rollout_log_probs_T
        return self.log_probs(self._policy, step.micros, step.batch.rewards_T) if self._several else None

    def reference_log_probs(self, step: Step) -> Tensor | None:
        """log π_ref of all tokens, [T]; None without a divergence."""
        if self._reference is None or not self._loss.kl_coef:
            return None
        return self.log_probs(self._reference, step.micros, step.batch.rewards_T)

    @torch.no_grad()
    def log_probs(self, model: PreTrainedModel, micros: Sequence[MicroBatch], like_T: Tensor) -> Tensor:
        """log-probabilities of the micro-batches' tokens under a model, 0 elsewhere, [T]; no gradient."""
        log_probs_T = torch.zeros_like(like_T)
        for micro in micros:
            log_probs_T[micro.tokens_t], _ = action_log_probs(model, micro, self._temperature)
        return log_probs_T

    def backward(
        self,
        step: Step,
        micros: Sequence[MicroBatch],
        weights_T: Tensor,
        advantages_T: Tensor,
        old_T: Tensor | None,
        reference_T: Tensor | None,
        version: int,
    ) -> tuple[Tensor, Tensor, list[Sums]]:
        """Add the gradients of one optimizer step. Returns the loss, log π of its tokens [T] and the metric sums."""
        batch = step.batch
        statistics = self._statistics(step, micros, weights_T, old_T)
        log_probs_T, total = torch.zeros_like(batch.rewards_T), torch.zeros((), device=batch.rewards_T.device)
        parts: list[Sums] = []
        for micro in micros:
            tokens_t = micro.tokens_t
            log_probs_t, entropy_t = action_log_probs(
                self._policy, micro, self._temperature, entropy_gradient=self._loss.entropy_coef > 0
            )
            log_probs_T[tokens_t] = log_probs_t.detach()
            inputs = LossInputs(
                log_probs_T=log_probs_t,
                rollout_log_probs_T=batch.rollout_log_probs_T[tokens_t],
                old_log_probs_T=log_probs_t.detach() if old_T is None else old_T[tokens_t],
                advantages_T=advantages_T[tokens_t],
                weights_T=weights_T[tokens_t],
                staleness_T=version - batch.versions_T[tokens_t],
                statistics=statistics.at(tokens_t),
            )
            loss, sums = policy_loss(self._method, self._settings, inputs)
            sums["actor/entropy"] = entropy_t.detach().sum()
            if self._loss.entropy_coef > 0:
                loss = loss - self._loss.entropy_coef * (inputs.weights_T * entropy_t).sum()
            if reference_T is not None:
                divergence_t = k3_divergence(reference_T[tokens_t] - log_probs_t)
                loss = loss + self._loss.kl_coef * (inputs.weights_T * divergence_t).sum()
                sums["actor/kl_to_reference"] = divergence_t.detach().sum()
            loss.backward()
            total += loss.detach()
            step.first_use(tokens_t, log_probs_t.detach(), teaches(self._method, self._settings, inputs))
            parts.append(sums)
        return total, log_probs_T, parts

    def _statistics(
        self, step: Step, micros: Sequence[MicroBatch], weights_T: Tensor, old_T: Tensor | None
    ) -> StepStatistics:
        """What the method needs to know of the whole optimizer step, at the present weights."""
        if not needs_statistics(self._method, self._settings):
            return StepStatistics()
        batch = step.batch
        log_probs_T = self.log_probs(self._policy, micros, batch.rewards_T)
        return step_statistics(
            self._method,
            self._settings,
            log_probs_T=log_probs_T,
            old_log_probs_T=log_probs_T if old_T is None else old_T,
            rollout_log_probs_T=batch.rollout_log_probs_T,
            weights_T=weights_T,
            rollout_T=batch.rollout_T,
            n_rollouts=batch.rollouts,
        )
