"""The rollout buffer: who waits, what fails, what is dropped, and that nothing is lost. All with real asyncio."""

from __future__ import annotations

import asyncio
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Sequence
from typing import Any

import pytest
from msgspec import structs

from soloist.config import RunConfig
from soloist.errors import RunError
from soloist.metrics import is_registered
from soloist.runtime.buffer import RolloutBuffer
from soloist.runtime.leases import Lease, NoJournal
from soloist.runtime.ledger_rows import Frontier
from soloist.runtime.tasks import TaskSource
from soloist.types import Failure, Rollout, Segment, Task, VersionSpan


class FakeClock:
    """Time that moves only when told, or by `tick` at each look."""

    def __init__(self, tick: float = 0.0) -> None:
        self.seconds, self.tick = 100.0, tick

    def monotonic(self) -> float:
        self.seconds += self.tick
        return self.seconds

    def now(self) -> float:
        return self.seconds


def numbered(index: int) -> Task:
    return Task(task_id=f"t{index}", environment="numbers", data={"index": index})


def make_buffer(config: dict[str, Any] | None = None, **options: Any) -> RolloutBuffer:
    settings = {"rollouts_per_step": 2, "max_staleness": 1, "players": 4, **(config or {})}
    # Time that stands still for `awake`: a busy machine would look like a process that was stopped.
    options = {"clock": FakeClock(), "awake": FakeClock(), "poll_seconds": 0.001, **options}
    return RolloutBuffer(RunConfig.model_validate(settings), TaskSource(numbered), **options)


def played(lease: Lease, version: int | None = None, tokens: int = 3, **changes: Any) -> Rollout:
    """A completed, scored rollout of a lease, sampled by one version."""
    oldest = lease.version if version is None else version
    segment = Segment(
        token_ids=[1] + [2] * tokens,
        action_mask=[False] + [True] * tokens,
        rollout_log_probs=[None] + [-0.5] * tokens,
        version_spans=[VersionSpan(version=oldest, start=1, end=1 + tokens)],
    )
    fields: dict[str, Any] = {
        "rollout_id": lease.rollout_id,
        "task_id": lease.task.task_id,
        "group_id": lease.group_id,
        "attempt": lease.attempt,
        "place": lease.place,
        "environment": "numbers",
        "state": "scored",
        "status": "completed",
        "terminated": True,
        "segments": [segment],
        "score": 1.0,
    }
    return Rollout(**{**fields, **changes})


def broken(lease: Lease, boundary: Any = "engine", reason: str = "lost") -> Rollout:
    return played(lease, status="failed", score=None, failure=Failure(boundary=boundary, reason=reason))


async def soon(awaitable: Awaitable[Any]) -> Any:
    """The result of something that must not wait long."""
    return await asyncio.wait_for(awaitable, 2.0)


async def waits(task: asyncio.Task[Any]) -> bool:
    """Whether a task still waits after everybody else had many turns."""
    for _ in range(20):
        await asyncio.sleep(0)
    return not task.done()


async def until_told(reports: list[str], count: int = 1) -> None:
    """Give the waiters turns until they have reported so often; a hundred looks at the clock must do."""
    for _ in range(100):
        if len(reports) >= count:
            return
        await asyncio.sleep(0.002)
    raise AssertionError("nobody reported a stall")


async def lease_at(buffer: RolloutBuffer, version: int) -> Lease:
    lease = await soon(buffer.lease(lambda: version))
    assert isinstance(lease, Lease)
    return lease


async def test_rollouts_are_taken_in_order_of_arrival_and_marked_with_their_step() -> None:
    buffer = make_buffer()
    first, second = await lease_at(buffer, 0), await lease_at(buffer, 0)
    await buffer.put(second, played(second))
    await buffer.put(first, played(first))
    rollouts = await soon(buffer.take(version=0))
    assert [rollout.rollout_id for rollout in rollouts] == ["r1", "r0"]
    assert {(rollout.state, rollout.trained_step) for rollout in rollouts} == {("trained", 0)}
    buffer.check_conservation()


async def test_deterministic_mode_sorts_a_step_by_place() -> None:
    buffer = make_buffer({"deterministic": True, "max_staleness": 0})
    leases = [await lease_at(buffer, 0), await lease_at(buffer, 0)]
    for lease in reversed(leases):
        await buffer.put(lease, played(lease))
    rollouts = await soon(buffer.take(version=0))
    assert [rollout.place for rollout in rollouts] == [0, 1]
    assert buffer.admission.step == 1


async def test_the_learner_waits_for_a_full_step_and_players_for_a_place() -> None:
    buffer = make_buffer({"max_staleness": 0})
    learner = asyncio.create_task(buffer.take(version=0))
    leases = [await lease_at(buffer, 0), await lease_at(buffer, 0)]
    version = 0
    player = asyncio.create_task(buffer.lease(lambda: version))
    await buffer.put(leases[0], played(leases[0]))
    assert await waits(learner)
    await buffer.put(leases[1], played(leases[1]))
    assert len(await soon(learner)) == 2
    assert await waits(player), "step 1 needs engines of version 1"
    version = 1
    buffer.wake()
    assert (await soon(player)).version == 1


DROPPING = {"rollouts_per_step": 4, "group_size": 2, "advantage": {"drop_uniform_groups": True}}


async def put_group(buffer: RolloutBuffer, leases: list[Lease], *scores: float) -> None:
    for lease, score in zip(leases, scores, strict=True):
        await buffer.put(lease, played(lease, score=score))


@pytest.mark.parametrize("mode", [{}, {"lag": 1}, {"on_stale": "drop"}, {"on_stale": "train"}])
async def test_a_group_of_equal_rewards_is_dropped_and_the_next_task_takes_its_place(mode: dict[str, Any]) -> None:
    journal = Notes()
    buffer = make_buffer({**DROPPING, **mode}, journal=journal)
    learner = asyncio.create_task(buffer.take(version=0))
    leases = [await lease_at(buffer, 0) for _ in range(4)]
    await put_group(buffer, leases[:2], 1.0, 1.0)
    await put_group(buffer, leases[2:], 0.0, 1.0)
    assert await waits(learner)
    more = [await lease_at(buffer, 0) for _ in range(2)]
    assert [lease.unit for lease in more] == [2, 2]
    await put_group(buffer, more, 0.5, 0.0)
    assert {rollout.group_id for rollout in await soon(learner)} == {"g1", "g2"}
    assert journal.uniforms == [(0, ["r0", "r1"])]
    assert buffer.fates() == {"dropped:uniform": 2, "late": 0}
    counts = buffer.conservation()
    assert (counts["trained"], counts["dropped"]) == (4, 2)
    buffer.check_conservation()
    metrics = buffer.step_metrics()
    assert (metrics["group/dropped"], metrics["queue/dropped"]) == (1, 2)
    assert buffer.step_metrics()["group/dropped"] == 0
    assert (await lease_at(buffer, 1 if not mode.get("lag") else 0)).unit == 3, "task 0 is not tried again"


async def test_nothing_is_dropped_unless_it_is_wished() -> None:
    buffer = make_buffer({"rollouts_per_step": 2, "group_size": 2})
    await put_group(buffer, [await lease_at(buffer, 0) for _ in range(2)], 1.0, 1.0)
    assert len(await soon(buffer.take(version=0))) == 2
    assert buffer.step_metrics()["group/dropped"] == 0


async def test_uniform_groups_without_end_stop_the_run_with_the_reason() -> None:
    buffer = make_buffer(DROPPING)
    for number in range(50):
        # The count begins anew after a group that is trained.
        await put_group(buffer, [await lease_at(buffer, 0) for _ in range(2)], float(number == 10), 0.0)
    leases = [await lease_at(buffer, 0) for _ in range(2)]
    await buffer.put(leases[0], played(leases[0]))
    with pytest.raises(RunError, match="40 groups in a row had equal rewards, 20 steps' worth") as stopped:
        await buffer.put(leases[1], played(leases[1]))
    assert "drop_uniform_groups = false" in str(stopped.value)
    buffer.check_conservation()
    with pytest.raises(RunError, match="in a row"):
        await lease_at(buffer, 0)


async def test_a_uniform_group_that_a_crash_left_on_record_is_not_trained_after_all() -> None:
    """Its last score was on disk, the word that it is dropped was not."""
    leases = [await lease_at(make_buffer(DROPPING), 0)]
    first = leases[0]
    second = structs.replace(first, rollout_id="r1", place=1)
    journal = Notes()
    buffer = make_buffer(DROPPING, journal=journal)
    frontier = Frontier(next_unit=2, open_units=[0, 1], scored=[played(first), played(second)], uniform=0)
    buffer.restore(frontier)
    assert journal.uniforms == [(0, ["r0", "r1"])]
    assert not buffer.admission.ready()
    assert (await lease_at(buffer, 0)).unit == 1
    buffer.check_conservation()
    assert buffer.step_metrics()["queue/dropped"] == 2


class Notes(NoJournal):
    """A journal that remembers which groups were uniform."""

    def __init__(self) -> None:
        self.uniforms: list[tuple[int, list[str]]] = []

    def uniform(self, unit: int, rollouts: Sequence[Rollout]) -> None:
        self.uniforms.append((unit, [rollout.rollout_id for rollout in rollouts]))


async def test_with_a_lag_engines_are_held_until_their_last_step_is_full_and_the_wait_has_a_limit() -> None:
    clock, reports = FakeClock(), []
    health = {"stall_report_seconds": 10, "stall_limit_seconds": 25}
    buffer = make_buffer({"max_staleness": 1, "lag": 1, "health": health}, clock=clock, on_stall=reports.append)
    leases = [await lease_at(buffer, 0), await lease_at(buffer, 0)]
    for lease in leases:
        await buffer.put(lease, played(lease))
    await soon(buffer.take(version=0))
    held = asyncio.create_task(buffer.served(0))
    leases = [await lease_at(buffer, 0), await lease_at(buffer, 0)]
    assert [lease.step for lease in leases] == [1, 1]
    await buffer.put(leases[0], played(leases[0]))
    assert await waits(held)
    clock.seconds += 11
    await until_told(reports)
    assert reports[0].startswith("no full step for 11.0 s: step 1;")
    await buffer.put(leases[1], played(leases[1]))
    await soon(held)
    held = asyncio.create_task(buffer.served(1))
    assert await waits(held)
    clock.seconds += 26
    with pytest.raises(RunError, match=r"no full step for 26.0 s, the limit"):
        await soon(held)
    assert make_buffer().admission.needs(0) is False


async def test_with_a_lag_tokens_of_two_versions_end_the_run() -> None:
    buffer = make_buffer({"max_staleness": 1, "lag": 1, "rollouts_per_step": 1})
    lease = await lease_at(buffer, 0)
    await buffer.put(lease, played(lease))
    await soon(buffer.take(version=0))
    lease = await lease_at(buffer, 0)
    mixed = played(lease, tokens=2)
    spans = [VersionSpan(version=0, start=1, end=2), VersionSpan(version=1, start=2, end=3)]
    mixed = structs.replace(mixed, segments=[structs.replace(mixed.segments[0], version_spans=spans)])
    with pytest.raises(RunError, match=r"versions \[0, 1\]; with a lag all tokens are of one"):
        await buffer.put(lease, mixed)
    assert buffer.admission.step == 1


async def test_a_failed_attempt_frees_its_place_and_the_next_starts_empty() -> None:
    buffer = make_buffer({"rollouts_per_step": 1, "max_staleness": 0})
    first = await lease_at(buffer, 0)
    await buffer.put(first, broken(first))
    again = await lease_at(buffer, 0)
    assert (again.rollout_id, again.attempt) == (first.rollout_id, 1)
    await buffer.put(again, played(again, tokens=3))
    (rollout,) = await soon(buffer.take(version=0))
    assert (rollout.action_tokens, rollout.attempt) == (3, 1)
    assert buffer.fates()["failed:engine"] == 1
    buffer.check_conservation()


async def test_a_task_that_always_fails_is_quarantined_and_replaced() -> None:
    buffer = make_buffer({"rollouts_per_step": 1, "max_staleness": 0, "rollout": {"attempts": 3}})
    for attempt in range(3):
        lease = await lease_at(buffer, 0)
        assert (lease.place, lease.attempt) == (0, attempt)
        await buffer.put(lease, broken(lease, "environment", "rejected"))
    lease = await lease_at(buffer, 0)
    assert lease.place == 1
    await buffer.put(lease, played(lease))
    assert [rollout.place for rollout in await soon(buffer.take(version=0))] == [1]
    assert buffer.state()["source"]["quarantined"] == [[0, "environment: rejected"]]
    buffer.check_conservation()


@pytest.mark.parametrize(
    ("changes", "fate"),
    [
        ({"segments": []}, "failed:empty"),
        ({"score": None}, "failed:scorer"),
        ({"score": math.nan}, "failed:scorer"),
        ({"score": math.inf}, "failed:scorer"),
        ({"status": "failed", "score": 0.0}, "failed:environment"),
        ({"status": "aborted", "score": None}, "dropped:aborted"),
    ],
)
async def test_what_can_not_be_trained_never_becomes_a_reward(changes: dict[str, Any], fate: str) -> None:
    buffer = make_buffer({"rollouts_per_step": 1, "max_staleness": 0})
    lease = await lease_at(buffer, 0)
    await buffer.put(lease, played(lease, **changes))
    assert buffer.fates() == {fate: 1, "late": 0}
    assert not buffer.admission.ready()
    assert (await lease_at(buffer, 0)).attempt == 1
    buffer.check_conservation()


@pytest.mark.parametrize("on_stale", ["wait", "drop", "train"])
async def test_a_truncated_rollout_is_trained(on_stale: str) -> None:
    buffer = make_buffer({"rollouts_per_step": 1, "on_stale": on_stale})
    lease = await lease_at(buffer, 0)
    await buffer.put(lease, played(lease, status="truncated", terminated=False, truncated=True, score=0.0))
    (rollout,) = await soon(buffer.take(version=0))
    assert rollout.truncated
    assert buffer.conservation()["trained"] == 1


async def test_a_second_result_and_a_result_of_an_old_attempt_are_ignored() -> None:
    buffer = make_buffer({"rollouts_per_step": 1})
    lease = await lease_at(buffer, 0)
    await buffer.put(lease, broken(lease))
    again = await lease_at(buffer, 0)
    await buffer.put(lease, played(lease))
    assert not buffer.admission.ready()
    await buffer.put(again, played(again))
    await buffer.put(again, played(again))
    assert buffer.fates()["late"] == 2
    assert buffer.conservation()["scored"] == 1
    buffer.check_conservation()


async def test_a_rollout_under_the_wrong_name_or_still_running_is_refused() -> None:
    buffer = make_buffer()
    lease, other = await lease_at(buffer, 0), await lease_at(buffer, 0)
    with pytest.raises(ValueError, match="lease r0 attempt 0 got rollout r1"):
        await buffer.put(lease, played(other))
    with pytest.raises(ValueError, match="status None"):
        await buffer.put(lease, played(lease, status=None))
    assert buffer.conservation()["running"] == 2


async def test_too_many_failures_end_the_run_with_the_dominant_reason() -> None:
    buffer = make_buffer({"rollouts_per_step": 20, "max_staleness": 0, "rollout": {"attempts": 9}})
    learner = asyncio.create_task(buffer.take(version=0))
    for number in range(19):
        lease = await lease_at(buffer, 0)
        odd = broken(lease, "engine", "lost") if number == 5 else broken(lease, "sandbox", "no bwrap")
        await buffer.put(lease, played(lease) if number in (3, 12) else odd)
    lease = await lease_at(buffer, 0)
    with pytest.raises(RunError, match=r"90% .* sandbox \(17 of 18 failures\), most often: no bwrap"):
        await buffer.put(lease, broken(lease, "sandbox", "no bwrap"))
    with pytest.raises(RunError, match="no bwrap"):
        await soon(learner)
    assert buffer.conservation()["trained"] == 0
    buffer.check_conservation()


async def test_half_of_the_attempts_may_fail() -> None:
    buffer = make_buffer({"rollouts_per_step": 40, "max_staleness": 0, "rollout": {"attempts": 99}})
    for number in range(60):
        lease = await lease_at(buffer, 0)
        await buffer.put(lease, broken(lease) if number % 2 else played(lease))
    assert buffer.conservation()["failed"] == 30
    assert buffer.step_metrics()["rollout/failed_ratio"] == 0.5


@pytest.mark.parametrize("version", [1, None, -1])
async def test_versions_of_the_future_or_missing_ones_end_the_run(version: int | None) -> None:
    buffer = make_buffer()
    lease = await lease_at(buffer, 0)
    rollout = played(lease, version=version or 0)
    if version is None:
        segment = rollout.segments[0]
        bare = Segment(
            token_ids=segment.token_ids,
            action_mask=segment.action_mask,
            rollout_log_probs=segment.rollout_log_probs,
            version_spans=[],
        )
        rollout = played(lease, segments=[bare])
    with pytest.raises(RunError, match=f"oldest version {version} at step 0"):
        await buffer.put(lease, played(lease, version=version) if version is not None else rollout)
    with pytest.raises(RunError, match="oldest version"):
        await buffer.take(version=0)


async def test_tokens_older_than_the_lease_assumed_fail_at_the_engine_under_wait() -> None:
    buffer = make_buffer({"rollouts_per_step": 1, "max_staleness": 0})
    first = await lease_at(buffer, 0)
    await buffer.put(first, played(first))
    await soon(buffer.take(version=0))
    lease = await lease_at(buffer, 1)
    await buffer.put(lease, played(lease, version=0))
    assert buffer.fates()["failed:engine"] == 1
    assert not buffer.admission.ready()


async def test_a_rollout_beyond_the_bound_is_caught_when_it_is_taken() -> None:
    buffer = make_buffer({"rollouts_per_step": 1, "max_staleness": 0})
    lease = await lease_at(buffer, 0)
    await buffer.put(lease, played(lease))
    unit = buffer._places._units[0]
    unit.scored[0] = (played(lease, version=-1), 0.0)  # as if the admission had miscounted
    with pytest.raises(RunError, match="staleness 1 at step 0"):
        await buffer.take(version=0)
    with pytest.raises(RunError, match="staleness 1"):
        await buffer.lease(lambda: 0)


async def test_steps_are_taken_in_order() -> None:
    buffer = make_buffer()
    with pytest.raises(RunError, match=r"take\(version=1\), but step 0 comes next"):
        await buffer.take(version=1)
    assert buffer.admission.step == 0


async def test_a_slow_rollout_is_aborted_under_drop_and_counted_with_its_length() -> None:
    aborted: list[str] = []
    buffer = make_buffer({"rollouts_per_step": 1, "on_stale": "drop"}, on_abort=aborted.extend)
    slow = await lease_at(buffer, 0)
    for step in range(2):
        lease = await lease_at(buffer, step)
        await buffer.put(lease, played(lease))
        assert (await soon(buffer.take(version=step)))[0].rollout_id == lease.rollout_id
        assert aborted == (["r0"] if step == 1 else [])
        buffer.check_conservation()
    await buffer.put(slow, played(slow, tokens=7, status="aborted", score=None))
    metrics = buffer.step_metrics()
    assert (metrics["queue/dropped"], metrics["queue/dropped_length"]) == (1, 7)
    assert metrics["rollout/length_started"] == (3 + 3 + 7) / 3
    again = await lease_at(buffer, 2)
    assert (again.rollout_id, again.attempt) == ("r0", 1), "its task is not lost"
    buffer.check_conservation()


async def test_a_late_score_under_drop_is_dropped_even_if_nobody_aborted_it() -> None:
    buffer = make_buffer({"rollouts_per_step": 1, "max_staleness": 0, "on_stale": "drop"})
    lease = await lease_at(buffer, 0)
    await buffer.put(lease, played(lease))
    await soon(buffer.take(version=0))
    later = await lease_at(buffer, 1)
    await buffer.put(later, played(later, version=0))
    assert buffer.fates()["dropped:stale"] == 1
    assert buffer.conservation()["scored"] == 0
    buffer.check_conservation()


async def test_a_task_that_is_always_too_late_is_given_up_after_its_attempts() -> None:
    buffer = make_buffer({"rollouts_per_step": 1, "max_staleness": 0, "on_stale": "drop", "rollout": {"attempts": 2}})
    first = await lease_at(buffer, 0)
    await buffer.put(first, played(first))
    await soon(buffer.take(version=0))
    for attempt in range(2):
        late = await lease_at(buffer, 1)
        assert (late.place, late.attempt) == (1, attempt)
        await buffer.put(late, played(late, version=0))
    assert (await lease_at(buffer, 1)).place == 2
    assert buffer.state()["source"]["quarantined"] == [[1, "stale"]]
    assert buffer.step_metrics()["queue/dropped"] == 2
    buffer.check_conservation()


async def test_train_mode_trains_the_slow_rollout_with_all_its_staleness() -> None:
    buffer = make_buffer({"rollouts_per_step": 1, "on_stale": "train"})
    slow = await lease_at(buffer, 0)
    for step in range(5):
        lease = await lease_at(buffer, step)
        await buffer.put(lease, played(lease))
        await soon(buffer.take(version=step))
    await buffer.put(slow, played(slow))
    (rollout,) = await soon(buffer.take(version=5))
    assert rollout.rollout_id == "r0"
    assert (rollout.trained_step or 0) - (rollout.oldest_version or 0) == 5


async def test_a_group_is_trained_in_one_step_once_all_members_are_scored() -> None:
    buffer = make_buffer({"rollouts_per_step": 4, "group_size": 2})
    leases = [await lease_at(buffer, 0) for _ in range(4)]
    assert [(lease.group_id, lease.place) for lease in leases] == [("g0", 0), ("g0", 1), ("g1", 2), ("g1", 3)]
    for lease in (leases[0], leases[3], leases[2]):
        await buffer.put(lease, played(lease))
    assert not buffer.admission.ready()
    await buffer.put(leases[1], broken(leases[1]))
    retry = await lease_at(buffer, 0)
    assert (retry.rollout_id, retry.attempt) == ("r1", 1), "a member is retried in its group's place"
    await buffer.put(retry, played(retry))
    rollouts = await soon(buffer.take(version=0))
    assert [rollout.rollout_id for rollout in rollouts] == ["r2", "r3", "r0", "r1"]
    buffer.check_conservation()


async def test_a_group_whose_member_fails_for_good_is_given_up_as_a_whole() -> None:
    aborted: list[str] = []
    config = {"rollouts_per_step": 3, "group_size": 3, "max_staleness": 0, "rollout": {"attempts": 1}}
    buffer = make_buffer(config, on_abort=aborted.extend)
    one, two, three = [await lease_at(buffer, 0) for _ in range(3)]
    await buffer.put(one, played(one))
    await buffer.put(two, broken(two, "scorer", "unparsable gold"))
    assert aborted == ["r2"]
    buffer.check_conservation()
    assert (await lease_at(buffer, 0)).group_id == "g1", "its place is free at once"
    await buffer.put(three, played(three, status="aborted", score=None))
    assert buffer.fates() == {"failed:scorer": 1, "dropped:group": 2, "late": 0}
    assert buffer.state()["source"]["quarantined"] == [[0, "scorer: unparsable gold"]]
    buffer.check_conservation()


async def test_an_engine_that_lags_does_not_spoil_the_place_of_a_newer_group() -> None:
    buffer = make_buffer({"rollouts_per_step": 2, "group_size": 2, "max_staleness": 0})
    for lease in [await lease_at(buffer, 0), await lease_at(buffer, 0)]:
        await buffer.put(lease, played(lease))
    await soon(buffer.take(version=0))
    new = await lease_at(buffer, 1)
    lagging = asyncio.create_task(buffer.lease(lambda: 0))
    assert await waits(lagging)
    assert (await lease_at(buffer, 1)).group_id == new.group_id
    lagging.cancel()
    assert buffer.conservation()["running"] == 2


async def test_a_stall_is_reported_and_then_ends_the_run_with_the_report() -> None:
    """R6, RB-124, RB-125: who waits for whom and since when, again and again, and an end."""
    clock = FakeClock()
    reports: list[str] = []
    health = {"stall_report_seconds": 30.0, "stall_limit_seconds": 100.0}
    buffer = make_buffer({"health": health}, clock=clock, on_stall=reports.append)
    lease = await lease_at(buffer, 0)
    clock.seconds += 5
    buffer.note(lease, "tool python", finished=False)
    learner = asyncio.create_task(buffer.take(version=0))
    player = asyncio.create_task(buffer.lease(lambda: -1))
    assert await waits(learner)
    assert reports == []
    clock.seconds += 31
    await until_told(reports)
    assert "no full step for 31.0 s: step 0; rollouts: 1 attempts, 1 running" in reports[0]
    assert "oldest rollout r0 (attempt 0) has run 36.0 s and waits for tool python" in reports[0]
    assert "leased at versions 0-0" in reports[0]
    await asyncio.sleep(0.01)
    assert len(reports) == 1, "the next report is due after another 30 s"
    clock.seconds += 30
    await until_told(reports, count=2)
    clock.seconds += 40
    with pytest.raises(RunError, match=r"no full step for 101.0 s, the limit .* waits for tool python"):
        await soon(learner)
    with pytest.raises(RunError, match="no full step"):
        await soon(player)
    assert len(reports) == 2


async def test_time_in_which_the_process_itself_stood_still_is_no_stall_and_is_told() -> None:
    """R6: SIGSTOP of the main process for longer than the limit; everybody was stopped, so nobody is to blame."""
    clock, awake = FakeClock(), FakeClock()
    reports: list[str] = []
    health = {"stall_report_seconds": 100.0, "stall_limit_seconds": 100.0, "lease_seconds": 1e4}
    buffer = make_buffer({"health": health}, clock=clock, awake=awake, on_stall=reports.append)
    leases = [await lease_at(buffer, 0) for _ in range(2)]
    learner = asyncio.create_task(buffer.take(version=0))
    player = asyncio.create_task(buffer.lease(lambda: -1))
    assert await waits(learner)
    for one in (clock, awake):
        one.seconds += 500
    await until_told(reports)
    assert reports == ["this process stood still for 500.0 s; that is nobody's stall"], "told once, not by each waiter"
    clock.seconds += 99
    await asyncio.sleep(0.01)
    assert not learner.done()
    clock.seconds += 2
    with pytest.raises(RunError, match=r"no full step for 101.0 s, the limit"):
        await soon(learner)
    with pytest.raises(RunError, match="no full step"):
        await soon(player)
    assert leases[0].place == 0


STOPPED = """
import asyncio, sys
from soloist.config import RunConfig
from soloist.runtime.buffer import RolloutBuffer
from soloist.runtime.tasks import TaskSource
from soloist.types import Task

async def main():
    health = {"stall_report_seconds": 1.0, "stall_limit_seconds": 1.0, "lease_seconds": 600.0}
    config = RunConfig.model_validate({"rollouts_per_step": 1, "max_staleness": 0, "health": health})
    source = TaskSource(lambda index: Task(task_id="t", environment="numbers", data={}))
    buffer = RolloutBuffer(config, source, on_stall=lambda text: print(text, flush=True), poll_seconds=0.05)
    await buffer.lease(lambda: 0)
    asyncio.get_running_loop().call_later(0.02, lambda: print("waits", flush=True))
    await buffer.take(version=0)

asyncio.run(main())
"""


def test_a_process_that_was_stopped_and_goes_on_has_its_whole_limit_left() -> None:
    """The same with a real signal: 2.5 s of SIGSTOP at a limit of one second; the stall that follows is its own."""
    command = [sys.executable, "-c", STOPPED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(2.5)
        os.kill(process.pid, signal.SIGCONT)
        told, error = process.communicate(timeout=60)
    assert (said, process.returncode) == ("waits\n", 1), error
    assert told.startswith("this process stood still for 2."), "the first thing that is said, and no end of the run"
    assert "RunError: no full step for 1." in error


async def test_the_learners_hunger_is_told_when_it_waits_and_only_then() -> None:
    hunger: list[bool] = []
    buffer = make_buffer({"rollouts_per_step": 1, "max_staleness": 0}, on_hunger=lambda: hunger.append(buffer.hungry))
    lease = await lease_at(buffer, 0)
    player = asyncio.create_task(buffer.lease(lambda: 0))
    assert await waits(player)
    assert (hunger, buffer.hungry) == ([], False), "a player who waits is no hurry"
    learner = asyncio.create_task(buffer.take(version=0))
    assert await waits(learner)
    assert hunger
    assert all(hunger)
    await buffer.put(lease, played(lease))
    assert len(await soon(learner)) == 1
    assert not buffer.hungry
    player.cancel()


async def test_players_speak_up_when_the_learner_is_silent_but_do_not_end_the_run() -> None:
    clock = FakeClock()
    reports: list[str] = []
    buffer = make_buffer({"rollouts_per_step": 1, "max_staleness": 0}, clock=clock, on_stall=reports.append)
    lease = await lease_at(buffer, 0)
    await buffer.put(lease, played(lease))
    player = asyncio.create_task(buffer.lease(lambda: buffer.admission.step))
    assert await waits(player)
    clock.seconds += 301
    await until_told(reports)
    assert "the learner has not asked for a step for 301.0 s" in reports[0]
    assert len(await soon(buffer.take(version=0))) == 1
    assert (await soon(player)).step == 1


async def test_the_producers_error_reaches_everybody_who_waits_or_comes_later() -> None:
    buffer = make_buffer({"rollouts_per_step": 1, "max_staleness": 0})
    lease = await lease_at(buffer, 0)
    learner, player = asyncio.create_task(buffer.take(version=0)), asyncio.create_task(buffer.lease(lambda: 0))
    assert await waits(learner)
    buffer.fail(KeyError("the original"))
    buffer.close()
    for task in (learner, player):
        with pytest.raises(KeyError, match="the original"):
            await soon(task)
    with pytest.raises(KeyError, match="the original"):
        await buffer.put(lease, played(lease))


async def test_closing_wakes_all_waiters() -> None:
    buffer = make_buffer()
    learner = asyncio.create_task(buffer.take(version=0))
    assert await waits(learner)
    buffer.close()
    with pytest.raises(RunError, match="closed before step 0"):
        await soon(learner)
    with pytest.raises(RunError, match="closed"):
        await buffer.lease(lambda: 0)


async def test_a_cancelled_wait_loses_nothing() -> None:
    buffer = make_buffer()
    learner = asyncio.create_task(buffer.take(version=0))
    assert await waits(learner)
    learner.cancel()
    with pytest.raises(asyncio.CancelledError):
        await learner
    for lease in [await lease_at(buffer, 0), await lease_at(buffer, 0)]:
        await buffer.put(lease, played(lease))
    assert len(await soon(buffer.take(version=0))) == 2
    buffer.check_conservation()


async def test_metrics_are_registered_and_describe_the_step_that_was_taken() -> None:
    clock = FakeClock()
    buffer = make_buffer(clock=clock)
    leases = [await lease_at(buffer, 0) for _ in range(3)]
    for lease, tokens in zip(leases, (2, 4, 9), strict=True):
        await buffer.put(lease, played(lease, tokens=tokens))
        clock.seconds += 10
    await soon(buffer.take(version=0))
    metrics = buffer.step_metrics()
    assert all(is_registered(name) for name in metrics)
    assert (metrics["queue/size"], metrics["queue/age_s"]) == (3, 25.0)
    assert (metrics["rollout/length_started"], metrics["rollout/failed_ratio"]) == (5, 0)
    assert buffer.step_metrics()["rollout/length_started"] is None


async def test_finished_rollouts_that_wait_for_their_score_are_counted_apart() -> None:
    buffer = make_buffer()
    lease, _ = await lease_at(buffer, 0), await lease_at(buffer, 0)
    buffer.note(lease, "its score", finished=True)
    assert (buffer.conservation()["running"], buffer.conservation()["finished"]) == (1, 1)
    assert "oldest rollout r0 (attempt 0) has run 0.0 s and waits for its score" in buffer.report()


def frontier_of(*scored: Rollout, step: int = 0, next_unit: int = 0, **changes: Any) -> Frontier:
    """A ledger's word on a run with these finished and untrained rollouts; their tasks are open."""
    open_units = sorted({*(rollout.place for rollout in scored), *changes.pop("open_units", [])})
    attempts = {rollout.place: rollout.attempt + 1 for rollout in scored}
    fields = {"step": step, "next_unit": next_unit, "open_units": open_units, "attempts": attempts, **changes}
    return Frontier(scored=list(scored), **fields)


async def stored(unit: int, version: int, attempt: int = 0, **changes: Any) -> Rollout:
    """A finished rollout of an earlier life."""
    lease = await lease_at(make_buffer({"rollouts_per_step": 50}), 0)
    lease = structs.replace(lease, rollout_id=f"r{unit}", place=unit, attempt=attempt, group_id=f"g{unit}")
    return played(lease, version, **changes)


async def test_finished_rollouts_of_an_earlier_life_are_trained_and_the_rest_is_played_again() -> None:
    """RB-089, RB-090, RB-106: out of order, with their versions; nothing is skipped or played twice."""
    buffer = make_buffer({"rollouts_per_step": 1, "max_staleness": 2})
    scored = [await stored(3, 4), await stored(2, 5, attempt=1)]
    buffer.restore(frontier_of(*scored, step=6, next_unit=9, open_units=[7], tries={7: 1}, attempts={7: 2}))
    assert [rollout.rollout_id for rollout in await soon(buffer.take(version=6))] == ["r3"]
    again = await lease_at(buffer, 6)
    assert (again.rollout_id, again.attempt) == ("r7", 2)
    assert [rollout.rollout_id for rollout in await soon(buffer.take(version=7))] == ["r2"]
    assert (await lease_at(buffer, 7)).rollout_id == "r9"
    buffer.check_conservation()
    with pytest.raises(ValueError, match="2 units are under way"):
        buffer.restore(Frontier())


async def test_the_staleness_bound_holds_right_after_a_resume() -> None:
    """RB-107, R4: free places are those of (bound + 1) steps less what is finished; nothing gets older than allowed."""
    buffer = make_buffer({"rollouts_per_step": 4, "max_staleness": 2})
    finished = [await stored(unit, 8 + unit % 3) for unit in range(40, 46)]
    buffer.restore(frontier_of(*finished, step=10, next_unit=46))
    leases = [await lease_at(buffer, 10) for _ in range(6)]
    more = asyncio.create_task(buffer.lease(lambda: 10))
    assert await waits(more), "12 places, 6 of them were taken by what came back"
    more.cancel()
    for lease in leases:
        await buffer.put(lease, played(lease))
    ages: list[int] = []
    for step in (10, 11, 12):
        ages += [step - (rollout.oldest_version or 0) for rollout in await soon(buffer.take(version=step))]
    assert (len(ages), max(ages)) == (12, 2)


async def test_what_came_back_too_old_or_broken_is_dropped_on_record_and_played_again() -> None:
    """The ledger may hold what the buffer never judged, and settings may have changed since."""
    journal = Heard()
    buffer = make_buffer({"rollouts_per_step": 1, "max_staleness": 0}, journal=journal)
    old, broken_one, young = await stored(0, 1), await stored(1, 9), await stored(2, 3)
    buffer.restore(frontier_of(old, broken_one, young, step=3, next_unit=3))
    assert [(name, fate, reason[:29]) for name, fate, reason in journal.heard] == [
        ("r1", "failed", "engine: oldest version 9 at s"),
        ("r0", "dropped", "stale"),
    ]
    assert [rollout.rollout_id for rollout in await soon(buffer.take(version=3))] == ["r2"]
    assert (await lease_at(buffer, 4)).attempt == 1
    buffer.check_conservation()


async def test_a_group_with_members_missing_is_completed_after_a_resume() -> None:
    buffer = make_buffer({"rollouts_per_step": 2, "group_size": 2})
    member = await stored(1, 0, attempt=3)
    buffer.restore(Frontier(step=0, next_unit=1, open_units=[0], attempts={0: 1, 1: 4}, tries={0: 1}, scored=[member]))
    lease = await lease_at(buffer, 0)
    assert (lease.rollout_id, lease.attempt, lease.unit) == ("r0", 1, 0)
    await buffer.put(lease, played(lease))
    assert [rollout.rollout_id for rollout in await soon(buffer.take(version=0))] == ["r0", "r1"]


class Heard:
    """A journal that remembers."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []

    def expired(self, rollout_id: str, attempt: int, reason: str) -> None:
        self.heard.append((rollout_id, attempt, reason))

    def dropped(self, rollout: Rollout, fate: str, reason: str, boundary: str | None = None) -> None:
        self.heard.append((rollout.rollout_id, fate, reason))

    def quarantined(self, unit: int, reason: str) -> None:
        self.heard.append((unit, reason))


async def test_a_lease_without_a_sign_of_life_is_played_again_and_its_late_result_ignored() -> None:
    """RB-117, RB-119, RB-122: one rollout never returns; the step fills without it and the message names it."""
    clock, journal, aborted = FakeClock(), Heard(), []
    settings = {"rollouts_per_step": 1, "max_staleness": 0, "health": {"lease_seconds": 60.0}}
    buffer = make_buffer(settings, clock=clock, journal=journal, on_abort=aborted.extend)
    hung = await lease_at(buffer, 0)
    clock.seconds += 50
    assert buffer.note(hung, "turn 2 at the engine")
    clock.seconds += 50
    buffer.expire()
    assert buffer.holds(hung), "a sign of life renewed it"
    clock.seconds += 50
    again = await lease_at(buffer, 0)
    assert (again.rollout_id, again.attempt) == ("r0", 1)
    assert journal.heard == [("r0", 0, "lease expired while it waited for turn 2 at the engine")]
    assert aborted == ["r0"]
    assert not buffer.note(hung, "late")
    await buffer.put(hung, played(hung))
    await buffer.put(again, played(again, tokens=9))
    assert [rollout.action_tokens for rollout in await soon(buffer.take(version=0))] == [9]
    assert buffer.fates() == {"dropped:expired": 1, "late": 1}
    buffer.check_conservation()


async def test_a_result_at_hand_does_not_expire_while_it_is_written() -> None:
    clock = FakeClock()
    buffer = make_buffer({"rollouts_per_step": 1}, clock=clock)
    lease = await lease_at(buffer, 0)
    assert buffer.note(lease, "its record", finished=True)
    clock.seconds += 1e6
    buffer.expire()
    assert buffer.holds(lease)
    await buffer.put(lease, played(lease))
    assert len(await soon(buffer.take(version=0))) == 1


async def test_a_task_that_always_hangs_is_given_up_and_replaced() -> None:
    """RB-121: after the configured tries, with its reason on record; the step is filled by another task."""
    clock, journal = FakeClock(), Heard()
    settings = {"rollouts_per_step": 1, "max_staleness": 0, "rollout": {"attempts": 2}}
    buffer = make_buffer(settings, clock=clock, journal=journal)
    for _ in range(2):
        assert (await lease_at(buffer, 0)).rollout_id == "r0"
        clock.seconds += 1e4
        buffer.expire()
    assert journal.heard[-1] == (0, "lease expired while it waited for its first turn")
    assert (await lease_at(buffer, 0)).rollout_id == "r1"
    buffer.check_conservation()


class World:
    """Random players, engines that load late, and a learner; ends when the steps are done."""

    def __init__(self, seed: int, config: dict[str, Any], steps: int) -> None:
        self.random = random.Random(seed)
        self.aborted: set[str] = set()
        self.buffer = make_buffer(config, on_abort=self.aborted.update, poll_seconds=5.0)
        self.version, self.steps = 0, steps
        self.trained: list[Rollout] = []

    async def play(self) -> None:
        while True:
            lease = await self.buffer.lease(lambda: self.version)
            oldest = self.version  # an in-flight load never makes the first token younger
            long = self.random.random() < 0.05
            for _ in range(self.random.randint(40, 80) if long else self.random.randint(0, 6)):
                await asyncio.sleep(0)
                if lease.rollout_id in self.aborted:
                    break
            if lease.rollout_id in self.aborted:
                self.aborted.discard(lease.rollout_id)
                rollout = played(lease, oldest, status="aborted", score=None)
            else:
                rollout = broken(lease) if self.random.random() < 0.2 else played(lease, oldest)
            await self.buffer.put(lease, rollout)
            self.buffer.check_conservation()

    async def learn(self) -> None:
        for step in range(self.steps):
            rollouts = await self.buffer.take(version=step)
            self.buffer.check_conservation()
            self.trained += rollouts
            for _ in range(self.random.randint(0, 5)):
                await asyncio.sleep(0)
            self.version = step + 1
            self.buffer.wake()

    async def run(self, players: int, seconds: float = 2.0) -> None:
        crowd = [asyncio.create_task(self.play()) for _ in range(players)]
        try:
            await asyncio.wait_for(self.learn(), seconds)
        finally:
            for player in crowd:
                player.cancel()
            await asyncio.gather(*crowd, return_exceptions=True)


@pytest.mark.parametrize("on_stale", ["wait", "drop", "train"])
@pytest.mark.parametrize("group_size", [1, 2])
@pytest.mark.parametrize("seed", range(6))
async def test_any_schedule_keeps_the_bound_conserves_and_goes_on(on_stale: str, group_size: int, seed: int) -> None:
    staleness = seed % 3
    config = {"rollouts_per_step": 4, "group_size": group_size, "max_staleness": staleness, "on_stale": on_stale}
    world = World(seed, {**config, "rollout": {"attempts": 20}}, steps=25)
    await world.run(players=1 + 3 * (seed % 4))
    assert len(world.trained) == 25 * 4
    assert len({rollout.rollout_id for rollout in world.trained}) == 100
    lags = [(rollout.trained_step or 0) - (rollout.oldest_version or 0) for rollout in world.trained]
    assert min(lags) >= 0
    if on_stale != "train":
        assert max(lags) <= staleness
    if on_stale == "wait":
        assert "dropped:stale" not in world.buffer.fates()


async def test_thousands_of_rollouts_leave_nothing_behind_in_memory() -> None:
    """RB-141, R13: what is trained, failed or dropped is forgotten; only what is under way is remembered."""
    world = World(3, {"rollouts_per_step": 40, "max_staleness": 1, "rollout": {"attempts": 20}}, steps=50)
    await world.run(players=60, seconds=60.0)
    places = world.buffer._places
    assert len(world.trained) == 2_000
    assert len(places._units) <= 3 * 40
    assert len(places._counts) <= 3 * 40
    assert len(places.source.state()["open"]) <= 3 * 40
    assert len(places.tally._recent) <= 40
    assert len(places.admission._bounds) <= 3 * 40
