"""Rewards for how an answer was given, added to what it is worth (methods.md §8).

Guarantees: never above 0, never below −penalty, so the sum with the reward stays bounded. Not covered: leaving overlong
rollouts out of the loss instead (DAPO's filter), and which rollouts count as truncated.
Legend: R rollouts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from soloist.algorithms.tensors import check_packed


def overlong_penalty(lengths_R: Tensor, *, limit: int, buffer: int, penalty: float = 1.0) -> Tensor:
    """The price of a length l near the limit L, with a buffer B (DAPO, arXiv 2503.14476, eq 13):

        0                          l ≤ L − B
        penalty·(L − B − l)/B      L − B < l ≤ L
        −penalty                   l > L

    `lengths_R`, `limit` and `buffer` in tokens. Open: l is all tokens of a rollout, prompt and observations too,
    as `rollout.max_tokens` counts them; DAPO has one turn. Returns [R] in units of the reward, fp32, to be added to
    the score.
    Raises ValueError unless lengths are one-dimensional and not negative, 0 < buffer ≤ limit and penalty ≥ 0.
    """
    check_packed(lengths_R=lengths_R)
    if not 0 < buffer <= limit:
        raise ValueError(f"overlong buffer must lie within 1 … limit = {limit} tokens, found {buffer}")
    if not 0 <= penalty < float("inf"):
        raise ValueError(f"overlong penalty must be 0 or more, found {penalty}; it is subtracted")
    if bool((lengths_R < 0).any()):
        raise ValueError(f"lengths must not be negative, found {int(lengths_R.min())}")
    room_R = (limit - buffer - lengths_R.to(torch.float64)) / buffer
    return (penalty * room_R.clamp(min=-1.0, max=0.0)).to(torch.float32)
