"""Figures of a step's rollouts: no invented zeros, staleness of the oldest token, and warnings worth hearing."""

from __future__ import annotations

from typing import Any

import pytest

from soloist.metrics import is_registered
from soloist.training.statistics import rollout_metrics, staleness_of, warnings_of
from soloist.types import Failure, Rollout, Sampling, Segment, Turn, VersionSpan


def rollout(score: float | None, versions: list[int], name: str = "r", **changes: Any) -> Rollout:
    """A rollout with one action token of each version, in one segment."""
    n = len(versions)
    segment = Segment(
        token_ids=[0, *range(1, n + 1)],
        action_mask=[False] + [True] * n,
        rollout_log_probs=[None] + [-0.5] * n,
        version_spans=[VersionSpan(version=v, start=i + 1, end=i + 2) for i, v in enumerate(versions)],
    )
    fields: dict[str, Any] = {
        "rollout_id": name, "task_id": "t", "group_id": "g", "environment": "e", "status": "completed",
        "state": "scored", "score": score, "segments": [segment], "sampling": Sampling(max_new_tokens=8),
        "turns": [Turn(segment=0, start=1, end=n + 1, finish_reason="stop")], "scored_at": 90.0,
    }  # fmt: skip
    return Rollout(**(fields | changes))


def test_staleness_counts_from_the_oldest_token_whatever_was_loaded_in_flight() -> None:
    assert staleness_of(rollout(1.0, [4, 5, 7]), version=7) == 3
    assert staleness_of(rollout(1.0, [7]), version=7) == 0


@pytest.mark.parametrize(("versions", "found"), [([8], "oldest version 8"), ([], "oldest version None")])
def test_a_negative_or_unknown_staleness_is_an_error_that_names_the_rollout(versions: list[int], found: str) -> None:
    """Trap 7: it means a wrong label, not a fresh rollout."""
    with pytest.raises(ValueError, match=f"rollout r9 has {found} but version 7"):
        staleness_of(rollout(1.0, versions, "r9"), version=7)
    with pytest.raises(ValueError, match="r9"):
        rollout_metrics([rollout(1.0, [7]), rollout(1.0, versions, "r9")], version=7, now=100.0)


def test_the_figures_of_a_step_by_literal_numbers() -> None:
    rollouts = [
        rollout(1.0, [5, 5, 6, 7], info={"tool_calls": 2}),
        rollout(0.0, [7, 7], truncated=True, status="truncated", scored_at=96.0),
        rollout(0.0, [6, 6, 6], turns=[]),
        rollout(1.0, [7]),
    ]
    assert rollout_metrics(rollouts, version=7, now=100.0) == {
        "reward/mean": 0.5,
        "reward/std": 0.5,
        "rollout/length": 2.5,
        "rollout/truncated_ratio": 0.25,
        "rollout/turns": 0.75,
        "rollout/tool_calls": 0.5,
        "off_policy/staleness/mean": 0.75,
        "off_policy/staleness/max": 2.0,
        "off_policy/staleness/p95": 2.0,
        "off_policy/versions_per_rollout": 1.5,
        "off_policy/spanning_frac": 0.25,
        "queue/age_s": 8.5,
    }
    assert all(is_registered(name) for name in rollout_metrics(rollouts, version=7, now=100.0))


def test_rewards_include_those_of_the_turns() -> None:
    turns = [Turn(segment=0, start=1, end=2, finish_reason="stop", reward=0.25)]
    metrics = rollout_metrics([rollout(1.0, [0], turns=turns), rollout(0.75, [0])], version=0, now=100.0)
    assert metrics["reward/mean"] == 1.0
    assert metrics["reward/std"] == 0.25


def test_a_rollout_without_a_score_is_no_reward_of_0() -> None:
    """RB-032, RB-078: of four rollouts two have no verdict; the mean is that of the other two."""
    failure = Failure(boundary="scorer", reason="raised")
    rollouts = [
        rollout(1.0, [0]),
        rollout(None, [0], status="failed", failure=failure),
        rollout(0.5, [0]),
        rollout(None, [0], status="aborted"),
    ]
    metrics = rollout_metrics(rollouts, version=0, now=100.0)
    assert (metrics["reward/mean"], metrics["reward/std"]) == (0.75, 0.25)
    unscored = rollout_metrics(rollouts[1:2], version=0, now=100.0)
    assert (unscored["reward/mean"], unscored["reward/std"]) == (None, None)


def test_a_first_step_cut_short_without_signal_says_which_setting_to_raise() -> None:
    """RB-073: every completion truncated at 8 tokens, every reward 0."""
    rollouts = [rollout(0.0, [0] * 8, truncated=True, status="truncated") for _ in range(3)]
    truncated, constant = warnings_of(rollouts, rollout_metrics(rollouts, version=0, now=100.0))
    assert "all 3 rollouts were truncated (longest turn allowed: 8 tokens)" in truncated
    assert "rollout.max_new_tokens" in truncated
    assert "all 3 rewards are 0" in constant


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1.0, -0.7])
def test_equal_rewards_are_noticed_whatever_number_they_are(reward: float) -> None:
    """A mean of equal floats may differ from them by rounding; the spread must be exactly 0 all the same."""
    rollouts = [rollout(reward, [0]) for _ in range(7)]
    metrics = rollout_metrics(rollouts, version=0, now=100.0)
    assert metrics["reward/std"] == 0.0
    assert len(warnings_of(rollouts, metrics)) == 1


def test_a_step_that_teaches_something_is_not_warned_about() -> None:
    rollouts = [rollout(0.0, [0], truncated=True, status="truncated"), rollout(1.0, [0])]
    metrics = rollout_metrics(rollouts, version=0, now=100.0)
    assert warnings_of(rollouts, metrics) == []
    (warning,) = warnings_of(rollouts, metrics | {"advantage/zero_frac": 1.0})
    assert "all advantages are 0" in warning
