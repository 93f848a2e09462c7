"""Value model: its loss, and two scores of how well it predicts.

Guarantees: the loss is a sum of per-token terms times weights made from the whole step, as the policy's, and a token of
weight exactly 0 is absent. The scores are None, never ±inf or NaN, when the returns don't vary.
Not covered: where targets come from (`advantages.value_targets`), and what is scored: the caller passes one item per
token or one per rollout; per token, long rollouts weigh more.
Legend: T packed trainable tokens, N items that are scored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from soloist.algorithms.masked import masked_var
from soloist.algorithms.tensors import at_least_float32, check_packed


def value_loss(values_T: Tensor, targets_T: Tensor, weights_T: Tensor) -> Tensor:
    """L = Σ_t w_t · (V_t − R_t)²: plain squared error, without a factor ½ and without clipping (methods.md §1.3).

    Differentiable in `values_T` only; V and R in units of the reward, all [T]. Scalar, in fp32 or better.
    Raises ValueError when the tensors are not one-dimensional and of one length.
    """
    check_packed(values_T=values_T, targets_T=targets_T, weights_T=weights_T)
    weights_T = at_least_float32(weights_T.detach())
    error_T = at_least_float32(values_T) - at_least_float32(targets_T.detach())
    # Selected before squaring, so that the backward of an absent token is 0 and not 0 · inf.
    return (weights_T * torch.where(weights_T != 0, error_T, 0.0).square()).sum()


def explained_variance(values_N: Tensor, targets_N: Tensor) -> float | None:
    """EV = 1 − Var(R − V) / Var(R). 1 is perfect, 0 as good as any constant; a constant bias is forgiven.

    None when N < 2 or Var(R) = 0. Raises ValueError on shapes.
    """
    return _one_minus_ratio(values_N, targets_N, forgive_bias=True)


def skill(values_N: Tensor, targets_N: Tensor) -> float | None:
    """1 − mean((R − V)²) / Var(R): against the best constant, and a bias counts (methods.md §1.3).

    None when N < 2 or Var(R) = 0. Raises ValueError on shapes.
    """
    return _one_minus_ratio(values_N, targets_N, forgive_bias=False)


def _one_minus_ratio(values_N: Tensor, targets_N: Tensor, *, forgive_bias: bool) -> float | None:
    check_packed(values_N=values_N, targets_N=targets_N)
    targets, values = targets_N.detach().to(torch.float64), values_N.detach().to(torch.float64)
    everything = torch.ones_like(targets, dtype=torch.bool)
    variance = float(masked_var(targets, everything))
    if targets.numel() < 2 or variance == 0.0:
        return None
    error = targets - values
    # A critic's bias is invisible in a variance; the mean square keeps it.
    unexplained = masked_var(error, everything) if forgive_bias else error.square().mean()
    return 1.0 - float(unexplained) / variance
