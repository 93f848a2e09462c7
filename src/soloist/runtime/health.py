"""What keeps the event loop honest: a gauge of its delay, a thread for work that would block it, a voice for waits.

Guarantees: the gauge's memory is constant however long it runs; a `WorkerThread` runs its calls one after the other in
one thread, in the order in which they were asked for.
Not covered: stalls of the data flow (`buffer.py` reports those).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import ParamSpec, TypeVar

import psutil

from soloist.seams import Clock, SystemClock

P = ParamSpec("P")
T = TypeVar("T")

_SMALLEST_S = 1e-5
_BUCKETS_PER_OCTAVE = 8
_BUCKETS = 24 * _BUCKETS_PER_OCTAVE  # up to 168 s; longer delays share the last bucket


class DelayHistogram:
    """Counts of delays in buckets that are 2^(1/8) wide (9 %), so a percentile is exact within one bucket."""

    def __init__(self) -> None:
        self._counts = [0] * (_BUCKETS + 1)
        self.total = 0

    def add(self, seconds: float) -> None:
        """Count one delay; negative ones count as none."""
        ratio = max(seconds, _SMALLEST_S) / _SMALLEST_S
        # Rounded up: a percentile may overstate a delay by one bucket, never understate it.
        self._counts[min(_BUCKETS, math.ceil(math.log2(ratio) * _BUCKETS_PER_OCTAVE))] += 1
        self.total += 1

    def percentile(self, share: float) -> float | None:
        """Upper edge, in seconds, of the bucket below which `share` of the delays lie; None before the first."""
        rank, seen = share * self.total, 0
        for bucket, count in enumerate(self._counts):
            seen += count
            if count and seen >= rank:
                return float(_SMALLEST_S * 2 ** (bucket / _BUCKETS_PER_OCTAVE))
        return None


class EventLoopDelay:
    """How late the event loop wakes its tasks, measured with a sleep of 10 ms.

    Example: `group.create_task(delay.run(), name="event-loop delay")`, then `delay.p99_ms()` at any time.
    """

    interval_s = 0.01

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._histogram = DelayHistogram()
        self._longest = 0.0

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            asleep_at = self._clock.monotonic()
            await asyncio.sleep(self.interval_s)
            self.add(self._clock.monotonic() - asleep_at - self.interval_s)

    def add(self, seconds: float) -> None:
        """Record one delay."""
        self._histogram.add(seconds)
        self._longest = max(self._longest, seconds)

    def p99_ms(self) -> float | None:
        """99th percentile since the start, in milliseconds; None before the first measurement."""
        found = self._histogram.percentile(0.99)
        return None if found is None else found * 1e3

    def max_ms(self) -> float:
        """Largest delay since the last call of this method, in milliseconds."""
        longest, self._longest = self._longest, 0.0
        return longest * 1e3


class WorkerThread:
    """One dedicated thread; the event loop goes on while it works.

    Example: `learner = WorkerThread("learner"); loss = await learner.call(update, rollouts)`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function` in the thread and return what it returns, or raise what it raises.

        A caller that is cancelled stops waiting; the function itself runs to its end.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, lambda: function(*args, **kwargs))

    async def close(self) -> None:
        """Let the calls under way end, then end the thread. Safe to call twice."""
        # In another thread, because waiting for the calls under way would block the loop.
        await asyncio.to_thread(self._executor.shutdown, True)


def resources() -> dict[str, float | None]:
    """Memory and open files of this process, as metrics: what grows with the steps leaks."""
    process = psutil.Process()
    with process.oneshot():
        return {
            "process/rss_mb": process.memory_info().rss / 2**20,
            "process/open_files": float(process.num_fds()),
            "process/threads": float(process.num_threads()),
        }


@asynccontextmanager
async def reported_wait(
    report: Callable[[float], None], every_s: float, clock: Clock | None = None
) -> AsyncIterator[None]:
    """Call `report(seconds so far)` every `every_s` seconds while the block waits; a short wait says nothing.

    Example: `async with reported_wait(lambda s: note(f"no weights for {s:.0f} s"), 30): await engines.load(weights)`.
    """
    clock = clock or SystemClock()
    began = clock.monotonic()

    async def speak() -> None:
        while True:
            await asyncio.sleep(every_s)
            report(clock.monotonic() - began)

    speaker = asyncio.create_task(speak(), name="report of a wait")
    try:
        yield
    finally:
        speaker.cancel()
