"""Rollouts of one step become tensors: all trainable tokens in one row, and micro-batches for the models.

T: trainable (action) tokens of the step, rollout by rollout, in time order over a rollout's segments. R: rollouts.
S: segments. What a rollout adds is made once, as arrays, when it arrives; a step only joins them.
Guarantees: every action token of every rollout appears once; rewards end on the last action token at or before their
event; which tokens share a micro-batch never changes the sums that the learner makes of them.
Not covered: how micro-batches are laid out (`models/rows.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from soloist.models.rows import Integers, MicroBatch, build_micro_batches
from soloist.types import Rollout


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """All that one step trains on.

    Example: two rollouts with 3 and 5 action tokens give T = 8, `lengths_R` = [3, 5].
    """

    rollout_ids: list[str]
    """R ids, in the order of the packed row."""
    sequences: list[Integers]
    """S token-id rows, of different lengths; on the CPU, as everything that only micro-batches are made from."""
    segment_T: Integers
    """Which sequence holds the token, ascending; on the CPU."""
    position_T: Integers
    """Where in the sequence; its logits are read one position before; on the CPU."""
    rollout_T: Tensor
    """Which rollout the token belongs to, int64, ascending."""
    lengths_R: Tensor
    """Trainable tokens of each rollout, int64."""
    rollout_log_probs_T: Tensor
    """log μ, as the engine recorded it, float32."""
    versions_T: Tensor
    """Version that sampled the token, int64."""
    turn_T: Tensor
    """Number of the token's turn within its rollout, from 0 without gaps, int64."""
    rewards_T: Tensor
    """Reward that belongs to the token, float32."""
    task_ids: list[str]
    """Task of each rollout."""
    group_R: Tensor
    """Number of each rollout's group, int64; rollouts of one group share it."""
    truncated_R: list[bool]
    """Whether a budget cut the rollout."""
    last_segment_R: Integers
    """The last sequence of each rollout: its end is the state that a truncated rollout stopped in."""

    @property
    def tokens(self) -> int:
        """T."""
        return len(self.segment_T)

    @property
    def rollouts(self) -> int:
        """R."""
        return len(self.rollout_ids)


@dataclass(frozen=True, kw_only=True)
class RolloutArrays:
    """One rollout's share of a step, made when it arrives. S its segments, T its action tokens, as in `StepBatch`."""

    sequences: list[Integers]
    segment_T: Integers
    position_T: Integers
    log_probs_T: NDArray[np.float32]
    versions_T: Integers
    turn_T: Integers
    rewards_T: NDArray[np.float64]
    """Rewards of the turns; the final score is added when the step is packed."""


def rollout_arrays(rollout: Rollout) -> RolloutArrays:
    """Check a rollout and turn it into arrays. Raises ValueError, naming it, when it must not be trained."""
    _refuse_untrainable(rollout)
    sequences, segments, positions, log_probs, versions = [], [], [], [], []
    for number, segment in enumerate(rollout.segments):
        actions = np.flatnonzero(segment.action_mask)
        sequences.append(np.array(segment.token_ids, dtype=np.int64))
        positions.append(actions)
        segments.append(np.full(len(actions), number))
        # None for observation tokens becomes NaN, which no action token has: `segment.check` was there before.
        log_probs.append(np.array(segment.rollout_log_probs, dtype=np.float64)[actions])
        own = np.zeros(len(sequences[-1]), dtype=np.int64)
        for span in segment.version_spans:
            own[span.start : span.end] = span.version
        versions.append(own[actions])
    segment_T, position_T = np.concatenate(segments), np.concatenate(positions)
    turn_T, rewards_T = _turns(rollout, segment_T, position_T)
    return RolloutArrays(
        sequences=sequences,
        segment_T=segment_T,
        position_T=position_T,
        log_probs_T=np.concatenate(log_probs).astype(np.float32),
        versions_T=np.concatenate(versions),
        turn_T=turn_T,
        rewards_T=rewards_T,
    )


def _refuse_untrainable(rollout: Rollout) -> None:
    if not rollout.trainable or not math.isfinite(rollout.reward or 0.0):
        raise ValueError(
            f"rollout {rollout.rollout_id} is {rollout.status} with reward {rollout.reward} and "
            f"{rollout.action_tokens} action tokens; only scored rollouts with action tokens are trained"
        )
    for number, segment in enumerate(rollout.segments):
        try:
            segment.check()
        except ValueError as error:
            raise ValueError(f"rollout {rollout.rollout_id}, segment {number}: {error}") from error


def _turns(rollout: Rollout, segment_T: Integers, position_T: Integers) -> tuple[Integers, NDArray[np.float64]]:
    """Turn and reward of each token, in time order. No reward is lost, whatever it was given for.

    Turns are numbered without gaps; tokens of no turn (there should be none) count to the first.
    """
    turn_T, rewards_T = np.zeros(len(segment_T), dtype=np.int64), np.zeros(len(segment_T))
    last = 0
    for number, turn in enumerate(rollout.turns):
        # An empty action has no token of its own; its reward stays with the last token before it.
        own = np.flatnonzero((segment_T == turn.segment) & (turn.start <= position_T) & (position_T < turn.end))
        if len(own):
            turn_T[own], last = number, int(own[-1])
        rewards_T[last] += turn.reward
    return np.unique(turn_T, return_inverse=True)[1].astype(np.int64), rewards_T


def pack(
    rollouts: Sequence[Rollout],
    device: str = "cpu",
    scores: Sequence[float] | None = None,
    arrays: Sequence[RolloutArrays] | None = None,
) -> StepBatch:
    """Pack scored rollouts. `scores` replaces their final rewards (the control experiment with shuffled rewards).

    `arrays` are those of the rollouts if they were made before. Raises ValueError, naming the rollout, when one is not
    trainable or its per-token data do not fit together.
    """
    if not rollouts:
        raise ValueError("a step of 0 rollouts was to be packed; the buffer must hand over at least one")
    if scores is not None and len(scores) != len(rollouts):
        raise ValueError(f"{len(scores)} scores were given for {len(rollouts)} rollouts; each needs one")
    parts = [rollout_arrays(rollout) for rollout in rollouts] if arrays is None else list(arrays)
    scores = [rollout.score or 0.0 for rollout in rollouts] if scores is None else scores
    segments_R = np.array([len(part.sequences) for part in parts])
    lengths_R = np.array([len(part.segment_T) for part in parts])
    first_R = np.cumsum(segments_R) - segments_R
    rewards_T = np.concatenate([part.rewards_T for part in parts])
    rewards_T[np.cumsum(lengths_R) - 1] += scores

    def tensor(numbers: NDArray[Any], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.from_numpy(numbers).to(device, dtype)

    return StepBatch(
        rollout_ids=[rollout.rollout_id for rollout in rollouts],
        sequences=[sequence for part in parts for sequence in part.sequences],
        segment_T=np.concatenate([part.segment_T for part in parts]) + np.repeat(first_R, lengths_R),
        position_T=np.concatenate([part.position_T for part in parts]),
        rollout_T=tensor(np.repeat(np.arange(len(parts)), lengths_R)),
        lengths_R=tensor(lengths_R),
        rollout_log_probs_T=tensor(np.concatenate([part.log_probs_T for part in parts]), torch.float32),
        versions_T=tensor(np.concatenate([part.versions_T for part in parts])),
        turn_T=tensor(np.concatenate([part.turn_T for part in parts])),
        rewards_T=tensor(rewards_T, torch.float32),
        task_ids=[rollout.task_id for rollout in rollouts],
        group_R=tensor(np.unique([rollout.group_id for rollout in rollouts], return_inverse=True)[1]),
        truncated_R=[rollout.truncated for rollout in rollouts],
        last_segment_R=first_R + segments_R - 1,
    )


def micro_batches(
    batch: StepBatch, token_budget: int, rollouts: Sequence[int] | None = None, *, packed: bool = False
) -> list[MicroBatch]:
    """Micro-batches of some rollouts (all when None) of up to `token_budget` tokens; see `rows.build_micro_batches`."""
    chosen = np.arange(batch.tokens)
    if rollouts is not None:
        chosen = np.flatnonzero(np.isin(batch.rollout_T.numpy(force=True), rollouts))
    return build_micro_batches(
        batch.sequences,
        batch.segment_T[chosen],
        batch.position_T[chosen],
        names=chosen,
        token_budget=token_budget,
        packed=packed,
        device=str(batch.rewards_T.device),
    )


def states_after_the_end(batch: StepBatch, token_budget: int, *, packed: bool = False) -> list[MicroBatch]:
    """Micro-batches for the states in which truncated rollouts stopped; `tokens_t` are the rollouts' indices."""
    cut = np.flatnonzero(batch.truncated_R)
    segments = batch.last_segment_R[cut]
    return build_micro_batches(
        batch.sequences,
        segments,
        np.array([len(batch.sequences[segment]) for segment in segments], dtype=np.int64),
        names=cut,
        token_budget=token_budget,
        packed=packed,
        device=str(batch.rewards_T.device),
    )


def minibatches(batch: StepBatch, parts: int) -> list[list[int]]:
    """Rollout indices of each of `parts` minibatches: every rollout once, sizes equal to within one."""
    return [list(range(part, batch.rollouts, parts)) for part in range(parts)]


def per_rollout(numbers_T: Tensor, batch: StepBatch) -> Tensor:
    """Mean over each rollout's trainable tokens, [R] in fp64: long rollouts count as much as short ones.

    In fp64 the mean of equal fp32 numbers is that number, so returns that don't vary have variance 0 exactly.
    """
    sums_R = torch.zeros(batch.rollouts, dtype=torch.float64, device=numbers_T.device)
    sums_R.index_add_(0, batch.rollout_T, numbers_T.double())
    return sums_R / batch.lengths_R
