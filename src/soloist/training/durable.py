"""Trains a run durably: opens the ledger, recovers, publishes, builds the `Run`, trains, and leaves a last snapshot.

    ledger opens ──► recover ──► publish version C ──► engines start with it ──► buffer restored ──► steps C … N - 1

Imports without torch, so that tests run it with a numeric stand-in for the learner.
Guarantees: whatever ends the run, snapshots under way, ledger and learner are closed in this order; the folder then
is one that the next call goes on from, as it is after a kill at any instant.
Not covered: making a learner and engines (`setup.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from typing import Protocol

from soloist.config import RunConfig
from soloist.errors import UserError
from soloist.metrics import MetricsLog, read_metrics
from soloist.runtime.buffer import RolloutBuffer
from soloist.runtime.exact_lag import ExactLag
from soloist.runtime.health import EventLoopDelay
from soloist.runtime.ledger import Ledger, StoredStep
from soloist.runtime.staleness import Admission
from soloist.runtime.tasks import TaskSource
from soloist.seams import Clock, SystemClock
from soloist.training.loop import train
from soloist.training.observer import Observer, SilentObserver
from soloist.training.recovery import OnStep, Recovered, recover
from soloist.training.retraining import Metrics, StepLearner
from soloist.training.run import Engines, Episodes, Run, SampleLog
from soloist.training.run_folder import RunFolder
from soloist.training.snapshot_writer import SnapshotWriter
from soloist.training.snapshots import SnapshotFolder
from soloist.training.statistics import rollout_metrics
from soloist.training.stopwatch import Stopwatch
from soloist.training.weights import PublishedWeights
from soloist.types import Rollout, Sampling, Task, WeightsRef


class Players(Protocol):
    """Engines that have the published weights, and what plays episodes with them."""

    @property
    def engines(self) -> Engines:
        """All engines as one."""

    @property
    def episodes(self) -> Episodes:
        """Plays one rollout."""

    @property
    def sampling(self) -> Sampling:
        """How action tokens are drawn."""

    def train_task(self, index: int) -> Task:
        """Training task number `index`."""

    async def ready(self) -> None:
        """Last check before the first step, with engines and learner at one version. Raises RunError."""

    def samples(self, first_step: int) -> SampleLog | None:
        """What keeps a few rollouts for the report."""


@dataclass(kw_only=True)
class Job:
    """What a durable run is made from.

    Example: `asyncio.run(train_durably(Job(config=config, folder=RunFolder(config), learner=…, …)))`.
    """

    config: RunConfig
    folder: RunFolder
    learner: StepLearner
    snapshots: SnapshotFolder
    weights: PublishedWeights
    open_players: Callable[[WeightsRef], AbstractAsyncContextManager[Players]]
    observer: Observer = field(default_factory=SilentObserver)
    clock: Clock = field(default_factory=SystemClock)


async def train_durably(job: Job) -> None:
    """Train until `config.steps` steps are committed, going on from whatever the folder holds.

    Raises UserError when the folder has more steps than asked for, RunError when the run can't go on.
    """
    note, config = job.observer.note, job.config
    async with AsyncExitStack() as stack:
        stack.push_async_callback(job.learner.close)
        ledger = await Ledger.open(job.folder.ledger, job.clock)
        stack.push_async_callback(ledger.close)
        writer = SnapshotWriter(job.snapshots, ledger, note, config.keep_rollouts)
        stack.push_async_callback(writer.close)
        log = MetricsLog(job.folder.metrics)
        _refuse_fewer_steps(job, (await ledger.frontier()).step)
        found = await recover(
            ledger,
            job.snapshots,
            job.learner,
            value_updates=config.value_updates,
            note=note,
            on_step=_fill_metrics(job, log),
        )
        step = found.frontier.step
        if step:
            note(_what_was_found(found))
        job.weights.forget_newer(step)
        reference = await job.learner.publish(job.weights.folder_of(step))
        if step < config.steps:
            async with job.open_players(reference) as players:
                await players.ready()
                job.observer.stage_started("train", config.steps)
                await _train(job, players, ledger, writer, log, found)
        elif found.snapshot < step:
            # The run died between its last step and that step's snapshot.
            state = await job.learner.state()
            progress = {"step": step, "state_hash": found.state_hash, "lineage": ledger.lineage, "life": ledger.life}
            await writer.start(step, found.state_hash, {**state, "progress": ({}, progress)})
        await writer.finish()


async def _train(
    job: Job, players: Players, ledger: Ledger, writer: SnapshotWriter, log: MetricsLog, found: Recovered
) -> None:
    aborts = _Aborts(players.engines)
    buffer = RolloutBuffer(
        job.config,
        TaskSource(players.train_task),
        clock=job.clock,
        on_stall=job.observer.note,
        on_abort=aborts.start,
        on_hunger=ledger.hurry,
        journal=ledger,
    )
    buffer.restore(found.frontier)
    await _set_engines_back(job, players.engines, buffer.admission)
    delay = EventLoopDelay()
    run = Run(
        config=job.config,
        first_step=found.frontier.step,
        buffer=buffer,
        engines=players.engines,
        episodes=players.episodes,
        sampling=players.sampling,
        learner=job.learner,
        ledger=ledger,
        weights=job.weights,
        snapshots=writer,
        log=log,
        samples=players.samples(found.frontier.step),
        stopwatch=Stopwatch(job.clock, job.folder.timeline),
        delay=delay,
        clock=job.clock,
        observer=job.observer,
        state_hash=found.state_hash,
    )
    gauge = asyncio.create_task(delay.run(), name="event-loop delay")
    try:
        await train(run)
    finally:
        gauge.cancel()


async def _set_engines_back(job: Job, engines: Engines, admission: Admission | ExactLag) -> None:
    """With a lag: load the version that the first step to be filled needs, as in the run before the crash."""
    # Older than what was published last, unless the crash came when that was just what players waited for.
    if isinstance(admission, ExactLag) and admission.version < engines.version:
        await engines.load(job.weights.reference_to(admission.version))


def _refuse_fewer_steps(job: Job, done: int) -> None:
    if done > job.config.steps:
        raise UserError(
            f"{job.folder.path} has {done} steps already, found steps = {job.config.steps}; give at least as many, or "
            "choose another --name"
        )


def _what_was_found(found: Recovered) -> str:
    frontier = found.frontier
    first = sorted(frontier.open_units)[:4] or [frontier.next_unit]
    return (
        f"train goes on at step {frontier.step}: snapshot of step {found.snapshot}, {found.retrained} recorded steps "
        f"trained again, {len(frontier.scored)} finished rollouts are back; tasks {', '.join(map(str, first))} are next"
    )


def _fill_metrics(job: Job, log: MetricsLog) -> OnStep:
    """A step that was committed, but died before its metrics were written, gets them when it is trained again."""
    known = {record["step"] for record in read_metrics(job.folder.metrics, "train")}

    def write(stored: StoredStep, rollouts: Sequence[Rollout], metrics: Metrics) -> None:
        if stored.step not in known:
            now = job.clock.now()
            log.write("train", stored.step, now, rollout_metrics(rollouts, stored.step, now) | metrics)

    return write


class _Aborts:
    """Aborts rollouts from synchronous code; keeps the tasks alive until they are done."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, rollout_ids: list[str]) -> None:
        task = asyncio.get_running_loop().create_task(self._engines.abort(rollout_ids), name="abort of stale rollouts")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
