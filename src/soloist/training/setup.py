"""Builds what a stage needs from the config: the bench (environment, renderer, engines) and the `Run` of the main loop.

Guarantees: whatever was started is stopped in every case, engines and sandboxes included; before the first step a probe
compares the engine's log-probabilities with the learner's, so a wrong temperature or processing never trains.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from soloist.config import RunConfig
from soloist.engines.base import EngineHealth
from soloist.engines.pool import EngineSet, pinned_engine, sampling_engines
from soloist.environments.base import Environment
from soloist.environments.registry import build_environment
from soloist.errors import RunError
from soloist.metrics import MetricsLog
from soloist.models.loading import load_policy, load_tokenizer
from soloist.models.value import ValueModel
from soloist.rollout.play import EpisodePlayer, new_rollout
from soloist.rollout.rendering import Rendering, build_renderer
from soloist.runtime.buffer import RolloutBuffer
from soloist.runtime.health import EventLoopDelay, reported_wait
from soloist.runtime.leases import Lease
from soloist.runtime.ledger import Ledger
from soloist.seams import Clock
from soloist.training.checkpoint import Checkpoints
from soloist.training.evaluation import play_tasks
from soloist.training.learner import Learner, Metrics
from soloist.training.learner_thread import LearnerThread
from soloist.training.observer import Observer
from soloist.training.run_folder import RunFolder
from soloist.training.samples import Samples
from soloist.training.statistics import rollout_metrics, warnings_of
from soloist.training.stopwatch import Stopwatch
from soloist.training.weights import PublishedWeights
from soloist.types import Rollout, Sampling, WeightsRef

# |π/μ − 1| that the start-up probe accepts. bf16 engines sample from rounded logits; fp32 ones differ in last bits.
PROBE_LIMIT = {"float32": 1e-4, "bfloat16": 0.2}


def build_rendered(config: RunConfig, model: Path) -> tuple[Environment, Rendering]:
    """Environment and renderer of a run. Raises UserError for names, folders or task files that are wrong."""
    rendering = build_renderer(load_tokenizer(model), config.model.renderer)
    environment = build_environment(
        config.environment, config.seed, good=config.sft.good, miscopied=config.sft.miscopied
    )
    return environment, rendering


@dataclass(kw_only=True)
class Bench:
    """What plays episodes: an environment, a renderer and engines with weights."""

    environment: Environment
    rendering: Rendering
    engines: EngineSet
    episodes: EpisodePlayer
    sampling: Sampling


@asynccontextmanager
async def open_bench(
    config: RunConfig,
    model: Path,
    clock: Clock,
    weights: WeightsRef | None = None,
    pinned: bool = False,
) -> AsyncIterator[Bench]:
    """Start environment and engines, load `weights` if given, and stop both at the end. `pinned` means one engine."""
    environment, rendering = build_rendered(config, model)
    if pinned:
        engines = EngineSet([pinned_engine(model, config.engine, fixed_shapes=config.deterministic)])
    else:
        engines = sampling_engines(model, config.engine, fixed_shapes=config.deterministic)
    try:
        await asyncio.gather(environment.start(), engines.start())
        if weights is not None:
            await engines.load(weights)
        yield Bench(
            environment=environment,
            rendering=rendering,
            engines=engines,
            episodes=EpisodePlayer(
                environment=environment,
                engine=engines,
                rendering=rendering,
                budget=config.rollout,
                max_length=config.engine.max_length,
                clock=clock,
            ),
            sampling=Sampling(
                temperature=config.rollout.temperature,
                max_new_tokens=config.rollout.max_new_tokens,
                stop_token_ids=tuple(rendering.stop_token_ids),
                seed=config.seed,
            ),
        )
    finally:
        await engines.close()
        await environment.close()


@dataclass(kw_only=True)
class Run:
    """Everything that the main loop speaks with."""

    config: RunConfig
    first_step: int
    buffer: RolloutBuffer
    engines: EngineSet
    episodes: EpisodePlayer
    sampling: Sampling
    learner: LearnerThread
    ledger: Ledger
    weights: PublishedWeights
    checkpoints: Checkpoints
    log: MetricsLog
    samples: Samples
    stopwatch: Stopwatch
    delay: EventLoopDelay
    clock: Clock
    observer: Observer
    _noted: Metrics = field(default_factory=dict)
    _engine_before: tuple[float, int] = (0.0, 0)

    async def started(self, lease: Lease) -> Rollout:
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
        await self.ledger.started(rollout)
        return rollout

    async def ended(self, lease: Lease, rollout: Rollout) -> None:
        """Put an ended rollout on record, then into the buffer: what can be trained is on disk before."""
        await self.ledger.ended(rollout, "dropped" if rollout.status == "aborted" else None)
        for refused, fate, reason in await self.buffer.put(lease, rollout):
            await self.ledger.ended(refused, fate, reason)

    def slot_of(self, lease: Lease) -> int | None:
        """In deterministic mode each place of a step has its own cache slot; else the engine chooses."""
        return lease.place % self.config.rollouts_per_step if self.config.deterministic else None

    def note(self, metrics: Metrics) -> None:
        """Keep metrics until the step is recorded."""
        self._noted |= metrics

    async def commit(self, step: int, rollouts: list[Rollout]) -> None:
        """Put the step on record: which rollouts, in which order, from which version."""
        record = {
            "version": step,
            "rollouts": [rollout.rollout_id for rollout in rollouts],
            "losses": {name: self._noted.get(name) for name in ("actor/pg_loss", "critic/loss")},
        }
        record["hash"] = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
        await self.ledger.commit(step, rollouts, record)

    def publishes_after(self, step: int) -> bool:
        """Whether engines get new weights after this step; the last step always publishes."""
        return (step + 1) % self.config.publish_every == 0 or step + 1 == self.config.steps

    async def publish(self, version: int) -> None:
        """Write the learner's weights and load them into all engines. In-flight requests go on."""
        reference = await self.learner.publish(self.weights.folder_of(version))
        if reference.version != version:
            raise RunError(f"the learner published version {reference.version}, but step {version} was due")

        def report(waited: float) -> None:
            self.observer.note(
                f"not all engines have loaded version {version} after {waited:.1f} s: {self.buffer.report()}"
            )

        async with reported_wait(report, self.config.health.stall_report_seconds, self.clock):
            await self.engines.load(reference)
        self.weights.forget_old(version)
        self.buffer.wake()

    async def record(self, step: int, rollouts: list[Rollout]) -> None:
        """Write the step's metrics and, when due, a checkpoint."""
        metrics = rollout_metrics(rollouts, step, self.clock.now()) | self._noted | self.buffer.step_metrics()
        lap, seconds = self.stopwatch.read()
        metrics |= {f"time/{name}": value for name, value in seconds.items()}
        metrics |= self._speeds(lap, seconds, rollouts, await self.engines.health())
        metrics |= {"loop/delay_p99_ms": self.delay.p99_ms(), "loop/delay_max_ms": self.delay.max_ms()}
        self.log.write("train", step, self.clock.now(), metrics)
        last = step + 1 == self.config.steps
        await asyncio.to_thread(self.samples.record, step, rollouts, self.learner.tokens, last=last)
        self.observer.progress("train", step + 1, metrics)
        if step == self.first_step:
            for warning in warnings_of(rollouts, metrics):
                self.observer.note(f"warning: {warning}")
        self._noted = {}
        # Last, since a step that a checkpoint holds is not trained again: killed before this line, it would be missing
        # from the metrics. The price is that the checkpoint's time stands in the next step's record.
        if (step + 1) % self.config.checkpoint_every == 0 or last:
            await self.stopwatch.timed("checkpoint", self.checkpoint(step + 1))

    def _speeds(
        self, lap: float, seconds: dict[str, float], rollouts: list[Rollout], health: dict[str, EngineHealth]
    ) -> Metrics:
        busy, tokens = sum(one.busy_s for one in health.values()), sum(one.tokens for one in health.values())
        busy_before, tokens_before = self._engine_before
        self._engine_before = (busy, tokens)
        lap = max(lap, 1e-9)
        # A restarted child counts from 0 again; a negative difference is not a speed.
        idle = 1 - min(1.0, max(0.0, busy - busy_before) / (lap * len(health)))
        return {
            "time/step": lap,
            "trainer/idle_ratio": min(1.0, seconds.get("wait_for_rollouts", 0.0) / lap),
            "rollouter/idle_ratio": idle,
            "perf/tokens_per_s": max(0, tokens - tokens_before) / lap,
            "perf/trained_tokens_per_s": sum(rollout.action_tokens for rollout in rollouts) / lap,
        }

    async def checkpoint(self, step: int) -> None:
        """Everything with memory, after `step` updates."""
        state = await self.learner.state()
        progress: dict[str, Any] = {"step": step, "buffer": self.buffer.state()}
        await asyncio.to_thread(self.checkpoints.save, step, state | {"progress": ({}, progress)})


def build_learner(config: RunConfig, folder: RunFolder) -> Learner:
    """Policy from the SFT folder, value model from its pretraining. Raises UserError or RunError."""
    torch.set_num_threads(config.threads)
    policy = load_policy(folder.sft_model, config.model.dtype, config.model.device)
    value = ValueModel.from_policy(policy)
    found = Checkpoints(folder.value_pretraining / "best").load_newest(lambda text: None)
    if found is None:
        raise RunError(f"{folder.value_pretraining} holds no value model; run `soloist pretrain-value` first")
    with torch.no_grad():
        for name, parameter in value.named_parameters():
            parameter.copy_(found[1]["value"][0][name])
    return Learner(policy, value, config)


async def probe_parity(bench: Bench, learner: LearnerThread, config: RunConfig, clock: Clock) -> float:
    """Largest |π/μ − 1| over a few episodes with tool turns. Raises RunError when engine and learner disagree."""
    tasks = [bench.environment.heldout_task(index) for index in range(4)]
    rollouts = await play_tasks(
        bench.episodes, tasks, sampling=bench.sampling, config=config, clock=clock, prefix="probe"
    )
    usable = [rollout for rollout in rollouts if rollout.trainable]
    error = max(await learner.log_prob_errors(usable), default=0.0)
    limit = max(PROBE_LIMIT[config.model.dtype], PROBE_LIMIT[config.engine.dtype])
    if not error <= limit:
        raise RunError(
            f"engine and learner disagree before the first step: some |π/μ − 1| is {error:.3g}, expected ≤ {limit:g} "
            f"at temperature {config.rollout.temperature:g}; the engine must return processed log-probabilities (after "
            "temperature, without top-p or top-k) of the same weights"
        )
    return error
