"""Puts the product together with the stand-ins: one call trains a run in its folder, or goes on with it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from standin import ByteRendering, NumericLearner, stub_child

import soloist.engines.local.engine as local_engine
from soloist.config import RunConfig, build_config
from soloist.engines.local.engine import LocalEngine
from soloist.engines.pool import EngineSet
from soloist.environments.calculator import Calculator
from soloist.rollout.play import EpisodePlayer
from soloist.seams import Storage, SystemClock
from soloist.training.durable import Job, train_durably
from soloist.training.observer import SilentObserver
from soloist.training.run_folder import RunFolder
from soloist.training.snapshots import SnapshotFolder
from soloist.training.weights import PublishedWeights, versions_kept
from soloist.types import Sampling, Task, WeightsRef


class Talking(SilentObserver):
    """Writes notes to the life's log."""

    def note(self, text: str) -> None:
        """One line."""
        print(f"note: {text}", file=sys.stderr, flush=True)


class StandInPlayers:
    """`Players`: the real engine set and sandbox, a stub for the engine's child."""

    def __init__(self, config: RunConfig, home: Path, engines: EngineSet, environment: Calculator) -> None:
        rendering: Any = ByteRendering()
        self.engines = engines
        self.episodes = EpisodePlayer(
            environment=environment,
            engine=engines,
            rendering=rendering,
            budget=config.rollout,
            max_length=config.engine.max_length,
            clock=SystemClock(),
        )
        self.sampling = Sampling(max_new_tokens=config.rollout.max_new_tokens, stop_token_ids=(0,), seed=config.seed)
        self._environment = environment

    def train_task(self, index: int) -> Task:
        """The calculator's."""
        return self._environment.train_task(index)

    async def ready(self) -> None:
        """Nothing to compare: the stub has no log-probabilities of its own."""

    def samples(self, first_step: int) -> None:
        """None are kept."""


def encode(tensors: Mapping[str, Any]) -> bytes:
    """Vectors of integers as JSON."""
    return json.dumps(dict(tensors)).encode()


def decode(data: bytes) -> dict[str, Any]:
    """And back."""
    found: dict[str, Any] = json.loads(data)
    return found


def config_of(home: Path, plan: dict[str, Any]) -> RunConfig:
    """The run's config: what the plan says, in the run's folder."""
    raw = dict(plan["config"])
    raw |= {"runs_dir": str(home / "runs"), "name": "run", "environment": {"tasks": str(home / "tasks.jsonl")}}
    return build_config(raw, source="plan")


def train(home: Path, plan: dict[str, Any], observer: Any = None) -> int:
    """Train to the end. Returns 0; what goes wrong is raised."""
    config = config_of(home, plan)
    local_engine.Child = stub_child(plan["token_seconds"])  # type: ignore[misc]
    folder = RunFolder(config)
    storage = Storage()

    @asynccontextmanager
    async def open_players(weights: WeightsRef) -> AsyncIterator[StandInPlayers]:
        environment = Calculator(config.environment, config.seed)
        engine = LocalEngine("local-0", home / "model", config.engine, fixed_shapes=config.deterministic)
        engines = EngineSet([engine])
        try:
            await asyncio.gather(environment.start(), engines.start())
            await engines.load(weights)
            yield StandInPlayers(config, home, engines, environment)
        finally:
            await engines.close()
            await environment.close()

    with folder.locked():
        folder.open(config, resume=True)
        job = Job(
            config=config,
            folder=folder,
            learner=NumericLearner(config.seed, plan["step_seconds"], storage),
            snapshots=SnapshotFolder(folder.checkpoints, encode, decode, storage=storage),
            weights=PublishedWeights(folder.weights, home / "model", keep=versions_kept(config)),
            open_players=open_players,
            observer=observer or Talking(),
        )
        asyncio.run(train_durably(job))
        folder.mark_done("train", {"steps": config.steps})
    return 0
