"""The config tree: what it refuses and in which words, overrides, recipes, and that nothing is lost on disk."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from soloist.config import RunConfig, build_config
from soloist.config_files import (
    apply_overrides,
    describe_fields,
    dump_config,
    load_config,
    packaged_recipes,
    read_recipe,
)
from soloist.errors import UserError


def nested(dotted: str, value: Any) -> dict[str, Any]:
    """`a.b` → `{"a": {"b": value}}`."""
    for part in reversed(dotted.split(".")):
        value = {part: value}
    return value


def integer_fields(section: type[BaseModel] = RunConfig, prefix: str = "") -> list[str]:
    found = []
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found += integer_fields(field.annotation, f"{prefix}{name}.")
        elif field.annotation is int:
            found.append(prefix + name)
    return found


def sentence(raw: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        build_config(raw, source="my.toml")
    return str(caught.value)


@pytest.mark.parametrize("value", [-1, "four", 1.5, None])
@pytest.mark.parametrize("field", integer_fields())
def test_a_wrong_integer_is_refused_with_field_value_and_range(field: str, value: Any) -> None:
    """RB-145: a validation error with field path and value, for each integer setting."""
    said = sentence(nested(field, value))
    assert said.startswith(f"my.toml: {field}: found {value!r}")
    assert "expected: " in said
    assert "\n" not in said


@pytest.mark.parametrize("field", [field for field in integer_fields() if field != "seed"])
def test_an_integer_beyond_all_reason_is_refused_before_it_allocates(field: str) -> None:
    """RB-145: 1e9 for each integer setting."""
    said = sentence(nested(field, 1e9))
    assert f"{field}: found 1000000000.0" in said
    assert "less than or equal to" in said


@pytest.mark.parametrize("field", ["steps", "rollouts_per_step", "group_size", "engine.slots", "policy.epochs"])
def test_zero_is_refused_where_nothing_could_run(field: str) -> None:
    """RB-145: group size 0 must not end as a ZeroDivisionError."""
    said = sentence(nested(field, 0))
    assert f"{field}: found 0" in said
    assert "greater than or equal to 1" in said


@pytest.mark.parametrize(
    ("raw", "parts"),
    [
        ({"polcy": {"lr": 1}}, ["unknown key 'polcy'", "policy"]),
        ({"policy": {"learning_rate": 1}}, ["unknown key 'policy.learning_rate'", "value 1", "lr", "max_grad_norm"]),
        ({"policy": 3}, ["policy: found 3"]),
        ({"policy": {"lr": "fast"}}, ["policy.lr: found 'fast'", "number"]),
        ({"policy": {"lr": 0}}, ["policy.lr: found 0", "greater than 0"]),
        ({"loss": {"policy_loss": "grpo"}}, ["loss.policy_loss: found 'grpo'", "'dis'", "'ppo'"]),
        ({"loss": {"eps_low": 1.5}}, ["loss.eps_low: found 1.5", "less than or equal to 1"]),
        ({"advantage": {"adv_estimator": "grpo"}}, ["advantage.adv_estimator: found 'grpo'", "skip_observation_gae"]),
        ({"deterministic": "perhaps"}, ["deterministic: found 'perhaps'", "boolean"]),
        ({"value": {"freeze": "attn"}}, ["value.freeze: found 'attn'"]),
        ({"name": ""}, ["name: found ''"]),
    ],
)
def test_a_mistake_is_named_with_what_was_found_and_what_is_possible(raw: dict[str, Any], parts: list[str]) -> None:
    """RB-148: plain words, the unknown key and its valid siblings."""
    said = sentence(raw)
    assert said.startswith("my.toml: ")
    assert [part for part in parts if part not in said] == []


@pytest.mark.parametrize(
    ("raw", "parts"),
    [
        ({"rollouts_per_step": 6, "group_size": 4}, ["rollouts_per_step = 6", "group_size = 4", "multiple"]),
        ({"advantage": {"drop_uniform_groups": True}}, ["drop_uniform_groups = true", "with group_size = 1", "raise"]),
        ({"publish_every": 4, "max_staleness": 1}, ["publish_every = 4", "= 1", "raise max_staleness to 3"]),
        ({"deterministic": True}, ["deterministic", "max_staleness = 0 or a lag, found 2"]),
        ({"lag": 2, "max_staleness": 3}, ["lag = 2", "max_staleness = 3", "leave max_staleness out"]),
        ({"lag": 1, "on_stale": "drop"}, ["lag = 1", "on_stale = 'wait'", "found 'drop'"]),
        ({"lag": 3, "publish_every": 2}, ["lag = 3", "publish_every = 1", "and 2", "leave them out"]),
        ({"deterministic": True, "max_staleness": 0, "engine": {"slots": 8}}, ["slots = 8", "raise engine.slots"]),
        ({"deterministic": True, "max_staleness": 0, "engine": {"count": 2}}, ["engine.count = 2", "set it to 1"]),
        ({"rollout": {"max_tokens": 500}}, ["rollout.max_tokens = 500", "engine.max_length = 256"]),
        ({"token_budget": 100}, ["rollout.max_tokens = 200", "token_budget = 100"]),
        ({"sft": {"good": 0.8, "miscopied": 0.4}}, ["sft.good + sft.miscopied = 1.2"]),
        ({"loss": {"fixed_length": 50}}, ["fixed_length = 50", "loss_agg_mode = 'fixed-length'"]),
        ({"loss": {"policy_loss": "importance_weighting"}, "policy": {"epochs": 2}}, ["policy.epochs = 2", "'dis'"]),
        ({"policy": {"minibatches": 65}}, ["policy.minibatches = 65", "rollouts_per_step = 64"]),
        ({"model": {"heads": 5}}, ["model.hidden_size = 96", "model.heads = 5"]),
        ({"health": {"stall_report_seconds": 900}}, ["stall_report_seconds = 900", "stall_limit_seconds = 300"]),
        ({"health": {"lease_seconds": 20}}, ["lease_seconds = 20", "rollout.max_seconds = 60"]),
    ],
)  # fmt: skip
def test_settings_that_contradict_each_other_are_refused_with_the_arithmetic(
    raw: dict[str, Any], parts: list[str]
) -> None:
    """RB-147: the message prints both numbers and the way out."""
    said = sentence(raw)
    assert [part for part in parts if part not in said] == []
    assert "\n" not in said


def test_a_lag_is_the_bound_on_staleness_and_makes_deterministic_mode_possible() -> None:
    for lag in (0, 1, 5):
        config = build_config({"lag": lag, "deterministic": True}, "my.toml")
        assert (config.lag, config.max_staleness) == (lag, lag)
        assert build_config(tomllib.loads(dump_config(config)), "again") == config
    assert build_config({"max_staleness": 3}, "my.toml").lag is None
    assert sentence({"lag": "soon"}).startswith("my.toml: lag: found 'soon', expected: ")


def test_overrides_reach_nested_keys_and_are_read_as_toml() -> None:
    raw = {"policy": {"lr": 1.0, "epochs": 2}}
    merged = apply_overrides(raw, {"policy.lr": "3e-4", "value.freeze": '["a", "b"]', "on_stale": "drop", "steps": "7"})
    assert merged["policy"] == {"lr": 3e-4, "epochs": 2}
    assert merged["value"]["freeze"] == ["a", "b"]
    assert (merged["on_stale"], merged["steps"]) == ("drop", 7)
    assert raw == {"policy": {"lr": 1.0, "epochs": 2}}


def test_an_override_below_a_plain_value_is_refused() -> None:
    with pytest.raises(UserError, match=r"--name\.x: 'name' holds 'calculator'"):
        load_config("calculator", {"name.x": "3"})
    with pytest.raises(UserError, match=r"unknown key 'policy\.lrr'.*epochs, lr"):
        load_config("calculator", {"policy.lrr": "3"})


@pytest.mark.parametrize("name", sorted(packaged_recipes()))
def test_packaged_recipes_run_on_a_cpu_as_they_are(name: str) -> None:
    """RB-154: nothing in a shipped example needs a GPU."""
    config = load_config(name)
    assert config.name == Path(name).stem
    assert (config.model.device, config.engine.device) == ("cpu", "cpu")
    assert packaged_recipes()[name].read_text(encoding="utf-8").startswith("# ")


def test_recipes_say_only_what_differs_from_the_defaults() -> None:
    default = RunConfig().model_dump(mode="json")
    for name in packaged_recipes():
        raw = read_recipe(name)
        sections = {key: value for key, value in raw.items() if isinstance(value, dict)}
        plain = {key: value for key, value in raw.items() if key not in sections}
        same = [key for key, value in plain.items() if value == default[key]]
        same += [
            f"{s}.{key}" for s, keys in sections.items() for key, value in keys.items() if value == default[s][key]
        ]
        assert same == [], name
    assert load_config("calculator-moe").model.family == "qwen3_moe"
    assert load_config("calculator-hard").environment.preset == "hard"
    assert load_config("calculator-hard").engine.max_length >= load_config("calculator-hard").rollout.max_tokens


@pytest.mark.parametrize(
    ("content", "part"),
    [(b"steps = = 3", "not a TOML file"), (b"\xff\xfe", "not a TOML file"), (b"stps = 3", "'stps'")],
)
def test_a_broken_recipe_file_is_named(tmp_path: Path, content: bytes, part: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        load_config(str(path))
    assert str(caught.value).startswith(f"{path}: ")
    assert part in str(caught.value)


def test_a_recipe_that_is_neither_packaged_nor_a_file_lists_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        load_config(str(tmp_path / "nowhere.toml"))
    assert "nowhere.toml" in str(caught.value)
    assert "calculator-moe" in str(caught.value)


@given(
    steps=st.integers(1, 10**6),
    lr=st.floats(1e-12, 1e3),
    seed=st.integers(0, 2**63 - 1),
    lambda_policy=st.none() | st.floats(0, 1),
    freeze=st.lists(st.text(max_size=20), max_size=4),
    name=st.text(st.characters(codec="utf-8"), min_size=1, max_size=20),
)
def test_the_resolved_config_reads_back_as_the_same_config(
    steps: int, lr: float, seed: int, lambda_policy: float | None, freeze: list[str], name: str
) -> None:
    raw = {"steps": steps, "seed": seed, "policy": {"lr": lr}, "value": {"freeze": freeze}, "name": name}
    raw["advantage"] = {} if lambda_policy is None else {"lambda_policy": lambda_policy}
    config = build_config(raw, "x")
    assert build_config(tomllib.loads(dump_config(config)), "y") == config
    assert config.folder == Path("runs") / name


def test_every_key_has_a_description_and_the_tree_stays_small() -> None:
    rows = describe_fields()
    assert [name for name, _, description in rows if not description] == []
    assert len(rows) <= 150
    assert ("policy.lr", "0.0004", "Learning rate after warm-up.") in rows


def test_a_config_cannot_be_changed_once_it_is_read() -> None:
    config = RunConfig()
    with pytest.raises(ValueError, match="frozen"):
        config.steps = 3
    with pytest.raises(ValueError, match="frozen"):
        config.policy.lr = 3.0
