"""Statistics of the selected places of a tensor: mean, variance, quantile, whitening.

Guarantees: places are selected before any arithmetic, so NaN, ±inf or anything else at a masked place changes no bit of
a result or of its gradient. No place, one place and equal values have a defined result, never NaN.
Not covered: statistics over several tensors; gather a whole step into one before calling.
Legend: `x` and `mask` have one shape, any rank; `mask` is bool, True selects. n is the number of selected places.
"""

from __future__ import annotations

import torch
from torch import Tensor

from soloist.algorithms.tensors import at_least_float32


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """(1/n)·Σ x over the selected places; 0 when n = 0. Scalar, in fp32 or better. Raises ValueError on shapes."""
    return _mean(_selected(x, mask), mask).to(at_least_float32(x).dtype)


def masked_var(x: Tensor, mask: Tensor) -> Tensor:
    """(1/n)·Σ (x − mean)² over the selected places; exactly 0 when n ≤ 1 or all values are equal.

    Divided by n, not by n − 1: a batch is described, nothing is estimated. Scalar. Raises ValueError on shapes.
    """
    selected = _selected(x, mask)
    centred = torch.where(mask, selected - _mean(selected, mask), 0.0)
    variance = _mean(centred.square(), mask)
    # The mean of equal numbers can be off by a rounding; that must not look like variance.
    infinity = torch.tensor(torch.inf, dtype=selected.dtype, device=x.device)
    lowest, highest = torch.where(mask, selected, infinity), torch.where(mask, selected, -infinity)
    spread = x.numel() > 0 and bool(lowest.min() != highest.max())
    return (variance if spread else torch.zeros_like(variance)).to(at_least_float32(x).dtype)


def masked_quantile(x: Tensor, mask: Tensor, share: float) -> Tensor:
    """Value below which `share` of the selected places lie, by linear interpolation between neighbours.

    At rank share·(n − 1) of the sorted values, as numpy's default; 0 when n = 0. Unlike `torch.quantile` it has no
    limit on the number of places. Scalar. Raises ValueError when share is outside 0 … 1 or on shapes.
    """
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"quantile needs a share within 0 … 1, found {share}")
    _check(x, mask)
    values = at_least_float32(x)[mask].sort().values
    if values.numel() == 0:
        return values.new_zeros(())
    rank = share * (values.numel() - 1)
    below = int(rank)
    above = min(below + 1, values.numel() - 1)
    return torch.lerp(values[below], values[above], rank - below)


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """(x − mean) / std over the selected places, 0 at the others; all 0 when the selected values have no variance.

    For advantages of a whole step, never for value targets. Shape of x, in fp32 or better. Raises ValueError on shapes.
    """
    selected = _selected(x, mask)
    variance = masked_var(selected, mask)
    scale = torch.where(variance > 0, variance, torch.inf).rsqrt()
    whitened = torch.where(mask, (selected - _mean(selected, mask)) * scale, 0.0)
    return whitened.to(at_least_float32(x).dtype)


def _check(x: Tensor, mask: Tensor) -> None:
    if x.shape != mask.shape or mask.dtype != torch.bool:
        raise ValueError(
            f"mask must be bool with the shape {tuple(x.shape)} of x, found {mask.dtype} {tuple(mask.shape)}"
        )


def _selected(x: Tensor, mask: Tensor) -> Tensor:
    """`x` in fp64 with 0 at masked places, so that no later operation can meet what stood there."""
    _check(x, mask)
    return torch.where(mask, x.to(torch.float64), 0.0)


def _mean(selected: Tensor, mask: Tensor) -> Tensor:
    return selected.sum() / mask.sum().clamp(min=1)
