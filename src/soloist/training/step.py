"""What the updates of one step share: the packed rollouts, their micro-batches, targets and first looks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from soloist.algorithms.aggregation import LossAggregation, aggregation_weights
from soloist.algorithms.values import explained_variance, skill
from soloist.models.frozen import FrozenStates
from soloist.models.rows import MicroBatch
from soloist.training.pack import RolloutArrays, StepBatch, per_rollout
from soloist.training.samples import TokenTable

Metrics = dict[str, float | None]


class Step:
    """One step under way. T packed trainable tokens, R rollouts.

    Example: `step = Step(batch, arrays, micros, FrozenStates(value.backbone))`.
    """

    def __init__(
        self,
        batch: StepBatch,
        arrays: Sequence[RolloutArrays],
        micros: list[MicroBatch],
        recall: FrozenStates | None,
    ) -> None:
        self.batch = batch
        self.arrays = arrays
        """What the batch was packed from, rollout by rollout."""
        self.micros = micros
        self.recall = recall
        """What frozen layers of the value model gave; None without one."""
        self.bootstrap_R = torch.zeros(batch.rollouts, device=batch.rewards_T.device)
        """V of the states in which truncated rollouts stopped, where that counts."""
        self.targets_T = torch.zeros_like(batch.rewards_T)
        self.values_T: Tensor | None = None
        """V that the advantages were made from."""
        self.log_probs_T = torch.full_like(batch.rewards_T, torch.nan)
        """log π when the step first used the token."""
        self.teaches_T = torch.ones_like(batch.rewards_T, dtype=torch.bool)
        """Whether the token could teach when the step first used it."""
        self._looked = False

    def first_use(self, tokens_t: Tensor, log_probs_t: Tensor, teaches_t: Tensor) -> None:
        """Keep what the first update saw of the tokens; later ones have moved on."""
        first_t = self.log_probs_T[tokens_t]
        new_t = first_t.isnan()
        self.log_probs_T[tokens_t] = torch.where(new_t, log_probs_t, first_t)
        self.teaches_T[tokens_t] = torch.where(new_t, teaches_t, self.teaches_T[tokens_t])

    def token_table(self, advantages_T: Tensor) -> TokenTable:
        """What the update saw of each token, for the report."""
        return TokenTable(
            lengths_R=self.batch.lengths_R.tolist(),
            log_ratio_T=self.log_probs_T - self.batch.rollout_log_probs_T,
            advantages_T=advantages_T,
            values_T=self.values_T,
            in_band_T=self.teaches_T,
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

    def weights_of(self, members: Sequence[int], mode: LossAggregation, fixed_length: int) -> Tensor:
        """Aggregation weights over the rollouts `members`, [T]; 0 for all other tokens."""
        batch = self.batch
        if len(members) == batch.rollouts:
            return aggregation_weights(mode, batch.rollout_T, batch.rollouts, fixed_length)
        inside_T = torch.isin(batch.rollout_T, torch.tensor(members, device=batch.rollout_T.device))
        weights_T = torch.zeros_like(batch.rewards_T)
        weights_T[inside_T] = aggregation_weights(mode, batch.rollout_T[inside_T], batch.rollouts, fixed_length)
        return weights_T
