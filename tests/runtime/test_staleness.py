"""Admission: the bound, capacity, conservation and liveness, by scenario, by hypothesis and over random schedules."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from soloist.runtime.staleness import Admission, Mode

MODES: tuple[Mode, ...] = ("wait", "drop", "train")


class Oracle:
    """A slow, obvious bookkeeper beside `Admission`: who runs, who lies in which step, and what was ever consumed."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.per_step = admission.capacity // admission.unit_size
        self.running: dict[int, int] = {}  # unit -> oldest version so far
        self.occupied: dict[int, list[int]] = {}  # step -> units in order
        self.oldest: dict[int, int] = {}
        self.fates = {"consumed": 0, "dropped": 0, "released": 0}
        self.next_unit = 0
        self.histogram: dict[int, int] = {}

    def reserve(self, version: int) -> int | None:
        unit = self.next_unit
        possible = self.could_reserve(version)
        step = self.admission.reserve(unit, version)
        assert (step is not None) == possible or (self.admission.mode == "drop" and not possible)
        if step is None:
            return None
        self.next_unit += 1
        self.running[unit] = version
        if self.admission.mode != "train":
            assert self.admission.step <= step <= version + self.admission.max_staleness
        return unit

    def could_reserve(self, version: int) -> bool:
        """Whether a place must be found: Hall's condition over all bounds, or a free place in `drop` mode.

        Under `drop` displaced units hold nothing and moves may find more, so there it is a lower bound.
        """
        a = self.admission
        if a.mode == "train":
            return len(self.running) + len(self.oldest) < (a.max_staleness + 1) * self.per_step
        if a.mode == "drop":
            return any(a.step_state(b) == "waiting" for b in self.steps_to(version))
        bounds = [v + a.max_staleness for v in (*self.running.values(), version)]
        horizon = range(a.step, a.step + a.max_staleness + 1)
        free = {b: self.per_step - len(self.occupied.get(b, [])) for b in horizon}
        return all(
            sum(bound <= b for bound in bounds) <= sum(free[c] for c in horizon if c <= b)
            for b in (a.step - 1, *horizon)
        )

    def steps_to(self, version: int) -> range:
        return range(self.admission.step, version + self.admission.max_staleness + 1)

    def shape(self) -> tuple[int, int, Mode, int]:
        a = self.admission
        return a.capacity, a.max_staleness, a.mode, a.unit_size

    def occupy(self, unit: int, oldest: int) -> int | None:
        a = self.admission
        step = a.occupy(unit, oldest)
        del self.running[unit]
        if step is None:
            assert a.mode == "drop"
            open_steps = [b for b in self.steps_to(oldest) if len(self.occupied.get(b, [])) < self.per_step]
            assert not open_steps, "dropped although a step within the bound had a place for a scored unit"
            self.fates["dropped"] += 1
            return None
        assert step >= a.step
        self.occupied.setdefault(step, []).append(unit)
        self.oldest[unit] = oldest
        return step

    def release(self, unit: int) -> None:
        self.admission.release(unit)
        del self.running[unit]
        self.fates["released"] += 1

    def consume(self) -> None:
        step = self.admission.step
        units = self.admission.consume()
        assert units == self.occupied.pop(step)
        assert self.admission.step == step + 1
        for unit in units:
            lag = step - self.oldest.pop(unit)
            self.histogram[lag] = self.histogram.get(lag, 0) + 1
            assert lag >= 0
            assert self.admission.mode == "train" or lag <= self.admission.max_staleness
        self.fates["consumed"] += len(units)

    def drop_overdue(self) -> None:
        for unit in self.admission.overdue():
            assert self.admission.mode == "drop"
            self.admission.drop(unit)
            del self.running[unit]
            self.fates["dropped"] += 1

    def check(self) -> None:
        counts = self.admission.counts()
        assert counts["attempts"] == self.next_unit == sum(counts.values()) - counts["attempts"]
        assert counts["running"] == len(self.running)
        assert counts["occupied"] == len(self.oldest)
        assert {fate: counts[fate] for fate in self.fates} == self.fates
        assert all(len(units) <= self.per_step for units in self.occupied.values())
        full = len(self.occupied.get(self.admission.step, [])) == self.per_step
        assert self.admission.ready() == full
        if self.admission.mode == "wait":
            assert counts["dropped"] == 0

    def resume(self) -> None:
        fresh = Admission(*self.shape())
        fresh.load_state(self.admission.state())
        assert fresh.state() == self.admission.state()
        self.admission = fresh


class AdmissionMachine(RuleBasedStateMachine):
    """Producers of any speed, engines of several versions, failures and resumes, in any order."""

    @initialize(
        units=st.integers(1, 3), size=st.integers(1, 2), staleness=st.integers(0, 3), mode=st.sampled_from(MODES)
    )
    def begin(self, units: int, size: int, staleness: int, mode: Mode) -> None:
        self.oracle = Oracle(Admission(units * size, staleness, mode, unit_size=size))

    def version(self, lag: int) -> int:
        return max(0, self.oracle.admission.step - lag)

    def pick(self, number: int) -> int:
        running = sorted(self.oracle.running)
        return running[number % len(running)]

    @rule(lag=st.integers(0, 4))
    def reserve(self, lag: int) -> None:
        self.oracle.reserve(self.version(lag))

    @precondition(lambda self: self.oracle.running)
    @rule(number=st.integers(0, 99), newer=st.integers(0, 2))
    def score(self, number: int, newer: int) -> None:
        unit = self.pick(number)
        oldest = min(self.oracle.admission.step, self.oracle.running[unit] + newer)
        self.oracle.occupy(unit, oldest)

    @precondition(lambda self: self.oracle.running)
    @rule(number=st.integers(0, 99), lag=st.integers(0, 4))
    def join_an_older_engine(self, number: int, lag: int) -> None:
        unit, version = self.pick(number), self.version(lag)
        before = self.oracle.admission.state()
        if self.oracle.admission.join(unit, version):
            self.oracle.running[unit] = min(self.oracle.running[unit], version)
        else:
            assert self.oracle.admission.state() == before

    @precondition(lambda self: self.oracle.running)
    @rule(number=st.integers(0, 99))
    def fail(self, number: int) -> None:
        self.oracle.release(self.pick(number))

    @precondition(lambda self: self.oracle.admission.ready())
    @rule()
    def train(self) -> None:
        self.oracle.consume()
        self.oracle.drop_overdue()

    @rule()
    def resume(self) -> None:
        self.oracle.resume()

    @invariant()
    def everything_is_accounted_for(self) -> None:
        if hasattr(self, "oracle"):
            self.oracle.check()

    def teardown(self) -> None:
        """If all that runs ends and engines catch up, the current step becomes ready: no deadlock."""
        if not hasattr(self, "oracle"):
            return
        oracle = self.oracle
        for unit, version in sorted(oracle.running.items(), reverse=True):
            oracle.occupy(unit, version)
        for _ in range(2 * oracle.per_step):
            if oracle.admission.ready():
                break
            unit = oracle.reserve(oracle.admission.step)
            assert unit is not None
            oracle.occupy(unit, oracle.admission.step)
        assert oracle.admission.ready()


AdmissionMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAdmissionMachine = AdmissionMachine.TestCase


def simulate(seed: int, mode: Mode) -> Oracle:
    """One random schedule: players with heavy-tailed durations, lagging engines, failures, resumes, a learner."""
    rng = random.Random(seed)
    size = rng.choice((1, 1, 2))
    staleness, publish_every = rng.randrange(4), rng.choice((1, 1, 2))
    staleness = max(staleness, publish_every - 1)
    oracle = Oracle(Admission(size * rng.randint(1, 3), staleness, mode, unit_size=size))
    players, due = rng.randint(1, 8), {}
    for now in range(40):
        published = oracle.admission.step // publish_every * publish_every
        while len(due) < players:
            version = max(0, published - rng.choice((0, 0, 0, 1)) * publish_every)
            unit = oracle.reserve(version)
            if unit is None:
                break
            due[unit] = now + (25 if rng.random() < 0.07 else rng.randint(1, 4))
        for unit in [unit for unit, end in due.items() if end <= now]:
            del due[unit]
            oracle.release(unit) if rng.random() < 0.1 else oracle.occupy(unit, oracle.running[unit])
        while oracle.admission.ready() and rng.random() < 0.7:
            oracle.consume()
            oracle.drop_overdue()
            due = {unit: end for unit, end in due.items() if unit in oracle.running}
        if rng.random() < 0.02:
            oracle.resume()
        oracle.check()
    return oracle


@pytest.mark.parametrize("mode", MODES)
def test_the_bound_holds_and_nothing_is_lost_over_thousands_of_random_schedules(mode: Mode) -> None:
    oracles = [simulate(seed, mode) for seed in range(3334)]
    trained = sum(oracle.fates["consumed"] for oracle in oracles)
    worst = max((lag - oracle.admission.max_staleness for oracle in oracles for lag in oracle.histogram), default=0)
    assert trained > 15_000
    assert worst > 0 if mode == "train" else worst == 0
    assert (sum(oracle.fates["dropped"] for oracle in oracles) > 0) == (mode == "drop")


def play_beside_a_slow_one(mode: Mode) -> tuple[Admission, dict[str, Any]]:
    """Step by step: unit 0 takes 50 ticks at max_staleness = 1, every other unit takes one; a step holds one unit."""
    a = Admission(capacity=1, max_staleness=1, mode=mode)
    assert a.reserve(0, version=0) is not None
    seen: dict[str, Any] = {"trained": {}, "dropped_at": None, "stuck_ticks": 0}
    for tick in range(1, 52):
        unit = tick if a.reserve(tick, version=a.step) is not None else None
        if unit is not None:
            a.occupy(unit, a.step)
        if tick == 50 and seen["dropped_at"] is None:
            a.occupy(0, 0)
        seen["stuck_ticks"] += a.step_state(a.step) == "stuck"
        while a.ready():
            seen["trained"].update(dict.fromkeys(a.consume(), a.step - 1))
        for overdue in a.overdue():
            a.drop(overdue)
            seen["dropped_at"] = tick
    return a, seen


def test_wait_trains_a_rollout_of_50_ticks_at_staleness_1_and_waits_for_it() -> None:
    admission, seen = play_beside_a_slow_one("wait")
    assert seen["trained"][0] == 1, "trained at the last step that its version 0 allows"
    assert seen["stuck_ticks"] >= 45
    assert seen["dropped_at"] is None
    assert admission.counts()["dropped"] == 0


def test_drop_aborts_a_rollout_of_50_ticks_as_soon_as_its_bound_has_passed() -> None:
    admission, seen = play_beside_a_slow_one("drop")
    assert seen["dropped_at"] == 2, "steps 0 and 1 were filled by faster units at ticks 1 and 2"
    assert 0 not in seen["trained"]
    assert seen["stuck_ticks"] == 0
    assert admission.step == 51


def test_train_neither_waits_for_a_rollout_of_50_ticks_nor_drops_it() -> None:
    admission, seen = play_beside_a_slow_one("train")
    assert seen["trained"][0] >= 49, "staleness 49 or 50 with version 0"
    assert seen["stuck_ticks"] == 0
    assert admission.counts()["dropped"] == 0


def test_a_place_is_reserved_late_and_occupied_early() -> None:
    a = Admission(capacity=2, max_staleness=2)
    assert [a.reserve(unit, 0) for unit in range(7)] == [2, 2, 1, 1, 0, 0, None]
    assert a.occupy(0, 0) == 0, "the slack of a running unit with the same bound makes room in step 0"
    assert a.occupy(5, 0) == 0
    assert a.consume() == [0, 5]


def test_a_reservation_moves_only_within_its_own_bound() -> None:
    a = Admission(capacity=1, max_staleness=1)
    assert a.reserve(1, 0) == 1
    assert a.reserve(2, 0) == 0
    a.occupy(2, 0)
    a.consume()
    assert a.reserve(3, 1) == 2
    assert a.occupy(3, 1) == 2, "unit 1 must be trained at step 1, so unit 3 can't have that place"
    assert a.horizon() == {1: "stuck", 2: "ready"}
    assert a.reserve(4, 1) is None


def test_a_displaced_unit_refuses_tokens_that_no_step_can_train() -> None:
    a = Admission(capacity=1, max_staleness=1, mode="drop", step=4)
    assert a.reserve(1, 4) == 5
    for unit in (2, 3):
        a.occupy(unit, 4) if a.reserve(unit, 4) is not None else None
    assert a.horizon() == {4: "ready", 5: "stuck"}
    a.consume()
    assert a.reserve(4, 5) == 6
    assert a.occupy(4, 5) == 5, "it takes the place of unit 1, which runs on without one"
    assert not a.join(1, 3), "3 + 1 < 5"
    assert a.join(1, 4)
    assert a.occupy(1, 4) is None


def test_synchronous_training_admits_exactly_one_step_of_the_version_that_it_trains() -> None:
    a = Admission(capacity=2, max_staleness=0)
    assert [a.reserve(unit, 0) for unit in (1, 2, 3)] == [0, 0, None]
    a.occupy(1, 0)
    a.occupy(2, 0)
    a.consume()
    assert a.reserve(3, 0) is None, "the engines still have version 0, step 1 needs version 1"
    assert a.reserve(3, 1) == 1


def test_engines_that_lag_by_publish_every_still_reach_the_current_step() -> None:
    a = Admission(capacity=1, max_staleness=2, step=5)
    assert a.reserve(1, version=3) == 5
    assert a.reserve(2, version=3) is None
    assert a.reserve(3, version=2) is None, "2 + 2 < 5: too old for every step"
    assert a.reserve(4, version=5) == 7


def test_after_a_resume_at_step_10_there_is_room_for_max_staleness_plus_one_steps() -> None:
    for mode in MODES:
        a = Admission(capacity=4, max_staleness=2, mode=mode, step=10)
        admitted = [unit for unit in range(60) if a.reserve(unit, 10) is not None]
        assert len(admitted) == 12
        assert a.counts()["running"] == 12


def test_a_group_takes_its_places_as_a_whole() -> None:
    a = Admission(capacity=8, max_staleness=0, unit_size=4)
    assert [a.reserve(unit, 0) for unit in (1, 2, 3)] == [0, 0, None]
    a.occupy(2, 0)
    assert not a.ready()
    assert a.step_state(0) == "stuck"
    a.release(1)
    assert a.step_state(0) == "waiting"
    with pytest.raises(ValueError, match=r"capacity = 6 .* unit_size = 4"):
        Admission(capacity=6, max_staleness=0, unit_size=4)


def test_impossible_versions_and_units_are_refused_without_a_change() -> None:
    a = Admission(capacity=2, max_staleness=0, step=3)
    a.reserve(1, 3)
    before = a.state()
    with pytest.raises(ValueError, match="version 4, newer than step 3"):
        a.occupy(1, 4)
    with pytest.raises(ValueError, match="version 2, too old"):
        a.occupy(1, 2)
    with pytest.raises(ValueError, match="unit 1 is already"):
        a.reserve(1, 3)
    with pytest.raises(ValueError, match="unit 9 isn't running"):
        a.release(9)
    with pytest.raises(ValueError, match="step 3 is waiting"):
        a.consume()
    assert a.state() == before


def test_a_state_of_other_settings_is_refused() -> None:
    state = Admission(capacity=2, max_staleness=1).state()
    with pytest.raises(ValueError, match="resume with the settings"):
        Admission(capacity=4, max_staleness=1).load_state(state)
    same = Admission(capacity=2, max_staleness=1)
    same.load_state(state)
    assert same.state() == state


def test_restored_units_pass_the_limit_on_production_of_train_mode() -> None:
    """A step that was taken and not committed comes back with a crash: one step more than may be under way."""
    admission = Admission(capacity=1, max_staleness=1, mode="train", step=4)
    assert admission.restore(1, 3) == 4
    assert admission.restore(2, 3) == 5
    assert admission.reserve(3, 3) is None
    admission = Admission(capacity=1, max_staleness=1, mode="train", step=4)
    admission.restore(1, 3)
    admission.restore(2, 3)
    assert admission.reserve(3, 3, restored=True) == 6
    assert admission.reserve(4, 4) is None, "new ones wait until a step is trained"
