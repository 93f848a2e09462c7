"""How per-token terms become one loss: weights w_t made once from the whole step (methods.md §1.1).

Every loss of a step is Σ_t w_t · term_t over all its micro-batches and ranks. Since the weights are made before the
first backward, no loss knows how the step was cut up, and policy and value loss share one denominator.
Guarantees: tokens that a trust region masks count like the others (they are trainable tokens of the step); a rollout
without trainable tokens has no weight and does not count as a sequence; a step without tokens gives no weights.
Not covered: leaving out rollouts (failed, aborted); they don't enter the step in the first place.
Legend: T packed trainable tokens of the whole step, R rollouts; l_i tokens of rollout i, N rollouts with l_i > 0.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

LossAggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "fixed-length"]


def aggregation_weights(
    mode: LossAggregation,
    rollout_index_T: Tensor,
    n_rollouts: int,
    fixed_length: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """w_t of every trainable token of a step; the formulas are those of `rollout_weights`.

    `rollout_index_T` (int) says to which rollout 0 … n_rollouts − 1 a token belongs, in any order. Returns weights_T in
    `dtype`. Raises ValueError for an index outside that range, an unknown mode or a fixed-length without a length.
    """
    if rollout_index_T.numel() > 0:
        lowest, highest = int(rollout_index_T.min()), int(rollout_index_T.max())
        if lowest < 0 or highest >= n_rollouts:
            raise ValueError(f"rollout indices must lie in 0 … {n_rollouts - 1}, found {lowest} … {highest}")
    lengths_R = torch.bincount(rollout_index_T, minlength=n_rollouts)
    return rollout_weights(mode, lengths_R, fixed_length, dtype)[rollout_index_T]


def rollout_weights(
    mode: LossAggregation, lengths_R: Tensor, fixed_length: int = 0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """w of each token of rollout i, constant within a rollout:

        token-mean            1 / Σ_j l_j
        seq-mean-token-mean   1 / (N · l_i)
        seq-mean-token-sum    1 / N
        fixed-length          1 / (N · fixed_length)        Dr. GRPO, arXiv 2503.20783

    `lengths_R` counts the trainable tokens of every rollout of the step. Returns weights_R in `dtype`, 0 where l_i = 0.
    Raises ValueError for an unknown mode, and for fixed-length unless fixed_length > 0.
    """
    # fp64, so that counts of tokens stay exact and only the finished weight is rounded.
    lengths = lengths_R.to(torch.float64)
    n_sequences = (lengths > 0).sum().to(torch.float64)
    if mode == "token-mean":
        denominator_R = lengths.sum().expand_as(lengths)
    elif mode == "seq-mean-token-mean":
        denominator_R = n_sequences * lengths
    elif mode == "seq-mean-token-sum":
        denominator_R = n_sequences.expand_as(lengths)
    elif mode == "fixed-length":
        if fixed_length <= 0:
            raise ValueError(f"fixed-length needs a fixed_length of 1 token or more, found {fixed_length}")
        denominator_R = (n_sequences * fixed_length).expand_as(lengths)
    else:
        raise ValueError(f"loss_agg_mode '{mode}' is none of {', '.join(get_args(LossAggregation))}")
    weights_R = torch.where(lengths > 0, 1.0 / denominator_R.clamp(min=1), 0.0)
    return weights_R.to(dtype)
