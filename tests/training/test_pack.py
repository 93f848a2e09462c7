"""Packing: every action token once, no reward lost, micro-batches that cover all and never exceed their budget."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from soloist.training.pack import (
    StepBatch,
    micro_batches,
    minibatches,
    pack,
    per_rollout,
    rollout_arrays,
    states_after_the_end,
)
from soloist.types import Failure, Rollout, Segment, Turn, VersionSpan

Play = tuple[int, int, int, float]
"""One turn: observation tokens before it, action tokens, version, reward."""


def segment_of(plays: list[Play], number: int, first_token: int) -> tuple[Segment, list[Turn]]:
    """A segment and its turns, with token ids that occur nowhere else."""
    ids: list[int] = [first_token]  # a prompt of one token
    mask, log_probs = [False], [None]
    spans, turns = [], []
    for observation, action, version, reward in plays:
        ids += range(first_token + len(ids), first_token + len(ids) + observation + action)
        mask += [False] * observation + [True] * action
        log_probs += [None] * observation + [-(position + 1) / 16 for position in range(action)]
        end = len(ids)
        if action:
            spans.append(VersionSpan(version=version, start=end - action, end=end))
        turns.append(Turn(segment=number, start=end - action, end=end, finish_reason="stop", reward=reward))
    return Segment(token_ids=ids, action_mask=mask, rollout_log_probs=log_probs, version_spans=spans), turns


def rollout_of(segments: list[list[Play]], score: float | None = 1.0, name: int = 0, **changes: Any) -> Rollout:
    made = [segment_of(plays, number, 10_000 * name + 1000 * number) for number, plays in enumerate(segments)]
    fields: dict[str, Any] = {
        "rollout_id": f"r{name}",
        "task_id": "t",
        "group_id": "g",
        "environment": "e",
        "status": "completed",
        "state": "scored",
        "score": score,
        "segments": [segment for segment, _ in made],
        "turns": [turn for _, turns in made for turn in turns],
    }
    return Rollout(**(fields | changes))


# Quarters are exact in binary, so sums can be compared without a tolerance.
quarters = st.integers(-8, 8).map(lambda n: n / 4)
plays = st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 5), quarters)


@st.composite
def steps(draw: st.DrawFn) -> list[Rollout]:
    shapes = draw(st.lists(st.lists(st.lists(plays, min_size=1, max_size=4), min_size=1, max_size=3), max_size=5))
    shapes = [shape for shape in shapes if any(action for segment in shape for _, action, _, _ in segment)]
    shapes = shapes or [[[(0, 1, 0, 0.0)]]]
    return [rollout_of(shape, draw(quarters), name) for name, shape in enumerate(shapes)]


def rewards_by_hand(rollout: Rollout) -> list[float]:
    """Slow reference: walk back in time from every reward to the last action token; the first one if there is none."""
    actions = [
        (number, position)
        for number, segment in enumerate(rollout.segments)
        for position, is_action in enumerate(segment.action_mask)
        if is_action
    ]
    rewards = dict.fromkeys(actions, 0.0)
    for turn in rollout.turns:
        earlier = [place for place in actions if place < (turn.segment, turn.end)]
        rewards[earlier[-1] if earlier else actions[0]] += turn.reward
    rewards[actions[-1]] += rollout.score or 0.0
    return list(rewards.values())


@given(steps())
def test_every_action_token_is_packed_once_with_its_own_log_probability_and_version(rollouts: list[Rollout]) -> None:
    batch = pack(rollouts)
    places = zip(batch.segment_T.tolist(), batch.position_T.tolist(), strict=True)
    packed = [
        (int(batch.sequences[s][p]), int(r), float(log_prob), int(version))
        for (s, p), r, log_prob, version in zip(
            places, batch.rollout_T, batch.rollout_log_probs_T, batch.versions_T, strict=True
        )
    ]
    expected = [
        (token, number, log_prob, version)
        for number, rollout in enumerate(rollouts)
        for segment in rollout.segments
        for token, log_prob, version in zip(
            segment.token_ids, segment.rollout_log_probs, segment.versions(), strict=True
        )
        if version is not None
    ]
    assert packed == expected
    assert batch.lengths_R.tolist() == [rollout.action_tokens for rollout in rollouts]
    assert batch.tokens == sum(batch.lengths_R.tolist())
    assert batch.rollouts == len(rollouts)


@given(steps())
def test_no_reward_is_lost_and_each_lies_on_the_last_action_token_at_or_before_its_event(
    rollouts: list[Rollout],
) -> None:
    """Trap 1: the sum over the packed row is the sum of the rollouts' rewards, empty turns included."""
    batch = pack(rollouts)
    by_rollout = torch.split(batch.rewards_T, batch.lengths_R.tolist())
    for rewards_t, rollout in zip(by_rollout, rollouts, strict=True):
        assert rewards_t.tolist() == rewards_by_hand(rollout)
        assert float(rewards_t.sum()) == rollout.reward


def test_rewards_by_literal_numbers() -> None:
    """Two turns, an empty one between them, one in a second segment, and the score at the very end."""
    rollout = rollout_of([[(1, 2, 0, 0.5), (2, 0, 0, 0.25), (1, 1, 0, 2.0)], [(0, 3, 1, -1.0), (4, 0, 1, 8.0)]], 100.0)
    batch = pack([rollout])
    assert batch.rewards_T.tolist() == [0.0, 0.75, 2.0, 0.0, 0.0, 107.0]
    assert batch.versions_T.tolist() == [0, 0, 0, 1, 1, 1]
    assert batch.position_T.tolist() == [2, 3, 7, 1, 2, 3]
    assert batch.segment_T.tolist() == [0, 0, 0, 1, 1, 1]


def test_the_reward_of_an_empty_first_turn_goes_to_the_first_action_token() -> None:
    batch = pack([rollout_of([[(0, 0, 0, 3.0), (1, 2, 0, 0.5)]], 0.0)])
    assert batch.rewards_T.tolist() == [3.0, 0.5]
    assert batch.rewards_T.dtype == torch.float32


@given(steps(), st.integers(1, 60), st.booleans())
def test_micro_batches_cover_all_tokens_once_and_name_them_as_the_step_does(
    rollouts: list[Rollout], budget: int, packed: bool
) -> None:
    batch = pack(rollouts)
    micros = micro_batches(batch, budget, packed=packed)
    tokens = [token for micro in micros for token in micro.tokens_t.tolist()]
    assert sorted(tokens) == list(range(batch.tokens))
    for micro in micros:
        expected = [
            batch.sequences[batch.segment_T[token]][batch.position_T[token]] for token in micro.tokens_t.tolist()
        ]
        assert micro.targets_t.tolist() == expected


@given(steps(), st.booleans())
def test_arrays_made_before_give_the_same_step(rollouts: list[Rollout], shuffled: bool) -> None:
    scores = [float(number) for number in range(len(rollouts))] if shuffled else None
    arrays = [rollout_arrays(rollout) for rollout in rollouts]
    one, two = pack(rollouts, scores=scores), pack(rollouts, scores=scores, arrays=arrays)
    assert torch.equal(one.rewards_T, two.rewards_T)
    assert torch.equal(one.rollout_log_probs_T, two.rollout_log_probs_T)
    assert pack(rollouts, scores=scores, arrays=arrays).rewards_T.tolist() == one.rewards_T.tolist(), "used up"


@pytest.mark.parametrize("packed", [False, True])
def test_the_states_after_the_end_are_those_of_truncated_rollouts_last_segments(packed: bool) -> None:
    rollouts = [
        rollout_of([[(0, 1, 0, 0.0)], [(0, 2, 0, 0.0)]], name=0, status="truncated", truncated=True),
        rollout_of([[(0, 4, 0, 0.0)]], name=1),
        rollout_of([[(0, 3, 0, 0.0)]], name=2, status="truncated", truncated=True),
    ]
    batch = pack(rollouts)
    (micro,) = states_after_the_end(batch, 100, packed=packed)
    assert sorted(micro.tokens_t.tolist()) == [0, 2]
    for rollout, place in zip(micro.tokens_t.tolist(), micro.before_t.tolist(), strict=True):
        last = rollouts[rollout].segments[-1].token_ids[-1]
        assert micro.input_ids_BL.flatten()[place] == last
    assert states_after_the_end(pack(rollouts[1:2]), 100, packed=packed) == []


@given(steps(), st.integers(1, 8), st.integers(1, 60))
def test_minibatches_partition_the_rollouts_and_their_micro_batches_the_tokens(
    rollouts: list[Rollout], parts: int, budget: int
) -> None:
    batch = pack(rollouts)
    split = minibatches(batch, parts)
    assert len(split) == parts
    assert sorted(member for part in split for member in part) == list(range(batch.rollouts))
    assert max(map(len, split)) - min(map(len, split)) <= 1
    tokens = [
        token for part in split for micro in micro_batches(batch, budget, part) for token in micro.tokens_t.tolist()
    ]
    assert sorted(tokens) == list(range(batch.tokens))


def test_rows_of_one_micro_batch_are_about_equally_long() -> None:
    lengths = [2, 30, 3, 29, 2, 31]
    batch = pack([rollout_of([[(0, length - 1, 0, 0.0)]], 0.0, name) for name, length in enumerate(lengths)])
    shapes = [tuple(micro.input_ids_BL.shape) for micro in micro_batches(batch, 93)]
    assert shapes == [(3, 31), (3, 3)]
    assert sum(rows * width for rows, width in shapes) == 102


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"status": "failed", "score": None, "failure": Failure(boundary="scorer", reason="x")}, "r3 is failed with"),
        ({"status": "aborted", "score": None}, "r3 is aborted with reward None"),
        ({"score": None}, "r3 is completed with reward None and 1 action tokens"),
        ({"segments": []}, "r3 is completed with reward 1.0 and 0 action tokens"),
        ({"score": math.nan}, "r3 is completed with reward nan"),
        ({"score": math.inf}, "r3 is completed with reward inf"),
    ],
)
def test_a_rollout_that_must_not_be_trained_is_refused_by_name(changes: dict[str, Any], sentence: str) -> None:
    """RB-030 … RB-034, RB-077: nothing without a verdict enters a gradient, and never as a reward of 0."""
    good = rollout_of([[(0, 1, 0, 0.0)]])
    bad = msgspec.structs.replace(good, rollout_id="r3", **changes)
    with pytest.raises(ValueError, match=sentence):
        pack([good, bad])
    assert pack([good]).tokens == 1


def test_per_token_data_that_do_not_fit_are_refused_with_rollout_and_segment() -> None:
    """RB-059, R8: the sample with a non-finite log-probability is named."""
    rollout = rollout_of([[(0, 1, 0, 0.0)], [(0, 2, 0, 0.0)]], name=7)
    rollout.segments[1].rollout_log_probs[2] = math.nan
    with pytest.raises(ValueError, match="rollout r7, segment 1: action token 2 has log-probability nan"):
        pack([rollout])
    rollout.segments[1].rollout_log_probs.pop()
    with pytest.raises(ValueError, match=r"rollout r7, segment 1: .*3 token_ids.*2 rollout_log_probs"):
        pack([rollout])


def test_replaced_scores_are_one_for_each_rollout_and_leave_the_turns_rewards() -> None:
    rollouts = [rollout_of([[(0, 2, 0, 0.5)]], score, name) for name, score in enumerate((1.0, 0.0))]
    assert pack(rollouts, scores=[0.0, 1.0]).rewards_T.tolist() == [0.0, 0.5, 0.0, 1.5]
    assert pack(rollouts).rewards_T.tolist() == [0.0, 1.5, 0.0, 0.5]
    for scores in ([1.0], [1.0, 2.0, 3.0]):
        with pytest.raises(ValueError, match=f"{len(scores)} scores were given for 2 rollouts"):
            pack(rollouts, scores=scores)


def test_a_step_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="0 rollouts"):
        pack([])
    with pytest.raises(ValueError, match=r"r0 is completed with reward 2\.0 and 0 action tokens"):
        pack([rollout_of([[(2, 0, 0, 1.0)]])])


def test_truncation_and_the_last_segment_are_known_for_the_bootstrap() -> None:
    rollouts = [
        rollout_of([[(0, 1, 0, 0.0)], [(0, 2, 0, 0.0)]], name=0, status="truncated", truncated=True),
        rollout_of([[(0, 1, 0, 0.0)]], name=1),
    ]
    batch = pack(rollouts)
    assert batch.truncated_R == [True, False]
    assert batch.last_segment_R.tolist() == [1, 2]
    assert batch.sequences[2].tolist() == rollouts[1].segments[0].token_ids


def mean_by_hand(numbers: list[float], batch: StepBatch, rollout: int) -> float:
    own = [number for number, owner in zip(numbers, batch.rollout_T.tolist(), strict=True) if owner == rollout]
    return math.fsum(own) / len(own)


@given(steps(), st.integers(0, 1000))
def test_means_per_rollout_count_long_rollouts_no_more_than_short_ones(rollouts: list[Rollout], seed: int) -> None:
    batch = pack(rollouts)
    numbers_T = torch.randn(batch.tokens, generator=torch.Generator().manual_seed(seed))
    means = per_rollout(numbers_T, batch).tolist()
    assert means == pytest.approx([mean_by_hand(numbers_T.tolist(), batch, r) for r in range(batch.rollouts)])
    equal_T = torch.full((batch.tokens,), 0.1)
    assert set(per_rollout(equal_T, batch).tolist()) == {float(equal_T[0])}
