"""The gauge of the event loop and the worker thread."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soloist.metrics import is_registered
from soloist.runtime.health import DelayHistogram, EventLoopDelay, WorkerThread, reported_wait, resources


@given(st.lists(st.floats(1e-5, 100.0), min_size=1, max_size=300), st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_a_percentile_is_right_within_one_bucket(delays: list[float], share: float) -> None:
    histogram = DelayHistogram()
    for delay in delays:
        histogram.add(delay)
    rank = max(1, -int(-share * len(delays) // 1))
    exact = sorted(delays)[rank - 1]
    found = histogram.percentile(share)
    assert found is not None
    assert exact * (1 - 1e-9) <= found <= exact * 2 ** (1 / 8) * (1 + 1e-9)


def test_the_histogram_has_no_value_before_the_first_and_bounds_the_largest() -> None:
    histogram = DelayHistogram()
    assert histogram.percentile(0.99) is None
    histogram.add(-0.001)
    assert histogram.percentile(1.0) == 1e-5
    histogram.add(1e9)
    assert histogram.percentile(1.0) == pytest.approx(168, rel=0.01)


def test_the_maximum_starts_anew_at_each_look_and_the_percentile_does_not() -> None:
    delay = EventLoopDelay()
    assert delay.p99_ms() is None
    for seconds in (0.001, 0.5, 0.002):
        delay.add(seconds)
    assert delay.max_ms() == 500
    assert delay.max_ms() == 0
    assert delay.p99_ms() == pytest.approx(500, rel=0.1)


async def test_the_delay_of_a_blocked_event_loop_is_seen() -> None:
    class Clock:
        seconds = 0.0

        def monotonic(self) -> float:
            return self.seconds

        def now(self) -> float:
            return self.seconds

    clock = Clock()
    delay = EventLoopDelay(clock)
    delay.interval_s = 0.001
    gauge = asyncio.create_task(delay.run())
    await asyncio.sleep(0)
    clock.seconds = 0.251
    await asyncio.sleep(0.01)
    gauge.cancel()
    assert delay.max_ms() == pytest.approx(250)
    assert gauge.cancelling() == 1


async def test_a_worker_runs_calls_in_order_in_one_thread_of_its_own() -> None:
    worker = WorkerThread("learner")
    order: list[int] = []

    def work(number: int, *, twice: bool = False) -> tuple[int, str]:
        order.append(number)
        return (2 * number if twice else number), threading.current_thread().name

    results = await asyncio.gather(*(worker.call(work, n, twice=True) for n in range(10)))
    assert [value for value, _ in results] == list(range(0, 20, 2))
    assert order == list(range(10))
    assert {name for _, name in results} == {"learner_0"}
    await worker.close()
    await worker.close()


async def test_a_workers_error_reaches_the_caller_and_the_thread_lives_on() -> None:
    worker = WorkerThread("ledger")

    def fail() -> None:
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        await worker.call(fail)
    assert await worker.call(lambda: 5) == 5
    await worker.close()


async def test_the_event_loop_goes_on_while_the_worker_works() -> None:
    worker = WorkerThread("learner")
    release = threading.Event()
    work = asyncio.create_task(worker.call(release.wait, 5.0))
    turns = 0
    while turns < 50:
        await asyncio.sleep(0)
        turns += 1
    assert not work.done()
    release.set()
    assert await work is True
    await worker.close()


async def test_a_long_wait_is_reported_again_and_again_and_a_short_one_never() -> None:
    said: list[float] = []
    three = asyncio.Event()

    def report(waited: float) -> None:
        said.append(waited)
        if len(said) == 3:
            three.set()

    async with reported_wait(report, every_s=0.01):
        await asyncio.wait_for(three.wait(), 10)
    count = len(said)  # on a busy machine a fourth may come before the wait ends
    assert said == sorted(said)
    assert said[0] >= 0.009
    async with reported_wait(report, every_s=1000):
        await asyncio.sleep(0)
    assert len(said) == count
    assert [
        task for task in asyncio.all_tasks() if task.get_name() == "report of a wait" and not task.cancelling()
    ] == []


def test_memory_open_files_and_threads_are_metrics_that_see_a_leak(tmp_path: Path) -> None:
    """R13: what grows with the steps shows up in the metrics of every step."""
    before = resources()
    files = [(tmp_path / f"{number}").open("w") for number in range(20)]
    stop = threading.Event()
    threads = [threading.Thread(target=stop.wait) for _ in range(5)]
    for thread in threads:
        thread.start()
    after = resources()
    stop.set()
    for thread in threads:
        thread.join()
    for file in files:
        file.close()
    assert all(is_registered(name) and (value or 0) > 0 for name, value in before.items())
    grown = {name: (after[name] or 0) - (value or 0) for name, value in before.items()}
    assert (grown["process/open_files"], grown["process/threads"]) == (20, 5)
    assert resources()["process/open_files"] == before["process/open_files"]
