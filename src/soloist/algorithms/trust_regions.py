"""Trust regions: which tokens may teach at all (`kept_T`), and the interval in which a ratio counts (`low`, `high`).

Guarantees: regions are made of detached quantities and get no gradient. A NaN is inside of every region: it must show
in the loss. SAT with c = 1 everywhere has the bits of PPO's interval, since both are made in fp64 and rounded once.
Not covered: what becomes of a ratio outside the interval; that is the surrogate's part (`surrogates.py`).
Legend: T packed tokens; d = log π_θ − log π_old in nats, r = exp(d).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from soloist.algorithms.ratios import saturated_ratio
from soloist.algorithms.tensors import at_least_float32


@dataclass(frozen=True, kw_only=True)
class TrustRegion:
    """What a region says of every token.

    Example: `clip_region(log_ratio_T, 0.2, 0.28).high` is 1.28.
    """

    kept_T: Tensor
    """Tokens that may teach; the others give exactly nothing. Bool [T]."""
    low: Tensor
    """Lower end for r, [T] or one for all."""
    high: Tensor
    """Upper end for r, [T] or one for all."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """[T] each, by the names of `soloist.metrics.METRICS`."""


def no_region(log_ratio_T: Tensor) -> TrustRegion:
    """Every token teaches with its whole ratio."""
    return _region(log_ratio_T, 0.0, math.inf)


def band_region(log_ratio_T: Tensor, eps_low: float, eps_high: float) -> TrustRegion:
    """Kept where 1 − ε_low < r < 1 + ε_high (SAO, arXiv 2607.07508, eq 2). Strict, and blind to the advantage."""
    below_T, above_T = band_sides(log_ratio_T, eps_low, eps_high)
    outside_T = below_T | above_T
    metrics = {"dis/masked_frac": outside_T, "dis/masked_frac_low": below_T, "dis/masked_frac_high": above_T}
    return _region(log_ratio_T, 0.0, math.inf, kept_T=~outside_T, metrics=metrics)


def band_sides(log_ratio_T: Tensor, eps_low: float, eps_high: float) -> tuple[Tensor, Tensor]:
    """(r ≤ 1 − ε_low, r ≥ 1 + ε_high), two bool [T]: tokens below and above the band, its ends included.

    Compared as d with log(1 − ε_low) and log(1 + ε_high), without exp. ε_low ≥ 1 leaves only d = −∞ below.
    """
    log_ratio_T = at_least_float32(log_ratio_T)
    lowest = math.log(1.0 - eps_low) if eps_low < 1.0 else -math.inf
    return log_ratio_T <= lowest, log_ratio_T >= math.log1p(eps_high)


def clip_region(log_ratio_T: Tensor, eps_low: float, eps_high: float) -> TrustRegion:
    """[1 − ε_low, 1 + ε_high] (PPO, arXiv 1707.06347, eq 7, with DAPO's two epsilons, arXiv 2503.14476, eq 10)."""
    return _region(log_ratio_T, 1.0 - eps_low, 1.0 + eps_high)


def truncation_region(log_ratio_T: Tensor, eps_low: float, eps_high: float) -> TrustRegion:
    """[1 − ε_low, 1 + ε_high] for the coefficient of CISPO (arXiv 2506.13585, eq 5); counts the ratios outside."""
    region = clip_region(log_ratio_T, eps_low, eps_high)
    ratio_T = saturated_ratio(log_ratio_T)
    metrics = {"cispo/clip_frac": (ratio_T < region.low) | (ratio_T > region.high)}
    return TrustRegion(kept_T=region.kept_T, low=region.low, high=region.high, metrics=metrics)


def sat_region(log_ratio_T: Tensor, quantile: Tensor, kernel: str, eps_low: float, eps_high: float) -> TrustRegion:
    """[1 − ε_low·c⁻, 1 + ε_high·c⁺], c = kernel(|d|; q) on d's own side where |d| > q > 0, else 1.

    SAT (arXiv 2607.18722): the end towards which a stale token has moved comes nearer, the other one stays.
    `quantile` is q of the step or micro-batch, a scalar in nats. Raises ValueError for an unknown kernel.
    """
    distance_T = log_ratio_T.detach().to(torch.float64)
    size_T, q = distance_T.abs(), quantile.detach().to(torch.float64)
    gated_T = (size_T > q) & (q > 0)
    contraction_T = torch.where(gated_T, sat_kernel(kernel, size_T, q), 1.0)
    radius_low_T = eps_low * torch.where(distance_T < 0, contraction_T, 1.0)
    radius_high_T = eps_high * torch.where(distance_T > 0, contraction_T, 1.0)
    metrics = {
        "sat/gate_rate": gated_T,
        "sat/radius_low": radius_low_T,
        "sat/radius_high": radius_high_T,
        "sat/contraction_min": contraction_T,
        "sat/proxy": size_T,
    }
    return _region(log_ratio_T, 1.0 - radius_low_T, 1.0 + radius_high_T, metrics=metrics)


def sat_kernel(kernel: str, size_T: Tensor, quantile: Tensor) -> Tensor:
    """c of a token with |d| > q, in (0, 1]:

        hill         2 / (1 + (|d|/q)²)         1 at |d| = q, so that nothing jumps
        hill_half    1 / (1 + (|d|/q)²)
        hill_excess  1 / (1 + ((|d| − q)/q)²)

    SAT (arXiv 2607.18722) leaves the kernel open. Raises ValueError for another name.
    """
    if kernel == "hill":
        return 2.0 / (1.0 + (size_T / quantile).square())
    if kernel == "hill_half":
        return 1.0 / (1.0 + (size_T / quantile).square())
    if kernel == "hill_excess":
        return 1.0 / (1.0 + ((size_T - quantile) / quantile).square())
    raise ValueError(f"sat_kernel '{kernel}' is none of hill, hill_half, hill_excess")


def second_moment_region(log_ratio_T: Tensor, kept_T: Tensor) -> TrustRegion:
    """Kept as chosen over the whole step: M2PO (arXiv 2510.01161), see `step_statistics.second_moment_kept`."""
    return _region(log_ratio_T, 0.0, math.inf, kept_T=kept_T, metrics={"m2po/masked_frac": ~kept_T})


def probability_region(
    log_probs_T: Tensor, old_log_probs_T: Tensor, advantages_T: Tensor, delta: float, cap: float
) -> TrustRegion:
    """Kept unless π_θ − π_old > δ where A > 0, or < −δ where A < 0; r counts up to `cap`.

    DPPO (arXiv 2602.04879), the binary form of total variation: the change of the sampled token's probability.
    """
    difference_T = saturated_ratio(log_probs_T.detach()) - saturated_ratio(old_log_probs_T.detach())
    left_T = ((difference_T > delta) & (advantages_T > 0)) | ((difference_T < -delta) & (advantages_T < 0))
    return _region(log_probs_T, 0.0, cap, kept_T=~left_T, metrics={"tv/masked_frac": left_T})


def limited(ratio_T: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """clip(r, low, high), [T]; the gradient is 1 inside, ends included, and 0 outside. NaN stays NaN, both ways."""
    return torch.where(ratio_T > high, high, torch.where(ratio_T < low, low, ratio_T))


def _region(
    like_T: Tensor,
    low: float | Tensor,
    high: float | Tensor,
    kept_T: Tensor | None = None,
    metrics: dict[str, Tensor] | None = None,
) -> TrustRegion:
    like_T = at_least_float32(like_T.detach())

    def rounded_once(end: float | Tensor) -> Tensor:
        return torch.as_tensor(end, dtype=torch.float64, device=like_T.device).to(like_T.dtype)

    kept_T = torch.ones_like(like_T, dtype=torch.bool) if kept_T is None else kept_T
    return TrustRegion(kept_T=kept_T, low=rounded_once(low), high=rounded_once(high), metrics=metrics or {})
