"""A set of engines, each with its own version; the runtime talks to engines only through it.

Guarantees: turns of one rollout stay on one engine (its prefix is there), new rollouts go to the engine with the
fewest; `version` is the oldest in the set, so nobody counts on weights that some engine lacks; when an engine is lost
its rollouts go on elsewhere from their prompt, and the last one's loss ends the run with all reasons.
Not covered: starting lost engines again (each engine restarts its own child).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from soloist.config import EngineConfig
from soloist.engines.base import Engine, EngineHealth
from soloist.engines.local.engine import LocalEngine
from soloist.errors import RolloutError, RunError
from soloist.types import Completion, GenerateRequest, WeightsRef

_log = logging.getLogger("soloist.engines")


class EngineSet:
    """Several engines as one. Raises ValueError when the set is empty or two engines share a name.

    Example: `engines = EngineSet([LocalEngine("local-0", folder, config)]); await engines.start()`.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        names = [engine.name for engine in engines]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"an engine set needs engines with different names, found {names}")
        self.engines = list(engines)
        self.lost: dict[str, str] = {}
        """Engines that are out of the set, with the reason."""
        self._homes: dict[str, Engine] = {}

    @property
    def living(self) -> list[Engine]:
        """Engines that serve."""
        return [engine for engine in self.engines if engine.name not in self.lost]

    @property
    def version(self) -> int:
        """Oldest version among the living engines. Raises RunError when there are none."""
        return min(engine.version for engine in self._some_living())

    def version_for(self, rollout_id: str) -> int:
        """Version of the engine that serves this rollout; a new rollout is given its engine here. Raises RunError."""
        home = self._homes[rollout_id] = self._home(rollout_id)
        return home.version

    def engine_of(self, rollout_id: str) -> str:
        """Name of the engine that serves this rollout; empty when none does."""
        home = self._homes.get(rollout_id)
        return home.name if home else ""

    async def start(self) -> None:
        """Start all engines at once. Raises RunError when one can't; the others are closed then."""
        try:
            async with asyncio.TaskGroup() as group:
                for engine in self.engines:
                    group.create_task(engine.start(), name=f"start of engine {engine.name}")
        except BaseExceptionGroup as failures:
            await self.close()
            raise failures.exceptions[0] from None
        except BaseException:
            await self.close()
            raise

    async def generate(self, request: GenerateRequest) -> Completion:
        """Continue a prompt on the rollout's engine. Raises RolloutError, or RunError when no engine is left."""
        while True:
            home = self._homes[request.rollout_id] = self._home(request.rollout_id)
            try:
                return await home.generate(request)
            except RolloutError as error:
                # A living engine's failure belongs to the request; only the loss of an engine is worth another try.
                if (await home.health()).alive:
                    raise
                self._lose(home, error.reason)

    async def release(self, rollout_id: str) -> None:
        """Forget a rollout that is over."""
        home = self._homes.pop(rollout_id, None)
        if home is not None and home.name not in self.lost:
            await home.release(rollout_id)

    async def load(self, weights: WeightsRef) -> None:
        """Load on all engines at once. Raises RunError when one refuses; a lost one leaves the set instead."""
        living = self._some_living()
        outcomes = await asyncio.gather(*(engine.load(weights) for engine in living), return_exceptions=True)
        # All outcomes first: an early raise would leave the other loads running behind our back.
        refusals: list[BaseException] = []
        for engine, outcome in zip(living, outcomes, strict=True):
            if not isinstance(outcome, BaseException):
                continue
            if isinstance(outcome, RunError) and not (await engine.health()).alive:
                self._lose(engine, str(outcome))
            else:
                refusals.append(outcome)
        if refusals:
            raise refusals[0]
        self._some_living()

    async def abort(self, rollout_ids: list[str] | None = None) -> None:
        """End the requests of these rollouts (all when None) on every living engine."""
        await asyncio.gather(*(engine.abort(rollout_ids) for engine in self.living))

    async def health(self) -> dict[str, EngineHealth]:
        """State and counters of every engine, lost ones too, by name."""
        states = await asyncio.gather(*(engine.health() for engine in self.engines))
        return {engine.name: state for engine, state in zip(self.engines, states, strict=True)}

    async def close(self) -> None:
        """Close all engines, even if one of them raises. Safe to call twice."""
        outcomes = await asyncio.gather(*(engine.close() for engine in self.engines), return_exceptions=True)
        for engine, outcome in zip(self.engines, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                _log.error("engine '%s' did not close cleanly: %r", engine.name, outcome)

    def _some_living(self) -> list[Engine]:
        living = self.living
        if not living:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self.lost.items())
            raise RunError(
                f"all {len(self.engines)} engines are lost ({reasons}); see the run's log for their last words"
            )
        return living

    def _home(self, rollout_id: str) -> Engine:
        """The engine that has the rollout, else the one with the fewest rollouts (the first of them)."""
        living = self._some_living()
        home = self._homes.get(rollout_id)
        if home is not None and home.name not in self.lost:
            return home
        # Rollouts rather than requests: one that waits for its tool will be back with its next turn.
        rollouts = Counter(engine.name for engine in self._homes.values())
        return min(living, key=lambda engine: rollouts[engine.name])

    def _lose(self, engine: Engine, reason: str) -> None:
        if engine.name not in self.lost:
            self.lost[engine.name] = reason
            _log.error("engine '%s' left the set: %s", engine.name, reason)


def sampling_engines(
    model_folder: Path, config: EngineConfig, *, fixed_shapes: bool = False, seed: int = 0
) -> EngineSet:
    """The engines that sample for training, `config.count` of them, named local-0, local-1, …, with equal weights."""
    names = [f"local-{number}" for number in range(config.count)]
    return EngineSet([LocalEngine(name, model_folder, config, fixed_shapes=fixed_shapes, seed=seed) for name in names])


def pinned_engine(model_folder: Path, config: EngineConfig, *, fixed_shapes: bool = False) -> LocalEngine:
    """An engine of its own for evaluation: nobody loads weights into it while it measures one version, unaltered."""
    exact = config.model_copy(update={"noise": 0.0, "rounding": "none"})
    return LocalEngine("evaluation", model_folder, exact, fixed_shapes=fixed_shapes)
