"""The recorder stores what was sampled as it was sampled, and seals a segment when the history was rewritten."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soloist.rollout.recorder import TurnRecorder
from soloist.types import Completion, VersionSpan


def completion(ids: list[int], *spans: tuple[int, int, int], log_probs: list[float] | None = None) -> Completion:
    """A completion with `spans` of (version, start, end), by default one span of version 0."""
    return Completion(
        token_ids=ids,
        log_probs=log_probs if log_probs is not None else [-(position + 1) / 8 for position in range(len(ids))],
        finish_reason="stop",
        version_spans=[VersionSpan(version=v, start=s, end=e) for v, s, e in spans or ((0, 0, len(ids)),)],
    )


def test_one_prompt_token_and_four_answer_tokens_give_four_trainable_positions() -> None:
    """RB-025: the first answer token and the sampled EOS count; the prompt does not."""
    recorder = TurnRecorder()
    recorder.prompt([7])
    recorder.action(completion([1, 2, 3, 99]), now=5.0)
    (segment,) = recorder.segments
    assert segment.action_mask == [False, True, True, True, True]
    assert segment.rollout_log_probs == [None, -0.125, -0.25, -0.375, -0.5]
    assert (recorder.turns[0].start, recorder.turns[0].end, recorder.turns[0].sampled_at) == (1, 5, 5.0)
    recorder.check()


def test_headers_and_the_newline_after_the_stop_token_are_not_trained() -> None:
    """RB-057: the template's own tokens (50 header, 51 newline) have mask 0, sampled ids and EOS mask 1."""
    recorder = TurnRecorder()
    recorder.prompt([1, 50])
    recorder.action(completion([8, 99]), now=0.0)
    recorder.prompt([1, 50, 8, 99, 51, 2, 50])
    recorder.action(completion([9, 99]), now=0.0)
    (segment,) = recorder.segments
    assert segment.token_ids == [1, 50, 8, 99, 51, 2, 50, 9, 99]
    assert segment.action_mask == [False, False, True, True, False, False, False, True, True]
    assert [log_prob is None for log_prob in segment.rollout_log_probs] == [not m for m in segment.action_mask]


def test_a_special_token_inside_an_action_moves_no_observation() -> None:
    """RB-053: the observation is what the ids say, whatever the text of the action looks like."""
    recorder = TurnRecorder()
    recorder.prompt([1])
    recorder.action(completion([4, 1_000, 5]), now=0.0)
    recorder.prompt([1, 4, 1_000, 5, 6, 6])
    recorder.action(completion([7]), now=0.0)
    (segment,) = recorder.segments
    assert segment.action_mask == [False, True, True, True, False, False, True]
    assert [recorder.turns[1].start, recorder.turns[1].end] == [6, 7]


def test_a_history_without_its_reasoning_seals_the_segment() -> None:
    """RB-054, RB-055, trap 4: the template drops 40 (reasoning) of past turns; each token keeps its own context."""
    recorder = TurnRecorder()
    recorder.prompt([1])
    recorder.action(completion([40, 4], (2, 0, 2)), now=0.0)
    recorder.prompt([1, 4, 6])
    recorder.action(completion([40, 5], (3, 0, 2)), now=0.0)
    recorder.prompt([1, 4, 6, 5, 6])
    recorder.action(completion([8], (3, 0, 1)), now=0.0)
    assert [segment.token_ids for segment in recorder.segments] == [[1, 40, 4], [1, 4, 6, 40, 5], [1, 4, 6, 5, 6, 8]]
    trained = [[t for t, m in zip(s.token_ids, s.action_mask, strict=True) if m] for s in recorder.segments]
    assert trained == [[40, 4], [40, 5], [8]]
    assert [turn.segment for turn in recorder.turns] == [0, 1, 2]
    recorder.check()


def test_a_shorter_prompt_is_a_rewritten_history_too() -> None:
    recorder = TurnRecorder()
    recorder.prompt([1, 2, 3])
    recorder.action(completion([4]), now=0.0)
    recorder.prompt([1, 2])
    assert [segment.token_ids for segment in recorder.segments] == [[1, 2, 3, 4], [1, 2]]
    assert recorder.token_ids == [1, 2]


def test_a_change_of_weights_in_mid_turn_is_kept_for_each_token() -> None:
    """Trap 7, RB-059: five tokens of the old version and four of the new one; all lists have one length."""
    recorder = TurnRecorder()
    recorder.prompt([1])
    recorder.action(completion(list(range(10, 19)), (3, 0, 5), (4, 5, 9)), now=0.0)
    (segment,) = recorder.segments
    assert segment.versions() == [None] + [3] * 5 + [4] * 4
    assert len(segment.token_ids) == len(segment.action_mask) == len(segment.rollout_log_probs) == 10


def test_spans_of_one_version_are_joined_only_where_they_touch() -> None:
    recorder = TurnRecorder()
    recorder.prompt([1])
    recorder.action(completion([2, 3], (3, 0, 1), (3, 1, 2)), now=0.0)
    recorder.action(completion([4], (3, 0, 1)), now=0.0)
    recorder.prompt([1, 2, 3, 4, 5])
    recorder.action(completion([6], (3, 0, 0), (3, 0, 1)), now=0.0)
    spans = [(span.version, span.start, span.end) for span in recorder.segments[0].version_spans]
    assert spans == [(3, 1, 4), (3, 5, 6)]
    recorder.check()


@pytest.mark.parametrize(
    "broken",
    [
        completion([2, 3], log_probs=[-0.5]),
        completion([2, 3], (0, 0, 1)),
        completion([2, 3], (0, 0, 1), (0, 0, 1)),
        completion([2, 3], (9, -1, 0), (0, 0, 1)),
        completion([2, 3], (0, 1, 2), (1, 0, 1)),
        completion([2, 3], (0, 0, 3), (1, 3, 2)),
        completion([], (0, 0, 1)),
    ],
)
def test_ids_log_probs_and_spans_that_disagree_are_refused_before_anything_is_stored(broken: Completion) -> None:
    recorder = TurnRecorder()
    recorder.prompt([1])
    with pytest.raises(ValueError, match="the engine returned"):
        recorder.action(broken, now=0.0)
    assert recorder.token_ids == [1]
    assert recorder.turns == []


def test_garbage_of_the_engine_is_found_by_the_check() -> None:
    recorder = TurnRecorder()
    recorder.prompt([1])
    recorder.action(completion([2, 3], log_probs=[-0.5, float("nan")]), now=0.0)
    with pytest.raises(ValueError, match="action token 2 has log-probability nan"):
        recorder.check()
    with pytest.raises(ValueError, match="0 tokens"):
        TurnRecorder().prompt([])


def test_an_observation_gives_its_reward_and_time_to_the_turn_before_it() -> None:
    recorder = TurnRecorder()
    recorder.prompt([1])
    recorder.action(completion([2]), now=1.0)
    recorder.observed(reward=0.5, now=2.0)
    recorder.action(completion([]), now=3.0)
    recorder.observed(reward=-1.0, now=4.0)
    assert [(t.reward, t.sampled_at, t.observed_at) for t in recorder.turns] == [(0.5, 1.0, 2.0), (-1.0, 3.0, 4.0)]
    assert (recorder.turns[1].start, recorder.turns[1].end) == (2, 2)


turns = st.lists(
    st.tuples(
        st.lists(st.integers(0, 9), max_size=3),  # observation before the action
        st.lists(st.integers(0, 9), max_size=4),  # action
        st.integers(0, 3),  # where the version changes
        st.booleans(),  # whether the history is rewritten first
    ),
    min_size=1,
    max_size=6,
)


@given(turns)
def test_whatever_is_played_every_sampled_token_is_stored_once_in_order(plays: list[tuple]) -> None:
    recorder = TurnRecorder()
    prompt, sampled, labels = [1], [], []
    for number, (observation, action, change, rewritten) in enumerate(plays):
        prompt = [100 + number, *observation] if rewritten else [*prompt, *observation]
        recorder.prompt(prompt)
        cut = min(change, len(action))
        recorder.action(completion(action, (number, 0, cut), (number + 1, cut, len(action))), now=0.0)
        sampled += action
        labels += [number] * cut + [number + 1] * (len(action) - cut)
        prompt = prompt + action
        assert recorder.token_ids == prompt
    recorder.check()
    stored = [(t, v) for s in recorder.segments for t, v in zip(s.token_ids, s.versions(), strict=True)]
    assert [pair for pair in stored if pair[1] is not None] == list(zip(sampled, labels, strict=True))
    assert len(recorder.segments) == 1 + sum(rewritten for *_, rewritten in plays[1:])
