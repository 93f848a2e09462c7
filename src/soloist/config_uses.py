"""Which settings count only together with others: a value that nothing would read is refused, never silently unused.

One table: groups of keys, when they are read, and what to do about them otherwise. A key that keeps its default is
never complained about. Keys that are in no group are read always; a test walks over all of them.
Not covered: values that contradict each other although all are read (`config.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from pydantic import BaseModel

from soloist.config_tree import RunSettings
from soloist.estimators import ADV_ESTIMATORS
from soloist.methods import LOSS_METHODS

LOSS_SETTINGS = (
    "eps_low",
    "eps_high",
    "sat_kernel",
    "sat_quantile",
    "sat_over",
    "truncation_cap",
    "icepop_low",
    "icepop_high",
    "correction_over",
    "m2_threshold",
    "tv_delta",
    "ratio_cap",
)


class Use(NamedTuple):
    """Some keys, and when they are read."""

    keys: tuple[str, ...]
    """Dotted; `value.*` is the whole section."""
    read: Callable[[RunSettings], bool]
    remedy: str
    """What a user does who wants them to count, or not to be complained about."""


def _estimator(c: RunSettings, setting: str) -> bool:
    return setting in ADV_ESTIMATORS[c.advantage.adv_estimator].settings


def _of_estimator(setting: str) -> Use:
    users = [name for name, method in ADV_ESTIMATORS.items() if setting in method.settings]
    return Use(
        (f"advantage.{setting}",),
        lambda c: _estimator(c, setting),
        f"leave it out, or use an adv_estimator that has it ({', '.join(users)})",
    )


def _of_loss(setting: str) -> Use:
    users = [name for name, method in LOSS_METHODS.items() if setting in method.settings]
    return Use(
        (f"loss.{setting}",),
        lambda c: setting in LOSS_METHODS[c.loss.policy_loss].settings,
        f"leave it out, or use a policy_loss that has it ({', '.join(users)})",
    )


USES: tuple[Use, ...] = (
    *map(_of_loss, LOSS_SETTINGS),
    *map(_of_estimator, ("gamma", "lambda_policy", "length_adaptive_alpha", "bootstrap_truncated", "order")),
    *map(_of_estimator, ("running_mean_over", "running_mean_window", "spo_offline_samples")),
    Use(
        ("advantage.whiten",),
        lambda c: not ADV_ESTIMATORS[c.advantage.adv_estimator].whitens,
        "leave it out: this adv_estimator whitens in any case",
    ),
    Use(
        ("value.*", "value_pretraining.*"),
        lambda c: ADV_ESTIMATORS[c.advantage.adv_estimator].critic,
        "leave it out: this adv_estimator has no value model; skip_observation_gae has one",
    ),
    Use(
        ("advantage.length_adaptive_alpha",),
        lambda c: c.advantage.lambda_policy is None,
        "leave it or advantage.lambda_policy out: a fixed λ doesn't adapt",
    ),
    Use(
        ("loss.fixed_length",),
        lambda c: c.loss.loss_agg_mode == "fixed-length",
        "leave it out, or set loss.loss_agg_mode = 'fixed-length'",
    ),
    Use(
        ("model.family", "model.hidden_size", "model.layers", "model.heads", "model.mlp_size"),
        lambda c: not c.model.path,
        "leave it out: the folder of model.path has its own architecture",
    ),
    Use(
        ("model.experts", "model.experts_per_token"),
        lambda c: not c.model.path and c.model.family == "qwen3_moe",
        "leave it out, or set model.family = 'qwen3_moe' (without model.path)",
    ),
    Use(
        ("engine.cuda_graphs",),
        lambda c: c.engine.device.startswith("cuda"),
        "leave it out, or set engine.device = 'cuda'",
    ),
    Use(
        (
            *("sft.batch_size", "sft.lr", "sft.warmup_steps", "sft.weight_decay", "sft.max_grad_norm"),
            *("sft.good", "sft.miscopied"),
        ),
        lambda c: c.sft.steps > 0,
        "leave it out, or set sft.steps above 0",
    ),
    Use(
        ("environment.distinct_tasks",),
        lambda c: not c.environment.tasks,
        "leave it out: the file of environment.tasks has its own number of tasks",
    ),
)


def unused(config: RunSettings) -> Iterator[str]:
    """One sentence for each key that was set and that nothing would read: key, value and remedy."""
    for use in USES:
        if use.read(config):
            continue
        for key in use.keys:
            for name, value, default in _set_values(config, key):
                # A recipe's key can't be taken out on the command line, but it can be set back.
                way_out = f"{use.remedy} (or set it to {default!r})"
                yield f"{name} = {value!r} would not be read with these settings; {way_out}"


def _set_values(config: RunSettings, key: str) -> Iterator[tuple[str, object, object]]:
    """(dotted name, value, default) of the keys meant by `key` that differ from their defaults."""
    *sections, last = key.split(".")
    node: BaseModel = config
    for section in sections:
        node = getattr(node, section)
    names = type(node).model_fields if last == "*" else {last: type(node).model_fields[last]}
    for name, field in names.items():
        value = getattr(node, name)
        if value != field.default:
            yield ".".join([*sections, name]), value, field.default
