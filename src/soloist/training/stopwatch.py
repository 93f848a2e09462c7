"""Where the time of a step goes: durations for the metrics, and a timeline of what ran when.

The timeline is one JSON object a line: `{"who": "learner", "what": "update_value", "start": 12.1, "end": 12.4}`,
seconds of the same clock as the rollouts' time stamps, so generation and training can be laid side by side. Durations
come from the clock that never goes back.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

from soloist.seams import Clock, fault_point

T = TypeVar("T")


class Stopwatch:
    """Sums durations by name until they are read.

    Example: `rollouts = await stopwatch.timed("wait_for_rollouts", buffer.take(version=3))`.
    """

    def __init__(self, clock: Clock, timeline: Path | None = None) -> None:
        self._clock = clock
        self._timeline = timeline
        self._seconds: dict[str, float] = {}
        self._events: list[dict[str, float | str]] = []
        self._lap = clock.monotonic()

    async def timed(self, name: str, work: Awaitable[T]) -> T:
        """Await `work` and add its duration to `name`. A fault point lies before it and one after it."""
        start, began = self._clock.now(), self._clock.monotonic()
        fault_point(f"{name}:before")
        try:
            found = await work
            fault_point(f"{name}:after")
            return found
        finally:
            duration = self._clock.monotonic() - began
            self._seconds[name] = self._seconds.get(name, 0.0) + duration
            self._events.append({"who": "learner", "what": name, "start": start, "end": start + duration})

    def read(self) -> tuple[float, dict[str, float]]:
        """Seconds since the last reading and durations by name; begins anew."""
        now = self._clock.monotonic()
        lap, self._lap = now - self._lap, now
        seconds, self._seconds = self._seconds, {}
        self._write_timeline()
        return lap, seconds

    def _write_timeline(self) -> None:
        events, self._events = self._events, []
        if self._timeline is None:
            return
        try:
            with self._timeline.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(event) + "\n" for event in events)
        except OSError:
            # A timeline is for people; a full disk shows up where it matters, in ledger and checkpoints.
            self._timeline = None
