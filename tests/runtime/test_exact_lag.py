"""Exact lag: which version serves which step, one step at a time, by scenario and by hypothesis."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from soloist.runtime.exact_lag import ExactLag


def play(a: ExactLag, unit: int, version: int) -> int | None:
    """Reserve and occupy at once."""
    return a.occupy(unit, version) if a.reserve(unit, version) is not None else None


def test_with_a_lag_of_two_the_first_three_steps_come_from_version_0_and_then_one_from_each() -> None:
    a = ExactLag(capacity=1, lag=2)
    assert [play(a, unit, 0) for unit in range(4)] == [0, 1, 2, None]
    served = []
    for step in range(6):
        assert a.consume() == [step]
        served.append(a.version)
        assert a.reserve(100 + step, a.version - 1) is None, "engines that are behind serve nobody"
        assert play(a, step + 3, a.version) == step + 3
    assert served == [1, 2, 3, 4, 5, 6], "step b is sampled by version b - 2"
    assert a.horizon() == {6: "ready", 7: "ready", 8: "ready", 9: "waiting"}


def test_a_lag_of_zero_is_synchronous() -> None:
    a = ExactLag(capacity=2, lag=0)
    assert [a.reserve(unit, 0) for unit in (1, 2, 3)] == [0, 0, None]
    assert a.step_state(0) == "stuck"
    a.occupy(2, 0)
    a.occupy(1, 0)
    assert (a.consume(), a.version) == ([2, 1], 1)
    assert a.reserve(3, 0) is None
    assert a.reserve(3, 1) == 1


def test_no_step_begins_before_the_one_before_it_is_fully_occupied() -> None:
    a = ExactLag(capacity=2, lag=1)
    assert [a.reserve(unit, 0) for unit in (0, 1, 2)] == [0, 0, None]
    a.occupy(1, 0)
    assert a.reserve(2, 0) is None, "unit 0 still runs in step 0"
    a.release(0)
    assert a.reserve(2, 0) == 0, "its place is filled by another unit of the same version"
    a.occupy(2, 0)
    assert a.reserve(0, 0) == 1
    assert a.consume() == [1, 2]


def test_engines_must_stay_until_every_step_that_needs_them_is_occupied() -> None:
    a = ExactLag(capacity=2, lag=1)
    for unit in range(3):
        play(a, unit, 0)
    a.consume()
    assert a.needs(0), "step 1 has a free place"
    assert not ExactLag(capacity=2, lag=1, step=5).needs(3)
    play(a, 3, 0)
    assert not a.needs(0)
    assert a.needs(1)


def test_restored_units_return_to_the_steps_that_they_had() -> None:
    """Three steps of two units, step 4 being trained next; unit 13 was under way when the run died."""
    a = ExactLag(capacity=2, lag=2, step=4)
    found = {unit: a.restore(unit, version) for unit, version in ((8, 2), (9, 2), (10, 3), (11, 3), (12, 4))}
    assert found == {8: 4, 9: 4, 10: 5, 11: 5, 12: 6}
    assert (a.filling, a.version) == (6, 4)
    assert a.restore(7, 2) is None, "another version than its step needs"
    assert a.reserve(13, 4, restored=True) == 6
    early = ExactLag(capacity=2, lag=2)
    assert [early.restore(unit, 0) for unit in range(6)] == [0, 0, 1, 1, 2, 2]
    assert early.version == 1


def test_a_group_is_one_unit_and_its_late_members_join_by_version() -> None:
    a = ExactLag(capacity=8, lag=1, unit_size=4)
    assert [a.reserve(unit, 0) for unit in (1, 2, 3)] == [0, 0, None]
    assert a.join(1, 0)
    a.occupy(1, 0)
    a.occupy(2, 0)
    a.consume()
    assert a.reserve(3, 0) == 1
    assert not a.join(3, 1), "a member of step 1 can't be sampled by version 1"
    with pytest.raises(ValueError, match=r"capacity = 6 .* unit_size = 4"):
        ExactLag(capacity=6, lag=0, unit_size=4)


def test_impossible_calls_are_refused_without_a_change() -> None:
    a = ExactLag(capacity=2, lag=1, step=3)
    a.reserve(1, 2)
    before = a.state()
    for call, message in (
        (lambda: a.occupy(1, 1), "version 1, step 3 takes version 2"),
        (lambda: a.occupy(1, 4), "version 4, newer than step 3"),
        (lambda: a.reserve(1, 2), "unit 1 is already"),
        (lambda: a.release(9), "unit 9 isn't running"),
        (lambda: a.drop(1), "can't be too old under lag = 1"),
        (a.consume, "step 3 is waiting"),
        (lambda: ExactLag(capacity=2, lag=-1), "lag = -1"),
        (lambda: ExactLag(capacity=2, lag=2).load_state(before), "resume with the settings"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert a.state() == before
    assert a.overdue() == []


class ExactLagMachine(RuleBasedStateMachine):
    """Producers of any speed, failures, a learner and engines that load when they may, in any order."""

    @initialize(units=st.integers(1, 3), size=st.integers(1, 2), lag=st.integers(0, 3))
    def begin(self, units: int, size: int, lag: int) -> None:
        self.lag, self.units = lag, units
        self.a = ExactLag(units * size, lag, unit_size=size)
        self.engines = 0
        self.running: dict[int, int] = {}  # unit -> version that samples it
        self.scored: dict[int, tuple[int, int]] = {}  # unit -> version, step
        self.next_unit = 0

    @rule(old=st.integers(0, 2))
    def reserve(self, old: int) -> None:
        version = max(0, self.engines - old)
        step = self.a.reserve(self.next_unit, version)
        if step is None:
            return
        assert version == step - min(step, self.lag)
        assert {self.a.filling} == {step}
        self.running[self.next_unit] = version
        self.next_unit += 1

    @precondition(lambda self: self.running)
    @rule(number=st.integers(0, 99))
    def score(self, number: int) -> None:
        unit = sorted(self.running)[number % len(self.running)]
        version = self.running.pop(unit)
        assert self.a.join(unit, version)
        self.scored[unit] = version, self.a.occupy(unit, version)

    @precondition(lambda self: self.running)
    @rule(number=st.integers(0, 99))
    def fail(self, number: int) -> None:
        unit = sorted(self.running)[number % len(self.running)]
        del self.running[unit]
        self.a.release(unit)

    @precondition(lambda self: self.a.ready())
    @rule()
    def train(self) -> None:
        step = self.a.step
        units = self.a.consume()
        assert len(units) == self.units
        for unit in units:
            assert self.scored.pop(unit) == (step - min(step, self.lag), step)

    @precondition(lambda self: self.engines < self.a.step and not self.a.needs(self.engines))
    @rule()
    def load(self) -> None:
        assert not self.running, "nobody may be sampled by two versions"
        self.engines += 1

    @rule()
    def resume(self) -> None:
        """A crash: what ran is lost, what was scored comes back to its step, engines get the version that is needed."""
        fresh = ExactLag(self.a.capacity, self.lag, unit_size=self.a.unit_size, step=self.a.step)
        for unit, (version, step) in sorted(self.scored.items(), key=lambda pair: (pair[1][0], pair[0])):
            # Units were handed out in order here, so their numbers tell the order of their steps.
            assert fresh.restore(unit, version) == step
        self.running.clear()
        self.a, self.engines = fresh, min(fresh.version, fresh.step)

    @invariant()
    def everything_is_accounted_for(self) -> None:
        if not hasattr(self, "a"):
            return
        counts = self.a.counts()
        assert counts["attempts"] == sum(counts.values()) - counts["attempts"]
        assert counts["running"] == len(self.running)
        assert counts["occupied"] == len(self.scored)
        assert self.a.step <= self.a.filling <= self.a.step + self.lag + 1
        assert set(self.running.values()) <= {self.a.version}
        copy = ExactLag(self.a.capacity, self.lag, unit_size=self.a.unit_size)
        copy.load_state(self.a.state())
        assert copy.state() == self.a.state()

    def teardown(self) -> None:
        """If all that runs ends and engines load what they may, steps go on for ever: no deadlock."""
        if not hasattr(self, "a"):
            return
        for unit in sorted(self.running):
            self.score(unit)
        goal = self.a.step + self.lag + 3
        for _ in range(8 * (self.lag + 3) * self.units):
            if self.engines < self.a.step and not self.a.needs(self.engines):
                self.load()
            if self.a.ready():
                self.train()
            before = self.next_unit
            self.reserve(0)
            if self.next_unit > before:
                self.running.pop(before)
                self.scored[before] = self.engines, self.a.occupy(before, self.engines)
        assert self.a.step >= goal


ExactLagMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestExactLagMachine = ExactLagMachine.TestCase
