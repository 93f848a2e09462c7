"""Ratio of the trained policy to the behaviour policy, and the region in which a token may teach.

    d = log π_θ(a) − log μ(a),   r = exp(d)

Guarantees: nothing is exponentiated before it was selected or saturated, so |d| of 750 gives finite values and finite
gradients in fp32, bf16 and fp16. NaN is never hidden: a broken log-probability must show in the loss, where the
non-finite gradient is noticed, instead of being counted as stale.
Not covered: which log-probabilities are compared; μ is what the engine recorded, at the same temperature.
Legend: T packed tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from soloist.algorithms.tensors import at_least_float32

LOG_RATIO_LIMIT = 20.0


def log_ratio(log_probs_T: Tensor, rollout_log_probs_T: Tensor) -> Tensor:
    """d = log π_θ − log μ in nats, [T], in fp32 or better; differentiable in log π_θ only."""
    return at_least_float32(log_probs_T) - at_least_float32(rollout_log_probs_T.detach())


def band_sides(log_ratio_T: Tensor, eps_low: float, eps_high: float) -> tuple[Tensor, Tensor]:
    """(r ≤ 1 − ε_low, r ≥ 1 + ε_high), two bool [T]: tokens below and above the band, its ends included.

    Compared as d with log(1 − ε_low) and log(1 + ε_high), without exp. ε_low ≥ 1 leaves only d = −∞ below.
    """
    log_ratio_T = at_least_float32(log_ratio_T)
    lowest = math.log(1.0 - eps_low) if eps_low < 1.0 else -math.inf
    return log_ratio_T <= lowest, log_ratio_T >= math.log1p(eps_high)


def band_mask(log_ratio_T: Tensor, eps_low: float, eps_high: float) -> Tensor:
    """1 − ε_low < r < 1 + ε_high, bool [T] (SAO, arXiv 2607.07508, eq 2). Strict, and blind to the advantage.

    `log_ratio_T` is d in nats, any float type. NaN counts as inside, see the module's docstring.
    """
    below_T, above_T = band_sides(log_ratio_T, eps_low, eps_high)
    return ~(below_T | above_T)


def masked_ratio(log_ratio_T: Tensor, eps_low: float, eps_high: float) -> Tensor:
    """f(r) = r inside the band, exactly 0 outside (SAO eq 2), [T] in fp32 or better.

    Differentiable in d: the gradient is r inside and exactly 0 outside, also where exp(d) would overflow.
    """
    inside_T = band_mask(log_ratio_T, eps_low, eps_high)
    # Two selections: before exp, so that it can't overflow into the backward, and after it, since exp(0) is not 0.
    selected_T = torch.where(inside_T, at_least_float32(log_ratio_T), 0.0)
    return torch.where(inside_T, selected_T.exp(), 0.0)


def saturation(dtype: torch.dtype) -> float:
    """Largest |d| that is exponentiated for log-probabilities of `dtype`, in nats.

    20 (a ratio of 5e8), or less where the gradient r would not fit into the type: about 10 in fp16.
    """
    return min(LOG_RATIO_LIMIT, math.log(torch.finfo(dtype).max) - 1.0)


def saturated_ratio(log_ratio_T: Tensor, limit: float | None = None) -> Tensor:
    """exp(clamp(d, −limit, limit)), [T] in fp32 or better. The gradient is r within the limit, 0 beyond it.

    Without `limit` it is the saturation of d's own type.
    """
    return _clamped(log_ratio_T, limit).exp()


def k3_divergence(log_ratio_T: Tensor, limit: float | None = None) -> Tensor:
    """exp(d) − 1 − d ≥ 0, [T] in nats: the low-variance estimate of KL(μ ‖ π_θ) for tokens drawn from μ.

    John Schulman, "Approximating KL divergence" (2020), estimator k3. d is clamped to ±limit before exp, so value and
    gradient stay finite (the gradient is 0 beyond the limit); clipping after exp would leave inf · 0 in the backward.
    """
    clamped_T = _clamped(log_ratio_T, limit)
    return clamped_T.expm1() - clamped_T


def _clamped(log_ratio_T: Tensor, limit: float | None) -> Tensor:
    limit = saturation(log_ratio_T.dtype) if limit is None else limit
    log_ratio_T = at_least_float32(log_ratio_T)
    # Not `clamp`, whose gradient at NaN is 0: the loss would be NaN and the gradient would look sound.
    return torch.where(log_ratio_T.abs() > limit, limit * log_ratio_T.detach().sign(), log_ratio_T)
