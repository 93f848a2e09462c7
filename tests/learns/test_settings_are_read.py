"""Every setting of the config is really read while a run goes through its stages: watched, not searched for by name.

`tests/test_config_methods.py` shows that settings which nothing would read are refused; this is the other half.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import soloist
from soloist.config import RunConfig, build_config
from soloist.config_sections import Section
from soloist.environments.base import Environment
from soloist.environments.registry import build_environment
from soloist.methods import LOSS_METHODS
from soloist.models.loading import load_policy
from soloist.models.tiny import build_tiny
from soloist.training.estimators import Estimators
from soloist.training.objective import Objective
from soloist.training.observer import SilentObserver
from soloist.training.stages import STAGES, run_stages

PACKAGE = Path(soloist.__file__).parent
CHECKS = {str(PACKAGE / f"config{part}.py") for part in ("", "_files", "_rules", "_sections", "_uses")}
"""Files that only check settings; reading one there does not make it count."""

BASE: dict[str, Any] = {
    "name": "read",
    "steps": 2,
    "rollouts_per_step": 8,
    "players": 4,
    "environment": {"name": "two-turns"},
    "model": {"hidden_size": 32, "layers": 1, "heads": 2, "mlp_size": 64},
    "engine": {"max_length": 48},
    "rollout": {"max_new_tokens": 4, "max_tokens": 40, "max_turns": 2},
    "sft": {"steps": 120, "lr": 5e-3, "batch_size": 32},
    "value_pretraining": {"rollouts": 192, "epochs": 1, "gate": -1e9},
    "eval": {"problems": 2, "samples": 1},
}

AFTER_A_FAILURE = {"engine.restarts", "rollout.retry_seconds"}
"""Read only when something breaks, as in `tests/engines/test_local_engine.py` and `tests/training/test_durable.py`."""
ONE_VALUE = {"engine.kind"}
"""Nothing to read as long as there is one possible value."""


def fields(section: type[BaseModel] = RunConfig, prefix: str = "") -> dict[tuple[str, str], str]:
    """(class, attribute) of every setting → its dotted key."""
    found: dict[tuple[str, str], str] = {}
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= fields(field.annotation, f"{prefix}{name}.")
        else:
            found[section.__name__, name] = prefix + name
    return found


FIELDS = fields()


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Keys that the package reads while the test runs, but for the files of `CHECKS`."""
    seen: set[str] = set()

    def watched(self: Section, name: str) -> Any:
        key = FIELDS.get((type(self).__name__, name))
        if key is not None:
            file = sys._getframe(1).f_code.co_filename
            if file.startswith(str(PACKAGE)) and file not in CHECKS:
                seen.add(key)
        return object.__getattribute__(self, name)

    monkeypatch.setattr(Section, "__getattribute__", watched, raising=False)
    return seen


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_run_through_all_stages_and_the_other_methods_read_every_setting(read: set[str], tmp_path: Path) -> None:
    config = build_config(BASE | {"runs_dir": str(tmp_path)}, "test")
    run_stages(config, STAGES, resume=False, skip_done=True, observer=SilentObserver())
    alone = set(FIELDS.values()) - read
    assert len(alone) < 40, "most settings count in any run"

    # What this run doesn't use is read by those who do: another environment, architecture, loss or estimator.
    other = build_config({"model": {"family": "qwen3_moe"}}, "test")
    environment = build_environment(other.environment, seed=0)
    asyncio.run(started_and_closed(environment))
    environment.train_task(0)
    policy = load_policy(build_tiny(other.model, 0, tmp_path / "moe"))
    for name in LOSS_METHODS:
        twice = {"policy": {"minibatches": 2}} if LOSS_METHODS[name].has_trust_region else {}
        Objective(policy, None, build_config({"loss": {"policy_loss": name}} | twice, "test"))
    Estimators(build_config({"advantage": {"adv_estimator": "running_mean"}}, "test").advantage)
    assert sorted(set(FIELDS.values()) - read) == sorted(AFTER_A_FAILURE | ONE_VALUE)


async def started_and_closed(environment: Environment) -> None:
    await environment.start()
    await environment.close()
