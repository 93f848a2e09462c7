"""The stopwatch: durations by name, a timeline on the clock of the rollouts, and never in the way."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from soloist.training.stopwatch import Stopwatch


class TwoClocks:
    """The date can jump; the interval clock can't."""

    def __init__(self) -> None:
        self.interval = 7.0
        self.date = 1000.0

    def monotonic(self) -> float:
        return self.interval

    def now(self) -> float:
        return self.date

    def pass_(self, seconds: float, jump: float = 0.0) -> None:
        self.interval += seconds
        self.date += seconds + jump


async def work(advance: Callable[[], None], answer: str = "done", error: Exception | None = None) -> str:
    advance()
    if error is not None:
        raise error
    return answer


async def test_durations_are_summed_by_name_until_they_are_read() -> None:
    clock = TwoClocks()
    watch = Stopwatch(clock)
    assert await watch.timed("update", work(lambda: clock.pass_(2.0))) == "done"
    await watch.timed("update", work(lambda: clock.pass_(3.0)))
    await watch.timed("wait", work(lambda: clock.pass_(0.5)))
    clock.pass_(1.0)
    assert watch.read() == (6.5, {"update": 5.0, "wait": 0.5})
    clock.pass_(4.0)
    assert watch.read() == (4.0, {})


async def test_work_that_fails_is_timed_too_and_its_error_goes_on() -> None:
    clock = TwoClocks()
    watch = Stopwatch(clock)
    with pytest.raises(KeyError, match="broken"):
        await watch.timed("update", work(lambda: clock.pass_(2.0), error=KeyError("broken")))
    assert watch.read() == (2.0, {"update": 2.0})


async def test_a_clock_that_is_set_back_makes_no_negative_duration() -> None:
    clock = TwoClocks()
    watch = Stopwatch(clock)
    await watch.timed("update", work(lambda: clock.pass_(2.0, jump=-3600.0)))
    lap, seconds = watch.read()
    assert lap == 2.0
    assert seconds == {"update": 2.0}


async def test_the_timeline_has_what_ran_when_in_seconds_of_the_rollouts_clock(tmp_path: Path) -> None:
    clock = TwoClocks()
    path = tmp_path / "timeline.jsonl"
    watch = Stopwatch(clock, path)
    await watch.timed("update", work(lambda: clock.pass_(2.0)))
    assert not path.exists()
    watch.read()
    await watch.timed("wait", work(lambda: clock.pass_(1.0)))
    watch.read()
    watch.read()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"who": "learner", "what": "update", "start": 1000.0, "end": 1002.0},
        {"who": "learner", "what": "wait", "start": 1002.0, "end": 1003.0},
    ]


async def test_a_disk_that_fails_stops_the_timeline_and_not_the_work(tmp_path: Path) -> None:
    """R16: what is written for people never ends a run."""
    clock = TwoClocks()
    watch = Stopwatch(clock, tmp_path / "no such folder" / "timeline.jsonl")
    for _ in range(2):
        await watch.timed("update", work(lambda: clock.pass_(1.0)))
        assert watch.read() == (1.0, {"update": 1.0})
    assert list(tmp_path.iterdir()) == []
