"""Combinations of settings that can't work or would leave a setting unused, each with the sentence that refuses it.

A rule is a condition on the whole config; it says the values found and the remedy. A new rule is a new pair.
Not covered: single values, whose limits stand with the fields in `config.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from soloist.config import RunConfig


def contradictions(c: RunConfig) -> list[tuple[bool, str]]:
    """All rules as (is broken, sentence). The first broken one is shown."""
    lag = c.publish_every - 1
    return [
        (
            c.rollouts_per_step % c.group_size != 0,
            f"rollouts_per_step = {c.rollouts_per_step} is not a multiple of group_size = {c.group_size}; "
            "a group is trained in one step, so make it a multiple",
        ),
        (
            c.on_stale != "train" and lag > c.max_staleness,
            f"publish_every = {c.publish_every} makes rollouts {lag} versions old before they start, above "
            f"max_staleness = {c.max_staleness}; raise max_staleness to {lag} or set on_stale = 'train'",
        ),
        (
            c.deterministic and c.max_staleness != 0,
            f"deterministic = true needs max_staleness = 0, found {c.max_staleness}; free-running asynchronous "
            "generation can't promise bits",
        ),
        (
            c.deterministic and c.engine.slots < c.rollouts_per_step,
            f"deterministic = true gives each rollout of a step its own slot, but engine.slots = {c.engine.slots} < "
            f"rollouts_per_step = {c.rollouts_per_step}; raise engine.slots",
        ),
        (
            c.deterministic and c.engine.count > 1,
            f"deterministic = true works with one engine, found engine.count = {c.engine.count}; set it to 1",
        ),
        (
            c.rollout.max_tokens > c.engine.max_length,
            f"rollout.max_tokens = {c.rollout.max_tokens} exceeds engine.max_length = {c.engine.max_length}; "
            "raise engine.max_length",
        ),
        (
            c.rollout.max_tokens > c.token_budget,
            f"rollout.max_tokens = {c.rollout.max_tokens} exceeds token_budget = {c.token_budget}, so one rollout "
            "would not fit into a micro-batch; raise token_budget",
        ),
        (
            c.sft.good + c.sft.miscopied > 1,
            f"sft.good + sft.miscopied = {c.sft.good + c.sft.miscopied:g} exceeds 1; the rest is the share of guesses",
        ),
        (
            (c.loss.loss_agg_mode == "fixed-length") != (c.loss.fixed_length > 0),
            f"loss.fixed_length = {c.loss.fixed_length} with loss_agg_mode = '{c.loss.loss_agg_mode}'; set both "
            "(mode 'fixed-length' and a length above 0) or neither",
        ),
        (
            c.policy.epochs * c.policy.minibatches > 1 and c.loss.policy_loss == "importance_weighting",
            f"policy.epochs = {c.policy.epochs} and policy.minibatches = {c.policy.minibatches} reuse rollouts, but "
            "policy_loss = 'importance_weighting' has no trust region; use 'dis' or 'ppo'",
        ),
        (
            c.policy.minibatches > c.rollouts_per_step,
            f"policy.minibatches = {c.policy.minibatches} exceeds rollouts_per_step = {c.rollouts_per_step}",
        ),
        (
            c.model.hidden_size % c.model.heads != 0,
            f"model.hidden_size = {c.model.hidden_size} is not a multiple of model.heads = {c.model.heads}",
        ),
        (
            c.health.stall_report_seconds > c.health.stall_limit_seconds,
            f"health.stall_report_seconds = {c.health.stall_report_seconds:g} exceeds stall_limit_seconds = "
            f"{c.health.stall_limit_seconds:g}; report a stall before it ends the run",
        ),
    ]
