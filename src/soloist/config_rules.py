"""Which losses, advantages and schedules fit together: contradictions with their remedy, as `config.py` shows them.

Not covered: settings that nothing reads (`config_uses.py`), and rules about budgets, engines and steps (`config.py`).
"""

from __future__ import annotations

from soloist.config_tree import RunSettings
from soloist.estimators import ADV_ESTIMATORS
from soloist.methods import LOSS_METHODS, Setting

Rule = tuple[bool, str]


def method_rules(c: RunSettings) -> list[Rule]:
    """Rules about the policy loss and the advantages, as (is broken, sentence)."""
    return [*_loss_rules(c), *_estimator_rules(c)]


def _loss_rules(c: RunSettings) -> list[Rule]:
    loss, method = c.loss, LOSS_METHODS[c.loss.policy_loss]
    updates, recomputes = c.policy.epochs * c.policy.minibatches, c.loss.old_log_probs == "recompute"
    # Whether a correction for the engine's probabilities can matter where the ratio is 1; clipping can't.
    corrected = method.correction in ("truncated", "masked")
    return [
        (
            loss.old_log_probs not in method.old_log_probs,
            f"policy_loss = '{loss.policy_loss}' with old_log_probs = '{loss.old_log_probs}': {_why_old(c)}; set "
            f"old_log_probs = '{method.old_log_probs[0]}' or leave it out",
        ),
        (
            updates > 1 and not method.has_trust_region,
            f"policy.epochs = {c.policy.epochs} and policy.minibatches = {c.policy.minibatches} reuse rollouts, but "
            f"policy_loss = '{loss.policy_loss}' has no trust region; use 'dis' or 'ppo', or one update a step",
        ),
        (
            updates == 1 and method.region in ("clip", "truncation") and not corrected and recomputes,
            f"policy_loss = '{loss.policy_loss}' with old_log_probs = 'recompute' and one update a step: the ratio "
            "is 1 at every token, so that neither clipping nor the data's age can matter; set old_log_probs = "
            "'rollout', or policy.minibatches or policy.epochs above 1",
        ),
        (
            updates == 1 and corrected and (loss.eps_low, loss.eps_high) != _own_eps(loss.policy_loss),
            f"policy_loss = '{loss.policy_loss}' with one update a step has a ratio of 1 at every token, so that "
            f"eps_low = {loss.eps_low} and eps_high = {loss.eps_high} would not be read; leave them out, or set "
            "policy.minibatches or policy.epochs above 1",
        ),
        (
            loss.icepop_low is not None and loss.icepop_high is not None and loss.icepop_low > loss.icepop_high,
            f"loss.icepop_low = {loss.icepop_low} exceeds loss.icepop_high = {loss.icepop_high}, so no token would "
            "be kept; swap them",
        ),
    ]


def _own_eps(policy_loss: str) -> tuple[Setting | None, Setting | None]:
    """Both epsilons as the method has them."""
    settings = LOSS_METHODS[policy_loss].settings
    return settings.get("eps_low"), settings.get("eps_high")


def _why_old(c: RunSettings) -> str:
    method = LOSS_METHODS[c.loss.policy_loss]
    if "rollout" not in method.old_log_probs:
        return "its correction π_old/μ would be 1 at every token"
    if method.region == "sat_clip":
        return "SAT measures how stale a token is by the ratio to the recorded probability"
    return "its ratio is to the recorded probability, no older policy is kept"


def _estimator_rules(c: RunSettings) -> list[Rule]:
    name, estimator = c.advantage.adv_estimator, ADV_ESTIMATORS[c.advantage.adv_estimator]
    repeats = bool(c.environment.tasks) or c.environment.distinct_tasks > 0
    by_task = name == "running_mean" and c.advantage.running_mean_over == "task"
    return [
        (
            estimator.groups and c.group_size == 1,
            f"adv_estimator = '{name}' compares rollouts of one task, found group_size = 1; set group_size to 2 or "
            "more (8 is usual), or use an estimator for single rollouts such as skip_observation_gae",
        ),
        (
            estimator.critic and c.value.updates_per_step == 0,
            f"adv_estimator = '{name}' needs a value model that learns, found value.updates_per_step = 0; set it to 1 "
            "or more (SAO has 2), or use an estimator without one",
        ),
        (
            (estimator.repeats or by_task) and not repeats,
            f"adv_estimator = '{name}'{' over tasks' if by_task else ''} remembers how each task went, but tasks never "
            "come again; set environment.distinct_tasks (or environment.tasks), or use running_mean_over = 'global'",
        ),
        (
            name == "spo" and c.group_size > 1,
            f"adv_estimator = 'spo' learns from single rollouts, found group_size = {c.group_size}; set group_size = 1",
        ),
        (
            name == "spo" and c.deterministic and c.max_staleness > 0,
            f"adv_estimator = 'spo' draws tasks by what was learned so far, which isn't the same in every run while "
            f"rollouts run ahead (max_staleness = {c.max_staleness}); set max_staleness = 0 or deterministic = false",
        ),
        (
            name == "spo" and c.advantage.overlong_buffer > 0,
            f"adv_estimator = 'spo' counts successes and needs rewards within 0 … 1, but overlong_buffer = "
            f"{c.advantage.overlong_buffer} makes some of them negative; leave overlong_buffer out",
        ),
        (
            c.advantage.overlong_buffer > c.rollout.max_tokens,
            f"advantage.overlong_buffer = {c.advantage.overlong_buffer} exceeds rollout.max_tokens = "
            f"{c.rollout.max_tokens}, so that every rollout would lose reward; make it smaller",
        ),
    ]
