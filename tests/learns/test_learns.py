"""The whole pipeline learns: SFT, value pretraining, asynchronous SAO and evaluation on a task of one minute.

Real parts everywhere: engine child, renderer, buffer, ledger, learner. Only the environment is made for these tests
(`conftest.py`): two turns, each with a reward of its own, and an observation between them.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from soloist.config import RunConfig, build_config
from soloist.metrics import read_metrics
from soloist.runtime.ledger import read_rollouts
from soloist.training.observer import SilentObserver
from soloist.training.stages import STAGES, run_stages


def config_for(folder: Path, **changes: Any) -> RunConfig:
    raw: dict[str, Any] = {
        "name": "learns",
        "runs_dir": str(folder),
        "steps": 60,
        "environment": {"name": "two-turns"},
        "model": {"hidden_size": 32, "layers": 2, "heads": 2, "mlp_size": 64},
        "engine": {"max_length": 48, "slots": 64},
        "rollout": {"max_new_tokens": 4, "max_tokens": 40, "max_turns": 2},
        "sft": {"steps": 150, "lr": 5e-3, "threads": 1, "batch_size": 32},
        "value_pretraining": {"rollouts": 256, "epochs": 2, "lr": 3e-3, "gate": -1.0},
        "policy": {"lr": 1e-3},
        "value": {"lr": 3e-3},
        "eval": {"problems": 64, "samples": 4},
    }
    return build_config(raw | changes, "test")


@pytest.mark.timeout(240)
def test_both_turns_learn_from_their_own_reward(tmp_path: Path) -> None:
    config = config_for(tmp_path)
    summary = run_stages(config, STAGES, resume=False, skip_done=True, observer=SilentObserver())
    assert 0.15 < summary["sft"]["eval"]["avg"] < 0.35, "SFT chooses at random: a quarter of each half"
    assert summary["eval"]["avg"] > 0.7
    assert summary["eval"]["version"] == config.steps

    steps = read_metrics(config.folder / "metrics.jsonl", "train")
    assert [record["step"] for record in steps] == list(range(config.steps))
    staleness = [record["off_policy/staleness/max"] for record in steps]
    assert max(staleness) <= config.max_staleness, "the bound holds for every trained rollout"
    assert max(staleness) > 0, "generation ran ahead of training"
    # The median, since one improbable token makes the mean of its step as large as it likes.
    assert statistics.median(record["mismatch_kl/mean"] for record in steps) < 0.02

    trained = [row for row in read_rollouts(config.folder / "ledger.sqlite") if row.fate == "trained"]
    assert len({row.rollout_id for row in trained}) == len(trained) == config.steps * config.rollouts_per_step
    assert json.loads((config.folder / "stages.json").read_text())["eval"]["avg"] == summary["eval"]["avg"]
