"""An episode becomes a rollout: tokens as sampled, budgets truncate, an abort is marked, a second attempt is new.

Engine, environment and rendering are the small real ones of `conftest.py`. What breaks is in `test_play_failures.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from soloist.environments.base import StepResult
from soloist.types import Message, Rollout

TOOL_CALL, ANSWER = "?1+2$", "3$"


def trained_text(rollout: Rollout) -> list[str]:
    """Trainable tokens of each segment, as text."""
    return [
        "".join(chr(t) for t, is_action in zip(s.token_ids, s.action_mask, strict=True) if is_action)
        for s in rollout.segments
    ]


# --- good episodes ---------------------------------------------------------------------------------------------------


async def test_a_tool_turn_and_an_answer_become_one_segment_with_exactly_the_sampled_tokens_trained(bench: Any) -> None:
    """RB-025, RB-057: mask 1 on what was sampled, the stop token included, and 0 on everything of the template."""
    parts = bench(TOOL_CALL, ANSWER)
    rollout = await parts.play()
    (segment,) = rollout.segments
    text = "".join(map(chr, segment.token_ids))
    assert text == "[u]1+2?\n[a]?1+2$[t]3\n[a]3$"
    mask = "".join("1" if is_action else "0" for is_action in segment.action_mask)
    assert mask == "00000000000" + "11111" + "00000000" + "11"
    assert [log_prob for log_prob in segment.rollout_log_probs if log_prob is not None] == [
        -(position + 1) / 64 for position in range(7)
    ]
    assert (rollout.status, rollout.state, rollout.terminated, rollout.truncated) == (
        "completed",
        "scored",
        True,
        False,
    )
    assert [message["role"] for message in rollout.messages] == ["user", "assistant", "tool", "assistant"]
    assert rollout.info == {"tool_calls": 1}


async def test_rewards_of_turns_and_score_add_up(bench: Any) -> None:
    rollout = await bench(TOOL_CALL, TOOL_CALL, ANSWER).play()
    assert [turn.reward for turn in rollout.turns] == [0.125, 0.125, 0.25]
    assert rollout.score == 1.0
    assert rollout.reward == 1.5


async def test_a_wrong_answer_is_a_reward_of_0_and_is_trained(bench: Any) -> None:
    """RB-034: a real failing verdict still gives 0.0."""
    rollout = await bench("4$").play()
    assert (rollout.score, rollout.status, rollout.trainable) == (0.0, "completed", True)
    assert rollout.failure is None


async def test_a_change_of_weights_in_mid_turn_labels_each_token_with_its_version(bench: Any) -> None:
    """Trap 7, RB-059: the labels are the engine's, and ids, masks, log-probabilities and versions have one length."""
    rollout = await bench(TOOL_CALL, ANSWER, switch_after=2).play()
    (segment,) = rollout.segments
    versions = [version for version in segment.versions() if version is not None]
    assert versions == [5, 5, 6, 6, 6, 6, 6]
    assert rollout.oldest_version == 5
    lengths = {len(segment.action_mask), len(segment.rollout_log_probs), len(segment.versions())}
    assert lengths == {len(segment.token_ids)}


async def test_ids_are_stored_as_sampled_where_text_would_not_give_them_back(bench: Any) -> None:
    """Trap 4: rendering the conversation again gives other ids (no stop token), yet the sampled ones go on."""
    parts = bench(TOOL_CALL, ANSWER)
    rollout = await parts.play()
    (segment,) = rollout.segments
    sampled = [token for completion in parts.engine.completions for token in completion.token_ids]
    assert [t for t, is_action in zip(segment.token_ids, segment.action_mask, strict=True) if is_action] == sampled
    rendered_again = parts.rendering.prompt(rollout.messages, [])
    assert rendered_again[: len(segment.token_ids)] != segment.token_ids
    second = parts.engine.requests[1].prompt_ids
    assert segment.token_ids[: len(second)] == second


async def test_a_rewritten_history_seals_a_segment_and_every_token_keeps_the_context_it_was_sampled_in(
    bench: Any,
) -> None:
    """RB-054, trap 4: the template changes past actions, so turn n + 1 does not extend turn n."""
    parts = bench("?1+2$", "?3+4$", "x3$", forgets=True)
    parts.faults.plan["step"] = iter(
        [
            StepResult(messages=[{"role": "tool", "content": "a"}]),
            StepResult(messages=[{"role": "tool", "content": "b"}]),
            StepResult(terminated=True),
        ]
    )
    rollout = await parts.play()
    assert trained_text(rollout) == ["?1+2$", "?3+4$", "x3$"]
    for segment, turn, request in zip(rollout.segments, rollout.turns, parts.engine.requests, strict=True):
        assert segment.token_ids[: turn.start] == request.prompt_ids
    assert [turn.segment for turn in rollout.turns] == [0, 1, 2]
    assert rollout.trainable


async def test_the_engine_is_asked_with_the_rollouts_key_slot_and_sampling(bench: Any) -> None:
    parts = bench(TOOL_CALL, ANSWER, max_new_tokens=9)
    await parts.play(slot=6)
    requests = parts.engine.requests
    assert [(r.rollout_id, r.key, r.slot) for r in requests] == [("r", 17, 6)] * 2
    assert [(r.sampling.temperature, r.sampling.seed, r.sampling.max_new_tokens) for r in requests] == [(0.7, 3, 9)] * 2
    assert len({r.request_id for r in requests}) == 2


# --- budgets truncate ------------------------------------------------------------------------------------------------


async def test_the_last_turn_gets_what_is_left_of_the_tokens_and_keeps_its_reason(bench: Any) -> None:
    """RB-074: a prompt of 11 tokens in a budget of 14 leaves 3; the cut action is truncated, no format error."""
    parts = bench("12345678$", max_tokens=14)
    rollout = await parts.play()
    assert parts.engine.requests[0].sampling.max_new_tokens == 3
    assert rollout.turns[0].finish_reason == "length"
    assert len(rollout.segments[0].token_ids) == 14
    assert (rollout.status, rollout.truncated, rollout.terminated) == ("truncated", True, False)
    assert rollout.score == 0.0


async def test_the_length_of_the_model_limits_the_tokens_too(bench: Any) -> None:
    parts = bench("1" * 300, max_tokens=400, max_new_tokens=400)
    rollout = await parts.play()
    assert len(rollout.segments[0].token_ids) == 256
    assert rollout.status == "truncated"


async def test_an_action_cut_by_length_is_not_executed_but_the_rollout_is_scored(bench: Any) -> None:
    parts = bench("?1+23$", max_new_tokens=4)
    rollout = await parts.play()
    assert parts.environment.episodes[0].steps == []
    assert trained_text(rollout) == ["?1+2"]
    assert (rollout.status, rollout.score, rollout.trainable) == ("truncated", 0.0, True)
    assert rollout.messages[-1] == {"role": "assistant", "content": "?1+2"}


@pytest.mark.parametrize(("budget", "turns"), [({"max_turns": 2}, 2), ({"max_tokens": 24}, 1), ({"max_turns": 1}, 1)])
async def test_the_budget_of_turns_or_tokens_truncates_between_turns_and_the_rollout_is_scored(
    bench: Any, budget: dict[str, int], turns: int
) -> None:
    parts = bench(TOOL_CALL, TOOL_CALL, ANSWER, **budget)
    rollout = await parts.play()
    assert len(rollout.turns) == turns
    assert (rollout.status, rollout.truncated, rollout.terminated) == ("truncated", True, False)
    assert (rollout.score, rollout.trainable) == (0.0, True)
    assert rollout.reward == 0.125 * turns


async def test_seconds_that_run_out_during_a_tool_call_truncate_before_the_next_action(bench: Any) -> None:
    parts = bench(TOOL_CALL, ANSWER, max_seconds=5)

    def slow() -> StepResult:
        parts.clock.time += 6
        return StepResult(messages=[{"role": "tool", "content": "3"}])

    parts.faults.plan["step"] = slow
    rollout = await parts.play()
    assert (rollout.status, rollout.truncated, rollout.score) == ("truncated", True, 0.0)
    assert trained_text(rollout) == [TOOL_CALL]


async def test_seconds_that_run_out_during_an_action_stop_it_and_what_was_sampled_is_scored_and_trained(
    bench: Any,
) -> None:
    parts = bench("12…", max_seconds=5)

    def slow() -> list[Message]:
        parts.clock.time += 4.99
        return [{"role": "user", "content": "1+2?"}]

    parts.faults.plan["reset"] = slow
    rollout = await parts.play()
    assert parts.engine.aborted.is_set()
    assert (rollout.status, rollout.truncated, rollout.score) == ("truncated", True, 0.0)
    assert trained_text(rollout) == ["12"]
    assert rollout.turns[0].finish_reason == "abort"


@pytest.mark.parametrize(
    ("flags", "status"),
    [
        ({"truncated": True}, "truncated"),
        ({"terminated": True}, "completed"),
        ({"terminated": True, "truncated": True}, "completed"),
    ],
)
async def test_the_environments_own_limit_truncates_and_an_end_wins_over_it(
    bench: Any, flags: dict[str, bool], status: str
) -> None:
    """Trap 2: two flags; when both are set, the episode ended by itself."""
    rollout = await bench(ANSWER, faults={"step": StepResult(**flags)}).play()
    assert rollout.status == status
    assert (rollout.terminated, rollout.truncated) == (status == "completed", status == "truncated")
    assert rollout.score == 1.0


# --- aborted and tried again -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_new_tokens", [64, 2])
async def test_an_abort_from_outside_is_marked_and_never_scored_even_at_the_token_limit(
    bench: Any, max_new_tokens: int
) -> None:
    """RB-077: aborted exactly at its limit, the rollout is neither truncated nor trained without a reward."""
    parts = bench("12…", max_new_tokens=max_new_tokens)
    parts.engine.aborted.set()
    rollout = await parts.play()
    assert (rollout.status, rollout.state, rollout.truncated) == ("aborted", "finished", False)
    assert (rollout.score, rollout.reward, rollout.trainable) == (None, None, False)
    assert "score" not in parts.faults.called
    assert trained_text(rollout) == ["12"]


async def test_a_second_attempt_starts_from_an_empty_record(bench: Any) -> None:
    """RB-060: six tokens, aborted; the second attempt has three tokens and nothing of the first but its number."""
    parts = bench("123456…", "45$")
    parts.engine.aborted.set()
    first = await parts.play()
    second = await parts.play(attempt=1)
    assert (trained_text(first), trained_text(second)) == (["123456"], ["45$"])
    assert (second.attempt, len(second.turns), second.status) == (1, 1, "completed")
    assert len(second.segments[0].rollout_log_probs) == len(second.segments[0].token_ids) == 14
    assert len(parts.environment.episodes) == 2


# --- cancelled -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["reset", "generate", "step", "score"])
async def test_a_cancelled_player_cleans_up_and_stays_cancelled(bench: Any, point: str) -> None:
    parts = bench(TOOL_CALL, ANSWER, faults={point: "hang"})
    task = asyncio.ensure_future(parts.play())
    await until(lambda: point in parts.faults.called)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert parts.environment.episodes[0].closed == 1
    assert parts.engine.released == ["r"]


async def until(condition: Callable[[], bool]) -> None:
    """Let other tasks run until the condition holds."""
    for _ in range(100):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("the condition never came true")
