"""Who holds which place: leases, attempts and groups of the rollout buffer, as synchronous bookkeeping.

    running ──► finished ──► scored ──► trained      finished: the episode is over, its score is not known yet
       └───────────┴─► failed    └─► dropped         a failed or aborted attempt is tried again, then its task given up

Invariant, after every call: attempts = running + finished + scored + trained + dropped + failed.

Guarantees: a failure is never handed out for training, nor is a rollout without action tokens or with a reward that is
not finite, nor (if so set) a group whose rewards are all equal; an attempt's record starts empty; a result that nobody
waits for any more is ignored; every rollout handed out obeys the staleness bound of `wait` and `drop`; what changes an
attempt's fate is told to the journal before the place is leased again.
Not covered: waiting and deadlines (`buffer.py`), the step a unit may enter (`staleness.py`,
`exact_lag.py`), what may be trained (`verdicts.py`), durability (`ledger.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from soloist.config import RunConfig
from soloist.errors import RunError
from soloist.metrics import mean
from soloist.runtime.exact_lag import ExactLag
from soloist.runtime.leases import Journal, Lease, Running, Unit
from soloist.runtime.ledger_rows import Frontier
from soloist.runtime.staleness import Admission
from soloist.runtime.tally import Tally
from soloist.runtime.tasks import TaskSource
from soloist.runtime.verdicts import check_drops, check_staleness, flaw_of, is_uniform, oldest_of
from soloist.seams import Clock
from soloist.types import Failure, Rollout, Task


class Places:
    """Leases places, judges what comes back and hands out full steps. Nothing here waits.

    Example: `lease = places.try_lease(version=0); places.settle(lease, rollout); rollouts = places.consume()`.
    """

    def __init__(
        self,
        config: RunConfig,
        source: TaskSource,
        clock: Clock,
        on_abort: Callable[[list[str]], None],
        journal: Journal,
    ) -> None:
        self.source = source
        self._journal = journal
        self._config = config
        self._size = config.group_size
        self._clock = clock
        self._on_abort = on_abort
        self.admission = self._new_admission(step=0)
        self.tally = Tally(window=config.rollouts_per_step)
        self._units: dict[int, Unit] = {}
        self._counts: dict[int, tuple[list[int], list[int]]] = {}  # attempts and tries of units that were given back
        self._uniform_in_a_row = 0
        self.ages_s: list[float] = []
        """Seconds between scoring and training of the rollouts consumed last."""

    def try_lease(self, version: int) -> Lease | None:
        """A place for an engine of `version`, or None. Members of a group that has its place come first."""
        # A group that has begun blocks its step until its last member ends, so it goes before new units.
        for unit in self._units.values():
            if unit.pending and self.admission.join(unit.index, version):
                return self._issue(unit, version)
        index, task = self.source.peek()
        step = self.admission.reserve(index, version)
        if step is None:
            return None
        self.source.lease()
        # Reserved before it is taken from the source: a task without a place stays where it is.
        return self._issue(self._new_unit(index, task, step), version)

    def settle(self, lease: Lease, rollout: Rollout) -> None:
        """Take an ended rollout back: it becomes scored, failed or dropped.

        Ignored when its attempt isn't running any more. Raises ValueError for a rollout that isn't the lease's or
        hasn't ended, RunError for versions that are missing or of the future, and after too many uniform groups.
        """
        running = self._find(lease)
        if running is None:
            self.tally.late += 1
            return
        if (rollout.rollout_id, rollout.attempt) != (lease.rollout_id, lease.attempt) or rollout.status is None:
            raise ValueError(
                f"lease {lease.rollout_id} attempt {lease.attempt} got rollout {rollout.rollout_id} attempt "
                f"{rollout.attempt} with status {rollout.status}; put the ended rollout of this very attempt"
            )
        unit, member = self._units[lease.unit], lease.place % self._size
        # Judged before anything changes, so that an impossible stamp leaves the books balanced.
        failure, length = self._judge(unit, rollout), rollout.action_tokens
        del unit.running[member]
        if failure is not None:
            self.tally.failed(failure, length)
            if rollout.failure is None:
                self._refuse(rollout, failure)
            self._retry(unit, member, f"{failure.boundary}: {failure.reason}")
        elif unit.doomed or rollout.status == "aborted":
            self.tally.dropped(unit.doomed or "aborted", length)
            if unit.doomed:
                self._journal.dropped(rollout, "dropped", unit.doomed)
            self._retry(unit, member, "aborted")
        else:
            self.tally.scored(length)
            unit.scored[member] = (rollout, self._clock.monotonic())
            self._occupy_if_complete(unit)

    def expire(self) -> list[str]:
        """End the leases that gave no sign of life for `health.lease_seconds`; their places are leased again.

        Returns who it was and what for it waited, one text each.
        """
        now = self._clock.monotonic()
        told = []
        for running in self._all_running():
            if running.finished or running.expires > now:
                continue
            lease = running.lease
            reason = f"lease expired while it waited for {running.waiting_for}"
            self._journal.expired(lease.rollout_id, lease.attempt, reason)
            self.tally.dropped("expired", 0)
            unit, member = self._units[lease.unit], lease.place % self._size
            del unit.running[member]
            self._on_abort([lease.rollout_id])
            self._retry(unit, member, reason)
            told.append(f"{lease.rollout_id} (attempt {lease.attempt}): {reason}")
        return told

    def consume(self) -> list[Rollout]:
        """The current step's rollouts in order of occupation, marked as trained at it; goes on to the next step.

        Raises ValueError when the step isn't ready, RunError when a rollout breaks the staleness bound.
        """
        step = self.admission.step
        units = [self._units.pop(index) for index in self.admission.consume()]
        pairs = [pair for unit in units for _, pair in sorted(unit.scored.items())]
        for rollout, _ in pairs:
            check_staleness(rollout, step, self._config)
        for unit in units:
            self.source.trained(unit.index)
        self.tally.trained(len(pairs))
        now = self._clock.monotonic()
        self.ages_s = [now - scored_at for _, scored_at in pairs]
        # Only here can a bound pass, because only here does the step advance.
        for index in self.admission.overdue():
            self.admission.drop(index)
            self._doom(self._units[index], "stale", "stale")
        return [msgspec.structs.replace(rollout, state="trained", trained_step=step) for rollout, _ in pairs]

    def note(self, lease: Lease, waiting_for: str, finished: bool) -> bool:
        """A sign of life: say what a running rollout waits for, and renew its lease. False: the lease is over.

        `finished` once the episode is over: such a lease does not expire any more.
        """
        running = self._find(lease)
        if running is not None:
            running.waiting_for, running.finished = waiting_for, finished
            running.expires = self._clock.monotonic() + self._config.health.lease_seconds
        return running is not None

    def holds(self, lease: Lease) -> bool:
        """Whether the lease is still in force."""
        return self._find(lease) is not None

    def scored_count(self) -> int:
        """Rollouts that are scored and not yet trained, members of incomplete groups included."""
        return sum(len(unit.scored) for unit in self._units.values())

    def conservation(self) -> dict[str, int]:
        """Attempts by state. `attempts` is counted on its own and must equal the sum of the others."""
        running = self._all_running()
        finished = sum(one.finished for one in running)
        return {
            "attempts": self.tally.attempts,
            "running": len(running) - finished,
            "finished": finished,
            "scored": self.scored_count(),
            **{fate: self.tally.ended[fate] for fate in ("trained", "dropped", "failed")},
        }

    def check_conservation(self) -> None:
        """Raise AssertionError unless every attempt, unit and task is counted exactly once."""
        kinds = {
            "attempts": self.conservation(),
            "tasks": self.source.counts(),
        }
        for total, counts in kinds.items():
            rest = {fate: count for fate, count in counts.items() if fate != total}
            if counts[total] != sum(rest.values()):
                raise AssertionError(f"{counts[total]} {total} are not the sum of {rest}")

    def describe(self) -> str:
        """One line about everything under way: step, queue sizes, versions, oldest rollout, failures."""
        counts = ", ".join(f"{count} {state}" for state, count in self.conservation().items())
        states = ", ".join(f"{step} {state}" for step, state in self.admission.horizon().items())
        line = f"step {self.admission.step}; rollouts: {counts}; steps: {states}; tasks: {self.source.counts()}"
        running = self._all_running()
        if running:
            versions = [one.lease.version for one in running]
            oldest = min(running, key=lambda one: one.since)
            line += (
                f"; leased at versions {min(versions)}-{max(versions)}; oldest rollout {oldest.lease.rollout_id} "
                f"(attempt {oldest.lease.attempt}) has run {self._clock.monotonic() - oldest.since:.1f} s and waits "
                f"for {oldest.waiting_for}"
            )
        return f"{line}; recent failures: {self.tally.dominant_failure()}"

    def step_metrics(self) -> dict[str, float | None]:
        """Metrics of the attempts that ended since the last call, and age of the rollouts consumed last."""
        return {**self.tally.step_metrics(), "queue/age_s": mean(self.ages_s)}

    def state(self) -> dict[str, Any]:
        """JSON-able, for people who look at a snapshot: step and task source. The ledger is what a resume reads."""
        return {"step": self.admission.step, "source": self.source.state()}

    def restore(self, frontier: Frontier) -> None:
        """Continue where a ledger says. Finished but untrained rollouts take their places again, oldest version first.

        One that no step may train any more (its bound, or settings that changed) is dropped and played again. Raises
        ValueError when something is under way.
        """
        if self._units:
            raise ValueError(f"{len(self._units)} units are under way; restore before anything is leased")
        self.admission = self._new_admission(frontier.step)
        self.source.restore(frontier.next_unit, frontier.open_units, frontier.quarantined, frontier.uniform)
        self.tally.dropped_before = frontier.dropped
        for index in frontier.open_units:
            places = range(index * self._size, (index + 1) * self._size)
            attempts = [frontier.attempts.get(place, 0) for place in places]
            self._counts[index] = (attempts, [frontier.tries.get(place, 0) for place in places])
        units: dict[int, list[Rollout]] = {}
        for rollout in frontier.scored:
            flaw = flaw_of(rollout, self.admission.step, self._config.lag)
            if flaw is None:
                units.setdefault(rollout.place // self._size, []).append(rollout)
            else:
                self._refuse(rollout, flaw)
        for index, rollouts in sorted(units.items(), key=lambda pair: (oldest_of(pair[1]), pair[0])):
            self._restore_unit(index, rollouts)

    # Units.

    def _new_unit(self, index: int, task: Task, step: int) -> Unit:
        attempts, tries = self._counts.pop(index, ([0] * self._size, [0] * self._size))
        pending = list(range(self._size))
        unit = Unit(index=index, task=task, step=step, attempts=attempts, tries=tries, pending=pending)
        self._units[index] = unit
        return unit

    def _restore_unit(self, index: int, rollouts: list[Rollout]) -> None:
        whole, oldest = len(rollouts) == self._size, oldest_of(rollouts)
        if whole and is_uniform(rollouts, self._config):
            # The run died between its last score and the word that it is dropped.
            self.source.claim(index)
            self.source.uniform(index)
            self._journal.uniform(index, rollouts)
            self.tally.dropped_before += len(rollouts)
            del self._counts[index]
            return
        # A group with members missing reserves a place as if it were leased now; a whole one needs no lease.
        step = self.admission.restore(index, oldest) if whole else self.admission.reserve(index, oldest, restored=True)
        if step is None:
            for rollout in rollouts:
                self._journal.dropped(rollout, "dropped", "stale")
                self.tally.dropped_before += 1
                self._counts[index][1][rollout.place % self._size] += 1
            return
        unit = self._new_unit(index, self.source.claim(index), step)
        now = self._clock.monotonic()
        unit.scored = {rollout.place % self._size: (rollout, now) for rollout in rollouts}
        unit.pending = [member for member in unit.pending if member not in unit.scored]
        self.tally.attempts += len(rollouts)

    def _new_admission(self, step: int) -> Admission | ExactLag:
        c = self._config
        if c.lag is not None:
            return ExactLag(c.rollouts_per_step, c.lag, unit_size=c.group_size, step=step)
        return Admission(c.rollouts_per_step, c.max_staleness, c.on_stale, unit_size=c.group_size, step=step)

    def _issue(self, unit: Unit, version: int) -> Lease:
        member = unit.pending.pop(0)
        place = unit.index * self._size + member
        lease = Lease(
            unit=unit.index,
            group_id=f"g{unit.index}",
            rollout_id=f"r{place}",
            place=place,
            attempt=unit.attempts[member],
            task=unit.task,
            step=unit.step,
            version=version,
        )
        now = self._clock.monotonic()
        unit.running[member] = Running(lease=lease, since=now, expires=now + self._config.health.lease_seconds)
        unit.attempts[member] += 1
        self.tally.attempts += 1
        return lease

    def _find(self, lease: Lease) -> Running | None:
        unit = self._units.get(lease.unit)
        running = unit.running.get(lease.place % self._size) if unit is not None else None
        return running if running is not None and running.lease.attempt == lease.attempt else None

    def _all_running(self) -> list[Running]:
        return [running for unit in self._units.values() for running in unit.running.values()]

    def _judge(self, unit: Unit, rollout: Rollout) -> Failure | None:
        """Why a rollout can't be trained, or None. Raises RunError for impossible version stamps."""
        if rollout.failure is not None or rollout.status == "failed":
            return rollout.failure or Failure(boundary="environment", reason="failed without a reason")
        if rollout.status == "aborted" or unit.doomed:
            return None
        flaw = flaw_of(rollout, self.admission.step, self._config.lag)
        if flaw is not None and flaw.boundary == "engine":
            self._refuse(rollout, flaw)
            raise RunError(f"rollout {rollout.rollout_id} from engine '{rollout.engine}' has {flaw.reason}")
        if flaw is not None:
            return flaw
        oldest = oldest_of([rollout])
        # Under `wait` the place was promised for the version at the lease; an engine that fell back breaks that.
        if self.admission.mode == "wait" and not self.admission.join(unit.index, oldest):
            return Failure(boundary="engine", reason=f"sampled by version {oldest}, older than when it was leased")
        return None

    def _refuse(self, rollout: Rollout, flaw: Failure) -> None:
        self._journal.dropped(rollout, "failed", f"{flaw.boundary}: {flaw.reason}", flaw.boundary)

    def _occupy_if_complete(self, unit: Unit) -> None:
        if len(unit.scored) < self._size:
            return
        rollouts = [rollout for rollout, _ in unit.scored.values()]
        if is_uniform(rollouts, self._config):
            self._pass_over(unit, rollouts)
            return
        self._uniform_in_a_row = 0
        if self.admission.occupy(unit.index, oldest_of(rollouts)) is None:
            self._doom(unit, "stale", "stale")

    def _pass_over(self, unit: Unit, rollouts: list[Rollout]) -> None:
        """Drop a uniform group; its task is done, and its place is free for the next one."""
        self.admission.release(unit.index)
        for rollout in rollouts:
            self.tally.dropped("uniform", rollout.action_tokens, scored_before=True)
        self.tally.uniform_groups += 1
        del self._units[unit.index]
        self.source.uniform(unit.index)
        self._journal.uniform(unit.index, rollouts)
        self._uniform_in_a_row += 1
        check_drops(self._uniform_in_a_row, self._config)

    def _retry(self, unit: Unit, member: int, reason: str) -> None:
        """Another attempt for the member. A group with nothing else to keep gives its place back and starts over."""
        unit.tries[member] += 1
        if unit.doomed:
            self._retire(unit)
        elif unit.tries[member] >= self._config.rollout.attempts:
            # The step must not wait for the doomed group while its other members come home.
            self.admission.release(unit.index)
            self._doom(unit, "group", reason)
        # Siblings still need the place; giving it back would throw their work away.
        elif unit.running or unit.scored:
            unit.pending = sorted([*unit.pending, member])
        else:
            self.admission.release(unit.index)
            self._give_back(unit)

    def _doom(self, unit: Unit, fate: str, reason: str) -> None:
        """The unit has lost its place: its scored rollouts are dropped for `fate`, its running ones aborted."""
        unit.doomed, unit.reason = fate, reason
        unit.pending.clear()
        for member, (rollout, _) in unit.scored.items():
            self.tally.dropped(fate, rollout.action_tokens, scored_before=True)
            self._journal.dropped(rollout, "dropped", fate)
            unit.tries[member] += 1
        unit.scored.clear()
        if unit.running:
            self._on_abort([running.lease.rollout_id for running in unit.running.values()])
        self._retire(unit)

    def _retire(self, unit: Unit) -> None:
        """Forget a doomed unit once its last member has come home: play its task again, or give it up."""
        # Leased again any earlier, two attempts of one rollout would run under one id.
        if unit.running:
            return
        if max(unit.tries) < self._config.rollout.attempts:
            self._give_back(unit)
            return
        del self._units[unit.index]
        self.source.quarantine(unit.index, unit.reason)
        self._journal.quarantined(unit.index, unit.reason)

    def _give_back(self, unit: Unit) -> None:
        del self._units[unit.index]
        self._counts[unit.index] = (unit.attempts, unit.tries)
        self.source.give_back(unit.index)
