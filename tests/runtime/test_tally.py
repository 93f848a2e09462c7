"""Counts of what became of attempts."""

from __future__ import annotations

from soloist.runtime.tally import Tally
from soloist.types import Failure


def test_the_share_of_failures_is_judged_over_the_last_window_only() -> None:
    tally = Tally(window=1)
    for _ in range(19):
        tally.failed(Failure(boundary="engine", reason="lost"), length=0)
    assert tally.failed_share() is None
    for _ in range(15):
        tally.scored(length=4)
    assert tally.failed_share() == 5 / 20
    assert tally.ended["failed"] == 19


def test_the_dominant_failure_names_boundary_and_reason() -> None:
    tally = Tally(window=1)
    assert tally.dominant_failure() == "no failure"
    for boundary, reason in (("engine", "a"), ("scorer", "b"), ("scorer", "c"), ("scorer", "c")):
        tally.failed(Failure(boundary=boundary, reason=reason), length=1)
    assert tally.dominant_failure() == "scorer (3 of 4 failures), most often: c"


def test_lengths_of_everything_that_ended_are_averaged_once() -> None:
    tally = Tally(window=1)
    tally.scored(length=10)
    tally.dropped("stale", length=10, scored_before=True)
    tally.dropped("stale", length=40)
    tally.failed(Failure(boundary="empty", reason="no action token"), length=1)
    metrics = tally.step_metrics()
    assert metrics["rollout/length_started"] == (10 + 40 + 1) / 3
    assert metrics["queue/dropped_length"] == 25
    assert (metrics["queue/dropped"], metrics["rollout/failed_ratio"]) == (2, 1 / 3)
    assert tally.step_metrics()["queue/dropped"] == 2, "dropped counts since the start"
