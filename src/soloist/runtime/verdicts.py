"""What may be trained: pure judgements of ended rollouts, apart from who holds which place (`places.py`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from soloist.config import RunConfig
from soloist.errors import RunError
from soloist.types import Failure, Rollout

DROP_LIMIT = 20
"""Steps' worth of groups in a row whose rewards are equal, before the run gives up."""


def oldest_of(rollouts: Sequence[Rollout]) -> int:
    """Oldest version in a group whose rollouts all have one."""
    return min(rollout.oldest_version or 0 for rollout in rollouts)


def is_uniform(rollouts: Sequence[Rollout], config: RunConfig) -> bool:
    """Whether a whole group teaches nothing, since its rewards are all equal, and is to be dropped for that."""
    return config.advantage.drop_uniform_groups and len({rollout.reward for rollout in rollouts}) == 1


def check_drops(in_a_row: int, config: RunConfig) -> None:
    """Raise RunError when so many groups in a row were uniform that no step will ever be full."""
    limit = DROP_LIMIT * (config.rollouts_per_step // config.group_size)
    if in_a_row >= limit:
        raise RunError(
            f"{in_a_row} groups in a row had equal rewards, {DROP_LIMIT} steps' worth, so nothing is left to train on; "
            "the tasks are too easy or too hard for this policy: choose others, or set "
            "advantage.drop_uniform_groups = false"
        )


def flaw_of(rollout: Rollout, step: int, lag: int | None) -> Failure | None:
    """Why a scored rollout must not be trained at `step` or later, whatever its place, or None."""
    if rollout.action_tokens == 0:
        return Failure(boundary="empty", reason="no action token")
    if rollout.reward is None or not math.isfinite(rollout.reward):
        return Failure(boundary="scorer", reason=f"reward {rollout.reward} is not a finite number")
    oldest = rollout.oldest_version
    if oldest is None or not 0 <= oldest <= step:
        rule = "every action token needs the version of weights that were published"
        return Failure(boundary="engine", reason=f"oldest version {oldest} at step {step}; {rule}")
    versions = sorted({span.version for span in rollout.spans() if span.end > span.start})
    if lag is not None and len(versions) > 1:
        return Failure(boundary="engine", reason=f"versions {versions}; with a lag all tokens are of one")
    return None


def check_staleness(rollout: Rollout, step: int, config: RunConfig) -> None:
    """Last look at the bound, at the moment of training and independent of the admission. Raises RunError."""
    oldest, lag = rollout.oldest_version, config.lag
    staleness = None if oldest is None else step - oldest
    late = staleness is not None and config.on_stale != "train" and staleness > config.max_staleness
    if staleness is None or staleness < 0 or late:
        raise RunError(
            f"rollout {rollout.rollout_id} has staleness {staleness} at step {step}, outside 0 … max_staleness = "
            f"{config.max_staleness} (on_stale = '{config.on_stale}'); this is a bug of the admission or of the engine"
        )
    if lag is not None and staleness != min(step, lag):
        raise RunError(
            f"rollout {rollout.rollout_id} has staleness {staleness} at step {step}, not min(step, lag = {lag}); this "
            "is a bug of the admission or of the engine"
        )
