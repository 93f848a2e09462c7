"""Rollouts of one step become tensors: all trainable tokens in one packed row, and micro-batches for the models.

T: trainable (action) tokens of the step, rollout by rollout, in time order over a rollout's segments. R: rollouts.
S: segments. B, L: rows and padded length of a micro-batch.
Guarantees: every action token of every rollout appears once; rewards end on the last action token at or before their
event; micro-batches hold whole segments of similar length within a token budget, so padding stays small. Which tokens
share a micro-batch never changes the sums that the learner makes of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from soloist.types import Rollout


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """All that one step trains on.

    Example: two rollouts with 3 and 5 action tokens give T = 8, `lengths_R` = [3, 5].
    """

    rollout_ids: list[str]
    """R ids, in the order of the packed row."""
    sequences: list[Tensor]
    """S token-id rows, int64, of different lengths."""
    segment_T: Tensor
    """Which sequence holds the token, int64."""
    position_T: Tensor
    """Where in the sequence, int64; its logits are read one position before."""
    rollout_T: Tensor
    """Which rollout the token belongs to, int64, ascending."""
    lengths_R: Tensor
    """Trainable tokens of each rollout, int64."""
    rollout_log_probs_T: Tensor
    """log μ, as the engine recorded it, float32."""
    versions_T: Tensor
    """Version that sampled the token, int64."""
    rewards_T: Tensor
    """Reward that belongs to the token, float32."""
    truncated_R: Tensor
    """Whether a budget cut the rollout, bool."""
    last_segment_R: Tensor
    """The last sequence of each rollout, int64: its end is the state that a truncated rollout stopped in."""

    @property
    def tokens(self) -> int:
        """T."""
        return int(self.segment_T.numel())

    @property
    def rollouts(self) -> int:
        """R."""
        return len(self.rollout_ids)


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Some segments, right-padded, and where their trainable tokens lie in them and in the step."""

    input_ids_BL: Tensor
    """Token ids; the padding on the right is never attended to by a real token (attention is causal)."""
    rows_t: Tensor
    """Row of each trainable token."""
    positions_t: Tensor
    """Position of each trainable token in its row."""
    tokens_t: Tensor
    """Its index in the packed row of the step."""


def pack(rollouts: Sequence[Rollout], device: str = "cpu", scores: Sequence[float] | None = None) -> StepBatch:
    """Pack scored rollouts. `scores` replaces their final rewards (the control experiment with shuffled rewards).

    Raises ValueError, naming the rollout, when one is not trainable or its per-token data do not fit together.
    """
    if not rollouts:
        raise ValueError("a step of 0 rollouts was to be packed; the buffer must hand over at least one")
    if scores is not None and len(scores) != len(rollouts):
        raise ValueError(f"{len(scores)} scores were given for {len(rollouts)} rollouts; each needs one")
    sequences: list[Tensor] = []
    columns: dict[str, list[float]] = {name: [] for name in ("segment", "position", "rollout", "log_prob", "version")}
    rewards: list[float] = []
    last_segments: list[int] = []
    for index, rollout in enumerate(rollouts):
        _refuse_untrainable(rollout)
        first = len(sequences)
        for segment in rollout.segments:
            versions = segment.versions()
            for position, is_action in enumerate(segment.action_mask):
                if is_action:
                    columns["segment"].append(len(sequences))
                    columns["position"].append(position)
                    columns["rollout"].append(index)
                    columns["log_prob"].append(segment.rollout_log_probs[position] or 0.0)
                    columns["version"].append(versions[position] or 0)
            sequences.append(torch.tensor(segment.token_ids, device=device))
        rewards += _rewards_of(rollout, scores[index] if scores is not None else rollout.score or 0.0)
        last_segments.append(first + len(rollout.segments) - 1)

    def integers(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    rollout_T = integers(columns["rollout"])
    return StepBatch(
        rollout_ids=[rollout.rollout_id for rollout in rollouts],
        sequences=sequences,
        segment_T=integers(columns["segment"]),
        position_T=integers(columns["position"]),
        rollout_T=rollout_T,
        lengths_R=torch.bincount(rollout_T, minlength=len(rollouts)),
        rollout_log_probs_T=torch.tensor(columns["log_prob"], dtype=torch.float32, device=device),
        versions_T=integers(columns["version"]),
        rewards_T=torch.tensor(rewards, dtype=torch.float32, device=device),
        truncated_R=torch.tensor([rollout.truncated for rollout in rollouts], device=device),
        last_segment_R=integers(last_segments),
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


def _rewards_of(rollout: Rollout, score: float) -> list[float]:
    """Reward of each action token of one rollout, in time order. No reward is lost, whatever it was given for."""
    places = (
        (index, position)
        for index, segment in enumerate(rollout.segments)
        for position, is_action in enumerate(segment.action_mask)
        if is_action
    )
    rank = {place: number for number, place in enumerate(places)}
    rewards = [0.0] * len(rank)
    last = 0
    for turn in rollout.turns:
        # An empty action has no token of its own; its reward stays with the last token before it.
        last = rank.get((turn.segment, turn.end - 1), last) if turn.end > turn.start else last
        rewards[last] += turn.reward
    rewards[-1] += score
    return rewards


def micro_batches(batch: StepBatch, token_budget: int, rollouts: Sequence[int] | None = None) -> list[MicroBatch]:
    """Split the segments of some rollouts (all when None) into right-padded batches of up to `token_budget` tokens."""
    chosen = set(range(batch.rollouts) if rollouts is None else rollouts)
    segment_of = batch.segment_T.tolist()
    rollout_of = batch.rollout_T.tolist()
    members: dict[int, list[int]] = {}
    for token, (segment, rollout) in enumerate(zip(segment_of, rollout_of, strict=True)):
        if rollout in chosen:
            members.setdefault(segment, []).append(token)
    # Longest first: rows of one micro-batch are about equally long, and the order does not depend on arrival.
    order = sorted(members, key=lambda segment: (-len(batch.sequences[segment]), segment))
    return [_pad(batch, group, members) for group in _groups(batch, order, token_budget)]


def _groups(batch: StepBatch, order: Sequence[int], token_budget: int) -> list[list[int]]:
    groups: list[list[int]] = []
    width = 0
    for segment in order:
        length = len(batch.sequences[segment])
        if not groups or (len(groups[-1]) + 1) * width > token_budget:
            groups.append([])
            width = length
        groups[-1].append(segment)
    return groups


def _pad(batch: StepBatch, segments: Sequence[int], members: dict[int, list[int]]) -> MicroBatch:
    rows = [batch.sequences[segment] for segment in segments]
    tokens = [token for segment in segments for token in members[segment]]
    row_of = [row for row, segment in enumerate(segments) for _ in members[segment]]
    device = batch.segment_T.device
    tokens_t = torch.tensor(tokens, device=device)
    return MicroBatch(
        input_ids_BL=torch.nn.utils.rnn.pad_sequence(rows, batch_first=True),
        rows_t=torch.tensor(row_of, device=device),
        positions_t=batch.position_T[tokens_t],
        tokens_t=tokens_t,
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
