"""What an engine is: token ids in; token ids, log-probabilities, finish reason and version spans out.

Guarantees asked of every engine: the log-probabilities are those of the distribution that was sampled (fp32, after the
temperature); every token carries the version of the weights that produced its logits; `load` is atomic, never stops
running requests and leaves the old weights in place when it fails. Engines know nothing of environments.
"""

from __future__ import annotations

from typing import Protocol

from soloist.types import Completion, GenerateRequest, Record, WeightsRef


class Capabilities(Record, frozen=True, kw_only=True):
    """What an engine can do beyond the minimum.

    Example: `Capabilities(in_flight_load=True, fixed_shapes=True)`.
    """

    in_flight_load: bool = False
    """Loads weights while requests run."""
    recompute_on_load: bool = False
    """Can compute the caches of running requests anew after a load."""
    fixed_shapes: bool = False
    """Can run prefill and decode in fixed shapes, for deterministic mode."""
    routed_experts: bool = False
    """Returns the experts that each token used."""
    lora: bool = False
    """Serves LoRA adapters."""


class EngineHealth(Record, frozen=True, kw_only=True):
    """One look at an engine.

    Example: `EngineHealth(alive=True, version=3, running=60, waiting=4, restarts=0, tokens=91_000, busy_s=11.2)`.
    """

    alive: bool
    version: int
    running: int
    """Requests in slots."""
    waiting: int
    """Requests without a slot yet."""
    restarts: int
    """Child processes started after crashes."""
    tokens: int
    """Tokens sampled since the start."""
    busy_s: float
    """Seconds spent in forward passes since the start."""


class Engine(Protocol):
    """An engine serves one model at one version at a time."""

    name: str
    capabilities: Capabilities

    @property
    def version(self) -> int:
        """Version of the last successful load."""

    async def start(self) -> None:
        """Become ready to serve. Raises RunError when that fails."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """Continue a prompt. Raises RolloutError("engine", …) when the machinery fails or its deadline passes."""

    async def release(self, rollout_id: str) -> None:
        """Forget the prefix kept for a rollout that is over."""

    async def load(self, weights: WeightsRef) -> None:
        """Swap the weights between two decode steps. Raises RunError and keeps the old ones when they don't fit."""

    async def abort(self, rollout_ids: list[str] | None = None) -> None:
        """End the requests of these rollouts (all when None) with finish reason `abort`."""

    async def health(self) -> EngineHealth:
        """State and counters."""

    async def close(self) -> None:
        """Stop and free everything. Safe to call twice."""
