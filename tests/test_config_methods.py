"""Methods in the config: every name works, contradictions are refused with the remedy, nothing is silently unused."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

import soloist
from soloist.config import RunConfig, build_config
from soloist.config_files import dump_config
from soloist.config_sections import EstimatorName, LossName
from soloist.config_uses import LOSS_SETTINGS, USES
from soloist.errors import UserError
from soloist.estimators import ADV_ESTIMATORS
from soloist.methods import LOSS_METHODS, SETTING_CHOICES

PACKAGE = Path(soloist.__file__).parent

# Values other than the defaults, where adding to a number or turning a switch isn't enough.
OTHER: dict[str, Any] = {
    "model.family": "qwen3_moe",
    "advantage.order": "advantages_first",
    "advantage.running_mean_over": "task",
    "advantage.lambda_policy": 0.5,
    "advantage.gamma": 0.5,
    "value.lambda_value": 0.5,
    "loss.sat_kernel": "hill_half",
    "loss.sat_over": "micro_batch",
    "loss.correction_over": "sequence",
    "loss.sat_quantile": 0.5,
    "loss.eps_low": 0.1,
}

# Settings under which a conditional key is read by nobody; the longest prefix counts.
UNREAD: dict[str, dict[str, Any]] = {
    "loss.": {"loss": {"policy_loss": "importance_weighting"}},
    "loss.fixed_length": {},
    "advantage.": {"advantage": {"adv_estimator": "group_mean"}, "group_size": 8},
    "advantage.whiten": {"advantage": {"adv_estimator": "reinforce_pp"}},
    "value": {"advantage": {"adv_estimator": "reinforce_pp"}},
    "model.experts": {},
    "model.": {"model": {"path": "some/folder"}},
    "engine.": {},
    "sft.": {"sft": {"steps": 0}},
    "environment.": {"environment": {"tasks": "tasks.jsonl"}},
}


def sentence(raw: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        build_config(raw, source="my.toml")
    return str(caught.value)


def leaves(section: type[BaseModel] = RunConfig, prefix: str = "") -> dict[str, Any]:
    """All keys with their fields."""
    found: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= leaves(field.annotation, f"{prefix}{name}.")
        else:
            found[prefix + name] = field
    return found


LEAVES = leaves()


def attributes_read() -> set[str]:
    """Names that any module reads, other than those that only check settings, as an attribute."""
    trees = [
        ast.parse(path.read_text(encoding="utf-8"))
        for path in PACKAGE.rglob("*.py")
        if path.name not in ("config_sections.py", "config_rules.py", "config_uses.py")
    ]
    return {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def conditional() -> set[str]:
    """Keys of which something else decides whether they are read."""
    found: set[str] = set()
    for use in USES:
        for key in use.keys:
            found |= {leaf for leaf in LEAVES if key.endswith(".*") and leaf.startswith(key[:-1])} or {key}
    return found


def other_value(key: str) -> Any:
    """A value that differs from the default of `key`."""
    default = LEAVES[key].default
    if key in OTHER:
        return OTHER[key]
    if isinstance(default, bool):
        return not default
    if isinstance(default, tuple):
        return ["x"]
    return 1 if default is None else default + (1 if isinstance(default, int) else 0.125)


def merged(first: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    section, name = key.split(".")
    return {**first, section: {**first.get(section, {}), name: value}}


def test_every_key_is_read_somewhere() -> None:
    """No setting is silently unused: what nobody reads is not a setting."""
    read = attributes_read()
    # Read by name: the settings of the loss that is chosen.
    by_name = {f"loss.{name}" for name in LOSS_SETTINGS}
    # Of a single possible value, so there is nothing to read yet.
    by_name |= {key for key, field in LEAVES.items() if len(get_args(field.annotation)) == 1}
    assert [key for key in LEAVES if key.rpartition(".")[2] not in read and key not in by_name] == []
    assert {name for method in LOSS_METHODS.values() for name in method.settings} == set(LOSS_SETTINGS)


@pytest.mark.parametrize("key", sorted(conditional()))
def test_a_key_that_nothing_would_read_is_refused_with_its_value_and_a_remedy(key: str) -> None:
    prefix = max((prefix for prefix in UNREAD if key.startswith(prefix)), key=len)
    said = sentence(merged(UNREAD[prefix], key, other_value(key)))
    assert f"{key} = " in said
    assert "would not be read" in said
    assert "leave " in said


def test_a_fixed_lambda_and_an_adaptive_one_exclude_each_other() -> None:
    said = sentence({"advantage": {"lambda_policy": 0.9, "length_adaptive_alpha": 2.0}})
    assert "advantage.length_adaptive_alpha = 2.0 would not be read" in said
    assert build_config({"advantage": {"lambda_policy": 0.9}}, "x").advantage.lambda_policy == 0.9


def test_keys_with_their_default_are_never_complained_about() -> None:
    """Otherwise a resolved config could not be read back."""
    for name, estimator in ADV_ESTIMATORS.items():
        raw: dict[str, Any] = {"advantage": {"adv_estimator": name}, "environment": {"distinct_tasks": 32}}
        raw["group_size"] = 8 if estimator.groups else 1
        config = build_config(raw, "x")
        assert build_config(tomllib.loads(dump_config(config)), "y") == config
        assert config.has_critic == estimator.critic


def test_the_tables_and_the_config_know_the_same_names() -> None:
    assert set(get_args(LossName)) == set(LOSS_METHODS)
    assert set(get_args(EstimatorName)) == set(ADV_ESTIMATORS)
    for name, choices in SETTING_CHOICES.items():
        assert set(get_args(get_args(LEAVES[f"loss.{name}"].annotation)[0])) == set(choices)


@pytest.mark.parametrize("name", sorted(LOSS_METHODS))
def test_a_method_fills_in_its_own_settings_and_keeps_what_was_set(name: str) -> None:
    method = LOSS_METHODS[name]
    twice = {"policy": {"minibatches": 2}} if method.has_trust_region else {}
    loss = build_config({"loss": {"policy_loss": name}, **twice}, "x").loss
    assert {key: getattr(loss, key) for key in method.settings} == dict(method.settings)
    assert (loss.loss_agg_mode, loss.old_log_probs) == (method.loss_agg_mode, method.old_log_probs[0])
    assert all(getattr(loss, key) is None for key in LOSS_SETTINGS if key not in method.settings)
    if "eps_low" in method.settings:
        assert build_config({"loss": {"policy_loss": name, "eps_low": 0.11}, **twice}, "x").loss.eps_low == 0.11


@pytest.mark.parametrize(
    ("raw", "parts"),
    [
        ({"advantage": {"adv_estimator": "group_relative"}}, ["group_size = 1", "2 or more", "skip_observation_gae"]),
        ({"advantage": {"adv_estimator": "group_mean"}}, ["group_mean", "group_size = 1"]),
        ({"value": {"updates_per_step": 0}}, ["needs a value model", "updates_per_step = 0"]),
        ({"loss": {"policy_loss": "sat_grpo", "old_log_probs": "recompute"}}, ["sat_grpo", "'recompute'", "'rollout'"]),
        ({"loss": {"policy_loss": "dis", "old_log_probs": "recompute"}}, ["'dis'", "recorded", "'rollout'"]),
        ({"loss": {"policy_loss": "tis", "old_log_probs": "rollout"}}, ["π_old/μ would be 1", "'recompute'"]),
        ({"loss": {"policy_loss": "ppo", "old_log_probs": "recompute"}}, ["ratio is 1", "minibatches"]),
        ({"advantage": {"adv_estimator": "spo"}}, ["never come again", "environment.distinct_tasks"]),
        (
            {"advantage": {"adv_estimator": "running_mean", "running_mean_over": "task"}},
            ["over tasks", "distinct_tasks", "'global'"],
        ),
        (
            {"advantage": {"adv_estimator": "spo"}, "environment": {"distinct_tasks": 8}, "group_size": 2},
            ["single rollouts", "group_size = 2"],
        ),
        ({"loss": {"policy_loss": "decoupled_ppo"}}, ["decoupled_ppo", "ratio is 1", "minibatches"]),
        (
            {"advantage": {"adv_estimator": "spo", "overlong_buffer": 9}, "environment": {"distinct_tasks": 8}},
            ["'spo'", "overlong_buffer = 9", "leave overlong_buffer out"],
        ),
        ({"loss": {"policy_loss": "importance_weighting"}, "policy": {"minibatches": 2}}, ["no trust region"]),
        ({"advantage": {"overlong_buffer": 300}}, ["overlong_buffer = 300", "max_tokens = 200"]),
        (
            {"loss": {"policy_loss": "tis", "eps_low": 0.1}},
            ["'tis'", "eps_low = 0.1", "would not be read", "minibatches"],
        ),
        ({"loss": {"policy_loss": "icepop", "icepop_low": 6.0}}, ["icepop_low = 6.0", "icepop_high = 5.0", "swap"]),
    ],
)
def test_contradictions_between_methods_are_refused_with_the_remedy(raw: dict[str, Any], parts: list[str]) -> None:
    said = sentence(raw)
    assert [part for part in parts if part not in said] == []
    assert "\n" not in said


def test_an_estimator_without_a_critic_makes_no_value_updates() -> None:
    config = build_config({"advantage": {"adv_estimator": "reinforce_pp"}}, "x")
    assert (config.has_critic, config.value_updates) == (False, 0)
    assert RunConfig().value_updates == 2
