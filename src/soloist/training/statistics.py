"""Figures about the rollouts of a step: rewards, lengths, staleness. Pure functions of records."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import pstdev

from soloist.metrics import mean, percentile
from soloist.types import Rollout

Metrics = dict[str, float | None]


def staleness_of(rollout: Rollout, version: int) -> int:
    """Version being trained minus the version of the oldest action token. Raises ValueError if negative or unknown."""
    oldest = rollout.oldest_version
    if oldest is None or oldest > version:
        raise ValueError(
            f"rollout {rollout.rollout_id} has oldest version {oldest} but version {version} is being trained; a token "
            "can't be younger than the weights, so its label is wrong"
        )
    return version - oldest


def rollout_metrics(rollouts: Sequence[Rollout], version: int, now: float) -> Metrics:
    """Metrics of the rollouts that are trained at `version`. A rollout without a score is no reward of 0."""
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    staleness = [float(staleness_of(rollout, version)) for rollout in rollouts]
    versions = [len({span.version for span in rollout.spans()}) for rollout in rollouts]
    return {
        "reward/mean": mean(rewards),
        # Exact arithmetic: equal rewards such as 0.1 give 0 and nothing near it, which `warnings_of` relies on.
        "reward/std": pstdev(rewards) if rewards else None,
        "rollout/length": mean(float(rollout.action_tokens) for rollout in rollouts),
        "rollout/truncated_ratio": mean(float(rollout.truncated) for rollout in rollouts),
        "rollout/turns": mean(float(len(rollout.turns)) for rollout in rollouts),
        "rollout/tool_calls": mean(float(rollout.info.get("tool_calls", 0)) for rollout in rollouts),
        "off_policy/staleness/mean": mean(staleness),
        "off_policy/staleness/max": max(staleness),
        "off_policy/staleness/p95": percentile(staleness, 0.95),
        "off_policy/versions_per_rollout": mean(float(count) for count in versions),
        "off_policy/spanning_frac": mean(float(count > 1) for count in versions),
        "queue/age_s": mean(now - rollout.scored_at for rollout in rollouts),
    }


def warnings_of(rollouts: Sequence[Rollout], metrics: Metrics) -> list[str]:
    """What a person should hear after the first step, because the run would learn little or nothing."""
    found = []
    if metrics.get("rollout/truncated_ratio") == 1.0:
        limit = max(rollout.sampling.max_new_tokens for rollout in rollouts)
        found.append(
            f"all {len(rollouts)} rollouts were truncated (longest turn allowed: {limit} tokens); raise "
            "rollout.max_new_tokens, rollout.max_tokens or rollout.max_turns"
        )
    if metrics.get("reward/std") == 0.0:
        found.append(
            f"all {len(rollouts)} rewards are {metrics['reward/mean']:g}, so they carry no signal; check the "
            "environment and the budgets"
        )
    if metrics.get("advantage/zero_frac") == 1.0:
        found.append("all advantages are 0, so nothing is learned; check rewards and the value model")
    return found
