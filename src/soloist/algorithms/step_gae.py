"""Step-level GAE, the variants that SAO compares its token-level one with (methods.md §1.4).

    δ_n = r_n + γ·V_{n+1} − V_n,   A_n = δ_n + γλ·A_{n+1},   λ = max(0, 1 − 1/(α·number of turns))

SAO, arXiv 2607.07508, ablation. n runs over the turns of a rollout that have trainable tokens: r_n is the sum of the
turn's rewards, V_n the mean of its tokens' values or the value of its last token, and all its tokens get A_n. It is the
token-level GAE of `advantages.py`, called with one row for each turn.

Guarantees: with one token in every turn it is the token-level GAE, bit for bit; how turns are numbered does not matter,
only where they begin. Everything is computed in fp64, returned in fp32 (fp64 if an input is) and detached.
Open: γ is paid per turn, not per token; the bootstrap stands in for the turn after the last.
Not covered: value targets, which stay those of tokens (`value_targets`).
Legend: T packed trainable tokens, rollout after rollout, each in time order; R rollouts; N turns with tokens.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from soloist.algorithms.advantages import (
    gae_over_rollouts,
    length_adaptive_lambda,
    result_dtype,
    rollout_index,
    sums_of_runs,
)
from soloist.algorithms.tensors import check_packed

TurnValue = Literal["mean", "last"]


def step_gae(
    rewards_T: Tensor,
    values_T: Tensor,
    lengths_R: Tensor,
    turn_T: Tensor,
    *,
    gamma: float,
    alpha: float,
    lam: float | Tensor | None = None,
    value_of: TurnValue,
    bootstrap_R: Tensor | None = None,
) -> Tensor:
    """A_n of its turn for every token, formula in the module's docstring; constant within a turn.

    `lengths_R` (int) are the trainable tokens of each rollout, 0 allowed, and sum to T. `turn_T` (int) numbers the
    turns of a rollout in time order; numbers may be missing, since a turn without tokens has no row. `lam`, one λ or
    [R], takes the place of the one that `alpha` makes from the number of turns. `bootstrap_R` is V after the last
    token, 0 where the episode ended by itself (the default). Returns advantages_T in units of the reward.
    Raises ValueError when shapes don't fit, turn numbers fall within a rollout, or `value_of` is unknown.
    """
    check_packed(rewards_T=rewards_T, values_T=values_T, turn_T=turn_T)
    rollout_T = rollout_index(lengths_R, rewards_T.numel())
    first_T = _first_of_turn(turn_T, rollout_T)
    row_T = first_T.cumsum(0) - 1
    tokens_N = torch.bincount(row_T)
    turns_R = torch.bincount(rollout_T[first_T], minlength=len(lengths_R))

    if value_of == "mean":
        values_N = sums_of_runs(values_T, tokens_N) / tokens_N
    elif value_of == "last":
        values_N = values_T.detach().to(torch.float64)[tokens_N.cumsum(0) - 1]
    else:
        raise ValueError(f"value_of '{value_of}' is none of {', '.join(get_args(TurnValue))}")
    advantages_N = gae_over_rollouts(
        sums_of_runs(rewards_T, tokens_N),
        values_N,
        turns_R,
        gamma=gamma,
        lam=length_adaptive_lambda(turns_R, alpha) if lam is None else lam,
        bootstrap_R=bootstrap_R,
    )
    return advantages_N[row_T].to(result_dtype(rewards_T, values_T))


def _first_of_turn(turn_T: Tensor, rollout_T: Tensor) -> Tensor:
    """Whether a token opens a turn, bool [T]: its turn or its rollout is not that of the token before it."""
    if turn_T.is_floating_point() or turn_T.dtype == torch.bool:
        raise ValueError(f"turn_T must hold whole numbers, found {turn_T.dtype}; pass it as torch.int64")
    change_t = turn_T.diff()
    same_rollout_t = rollout_T.diff() == 0
    falls = ((change_t < 0) & same_rollout_t).nonzero().flatten().tolist()
    if falls:
        before, after = int(turn_T[falls[0]]), int(turn_T[falls[0] + 1])
        raise ValueError(
            f"turn {after} follows turn {before} within rollout {int(rollout_T[falls[0]])} of the step; "
            "tokens must be packed in time order"
        )
    first_T = torch.ones_like(turn_T, dtype=torch.bool)
    first_T[1:] = (change_t != 0) | ~same_rollout_t
    return first_T
