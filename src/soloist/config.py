"""The whole config tree: a raw mapping becomes one checked `RunConfig`. Its sections: `config_sections.py`.

Imports without torch. Unknown keys, wrong types and combinations that can't work are refused here, with the field, the
value found, what was expected and the remedy. Files and overrides: `config_files.py`.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError, model_validator

from soloist.config_rules import method_rules
from soloist.config_sections import (
    AdvantageConfig,
    EngineConfig,
    EnvironmentConfig,
    EvalConfig,
    HealthConfig,
    LossConfig,
    ModelConfig,
    PolicyConfig,
    RolloutConfig,
    SftConfig,
    ValueConfig,
    ValuePretrainingConfig,
)
from soloist.config_tree import RunSettings
from soloist.config_uses import unused
from soloist.errors import UserError

__all__ = [
    "AdvantageConfig",
    "EngineConfig",
    "EnvironmentConfig",
    "EvalConfig",
    "HealthConfig",
    "LossConfig",
    "ModelConfig",
    "PolicyConfig",
    "RolloutConfig",
    "RunConfig",
    "SftConfig",
    "ValueConfig",
    "ValuePretrainingConfig",
    "build_config",
]


class RunConfig(RunSettings):
    """One run, from SFT to evaluation; made only of settings that work together."""

    @model_validator(mode="before")
    @classmethod
    def _lag_is_the_bound(cls, raw: Any) -> Any:
        """A lag implies `max_staleness`, so that nobody has to say it twice."""
        if isinstance(raw, dict) and raw.get("lag") is not None:
            return {"max_staleness": raw["lag"], **raw}
        return raw

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> RunConfig:
        for sentence in unused(self):
            raise ValueError(sentence)
        for broken, sentence in _contradictions(self):
            if broken:
                raise ValueError(sentence)
        return self


def _contradictions(c: RunSettings) -> list[tuple[bool, str]]:
    """All rules as (is broken, sentence). The first broken one is shown."""
    lag = c.publish_every - 1
    return [
        *method_rules(c),
        (
            c.rollouts_per_step % c.group_size != 0,
            f"rollouts_per_step = {c.rollouts_per_step} is not a multiple of group_size = {c.group_size}; "
            "a group is trained in one step, so make it a multiple",
        ),
        (
            c.advantage.drop_uniform_groups and c.group_size == 1,
            "advantage.drop_uniform_groups = true would drop every rollout with group_size = 1, as a group of one is "
            "always uniform; raise group_size, or leave drop_uniform_groups out",
        ),
        (
            c.on_stale != "train" and lag > c.max_staleness,
            f"publish_every = {c.publish_every} makes rollouts {lag} versions old before they start, above "
            f"max_staleness = {c.max_staleness}; raise max_staleness to {lag} or set on_stale = 'train'",
        ),
        (
            c.lag is not None and c.max_staleness != c.lag,
            f"lag = {c.lag} makes every rollout exactly so old, found max_staleness = {c.max_staleness}; leave "
            "max_staleness out, or set it to the lag",
        ),
        (
            c.lag is not None and (c.on_stale != "wait" or c.publish_every != 1),
            f"lag = {c.lag} needs on_stale = 'wait' and publish_every = 1, found '{c.on_stale}' and {c.publish_every}; "
            "leave them out (publish_every without a lag is the other kind of controlled lag)",
        ),
        (
            c.deterministic and c.max_staleness != 0 and c.lag is None,
            f"deterministic = true needs max_staleness = 0 or a lag, found {c.max_staleness} and none; free-running "
            "asynchronous generation can't promise bits, so set max_staleness = 0 or lag",
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
            c.policy.minibatches > c.rollouts_per_step,
            f"policy.minibatches = {c.policy.minibatches} exceeds rollouts_per_step = {c.rollouts_per_step}",
        ),
        (
            c.model.hidden_size % c.model.heads != 0,
            f"model.hidden_size = {c.model.hidden_size} is not a multiple of model.heads = {c.model.heads}",
        ),
        (
            c.health.lease_seconds < c.rollout.max_seconds,
            f"health.lease_seconds = {c.health.lease_seconds:g} is shorter than rollout.max_seconds = "
            f"{c.rollout.max_seconds:g}, which one turn may take; raise it",
        ),
        (
            c.health.stall_report_seconds > c.health.stall_limit_seconds,
            f"health.stall_report_seconds = {c.health.stall_report_seconds:g} exceeds stall_limit_seconds = "
            f"{c.health.stall_limit_seconds:g}; report a stall before it ends the run",
        ),
    ]


def build_config(raw: dict[str, Any], source: str) -> RunConfig:
    """Check a raw config. Raises UserError with one sentence: source, field, found, expected."""
    try:
        return RunConfig.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{source}: {_explain(field, first)}") from error


def _explain(field: str, error: Any) -> str:
    if error["type"] == "extra_forbidden":
        section = field.rpartition(".")[0]
        known = ", ".join(sorted(_fields_of(section)))
        return f"unknown key '{field}' (value {error['input']!r}); keys of {section or 'the top level'}: {known}"
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    return f"{field}: found {error['input']!r}, expected: {error['msg']}"


def _fields_of(dotted: str) -> list[str]:
    section: type[BaseModel] = RunConfig
    for part in filter(None, dotted.split(".")):
        annotation = section.model_fields[part].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        section = annotation
    return list(section.model_fields)
