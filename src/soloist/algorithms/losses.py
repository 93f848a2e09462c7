"""Policy losses: per-token terms times weights, summed. One signature, one registry (`POLICY_LOSSES`).

Guarantees: gradients reach log π_θ only; bf16 and fp16 are computed in fp32; a step's loss is the plain sum of its
micro-batches' losses, since the weights were made from the whole step (`aggregation.py`). A token of weight exactly 0
is absent: whatever stands there, NaN and ±inf included, changes no bit of loss, gradient or metric. A NaN at a live
token does reach the loss, so that it is found and not trained on.
Not covered: KL penalty, entropy bonus (SAO has neither), entropy as a metric.

Metrics are sums over the tokens of one call, plus their count, in fp64: add them up over micro-batches and ranks,
divide once. `metrics_of` does both. The loss itself needs no division.
Legend: T packed trainable tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from soloist.algorithms.tensors import at_least_float32, check_packed
from soloist.algorithms.trust_regions import (
    band_sides,
    k3_divergence,
    log_ratio,
    masked_ratio,
    saturated_ratio,
    saturation,
)

Sums = dict[str, Tensor]


class PolicyLoss(Protocol):
    """What the learner calls. All tensors are [T]; the result is a scalar to minimise and the sums of its metrics."""

    def __call__(
        self,
        log_probs_T: Tensor,
        rollout_log_probs_T: Tensor,
        advantages_T: Tensor,
        weights_T: Tensor,
        *,
        eps_low: float,
        eps_high: float,
    ) -> tuple[Tensor, Sums]:
        """Loss and metric sums. Raises ValueError when the tensors are not one-dimensional and of one length."""


def dis_loss(
    log_probs_T: Tensor,
    rollout_log_probs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    *,
    eps_low: float,
    eps_high: float,
) -> tuple[Tensor, Sums]:
    """L = −Σ_t w_t · sg(f(r_t)) · A_t · log π_θ(a_t),  f(r) = r if 1 − ε_low < r < 1 + ε_high, else 0.

    Direct double-sided importance sampling, SAO (arXiv 2607.07508), eqs 1–3. The gradient is −w·f(r)·A·∇log π_θ:
    exactly 0 outside the band (the token is masked, not clipped), whose tokens still count in w. Ours: the paper does
    not say that f is detached; without it the gradient would be A·r·(1 + log π_θ)·∇log π_θ.
    `rollout_log_probs_T` is log μ as recorded by the engine, in nats; A in units of the reward. Raises ValueError.
    """
    tokens = _Tokens.of(log_probs_T, rollout_log_probs_T, advantages_T, weights_T)
    with torch.no_grad():
        below_T, above_T = band_sides(tokens.log_ratio_T, eps_low, eps_high)
        coefficient_T = tokens.weights_T * masked_ratio(tokens.log_ratio_T, eps_low, eps_high) * tokens.advantages_T
        sums = tokens.common_sums()
        sums["dis/masked_frac"] = tokens.total(below_T | above_T)
        sums["dis/masked_frac_low"] = tokens.total(below_T)
        sums["dis/masked_frac_high"] = tokens.total(above_T)
        # The effective sample size is of the ratios before masking: it shows what the mask had to deal with.
        saturated_T = saturated_ratio(tokens.log_ratio_T.to(torch.float64), tokens.limit)
        sums["ratio"] = tokens.total(saturated_T)
        sums["ratio_squared"] = tokens.total(saturated_T.square())
    # Selected before the product: log π_θ = −inf times a coefficient of 0 would be NaN, forward and backward.
    selected_T = torch.where(below_T | above_T, 0.0, tokens.log_probs_T)
    return -(coefficient_T * selected_T).sum(), sums


def ppo_loss(
    log_probs_T: Tensor,
    rollout_log_probs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    *,
    eps_low: float,
    eps_high: float,
) -> tuple[Tensor, Sums]:
    """L = −Σ_t w_t · min( r_t·A_t, clip(r_t, 1 − ε_low, 1 + ε_high)·A_t ).

    PPO (arXiv 1707.06347), eq 7, with DAPO's two epsilons (arXiv 2503.14476). `rollout_log_probs_T` is of the policy
    that r is measured against: the recorded μ, or an older policy. Ours: r saturates at |log r| = 20, beyond which the
    gradient is 0; PPO leaves r unbounded where A < 0, and exp would overflow. Raises ValueError.
    """
    tokens = _Tokens.of(log_probs_T, rollout_log_probs_T, advantages_T, weights_T)
    ratio_T = saturated_ratio(tokens.log_ratio_T, tokens.limit)
    plain_T = ratio_T * tokens.advantages_T
    clipped_T = ratio_T.clamp(1.0 - eps_low, 1.0 + eps_high) * tokens.advantages_T
    with torch.no_grad():
        sums = tokens.common_sums()
        sums["ppo/clip_frac"] = tokens.total(clipped_T < plain_T)
    return -(tokens.weights_T * torch.minimum(plain_T, clipped_T)).sum(), sums


def importance_weighting_loss(
    log_probs_T: Tensor,
    rollout_log_probs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    *,
    eps_low: float = 0.0,
    eps_high: float = 0.0,
) -> tuple[Tensor, Sums]:
    """L = −Σ_t w_t · r_t · A_t, with the gradient −w·r·A·∇log π_θ: importance sampling without a trust region.

    The baseline that shows what a trust region is for. Both epsilons are accepted and have no effect. Ours: r saturates
    at |log r| = 20, beyond which the gradient is 0, so that one stale token can't overflow. Raises ValueError.
    """
    tokens = _Tokens.of(log_probs_T, rollout_log_probs_T, advantages_T, weights_T)
    ratio_T = saturated_ratio(tokens.log_ratio_T, tokens.limit)
    with torch.no_grad():
        sums = tokens.common_sums()
    return -(tokens.weights_T * ratio_T * tokens.advantages_T).sum(), sums


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "dis": dis_loss,
    "ppo": ppo_loss,
    "importance_weighting": importance_weighting_loss,
}


def metrics_of(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, float | None]:
    """Step metrics, named as in `soloist.metrics.METRICS`, from the sums of all its micro-batches.

    Each is (Σ over parts) / (Σ tokens), and dis/ess = (Σr)² / (n·Σr²). None, not NaN, for a step without tokens.
    """
    totals: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            totals[name] = totals.get(name, 0.0) + float(value)
    n = totals.pop("tokens", 0.0)
    ratio, ratio_squared = totals.pop("ratio", None), totals.pop("ratio_squared", 0.0)
    metrics = {name: total / n if n else None for name, total in totals.items()}
    if ratio is not None:
        metrics["dis/ess"] = ratio**2 / (n * ratio_squared) if ratio_squared else None
    return metrics


@dataclass(frozen=True, kw_only=True)
class _Tokens:
    """Checked inputs in fp32 or better, neutral (d = 0, A = 0, w = 0) where a token is absent."""

    log_probs_T: Tensor
    log_ratio_T: Tensor
    advantages_T: Tensor
    weights_T: Tensor
    live_T: Tensor
    limit: float
    """|d| at which ratios saturate; it depends on the type that the gradient will have."""

    @classmethod
    def of(cls, log_probs_T: Tensor, rollout_log_probs_T: Tensor, advantages_T: Tensor, weights_T: Tensor) -> _Tokens:
        """Check and select. Raises ValueError when shapes differ or are not [T]."""
        check_packed(
            log_probs_T=log_probs_T,
            rollout_log_probs_T=rollout_log_probs_T,
            advantages_T=advantages_T,
            weights_T=weights_T,
        )
        weights_T = at_least_float32(weights_T.detach())
        # NaN ≠ 0, so a broken weight counts as live and shows in the loss.
        live_T = weights_T != 0
        selected_T = torch.where(live_T, at_least_float32(log_probs_T), 0.0)
        behaviour_T = torch.where(live_T, at_least_float32(rollout_log_probs_T.detach()), 0.0)
        return cls(
            log_probs_T=selected_T,
            log_ratio_T=log_ratio(selected_T, behaviour_T),
            advantages_T=torch.where(live_T, at_least_float32(advantages_T.detach()), 0.0),
            weights_T=weights_T,
            live_T=live_T,
            limit=saturation(log_probs_T.dtype),
        )

    def total(self, x_T: Tensor) -> Tensor:
        """Σ over live tokens, in fp64: fp32 can't count beyond 2²⁴ tokens."""
        return torch.where(self.live_T, x_T.to(torch.float64), 0.0).sum()

    def common_sums(self) -> Sums:
        """Sums that every loss reports: tokens, Σ(log μ − log π), Σ k3."""
        return {
            "tokens": self.total(self.live_T),
            "actor/ppo_kl": -self.total(self.log_ratio_T.detach()),
            "mismatch_kl/mean": self.total(k3_divergence(self.log_ratio_T.detach(), self.limit)),
        }
