"""Admission: which future step a unit may be trained in. Integers only: no tasks, no clock, no waiting.

A *unit* is a group of `unit_size` rollouts that is trained in one step as a whole (one rollout for SAO). Every future
step has a virtual buffer of `capacity` rollouts (StaleFlow, arXiv 2601.12784; methods §6):

    reserve   before generation: the latest step b ≤ v + η with a place, v being the serving engine's version
    occupy    when scored: the earliest step b ≤ v + η with a place, v now being the version of the oldest action token
    consume   the current step, once every place of it is occupied

The engines' version may lag behind the current step (several engines, `publish_every` > 1): v + η is then nearer.

Guarantees, after every call:
- occupied + reserved places of a step never exceed its capacity; attempts = running + occupied + consumed + dropped +
  released.
- `wait`: a reservation holds its place, nothing is dropped, and an occupied step obeys b ≤ v_oldest + η.
- `drop`: a scored unit may take the place of a running one, which then runs without a place. The bound holds for every
  consumed unit; a running one whose bound has passed is named by `overdue`.
- `train`: neither waits for a certain unit nor drops. The bound is ignored by `occupy`, and `reserve` keeps running +
  occupied ≤ (η + 1) · capacity, so that production can't run away.

Why `wait` can't deadlock: a step that isn't ready has a free place or a reserved one. A reserved place belongs to a
running unit, which ends within its budgets and then occupies it or (a failure) frees it. A free place is open to the
next unit, and a unit that ends takes the earliest place that it can, so the current step fills first. Reservations move
to later places within their own bounds to make room, so a step is waited for only when the remaining units have no
later place left. `train` needs one step of the (η + 1) to end, `drop` any units that fill a step.

Not covered: who waits (`buffer.py`), what a rollout contains, and engines that never advance: with v + η below the
current step nothing is admitted, so the config must publish often enough (it refuses publish_every − 1 > η).
Where we differ from the paper: reservations move (it keeps them where they are), so that a slow unit with slack
doesn't hold up the current step while scored ones lie in later ones.
"""

from __future__ import annotations

from typing import Any, Literal

Mode = Literal["wait", "drop", "train"]
StepState = Literal["waiting", "ready", "stuck"]


def check_shape(capacity: int, unit_size: int, **others: int) -> None:
    """Raise ValueError unless a step of `capacity` rollouts holds whole units and no other number is negative."""
    if unit_size < 1 or capacity < 1 or capacity % unit_size:
        raise ValueError(
            f"capacity = {capacity} rollouts a step is not a multiple of unit_size = {unit_size}; make it one"
        )
    if min(others.values()) < 0:
        found = " and ".join(f"{name} = {value}" for name, value in others.items())
        raise ValueError(f"{found} must be ≥ 0")


def refuse_future(unit: int, version: int, step: int) -> None:
    """Raise ValueError for tokens of a version that does not exist while `step` is the next to be trained."""
    if version > step:
        raise ValueError(
            f"unit {unit} has version {version}, newer than step {step} that is trained next: its staleness "
            "would be negative; the engine stamps wrong versions"
        )


class Admission:
    """Places of units in the current and in future steps.

    Example: `a = Admission(capacity=1, max_staleness=1); a.reserve(7, version=0)` gives 1, `a.occupy(7, 0)` gives 0.
    """

    def __init__(
        self, capacity: int, max_staleness: int, mode: Mode = "wait", unit_size: int = 1, step: int = 0
    ) -> None:
        check_shape(capacity, unit_size, max_staleness=max_staleness, step=step)
        self.capacity = capacity
        self.unit_size = unit_size
        self.max_staleness = max_staleness
        self.mode: Mode = mode
        self.step = step
        """The step that is consumed next; equals the version that it trains."""
        self._bounds: dict[int, int] = {}  # running unit -> last step that may train it
        self._reserved: dict[int, int | None] = {}  # running unit -> step that holds its place (None: no place)
        self._occupied: dict[int, list[int]] = {}  # step -> scored units in order of occupation
        self._attempts = self._consumed = self._dropped = self._released = 0
        self._refused = -1  # newest version refused since the last change: a shortcut for many waiters

    # Units come and go.

    def reserve(self, unit: int, version: int, *, restored: bool = False) -> int | None:
        """Reserve the latest feasible step b ≤ version + η for a unit that an engine of `version` will serve.

        None: no place now, ask again after a change. In `train` mode the step is an estimate, nothing is held; there
        `restored` units pass the limit on production: a step that a crash took back makes them one step too many.
        Raises ValueError for a unit that is already here and for a version of the future.
        """
        if unit in self._bounds or any(unit in units for units in self._occupied.values()):
            raise ValueError(f"unit {unit} is already running or scored; release it before reserving again")
        refuse_future(unit, version, self.step)
        # Feasibility grows with the version and nothing has changed since, so the answer is the same.
        if version <= self._refused:
            return None
        bound = version + self.max_staleness
        step = self._open_step(restored) if self.mode == "train" else self._latest_place(bound)
        if step is None:
            self._refused = version
            return None
        self._attempts += 1
        self._bounds[unit] = bound
        self._reserved[unit] = None if self.mode == "train" else step
        return step

    def join(self, unit: int, version: int) -> bool:
        """Note that a running unit (also) gets tokens of `version`, which may be older than the reservation assumed.

        False, with nothing changed: no place of the unit could obey the bound, so these tokens must not join it.
        """
        refuse_future(unit, version, self.step)
        bound = min(self._bounds[unit], version + self.max_staleness)
        held = self._reserved[unit]
        if self.mode != "train" and held is not None and held > bound:
            # Look for a nearer place as if the unit held none: its own place may be what another one moves to.
            self._reserved[unit] = None
            nearer = self._latest_place(bound)
            if nearer is None:
                self._reserved[unit] = held
                return False
            self._reserved[unit] = nearer
        elif self.mode != "train" and bound < self.step:
            return False
        self._bounds[unit] = bound
        self._refused = -1
        return True

    def occupy(self, unit: int, oldest_version: int) -> int | None:
        """Give a scored unit the earliest feasible step and return it; its reservation is released.

        None (only under `drop`): no place within the bound, the unit counts as dropped. Raises ValueError for versions
        of the future, and under `wait` for a version so old that no place obeys the bound (check with `join`).
        """
        refuse_future(unit, oldest_version, self.step)
        # Freed first, so that its own place counts as room for the reservations that must move.
        held = self._reserved.pop(unit)
        step = self._earliest_place(oldest_version + self.max_staleness)
        if step is None and self.mode == "wait":
            self._reserved[unit] = held
            raise ValueError(
                f"unit {unit} has tokens of version {oldest_version}, too old for its place in step {held} with "
                f"max_staleness = {self.max_staleness}; call join() before its tokens count"
            )
        del self._bounds[unit]
        self._refused = -1
        if step is None:
            self._dropped += 1
            return None
        self._occupied.setdefault(step, []).append(unit)
        return step

    def restore(self, unit: int, oldest_version: int) -> int | None:
        """Give a unit that was scored in an earlier life the earliest feasible step, or None when none is left.

        Restored in order of their oldest version, all find a place that had one: the earliest bound goes first.
        """
        refuse_future(unit, oldest_version, self.step)
        step = self._earliest_place(oldest_version + self.max_staleness)
        if step is not None:
            self._attempts += 1
            self._occupied.setdefault(step, []).append(unit)
        return step

    def release(self, unit: int) -> None:
        """Free the place of a running unit that failed, or that won't be trained although it was scored."""
        self._forget(unit)
        self._released += 1

    def drop(self, unit: int) -> None:
        """Free the place of a running unit that is given up for its age."""
        self._forget(unit)
        self._dropped += 1

    def overdue(self) -> list[int]:
        """Running units that no step can train any more, oldest bound first (`drop` only; else empty)."""
        if self.mode != "drop":
            return []
        return sorted((u for u, bound in self._bounds.items() if bound < self.step), key=lambda u: (self._bounds[u], u))

    # Steps are consumed.

    def ready(self) -> bool:
        """Whether every place of the current step is occupied."""
        return self._free(self.step) == 0 and not self._holders(self.step)

    def consume(self) -> list[int]:
        """Take the current step's units in order of occupation and go on to the next step.

        Raises ValueError when the step isn't ready.
        """
        if not self.ready():
            raise ValueError(f"step {self.step} is {self.step_state(self.step)}, not ready; counts {self.counts()}")
        units = self._occupied.pop(self.step)
        self.step += 1
        self._consumed += len(units)
        self._refused = -1
        return units

    # What the others may know.

    def needs(self, version: int) -> bool:
        """Whether engines must stay at `version`: never, as any version within the bound will do (see `ExactLag`)."""
        return False

    def step_state(self, step: int) -> StepState:
        """`waiting` (has free places), `stuck` (waits for the units that hold the last places) or `ready`."""
        if self._free(step) > 0:
            return "waiting"
        return "stuck" if self._holders(step) else "ready"

    def horizon(self) -> dict[int, StepState]:
        """State of the current step and of all that could be reserved from it."""
        return {b: self.step_state(b) for b in range(self.step, self.step + self.max_staleness + 1)}

    def counts(self) -> dict[str, int]:
        """Units by fate; `attempts` is the sum of the others."""
        return {
            "attempts": self._attempts,
            "running": len(self._bounds),
            "occupied": sum(map(len, self._occupied.values())),
            "consumed": self._consumed,
            "dropped": self._dropped,
            "released": self._released,
        }

    def state(self) -> dict[str, Any]:
        """Everything, as JSON-able data."""
        return {
            "shape": [self.capacity, self.unit_size, self.max_staleness, self.mode],
            "step": self.step,
            "running": [[unit, bound, self._reserved[unit]] for unit, bound in self._bounds.items()],
            "occupied": [[step, list(units)] for step, units in self._occupied.items()],
            "counts": [self._attempts, self._consumed, self._dropped, self._released],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Become what `state` described. Raises ValueError when it was made with other settings."""
        shape = [self.capacity, self.unit_size, self.max_staleness, self.mode]
        if state["shape"] != shape:
            raise ValueError(
                f"state has [capacity, unit_size, max_staleness, mode] = {state['shape']}, this run {shape}; "
                "resume with the settings it was made with"
            )
        self.step = state["step"]
        self._bounds = {unit: bound for unit, bound, _ in state["running"]}
        self._reserved = {unit: step for unit, _, step in state["running"]}
        self._occupied = {step: list(units) for step, units in state["occupied"]}
        self._attempts, self._consumed, self._dropped, self._released = state["counts"]
        self._refused = -1

    # Places.

    def _free(self, step: int) -> int:
        taken = len(self._occupied.get(step, ())) + len(self._holders(step))
        return self.capacity // self.unit_size - taken

    def _holders(self, step: int) -> list[int]:
        """Running units that hold a place of `step`."""
        return [unit for unit, held in self._reserved.items() if held == step]

    def _latest_place(self, bound: int) -> int | None:
        """Latest step ≤ bound with a free place, or one where a reservation can move away."""
        steps = range(bound, self.step - 1, -1)
        found = next((b for b in steps if self._free(b) > 0), None)
        # Moving others is tried only when nothing is free: it costs a search over the steps.
        blocked: set[int] = set()
        return found if found is not None else next((b for b in steps if self._make_room(b, blocked)), None)

    def _earliest_place(self, bound: int) -> int | None:
        """Earliest step for a scored unit; what makes room there depends on the mode."""
        if self.mode == "train":
            step = self.step
            while self._free(step) <= 0:
                step += 1
            return step
        # Steps found blocked stay blocked for later candidates, which keeps the search linear in η.
        blocked: set[int] = set()
        for step in range(self.step, bound + 1):
            if self._make_room(step, blocked) or (self.mode == "drop" and self._displace(step)):
                return step
        return None

    def _open_step(self, unlimited: bool) -> int | None:
        """`train` mode: (η + 1) · capacity rollouts may be under way; the step that the next one would fall into."""
        per_step = self.capacity // self.unit_size
        under_way = len(self._bounds) + sum(map(len, self._occupied.values()))
        if not unlimited and under_way >= (self.max_staleness + 1) * per_step:
            return None
        return self.step + under_way // per_step

    def _make_room(self, step: int, blocked: set[int]) -> bool:
        """Free a place of `step` by moving the reservation with the most slack to a later step, in a chain if needed.

        Moves go forward only and `blocked` steps are not tried again. That finds a place whenever one exists: whatever
        a backward move could free, the unit that asks could take directly.
        """
        if self._free(step) > 0:
            return True
        holders = self._holders(step)
        if step in blocked or not holders:
            return False
        blocked.add(step)
        mover = max(holders, key=self._bounds.__getitem__)
        # The latest step first: it leaves the near ones to units that have no slack.
        for later in range(self._bounds[mover], step, -1):
            if self._make_room(later, blocked):
                self._reserved[mover] = later
                return True
        return False

    def _displace(self, step: int) -> bool:
        """`drop` mode: the reservation with the oldest bound loses its place; its unit runs on without one."""
        holders = self._holders(step)
        if holders:
            self._reserved[min(holders, key=self._bounds.__getitem__)] = None
        return bool(holders)

    def _forget(self, unit: int) -> None:
        if unit not in self._bounds:
            raise ValueError(f"unit {unit} isn't running; running: {sorted(self._bounds)}")
        del self._bounds[unit], self._reserved[unit]
        self._refused = -1
