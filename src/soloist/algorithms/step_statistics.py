"""What some policy losses need of the whole optimizer step before its first micro-batch: means, a quantile, a choice.

Guarantees: all of it is detached, made in fp64 from all live tokens of the step and from no absent one (weight 0), and
does not depend on micro-batches; a method that needs nothing gets nothing. NaN is never hidden: a token with a broken
ratio stays kept, and a sequence with one has a NaN mean.
Not covered: the forward pass that gives log π_θ of the whole step; several ranks (gather their tokens first).
Legend: T packed trainable tokens of the step, R rollouts, each of them one sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from soloist.algorithms.ratios import log_ratio
from soloist.algorithms.tensors import check_packed
from soloist.methods import LossMethod, Setting


@dataclass(frozen=True, kw_only=True)
class StepStatistics:
    """Detached facts of the step; None where the method doesn't read them.

    Example: `statistics.at(micro.tokens_t)` is the part of one micro-batch.
    """

    sequence_log_ratio_T: Tensor | None = None
    """mean_t(log π_θ − log π_old) of the token's sequence, nats, float64 [T]."""
    sequence_correction_T: Tensor | None = None
    """Sum (or, as set, mean) over the token's sequence of log π_old − log μ, nats, float64 [T]."""
    quantile: Tensor | None = None
    """q of SAT, nats, a scalar."""
    kept_T: Tensor | None = None
    """Tokens that M2PO keeps, bool [T]."""

    def at(self, tokens_t: Tensor) -> StepStatistics:
        """The same for the tokens `tokens_t` (indices or mask) of the step, in their order."""

        def part(x_T: Tensor | None) -> Tensor | None:
            return None if x_T is None else x_T[tokens_t]

        return StepStatistics(
            sequence_log_ratio_T=part(self.sequence_log_ratio_T),
            sequence_correction_T=part(self.sequence_correction_T),
            quantile=self.quantile,
            kept_T=part(self.kept_T),
        )


def needs_statistics(method: LossMethod, settings: Mapping[str, Setting]) -> bool:
    """Whether the loss reads anything of the whole step. Raises ValueError for settings that aren't the method's."""
    given = method.settings_with(settings)
    return (
        method.ratio == "sequence"
        or method.region == "second_moment"
        or given.get("sat_over") == "step"
        or given.get("correction_over", "token") != "token"
    )


@torch.no_grad()
def step_statistics(
    method: LossMethod,
    settings: Mapping[str, Setting],
    *,
    log_probs_T: Tensor,
    old_log_probs_T: Tensor,
    rollout_log_probs_T: Tensor,
    weights_T: Tensor,
    rollout_T: Tensor,
    n_rollouts: int,
) -> StepStatistics:
    """What `method` needs of a step, from the log-probabilities at its start, nats [T].

    `rollout_T` (int) says to which rollout 0 … n_rollouts − 1 a token belongs. Raises ValueError when shapes differ.
    """
    check_packed(
        log_probs_T=log_probs_T,
        old_log_probs_T=old_log_probs_T,
        rollout_log_probs_T=rollout_log_probs_T,
        weights_T=weights_T,
        rollout_T=rollout_T,
    )
    given = method.settings_with(settings)
    # Whatever stands at absent tokens is still in the differences; each of the functions below leaves it out.
    live_T = weights_T != 0
    ratio_T = log_ratio(log_probs_T, old_log_probs_T).to(torch.float64)
    sequence_log_ratio_T = sequence_correction_T = quantile = kept_T = None
    if method.ratio == "sequence":
        ratio_T = over_sequences(ratio_T, live_T, rollout_T, n_rollouts, mean=True)
        sequence_log_ratio_T = ratio_T
    correction_over = given.get("correction_over", "token")
    if correction_over != "token":
        correction_T = log_ratio(old_log_probs_T, rollout_log_probs_T)
        mean = correction_over == "sequence_mean"
        sequence_correction_T = over_sequences(correction_T, live_T, rollout_T, n_rollouts, mean=mean)
    if given.get("sat_over") == "step":
        quantile = linear_quantile(ratio_T[live_T].abs(), float(given["sat_quantile"]))
    if method.region == "second_moment":
        kept_T = second_moment_kept(ratio_T, live_T, float(given["m2_threshold"]))
    return StepStatistics(
        sequence_log_ratio_T=sequence_log_ratio_T,
        sequence_correction_T=sequence_correction_T,
        quantile=quantile,
        kept_T=kept_T,
    )


def over_sequences(x_T: Tensor, live_T: Tensor, rollout_T: Tensor, n_rollouts: int, *, mean: bool) -> Tensor:
    """Σ (or mean) of x over the live tokens of the token's own sequence, float64 [T]; 0 where no token is live."""
    x_T = torch.where(live_T, x_T.to(torch.float64), 0.0)
    totals_R = x_T.new_zeros(n_rollouts).index_add_(0, rollout_T, x_T)
    if mean:
        counts_R = x_T.new_zeros(n_rollouts).index_add_(0, rollout_T, live_T.to(torch.float64))
        totals_R = totals_R / counts_R.clamp(min=1.0)
    return totals_R[rollout_T]


def linear_quantile(x: Tensor, share: float) -> Tensor:
    """The value below which `share` of the entries of `x` [n] lie, linearly between neighbours; a scalar, 0 of nothing.

    `torch.quantile` does the same, but refuses more than 16 million entries.
    """
    if x.numel() == 0:
        return x.new_zeros(())
    ordered = x.sort().values
    position = share * (x.numel() - 1)
    below = int(position)
    above = min(below + 1, x.numel() - 1)
    part = position - below
    # Selected, since an infinite neighbour times a part of 0 is NaN.
    return ordered[below] + part * (ordered[above] - ordered[below]) if part > 0 else ordered[below]


def second_moment_kept(log_ratio_T: Tensor, live_T: Tensor, threshold: float) -> Tensor:
    """The most tokens, smallest d² first, whose mean d² is < τ; bool [T].

    M2PO (arXiv 2510.01161): the largest (log r)² are masked until the second moment of the rest is below τ. Of equal
    ones the earlier token is kept. Absent tokens are neither counted nor kept.
    """
    moments_T = torch.where(live_T, log_ratio_T.to(torch.float64).square(), torch.inf)
    ordered_T, order_T = moments_T.sort(stable=True)
    counts_T = torch.arange(1, len(ordered_T) + 1, device=ordered_T.device)
    # The running mean of a rising sequence rises, so this is a prefix of it.
    kept_T = torch.zeros_like(live_T)
    kept_T[order_T] = ordered_T.cumsum(0) / counts_T < threshold
    return (kept_T | moments_T.isnan()) & live_T
