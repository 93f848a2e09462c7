"""What breaks in an episode is a failure of its boundary, with its reason, and never a reward.

Engine, environment and rendering are the small real ones of `conftest.py`.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from soloist.environments.base import StepResult
from soloist.errors import RolloutError
from soloist.rollout import play
from soloist.types import Completion, Rollout, VersionSpan

TOOL_CALL, ANSWER = "?1+2$", "3$"


def assert_failed(rollout: Rollout, boundary: str, reason: str) -> None:
    assert rollout.status == "failed"
    assert rollout.failure is not None
    assert rollout.failure.boundary == boundary
    assert reason in rollout.failure.reason
    assert (rollout.score, rollout.reward, rollout.trainable, rollout.state) == (None, None, False, "finished")


# --- failures --------------------------------------------------------------------------------------------------------

# (where, what happens there, boundary of the failure, part of its reason)
BROKEN: list[tuple[str, Any, str, str]] = [
    ("generate", RolloutError("engine", "the child died"), "engine", "the child died"),
    ("generate", ValueError("bad reply"), "engine", "ValueError: bad reply"),
    ("generate", None, "engine", "AttributeError"),
    ("episode", KeyError("answer"), "environment", "KeyError: 'answer'"),
    ("reset", OSError("no sandbox left"), "environment", "OSError: no sandbox left"),
    ("reset", RolloutError("sandbox", "self-test failed"), "sandbox", "self-test failed"),
    ("reset", 3, "environment", "TypeError"),
    ("step", RuntimeError("pipe closed"), "environment", "RuntimeError: pipe closed"),
    ("step", RolloutError("sandbox", "the process is gone"), "sandbox", "the process is gone"),
    ("step", RolloutError("moon", "unknown place"), "environment", "unknown place"),
    ("step", None, "environment", "AttributeError"),
    ("step", TimeoutError("its own limit"), "environment", "TimeoutError: its own limit"),
    ("step", asyncio.CancelledError(), "environment", "cancelled from inside"),
    ("step", StepResult(reward=float("nan")), "scorer", "step returned nan"),
    ("score", RuntimeError("no verdict file"), "scorer", "RuntimeError: no verdict file"),
    ("score", RolloutError("scorer", "unparsable gold answer"), "scorer", "unparsable gold answer"),
    ("score", RolloutError("sandbox", "killed"), "sandbox", "killed"),
    ("prompt", ValueError("no template"), "renderer", "ValueError: no template"),
    ("prompt", "empty", "renderer", "0 tokens"),
    ("parse", IndexError("no call"), "renderer", "IndexError: no call"),
    ("assistant_message", TypeError("content"), "renderer", "TypeError: content"),
    ("extend", ValueError("no bridge"), "renderer", "ValueError: no bridge"),
]


@pytest.mark.parametrize(("point", "fault", "boundary", "reason"), BROKEN)
async def test_what_breaks_is_a_failure_of_its_boundary_and_never_a_score(
    bench: Any, point: str, fault: Any, boundary: str, reason: str
) -> None:
    """R7, RB-032, RB-034; trap 8: a broken part ends one rollout, with its reason, and is closed like any other."""
    parts = bench(TOOL_CALL, ANSWER, faults={point: fault})
    assert_failed(await parts.play(), boundary, reason)
    assert ("close" in parts.faults.called) == (point != "episode")


@pytest.mark.parametrize(
    ("point", "boundary"), [("reset", "environment"), ("step", "environment"), ("score", "scorer")]
)
async def test_what_never_answers_fails_within_its_deadline(
    bench: Any, monkeypatch: pytest.MonkeyPatch, point: str, boundary: str
) -> None:
    """R6: one hung part never stops training."""
    monkeypatch.setattr(play, "MACHINERY_SECONDS", 0.02)
    parts = bench(TOOL_CALL, ANSWER, faults={point: "hang"})
    assert_failed(await parts.play(), boundary, "no answer within 0.02 s")
    assert parts.environment.episodes[0].closed == 1


async def test_a_verifier_that_exceeds_its_limit_leaves_one_rollout_unscored_and_ends_nothing(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RB-136: only that sample has no verdict, with the limit as its reason; it is no 0, and the others are scored."""
    monkeypatch.setattr(play, "MACHINERY_SECONDS", 0.05)
    slow = {"score": "hang"}
    rollouts = await asyncio.gather(*[bench(ANSWER, faults=slow if n == 2 else {}).play() for n in range(4)])
    assert_failed(rollouts[2], "scorer", "no answer within 0.05 s")
    others = [rollout for n, rollout in enumerate(rollouts) if n != 2]
    assert [(rollout.status, rollout.score, rollout.trainable) for rollout in others] == [("completed", 1.0, True)] * 3


async def test_an_engine_that_ignores_the_abort_fails_soon_after_the_budget_of_seconds(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(play, "MACHINERY_SECONDS", 0.02)
    parts = bench(ANSWER, faults={"generate": "hang"}, max_seconds=0.02)
    assert_failed(await parts.play(), "engine", "no answer within 0.04 s")
    assert parts.engine.aborted.is_set()


@pytest.mark.parametrize("point", ["release", "close"])
@pytest.mark.parametrize("fault", ["hang", OSError("gone"), RolloutError("engine", "gone")])
async def test_cleaning_up_that_fails_or_hangs_loses_no_rollout(
    bench: Any, monkeypatch: pytest.MonkeyPatch, point: str, fault: Any
) -> None:
    monkeypatch.setattr(play, "MACHINERY_SECONDS", 0.02)
    parts = bench(ANSWER, faults={point: fault})
    rollout = await parts.play()
    assert (rollout.status, rollout.score) == ("completed", 1.0)
    assert {"release", "close"} <= set(parts.faults.called)


@pytest.mark.parametrize(
    "answer",
    [
        None,
        (None, {}),
        (float("nan"), {}),
        (float("inf"), {}),
        (-float("inf"), {}),
        ("abc", {}),
        ("", {}),
        ([1.0], {}),
        (10**400, {}),
        (1e16, {}),
        (1.0,),
        (1.0, {"verdict": object()}),
        (1.0, {"text": "\ud800"}),
        (1.0, 7),
    ],
)
async def test_what_is_no_number_is_a_failed_verdict_and_never_0(bench: Any, answer: Any) -> None:
    """RB-030, RB-031, RB-034: None, NaN, ±inf, "abc" or a wrong shape is excluded, with the value in the reason."""
    rollout = await bench(ANSWER, faults={"score": answer}).play()
    assert_failed(rollout, "scorer", "")
    assert rollout.failure is not None
    assert rollout.failure.reason


@pytest.mark.parametrize(("answer", "score"), [((True, {}), 1.0), ((-3, {}), -3.0), ((0, {}), 0.0)])
async def test_numbers_of_other_types_are_taken_as_they_are(bench: Any, answer: Any, score: float) -> None:
    rollout = await bench(ANSWER, faults={"score": answer}).play()
    assert (rollout.score, rollout.status) == (score, "completed")
    assert type(rollout.score) is float


def garbage(**changes: Any) -> Completion:
    good = {
        "token_ids": [ord("3"), ord("$")],
        "log_probs": [-0.5, -0.25],
        "finish_reason": "stop",
        "version_spans": [VersionSpan(version=1, start=0, end=2)],
    }
    return Completion(**(good | changes))


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        (garbage(log_probs=[-0.5]), "2 ids, 1 log-probabilities"),
        (garbage(log_probs=[-0.5, float("nan")]), "log-probability nan"),
        (garbage(log_probs=[-0.5, float("-inf")]), "log-probability -inf"),
        (garbage(log_probs=[-0.5, 2.0]), "log-probability 2.0"),
        (garbage(version_spans=[]), "version spans []"),
        (garbage(version_spans=[VersionSpan(version=1, start=0, end=9)]), "version spans [(0, 9)]"),
        (garbage(version_spans=[VersionSpan(version=-1, start=0, end=2)]), "version -1"),
    ],
)
async def test_garbage_of_an_engine_is_stopped_at_the_door(bench: Any, completion: Completion, reason: str) -> None:
    """S17, RB-059: lengths, log-probabilities and versions are checked before anything is scored or trained."""
    parts = bench(ANSWER, faults={"generate": completion})
    assert_failed(await parts.play(), "engine", reason)
    assert "score" not in parts.faults.called


@pytest.mark.parametrize("script", ["", "…"])
async def test_a_rollout_without_a_sampled_token_has_failed_as_empty(bench: Any, script: str) -> None:
    parts = bench(script)
    parts.engine.aborted.set()
    if script == "…":
        parts.faults.plan["reset"] = lambda: [{"role": "user", "content": "x" * 300}]  # no room for an action
    assert_failed(await parts.play(), "empty", "no token")
    assert parts.environment.episodes[0].closed == 1


async def test_an_empty_turn_beside_others_is_kept_with_its_reward(bench: Any) -> None:
    parts = bench("", ANSWER)
    parts.faults.plan["step"] = iter(
        [StepResult(messages=[{"role": "user", "content": "go on"}], reward=0.5), StepResult(terminated=True)]
    )
    rollout = await parts.play()
    assert (rollout.status, rollout.reward) == ("completed", 1.5)
    assert [turn.end - turn.start for turn in rollout.turns] == [0, 2]


@pytest.mark.parametrize("content", ["\ud800", object(), 2**70])
async def test_messages_that_no_ledger_can_store_fail_one_rollout_and_not_the_run(bench: Any, content: Any) -> None:
    message = {"role": "tool", "content": content}
    for point, planned in (("reset", [message]), ("step", StepResult(messages=[message]))):
        rollout = await bench(TOOL_CALL, ANSWER, faults={point: planned}).play()
        assert_failed(rollout, "environment", "Error")


async def test_a_reason_is_stored_whatever_it_contains(bench: Any) -> None:
    rollout = await bench(ANSWER, faults={"score": ValueError("\ud800" + "x" * 10_000)}).play()
    assert_failed(rollout, "scorer", "ValueError: ?xxx")
    assert rollout.failure is not None
    assert len(rollout.failure.reason) == 1000


async def test_of_rollouts_whose_reset_mostly_fails_only_the_others_are_trained(bench: Any) -> None:
    """RB-033: nine of ten resets fail; none of the nine becomes a reward of 0."""
    faults = [{"reset": OSError("image missing")} if number != 4 else {} for number in range(10)]
    rollouts = [await bench(ANSWER, faults=fault).play() for fault in faults]
    assert [rollout.trainable for rollout in rollouts] == [number == 4 for number in range(10)]
    assert [rollout.reward for rollout in rollouts if rollout.reward is not None] == [1.25]
    assert {rollout.failure.reason for rollout in rollouts if rollout.failure} == {"OSError: image missing"}
