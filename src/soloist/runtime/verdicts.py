"""What may be trained: pure judgements of ended rollouts, apart from who holds which place (`places.py`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from soloist.config import RunConfig
from soloist.errors import RunError
from soloist.types import Failure, Rollout


def oldest_of(rollouts: Sequence[Rollout]) -> int:
    """Oldest version in a group whose rollouts all have one."""
    return min(rollout.oldest_version or 0 for rollout in rollouts)


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
