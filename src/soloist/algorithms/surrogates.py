"""Surrogates: what a token adds to the loss, given its ratio, its region and its advantage.

Guarantees: a token that its region leaves out, or whose ratio is 0, adds exactly 0 in value and gradient, also where
log π_θ is −∞. A NaN of a token that counts reaches value and gradient.
Legend: T packed tokens; r saturated ratio, f(r) the ratio as the region limits it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from soloist.algorithms.trust_regions import TrustRegion, limited


@dataclass(frozen=True, kw_only=True)
class Terms:
    """A surrogate of every token. Example: `−(weights_T * pessimistic(ratio_T, advantages_T, region).gain_T).sum()`."""

    gain_T: Tensor
    """To be maximised, [T]."""
    passes_T: Tensor
    """Whether the region lets the gradient through, bool [T]; whatever A is."""
    clipped_T: Tensor | None = None
    """Tokens whose clipped term was the smaller one, bool [T]."""


def detached(ratio_T: Tensor, log_probs_T: Tensor, advantages_T: Tensor, region: TrustRegion) -> Terms:
    """sg(f(r))·A·log π_θ, with the gradient f(r)·A·∇log π_θ (SAO, arXiv 2607.07508, eq 3; CISPO, 2506.13585, eq 4).

    SAO does not say that f is detached; without it the gradient would be A·r·(1 + log π_θ)·∇log π_θ.
    """
    weight_T = torch.where(region.kept_T, limited(ratio_T.detach(), region.low, region.high), 0.0)
    coefficient_T = weight_T * advantages_T
    # Selected before the product: log π_θ = −inf times a coefficient of 0 would be NaN, forward and backward.
    selected_T = torch.where(coefficient_T == 0, 0.0, log_probs_T)
    return Terms(gain_T=coefficient_T * selected_T, passes_T=weight_T != 0)


def linear(ratio_T: Tensor, advantages_T: Tensor, region: TrustRegion) -> Terms:
    """f(r)·A, with the gradient r·A·∇log π_θ inside the region and 0 outside of it."""
    # 0 · A and not 0, so that a broken advantage shows wherever it stands.
    gain_T = torch.where(region.kept_T, limited(ratio_T, region.low, region.high) * advantages_T, 0.0 * advantages_T)
    outside_T = (ratio_T > region.high) | (ratio_T < region.low)
    return Terms(gain_T=gain_T, passes_T=region.kept_T & ~outside_T.detach())


def pessimistic(ratio_T: Tensor, advantages_T: Tensor, region: TrustRegion) -> Terms:
    """min( r·A, clip(r, low, high)·A ), PPO (arXiv 1707.06347), eq 7: clipped only where that lowers the objective."""
    plain_T = ratio_T * advantages_T
    limited_T = limited(ratio_T, region.low, region.high) * advantages_T
    clipped_T = limited_T < plain_T
    gain_T = torch.where(region.kept_T, torch.where(clipped_T, limited_T, plain_T), 0.0 * advantages_T)
    return Terms(gain_T=gain_T, passes_T=region.kept_T & ~clipped_T, clipped_T=clipped_T)
