"""The whole pipeline learns: SFT, value pretraining, asynchronous SAO and evaluation on a task that is learned in a minute.

Real parts everywhere: engine child, renderer, buffer, ledger, learner. Only the environment is made for the test: a first
turn, an observation with a digit, and a second turn that must repeat the digit. The demonstrations answer at random, so
what is right can only be learned from the reward, across the observation.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from soloist.config import EnvironmentConfig, RunConfig, build_config
from soloist.environments import registry
from soloist.environments.base import Action, Demonstration, StepResult, keyed_random
from soloist.metrics import read_metrics
from soloist.runtime.ledger import read_rollouts
from soloist.training.observer import SilentObserver
from soloist.training.stages import STAGES, run_stages
from soloist.types import Message, Task

DIGITS = 4


class Repeat:
    """Say anything, see a digit, repeat it."""

    name = "repeat"

    def __init__(self, config: EnvironmentConfig, seed: int, **mixture: float) -> None:
        self.seed = seed

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def train_task(self, index: int) -> Task:
        digit = keyed_random(self.seed, "train", index).randrange(DIGITS)
        return Task(task_id=f"repeat/{index}", environment=self.name, data={"digit": str(digit)})

    def heldout_task(self, index: int) -> Task:
        return Task(task_id=f"repeat/held/{index}", environment=self.name, data={"digit": str(index % DIGITS)})

    def demonstration(self, index: int) -> Demonstration:
        rng = keyed_random(self.seed, "demo", index)
        said, shown, answer = (str(rng.randrange(DIGITS)) for _ in range(3))
        messages: list[Message] = [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": said},
            {"role": "user", "content": shown},
            {"role": "assistant", "content": answer},
        ]
        return Demonstration(messages=messages, tools=[])

    def episode(self, task: Task) -> RepeatEpisode:
        return RepeatEpisode(task)


class RepeatEpisode:
    tools: list[dict[str, Any]] = []

    def __init__(self, task: Task) -> None:
        self.digit = task.data["digit"]
        self.said: list[str] = []

    async def reset(self) -> list[Message]:
        return [{"role": "user", "content": "go"}]

    async def step(self, action: Action) -> StepResult:
        self.said.append(action.text)
        if len(self.said) == 2:
            return StepResult(terminated=True)
        return StepResult(messages=[{"role": "user", "content": self.digit}])

    async def score(self) -> tuple[float, dict[str, Any]]:
        return float(self.said[-1:] == [self.digit] and len(self.said) == 2), {}

    async def close(self) -> None: ...


def config_for(folder: Path, **changes: Any) -> RunConfig:
    raw: dict[str, Any] = {
        "name": "learns",
        "runs_dir": str(folder),
        "steps": 40,
        "environment": {"name": "repeat"},
        "model": {"hidden_size": 32, "layers": 2, "heads": 2, "mlp_size": 64},
        "engine": {"max_length": 48, "slots": 64},
        "rollout": {"max_new_tokens": 4, "max_tokens": 40, "max_turns": 2},
        "sft": {"steps": 120, "lr": 1e-2, "threads": 1, "batch_size": 32},
        "value_pretraining": {"rollouts": 256, "epochs": 2, "lr": 3e-3, "gate": -1.0},
        "policy": {"lr": 3e-3},
        "value": {"lr": 3e-3},
        "eval": {"problems": 64, "samples": 4},
    }
    return build_config(raw | changes, "test")


@pytest.mark.timeout(240)
def test_reward_rises_across_an_observation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.ENVIRONMENTS, "repeat", Repeat)
    config = config_for(tmp_path)
    summary = run_stages(config, STAGES, resume=False, skip_done=True, observer=SilentObserver())
    assert 0.1 < summary["sft"]["eval"]["avg"] < 0.45, "random answers are right in a quarter of the cases"
    assert summary["eval"]["avg"] > 0.9
    assert summary["eval"]["version"] == config.steps

    steps = read_metrics(config.folder / "metrics.jsonl", "train")
    assert [record["step"] for record in steps] == list(range(config.steps))
    staleness = [record["off_policy/staleness/max"] for record in steps]
    assert max(staleness) <= config.max_staleness, "the bound holds for every trained rollout"
    assert max(staleness) > 0, "generation ran ahead of training"
    assert all(record["mismatch_kl/mean"] < 0.1 for record in steps)

    trained = [row for row in read_rollouts(config.folder / "ledger.sqlite") if row.fate == "trained"]
    assert len({row.rollout_id for row in trained}) == len(trained) == config.steps * config.rollouts_per_step
    assert json.loads((config.folder / "stages.json").read_text())["eval"]["avg"] == summary["eval"]["avg"]
