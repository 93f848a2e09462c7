"""Corrections: a factor made of log π_old − log μ, for tokens that the engine sampled with slightly other numbers.

Guarantees: the factor is detached and finite; a masked token's factor is exactly 0. A NaN stays NaN.
Legend: T packed tokens; c = log π_old − log μ in nats, of the token or of its sequence; k = exp(c).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from soloist.algorithms.ratios import saturated_ratio


def truncated_correction(log_weight_T: Tensor, cap: float, limit: float) -> tuple[Tensor, Tensor]:
    """(min(k, C), whether k > C), both [T]. TIS, Yao et al. (2025). `limit` is where exp saturates, in nats."""
    log_weight_T = log_weight_T.detach()
    factor_T = saturated_ratio(log_weight_T, limit)
    cut_T = factor_T > cap
    return torch.where(cut_T, cap, factor_T), cut_T


def masked_correction(log_weight_T: Tensor, low: float, high: float, limit: float) -> tuple[Tensor, Tensor]:
    """(k · 1[α ≤ k ≤ β], whether k was outside), both [T]. IcePop (arXiv 2510.18855).

    Compared as c with log α and log β, without exp; α = 0 masks nothing below.
    """
    log_weight_T = log_weight_T.detach()
    lowest = math.log(low) if low > 0 else -math.inf
    outside_T = (log_weight_T < lowest) | (log_weight_T > math.log(high))
    return torch.where(outside_T, 0.0, saturated_ratio(log_weight_T, limit)), outside_T


def proximal_correction(log_weight_T: Tensor, limit: float) -> Tensor:
    """k = π_prox / μ whole, [T]: decoupled PPO (AReaL, arXiv 2505.24298) and A-3PO (arXiv 2512.06547).

    Ours: k saturates at c = `limit`, so that one stale token can't overflow.
    """
    return saturated_ratio(log_weight_T.detach(), limit)
