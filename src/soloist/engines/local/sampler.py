"""Keyed sampling: which token follows depends on the logits and on (seed, rollout key, position), on nothing else.

Guarantees: a row gets the same random number in every batch, slot and process; the recorded log-probability is that of
the distribution that was sampled, log softmax(z / T) in fp32; a token of probability 0 is never drawn.
Not covered: top-p and top-k (training samples from the full distribution), and devices without float64.

Shapes: `logits_RV` has R rows (requests) and V columns (vocabulary).
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK64 = (1 << 64) - 1
# 2⁶⁴ / golden ratio: consecutive positions land far apart before they are mixed.
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def _signed(value: int) -> int:
    """The int64 with the same 64 bits, since torch has no unsigned arithmetic."""
    value &= _MASK64
    return value - (1 << 64) if value >> 63 else value


def _mix(value: int) -> int:
    """Finaliser of splitmix64 (Steele et al. 2014) on Python integers."""
    for shift, factor in _MIX:
        value = ((value ^ (value >> shift)) * factor) & _MASK64
    return value ^ (value >> 31)


def stream_key(seed: int, key: int) -> int:
    """Start of the random stream of one rollout, as a signed 64-bit integer."""
    # Seed and key are mixed one after the other, so that (1, 2) and (2, 1) are different streams.
    return _signed(_mix(_mix((seed + _GOLDEN) & _MASK64) ^ ((key * _GOLDEN) & _MASK64)))


def _shifted_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64 (torch's own keeps the sign)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def keyed_uniforms(streams_R: Tensor, positions_R: Tensor) -> Tensor:
    """u = splitmix64(stream + (position + 1) · golden) / 2⁵², one number in [0, 1) a row.

    Both arguments int64 [R]; returns float64 [R]. Position is that of the token in its rollout's sequence.
    """
    x = streams_R + (positions_R + 1) * _signed(_GOLDEN)
    for shift, factor in _MIX:
        x = (x ^ _shifted_right(x, shift)) * _signed(factor)
    x = x ^ _shifted_right(x, 31)
    # 52 bits rather than 53: u · total then always rounds to something below total.
    return _shifted_right(x, 12).double() * 2.0**-52


def sample(logits_RV: Tensor, temperatures_R: Tensor | None, uniforms_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Token = F⁻¹(u), F the cumulative softmax(z / T), one a row; T = 0 takes the most likely token.

    Temperatures None are all 1, which spares calls. Returns ids int64 [R], log-probabilities
    fp32 [R] and whether the row's logits were finite, bool [R]. A greedy row (T = 0) records its log-probability at
    T = 1. Rows with non-finite logits return meaningless ids within V: the caller must refuse them.
    """
    logits_RV = logits_RV.float()
    # NaN and ±inf survive a sum, so one pass tells whether all V values are finite; then it minus itself is 0.
    sums_R = logits_RV.sum(-1)
    finite_R = (sums_R - sums_R) == 0
    if temperatures_R is None:
        log_probs_RV = torch.log_softmax(logits_RV, dim=-1)
        ids_R = _drawn(log_probs_RV, uniforms_R)
    else:
        greedy_R = temperatures_R == 0
        # Divided by 1 rather than 0, which would turn the whole row into NaN.
        scale_R = torch.where(greedy_R, 1.0, temperatures_R)
        log_probs_RV = torch.log_softmax(logits_RV / scale_R[:, None], dim=-1)
        ids_R = torch.where(greedy_R, log_probs_RV.argmax(-1), _drawn(log_probs_RV, uniforms_R))
    ids_R = ids_R.clamp_(max=logits_RV.shape[-1] - 1)
    return ids_R, log_probs_RV.gather(-1, ids_R[:, None])[:, 0], finite_R


def _drawn(log_probs_RV: Tensor, uniforms_R: Tensor) -> Tensor:
    """F⁻¹(u) of each row; V where rounding leaves nothing."""
    # float64, as a sum over 10⁵ tokens in fp32 would lose the unlikely ones. Not normalised: u is scaled instead.
    cumulative_RV = log_probs_RV.double().exp_().cumsum_(-1)
    targets_R = uniforms_R * cumulative_RV[:, -1]
    # right=True skips entries equal to the target, that is tokens of probability 0.
    return torch.searchsorted(cumulative_RV, targets_R[:, None], right=True)[:, 0]
