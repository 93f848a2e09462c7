"""Records: immutable, strict on the wire, and a segment that says what is wrong with its tokens."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from soloist.types import Completion, Failure, Rollout, Sampling, Segment, Task, Turn, VersionSpan

GOOD: dict[str, Any] = {
    "token_ids": [3, 9, 5, 7],
    "action_mask": [False, True, True, False],
    "rollout_log_probs": [None, -0.1, -0.7, None],
    "version_spans": [VersionSpan(version=4, start=1, end=2), VersionSpan(version=6, start=2, end=3)],
}


def segment(**changes: Any) -> Segment:
    return Segment(**(GOOD | changes))


def rollout(**changes: Any) -> Rollout:
    return Rollout(**({"rollout_id": "r", "task_id": "t", "group_id": "g", "environment": "e"} | changes))


def test_each_action_token_has_a_version_and_observations_have_none() -> None:
    assert segment().versions() == [None, 4, 6, None]
    assert segment().action_tokens == 2
    segment().check(vocab_size=10)


def test_a_span_over_an_observation_labels_no_token_of_it() -> None:
    wide = segment(version_spans=[VersionSpan(version=4, start=0, end=4)])
    assert wide.versions() == [None, 4, 4, None]
    wide.check()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"action_mask": [False, True, True]}, "4 token_ids, 3 action_mask"),
        ({"rollout_log_probs": [None, -0.1, -0.7]}, "3 rollout_log_probs"),
        ({"rollout_log_probs": [None, -0.1, None, None]}, "action token 2 has log-probability None"),
        ({"rollout_log_probs": [None, float("nan"), -0.7, None]}, "action token 1 has log-probability nan"),
        ({"rollout_log_probs": [None, float("-inf"), -0.7, None]}, "action token 1 has log-probability -inf"),
        ({"rollout_log_probs": [None, 0.3, -0.7, None]}, r"log-probability 0\.3; it must be finite and ≤ 0"),
        ({"version_spans": [VersionSpan(version=4, start=1, end=2)]}, "action token 2 has version None"),
        ({"version_spans": [VersionSpan(version=-1, start=1, end=3)]}, "action token 1 has version -1"),
        ({"version_spans": [VersionSpan(version=4, start=1, end=5)]}, "version spans reach beyond the 4 tokens"),
        ({"version_spans": [VersionSpan(version=4, start=-3, end=3)]}, "version spans reach beyond the 4 tokens"),
        ({"version_spans": [VersionSpan(version=4, start=3, end=1)]}, "version spans reach beyond the 4 tokens"),
        ({"token_ids": [3, -9, 5, 7]}, "token 1 is -9, outside the vocabulary"),
        ({"token_ids": [3, 10, 5, 7]}, "token 1 is 10, outside the vocabulary of 10"),
        ({"action_mask": [True, True, True, False]}, "token 0 is an action, but nothing precedes it"),
    ],
)
def test_a_segment_whose_data_do_not_fit_is_refused_with_the_place(changes: dict[str, Any], sentence: str) -> None:
    """RB-059: ids, mask, log-probabilities and versions have one length, checked at every hand-over."""
    with pytest.raises(ValueError, match=sentence):
        segment(**changes).check(vocab_size=10)


def test_garbage_at_observation_tokens_is_no_reason_to_refuse() -> None:
    odd = segment(rollout_log_probs=[float("nan"), -0.1, -0.7, 3.0])
    odd.check()
    assert odd.action_tokens == 2


def test_the_reward_is_the_sum_of_turns_and_score_and_unknown_without_a_score() -> None:
    turns = [Turn(segment=0, start=1, end=2, finish_reason="stop", reward=reward) for reward in (0.25, -1.0)]
    assert rollout(turns=turns, score=2.0).reward == 1.25
    assert rollout(turns=turns).reward is None
    assert rollout(turns=turns, score=0.0).reward == -0.75


@pytest.mark.parametrize(
    ("changes", "trainable"),
    [
        ({"status": "completed", "score": 0.0}, True),
        ({"status": "truncated", "score": 1.0, "truncated": True}, True),
        ({"status": "completed", "score": None}, False),
        ({"status": "aborted", "score": None}, False),
        ({"status": "aborted", "score": 1.0}, False),
        ({"status": "failed", "score": 0.0, "failure": Failure(boundary="scorer", reason="x")}, False),
        ({"status": None, "score": 1.0}, False),
        ({"status": "completed", "score": 1.0, "segments": []}, False),
    ],
)
def test_only_a_scored_play_with_actions_is_trainable(changes: dict[str, Any], trainable: bool) -> None:
    """R7: a failure is never trained, and a score of 0 is a score."""
    record = rollout(**({"segments": [segment()]} | changes))
    assert record.trainable is trainable
    assert record.action_tokens == (2 if record.segments else 0)


def test_the_oldest_version_is_over_all_segments_and_ignores_empty_spans() -> None:
    empty = VersionSpan(version=1, start=2, end=2)
    second = segment(version_spans=[VersionSpan(version=3, start=1, end=3), empty])
    record = rollout(segments=[segment(), second])
    assert record.oldest_version == 3
    assert [span.version for span in record.spans()] == [4, 6, 3, 1]
    assert rollout().oldest_version is None


def test_records_are_immutable_and_refuse_unknown_or_mistyped_fields_from_outside() -> None:
    with pytest.raises(AttributeError):
        segment().token_ids = []  # type: ignore[misc]
    with pytest.raises(msgspec.ValidationError, match="answr"):
        msgspec.json.decode(b'{"task_id": "t", "environment": "e", "data": {}, "answr": 1}', type=Task)
    with pytest.raises(msgspec.ValidationError, match="finish_reason"):
        msgspec.convert(
            {"token_ids": [1], "log_probs": [0.0], "finish_reason": "eos", "version_spans": []}, type=Completion
        )


numbers = st.floats(allow_nan=False, allow_infinity=False)


@given(
    ids=st.lists(st.integers(0, 300_000), max_size=6),
    score=st.none() | numbers,
    status=st.sampled_from(["completed", "truncated", "aborted", "failed", None]),
    version=st.integers(0, 2**31),
)
def test_a_rollout_survives_the_wire_bit_for_bit(
    ids: list[int], score: float | None, status: Any, version: int
) -> None:
    part = Segment(
        token_ids=ids,
        action_mask=[True] * len(ids),
        rollout_log_probs=[-1 / 3] * len(ids),
        version_spans=[VersionSpan(version=version, start=0, end=len(ids))],
    )
    record = rollout(segments=[part], score=score, status=status, sampling=Sampling(stop_token_ids=(5,)))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=Rollout) == record
    assert msgspec.json.decode(msgspec.json.encode(record), type=Rollout) == record
