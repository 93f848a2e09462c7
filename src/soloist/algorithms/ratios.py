"""Ratios of the trained policy to an older one: per token, per sequence, and against A-3PO's interpolated policy.

    d = log π_θ(a) − log π_old(a),   r = exp(d)

Guarantees: nothing is exponentiated before it was saturated, so |d| of 750 gives finite values and finite gradients in
fp32, bf16 and fp16. NaN is never hidden: a broken log-probability must show in the loss, where the non-finite gradient
is noticed, instead of being counted as stale.
Not covered: which log-probabilities are compared; all are at the sampling temperature.
Legend: T packed tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from soloist.algorithms.tensors import at_least_float32

LOG_RATIO_LIMIT = 20.0


def log_ratio(log_probs_T: Tensor, old_log_probs_T: Tensor) -> Tensor:
    """d = log π_θ − log π_old in nats, [T], in fp32 or better; differentiable in log π_θ only."""
    return at_least_float32(log_probs_T) - at_least_float32(old_log_probs_T.detach())


def with_gradient_of(log_probs_T: Tensor, values_T: Tensor) -> Tensor:
    """sg(x) + log π_θ − sg(log π_θ): the value of x and the gradient of log π_θ, [T] in nats.

    The token form of a sequence's ratio (GSPO, arXiv 2507.18071, eqs 13–14): tokens of a sequence may lie in several
    micro-batches. Where A is constant over a sequence the gradient is that of GSPO itself.
    """
    # An impossible token has no gradient; −inf − (−inf) would be NaN.
    moving_T = torch.where(log_probs_T.isinf(), 0.0, at_least_float32(log_probs_T))
    return values_T.detach().to(moving_T.dtype) + (moving_T - moving_T.detach())


def interpolated_log_ratio(log_probs_T: Tensor, rollout_log_probs_T: Tensor, staleness_T: Tensor) -> Tensor:
    """u = log π_θ − sg( α·log μ + (1 − α)·log π_θ ),  α = 1/d for a token d versions old, 1 when d = 0; [T] in nats.

    A-3PO (arXiv 2512.06547). u has the value α·(log π_θ − log μ) and the gradient of log π_θ without a factor α, since
    the proximal policy is detached. `staleness_T` (int) is the version being trained minus the token's.
    """
    behind_T = log_ratio(log_probs_T.detach(), rollout_log_probs_T)
    return with_gradient_of(log_probs_T, behind_T / staleness_T.clamp(min=1))


def interpolated_correction(log_probs_T: Tensor, rollout_log_probs_T: Tensor, staleness_T: Tensor) -> Tensor:
    """log π_prox − log μ = (1 − α)·sg(log π_θ − log μ), [T] in nats (A-3PO, arXiv 2512.06547); see above for α."""
    behind_T = log_ratio(log_probs_T.detach(), rollout_log_probs_T)
    steps_T = staleness_T.clamp(min=1)
    # An infinite ratio of a token that needs no correction: 0 · inf is not 0. NaN stays.
    none_T = (steps_T == 1) & ~behind_T.isnan()
    return torch.where(none_T, 0.0, behind_T * (steps_T - 1) / steps_T)


def saturation(dtype: torch.dtype, factors: int = 1) -> float:
    """Largest d that is exponentiated for log-probabilities of `dtype`, in nats.

    20 (a ratio of 5e8), or less where a gradient made of `factors` such ratios would not fit into the type: about 10
    for one of them in fp16.
    """
    return min(LOG_RATIO_LIMIT, (math.log(torch.finfo(dtype).max) - 1.0) / factors)


def saturated_ratio(log_ratio_T: Tensor, limit: float | None = None) -> Tensor:
    """exp(min(d, limit)), [T] in fp32 or better. The gradient is r up to the limit, 0 beyond it.

    Without `limit` it is the saturation of d's own type. There is no lower limit: exp(−750) is 0, so is its slope.
    """
    limit = saturation(log_ratio_T.dtype) if limit is None else limit
    log_ratio_T = at_least_float32(log_ratio_T)
    # Not `clamp`, whose gradient at NaN is 0: the loss would be NaN and the gradient would look sound.
    return torch.where(log_ratio_T > limit, limit, log_ratio_T).exp()


def k3_divergence(log_ratio_T: Tensor, limit: float | None = None) -> Tensor:
    """exp(d) − 1 − d ≥ 0, [T] in nats: the low-variance estimate of KL(μ ‖ π_θ) for tokens drawn from μ.

    John Schulman, "Approximating KL divergence" (2020), estimator k3. d is clamped to ±limit before exp, so value and
    gradient stay finite (the gradient is 0 beyond the limit); clipping after exp would leave inf · 0 in the backward.
    """
    limit = saturation(log_ratio_T.dtype) if limit is None else limit
    log_ratio_T = at_least_float32(log_ratio_T)
    clamped_T = torch.where(log_ratio_T.abs() > limit, limit * log_ratio_T.detach().sign(), log_ratio_T)
    return clamped_T.expm1() - clamped_T
