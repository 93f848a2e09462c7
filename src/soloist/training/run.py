"""The `Run` of the main loop: what happens around a step and around a rollout. Imports without torch.

Guarantees: an attempt is on record before its rollout can be trained, a step before its weights are published; a
result that comes after its lease, or twice, is refused; a broken rollout is tried again after a pause.
Not covered: how the parts are made (`durable.py`), and when they are used (`loop.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from soloist.config import RunConfig
from soloist.engines.base import EngineHealth
from soloist.errors import RunError
from soloist.metrics import MetricsLog
from soloist.rollout.play import new_rollout
from soloist.runtime.buffer import RolloutBuffer
from soloist.runtime.health import EventLoopDelay, reported_wait, resources
from soloist.runtime.leases import Lease
from soloist.runtime.ledger import Ledger
from soloist.seams import Clock, fault_point
from soloist.training.observer import Observer
from soloist.training.retraining import Metrics, StepLearner
from soloist.training.snapshot_writer import SnapshotWriter
from soloist.training.statistics import rollout_metrics, warnings_of
from soloist.training.stopwatch import Stopwatch
from soloist.training.weights import PublishedWeights
from soloist.types import Rollout, Sampling, Task, WeightsRef

LONGEST_PAUSE_S = 30.0
"""Of a player whose rollouts keep failing."""
SHARED_WRITE_S = 0.2
"""For how long the results of rollouts are gathered for one write while the learner computes; a death forgets them."""


class Engines(Protocol):
    """The part of an engine set that a run needs; `engines/pool.py` has it."""

    @property
    def version(self) -> int:
        """Oldest version among the engines."""

    def version_for(self, rollout_id: str) -> int:
        """Version of the engine that serves this rollout."""

    def engine_of(self, rollout_id: str) -> str:
        """Name of that engine."""

    async def load(self, weights: WeightsRef) -> None:
        """Load on all engines."""

    async def abort(self, rollout_ids: list[str] | None = None) -> None:
        """End running requests with finish reason `abort`."""

    async def health(self) -> dict[str, EngineHealth]:
        """State of each engine."""


class Episodes(Protocol):
    """What plays rollouts; `rollout/play.py` has it."""

    async def play(
        self,
        rollout: Rollout,
        task: Task,
        slot: int | None = None,
        progress: Callable[[str], None] = lambda waiting_for: None,
    ) -> Rollout:
        """Play a task once and return the record. `progress` is a sign of life."""


class SampleLog(Protocol):
    """What keeps a few rollouts for the report; `samples.py` has it."""

    def record(self, step: int, rollouts: list[Rollout], tokens: Any, *, last: bool = False) -> None:
        """Write what is worth keeping of a step; never raises."""


@dataclass(kw_only=True)
class Run:
    """Everything that the main loop speaks with."""

    config: RunConfig
    first_step: int
    buffer: RolloutBuffer
    engines: Engines
    episodes: Episodes
    sampling: Sampling
    learner: StepLearner
    ledger: Ledger
    weights: PublishedWeights
    snapshots: SnapshotWriter
    log: MetricsLog
    samples: SampleLog | None
    stopwatch: Stopwatch
    delay: EventLoopDelay
    clock: Clock
    observer: Observer
    state_hash: str = ""
    """Of the learner after the last committed step."""
    _noted: Metrics = field(default_factory=dict)
    _engine_before: tuple[float, int] = (0.0, 0)

    # Around a rollout.

    async def played(self, lease: Lease) -> Rollout | None:
        """Play a lease; None when it ran out meanwhile, its place is somebody else's then."""
        fresh = await self._started(lease)
        seconds = self.config.health.lease_seconds

        def progress(waiting_for: str) -> None:
            if self.buffer.note(lease, waiting_for):
                self.ledger.renewed(fresh, self.clock.now() + seconds)

        playing = self.episodes.play(fresh, lease.task, self._slot_of(lease), progress)
        task = asyncio.create_task(playing, name=f"rollout {lease.rollout_id} attempt {lease.attempt}")
        try:
            # Woken now and then, so that a rollout that hangs costs its own place only.
            while not (await asyncio.wait({task}, timeout=seconds / 4))[0]:
                self.buffer.expire()
                if not self.buffer.holds(lease):
                    return None
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                # Its cleaning up may hang like itself; the player goes on.
                await asyncio.wait({task}, timeout=seconds / 4)

    async def ended(self, lease: Lease, rollout: Rollout) -> None:
        """Put an ended rollout on record, then into the buffer: what can be trained is on disk before."""
        self.buffer.note(lease, "its record", finished=True)
        aborted = rollout.status == "aborted"
        patience_s = 0.0 if self.buffer.hungry else SHARED_WRITE_S
        ended = self.ledger.ended(
            rollout, "dropped" if aborted else None, "aborted" if aborted else "", patience_s=patience_s
        )
        if not await ended:
            self.buffer.refused()
            return
        self.learner.prepare(rollout)  # while the learner's thread computes
        if rollout.failure is not None:
            # The lease is kept, so that nobody tries the place before the pause is over.
            pause = self.config.rollout.retry_seconds * 2 ** min(lease.attempt, 16)
            await asyncio.sleep(min(pause, LONGEST_PAUSE_S))
        await self.buffer.put(lease, rollout)

    async def _started(self, lease: Lease) -> Rollout:
        """An empty record for a lease, with its engine, on record as running."""
        self.engines.version_for(lease.rollout_id)
        rollout = new_rollout(
            rollout_id=lease.rollout_id,
            group_id=lease.group_id,
            place=lease.place,
            attempt=lease.attempt,
            task=lease.task,
            sampling=self.sampling,
            now=self.clock.now(),
            engine=self.engines.engine_of(lease.rollout_id),
        )
        expires_at = rollout.started_at + self.config.health.lease_seconds
        await self.ledger.started(rollout, unit=lease.unit, expires_at=expires_at)
        return rollout

    def _slot_of(self, lease: Lease) -> int | None:
        """In deterministic mode each place of a step has its own cache slot; else the engine chooses."""
        return lease.place % self.config.rollouts_per_step if self.config.deterministic else None

    # Around a step.

    def note(self, metrics: Metrics) -> None:
        """Keep metrics until the step is recorded."""
        self._noted |= metrics

    async def commit(self, step: int, rollouts: list[Rollout]) -> None:
        """Put the step on record: which rollouts, in which order, from which version, and what came out."""
        before, self.state_hash = self.state_hash, await self.learner.fingerprint()
        losses = {name: self._noted.get(name) for name in ("actor/pg_loss", "critic/loss")}
        record = {"version": step, "before": before, "losses": losses}
        await self.ledger.commit(step, rollouts, record, state_hash=self.state_hash)

    def publishes_after(self, step: int) -> bool:
        """Whether engines get new weights after this step; the last step always publishes."""
        return (step + 1) % self.config.publish_every == 0 or step + 1 == self.config.steps

    async def publish(self, version: int) -> None:
        """Write the learner's weights and load them into all engines. In-flight requests go on.

        With a lag engines go on from one version to the next only when every step that needs the one is occupied.
        """
        reference = await self.learner.publish(self.weights.folder_of(version))
        fault_point("publish:written")
        if reference.version != version:
            raise RunError(f"the learner published version {reference.version}, but step {version} was due")

        if self.config.lag is None:
            await self._load(reference)
        else:
            await self._follow(reference, self.config.lag)
        fault_point("publish:loaded")
        self.weights.forget_old(version)

    async def _follow(self, newest: WeightsRef, lag: int) -> None:
        """Bring engines up to `newest`, version by version: after a resume they may be several behind."""
        # Version v serves step v + lag; what no step of this run needs is not loaded.
        last = min(newest.version, self.config.steps - 1 - lag)
        while self.engines.version < last:
            await self.buffer.served(self.engines.version)
            following = self.engines.version + 1
            await self._load(newest if following == newest.version else self.weights.reference_to(following))

    async def _load(self, weights: WeightsRef) -> None:
        def report(waited: float) -> None:
            self.observer.note(
                f"not all engines have loaded version {weights.version} after {waited:.1f} s: {self.buffer.report()}"
            )

        async with reported_wait(report, self.config.health.stall_report_seconds, self.clock):
            await self.engines.load(weights)
        self.buffer.wake()

    async def record(self, step: int, rollouts: list[Rollout]) -> None:
        """Write the step's metrics and, when due, begin a snapshot."""
        metrics = rollout_metrics(rollouts, step, self.clock.now()) | self._noted | self.buffer.step_metrics()
        lap, seconds = self.stopwatch.read()
        metrics |= {f"time/{name}": value for name, value in seconds.items()}
        metrics |= self._speeds(lap, seconds, rollouts, await self.engines.health())
        metrics |= {"loop/delay_p99_ms": self.delay.p99_ms(), "loop/delay_max_ms": self.delay.max_ms()}
        metrics |= resources()
        self.log.write("train", step, self.clock.now(), metrics)
        last = step + 1 == self.config.steps
        if self.samples is not None:
            await asyncio.to_thread(self.samples.record, step, rollouts, self.learner.tokens, last=last)
        self.observer.progress("train", step + 1, metrics)
        if step == self.first_step:
            for warning in warnings_of(rollouts, metrics):
                self.observer.note(f"warning: {warning}")
        self._noted = {}
        # Last, since a step that a snapshot holds is not trained again: killed before this line, it would be missing
        # from the metrics. The price is that the snapshot's time stands in the next step's record.
        if (step + 1) % self.config.checkpoint_every == 0 or last:
            await self.stopwatch.timed("checkpoint", self.snapshot(step + 1))

    async def snapshot(self, step: int) -> None:
        """Copy everything with memory, after `step` updates, and let it be written beside what follows."""
        progress = {
            "step": step,
            "state_hash": self.state_hash,
            "lineage": self.ledger.lineage,
            "life": self.ledger.life,
            "frontier": self.buffer.state(),
        }
        state = await self.learner.state()
        await self.snapshots.start(step, self.state_hash, {**state, "progress": ({}, progress)})

    def _speeds(
        self, lap: float, seconds: dict[str, float], rollouts: list[Rollout], health: dict[str, EngineHealth]
    ) -> Metrics:
        busy, tokens = sum(one.busy_s for one in health.values()), sum(one.tokens for one in health.values())
        busy_before, tokens_before = self._engine_before
        self._engine_before = (busy, tokens)
        lap = max(lap, 1e-9)
        # A restarted child counts from 0 again; a negative difference is not a speed.
        idle = 1 - min(1.0, max(0.0, busy - busy_before) / (lap * max(1, len(health))))
        return {
            "time/step": lap,
            "trainer/idle_ratio": min(1.0, seconds.get("wait_for_rollouts", 0.0) / lap),
            "rollouter/idle_ratio": idle,
            "perf/tokens_per_s": max(0, tokens - tokens_before) / lap,
            "perf/trained_tokens_per_s": sum(rollout.action_tokens for rollout in rollouts) / lap,
        }
