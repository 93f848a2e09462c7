"""The learner on a thread of its own: the event loop goes on serving players while torch computes.

Torch releases the interpreter lock inside its kernels; what remains is short, so the loop's delay stays small (a
metric).
All calls but `prepare` run on one thread, in order, so the learner needs no locks; `prepare` only adds to a dict, which
is one step for the interpreter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from soloist.runtime.health import WorkerThread
from soloist.training.learner import Learner, State
from soloist.training.samples import TokenTable
from soloist.training.step import Metrics
from soloist.types import Rollout, WeightsRef


class LearnerThread:
    """`Learner` with awaitable methods. Replaced by a process group when there are many devices; the loop stays.

    Example: `metrics = await LearnerThread(learner).update_policy(rollouts)`.
    """

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._thread = WorkerThread("learner")

    @property
    def version(self) -> int:
        """Policy updates so far."""
        return self._learner.version

    @property
    def tokens(self) -> TokenTable | None:
        """What the last policy update saw of each token; None before the first."""
        return self._learner.tokens

    def prepare(self, rollout: Rollout) -> None:
        """See `Learner.prepare`; at once, on the caller's thread, while the learner's own computes."""
        self._learner.prepare(rollout)

    async def update_value(self, rollouts: Sequence[Rollout]) -> Metrics:
        """See `Learner.update_value`."""
        return await self._thread.call(self._learner.update_value, rollouts)

    async def update_policy(self, rollouts: Sequence[Rollout]) -> Metrics:
        """See `Learner.update_policy`."""
        return await self._thread.call(self._learner.update_policy, rollouts)

    async def log_prob_errors(self, rollouts: Sequence[Rollout]) -> list[float]:
        """See `Learner.log_prob_errors`."""
        return await self._thread.call(self._learner.log_prob_errors, rollouts)

    def task_weight(self, task_id: str) -> float:
        """See `Learner.task_weight`; at once, on the caller's thread."""
        return self._learner.task_weight(task_id)

    async def start_rates(self, scores: Mapping[str, Sequence[float]]) -> None:
        """See `Learner.start_rates`."""
        await self._thread.call(self._learner.start_rates, scores)

    async def publish(self, folder: Path) -> WeightsRef:
        """See `Learner.publish`."""
        return await self._thread.call(self._learner.publish, folder)

    async def fingerprint(self) -> str:
        """See `Learner.fingerprint`."""
        return await self._thread.call(self._learner.fingerprint)

    async def load_state(self, state: State) -> None:
        """See `Learner.load_state`."""
        await self._thread.call(self._learner.load_state, state)

    async def state(self) -> State:
        """See `Learner.state`."""
        return await self._thread.call(self._learner.state)

    async def close(self) -> None:
        """Let the thread end when its work is done."""
        await self._thread.close()
