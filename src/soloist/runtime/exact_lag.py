"""Exact lag: every rollout trained at step b comes, with all its tokens, from version v(b) = b − min(b, lag).

The controlled lag of comparisons (methods §8), as a sibling of `Admission` with the same calls. Integers only: no
tasks, no clock, no waiting. Generation runs up to `lag` steps ahead of training, one step after the other:

    step      0   1   2   3   4   5      lag = 2: version 0 fills steps 0, 1 and 2, then each version fills one step
    v(step)   0   0   0   1   2   3
              └───────┴───────┴── `filling`: the first step that isn't fully occupied
              consumed, or occupied and waiting to be

Invariant, after every call: all running units belong to the step `filling`; all steps before it are fully occupied
and none after it has begun. So a unit is trained in the step that it reserved, with tokens of the version that this
step needs, whatever the order in which units end; one that fails frees its place for another of the same version.

Guarantees: nothing is dropped; attempts = running + occupied + consumed + released.
Why it can't deadlock: `filling` ≤ step + lag + 1, and with v(filling) ≤ step its engines' version is published already;
running units end within their budgets. Only at `filling` = step + lag + 1 everybody waits, and then for a step that is
ready.
Not covered: engines that go on too early (`needs` tells when they may; `training/run.py` asks).
"""

from __future__ import annotations

from typing import Any

from soloist.runtime.staleness import Mode, StepState, check_shape, refuse_future


class ExactLag:
    """Places of units, one step at a time.

    Example: `a = ExactLag(capacity=1, lag=1); a.reserve(7, version=0)` gives 0, after `a.occupy(7, 0)` the next gets 1.
    """

    mode: Mode = "wait"
    """Nothing is dropped for its age, as in the mode of `Admission` with this name."""

    def __init__(self, capacity: int, lag: int, unit_size: int = 1, step: int = 0) -> None:
        check_shape(capacity, unit_size, lag=lag, step=step)
        self.capacity = capacity
        self.unit_size = unit_size
        self.max_staleness = lag
        self.step = step
        """The step that is consumed next; equals the version that it trains."""
        self.filling = step
        """The step that units are reserved in."""
        self._running: set[int] = set()
        self._occupied: dict[int, list[int]] = {}  # step -> scored units in order of occupation
        self._attempts = self._consumed = self._released = 0

    @property
    def version(self) -> int:
        """The version that engines must have for the next unit: v(filling)."""
        return max(0, self.filling - self.max_staleness)

    def needs(self, version: int) -> bool:
        """Whether a step that isn't fully occupied needs engines of `version`, or an older one: they must stay."""
        return self.version <= version

    # Units come and go.

    def reserve(self, unit: int, version: int, *, restored: bool = False) -> int | None:
        """Reserve a place of the step that is being filled, if engines of `version` may serve it.

        None: no place now, ask again after a change. `restored` changes nothing here. Raises ValueError for a unit
        that is already here and for a version of the future.
        """
        if unit in self._running or any(unit in units for units in self._occupied.values()):
            raise ValueError(f"unit {unit} is already running or scored; release it before reserving again")
        refuse_future(unit, version, self.step)
        if version != self.version or self._free() <= 0:
            return None
        self._attempts += 1
        self._running.add(unit)
        return self.filling

    def join(self, unit: int, version: int) -> bool:
        """Whether tokens of `version` may join a running unit. Raises ValueError for a unit that isn't running."""
        self._refuse_unknown(unit)
        refuse_future(unit, version, self.step)
        return version == self.version

    def occupy(self, unit: int, oldest_version: int) -> int:
        """Give a scored unit its place for good and return the step. Raises ValueError for another version's tokens."""
        if not self.join(unit, oldest_version):
            raise ValueError(
                f"unit {unit} has tokens of version {oldest_version}, step {self.filling} takes version "
                f"{self.version} with lag = {self.max_staleness}; call join() before its tokens count"
            )
        self._running.remove(unit)
        return self._occupy(unit)

    def restore(self, unit: int, oldest_version: int) -> int | None:
        """Give a unit that was scored in an earlier life its step again, or None when no step takes its version.

        Restored in order of version and unit, all return to the steps that they had: a step was full before the next
        one began, and units are handed out in order.
        """
        refuse_future(unit, oldest_version, self.step)
        if oldest_version != self.version or self._free() <= 0:
            return None
        self._attempts += 1
        return self._occupy(unit)

    def release(self, unit: int) -> None:
        """Free the place of a running unit that won't be trained."""
        self._refuse_unknown(unit)
        self._running.remove(unit)
        self._released += 1

    def drop(self, unit: int) -> None:
        """Never called: nothing is `overdue`. Raises ValueError."""
        raise ValueError(f"unit {unit} can't be too old under lag = {self.max_staleness}; release it")

    def overdue(self) -> list[int]:
        """Nothing: engines wait for every unit."""
        return []

    # Steps are consumed.

    def ready(self) -> bool:
        """Whether every place of the current step is occupied."""
        return self.filling > self.step

    def consume(self) -> list[int]:
        """Take the current step's units in order of occupation and go on to the next step.

        Raises ValueError when the step isn't ready.
        """
        if not self.ready():
            raise ValueError(f"step {self.step} is {self.step_state(self.step)}, not ready; counts {self.counts()}")
        units = self._occupied.pop(self.step)
        self.step += 1
        self._consumed += len(units)
        return units

    # What the others may know.

    def step_state(self, step: int) -> StepState:
        """`waiting` (has free places), `stuck` (waits for the units that hold the last places) or `ready`."""
        if step < self.filling:
            return "ready"
        return "waiting" if step > self.filling or self._free() > 0 else "stuck"

    def horizon(self) -> dict[int, StepState]:
        """State of the steps from the current one to the one that is being filled."""
        return {b: self.step_state(b) for b in range(self.step, self.filling + 1)}

    def counts(self) -> dict[str, int]:
        """Units by fate; `attempts` is the sum of the others."""
        return {
            "attempts": self._attempts,
            "running": len(self._running),
            "occupied": sum(map(len, self._occupied.values())),
            "consumed": self._consumed,
            "dropped": 0,
            "released": self._released,
        }

    def state(self) -> dict[str, Any]:
        """Everything, as JSON-able data."""
        return {
            "shape": [self.capacity, self.unit_size, self.max_staleness, "lag"],
            "steps": [self.step, self.filling],
            "running": sorted(self._running),
            "occupied": [[step, list(units)] for step, units in self._occupied.items()],
            "counts": [self._attempts, self._consumed, self._released],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Become what `state` described. Raises ValueError when it was made with other settings."""
        shape = [self.capacity, self.unit_size, self.max_staleness, "lag"]
        if state["shape"] != shape:
            raise ValueError(
                f"state has [capacity, unit_size, lag, mode] = {state['shape']}, this run {shape}; resume with the "
                "settings it was made with"
            )
        self.step, self.filling = state["steps"]
        self._running = set(state["running"])
        self._occupied = {step: list(units) for step, units in state["occupied"]}
        self._attempts, self._consumed, self._released = state["counts"]

    def _free(self) -> int:
        taken = len(self._running) + len(self._occupied.get(self.filling, ()))
        return self.capacity // self.unit_size - taken

    def _occupy(self, unit: int) -> int:
        step = self.filling
        units = self._occupied.setdefault(step, [])
        units.append(unit)
        if len(units) == self.capacity // self.unit_size:
            self.filling += 1
        return step

    def _refuse_unknown(self, unit: int) -> None:
        if unit not in self._running:
            raise ValueError(f"unit {unit} isn't running; running: {sorted(self._running)}")
