"""Training again from stored rollouts: the updates of a recorded step, in the recorded order. Without torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from soloist.errors import RunError
from soloist.types import Rollout, WeightsRef

Metrics = dict[str, float | None]
State = dict[str, tuple[dict[str, Any], dict[str, Any]]]


class StepLearner(Protocol):
    """A learner as the loop sees it: a thread, a group of processes, or a stand-in in a test."""

    @property
    def version(self) -> int:
        """Policy updates so far."""

    @property
    def tokens(self) -> Any:
        """What the last policy update saw of each token, for the report; None when nothing is known."""

    def prepare(self, rollout: Rollout) -> None:
        """Do at once, on the caller's thread, what can be done before the rollout's step; may do nothing."""

    async def update_value(self, rollouts: Sequence[Rollout]) -> Metrics:
        """One update of the value model."""

    async def update_policy(self, rollouts: Sequence[Rollout]) -> Metrics:
        """One policy update; `version` grows by one."""

    async def fingerprint(self) -> str:
        """A hash of everything that `state` holds and training depends on: equal if and only if all bits are."""

    async def publish(self, folder: Path) -> WeightsRef:
        """Write the policy's weights into `folder`, visible whole or not at all."""

    async def state(self) -> State:
        """A copy of everything with memory, as named (tensors, JSON) parts."""

    async def load_state(self, state: State) -> None:
        """Take back what `state` gave."""

    async def close(self) -> None:
        """Free what is held. Safe to call twice."""


async def retrain(learner: StepLearner, step: int, rollouts: Sequence[Rollout], value_updates: int) -> Metrics:
    """The updates of one step: K of the value model, one of the policy. Returns their metrics.

    Raises RunError when the learner isn't at the step's version.
    """
    if learner.version != step:
        raise RunError(f"step {step} trains version {step}, but the learner has version {learner.version}")
    metrics: Metrics = {}
    for _ in range(value_updates):
        metrics |= await learner.update_value(rollouts)
    return metrics | await learner.update_policy(rollouts)
