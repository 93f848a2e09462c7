"""Every recipe of `recipes/methods` starts and takes two steps, with real parts and a tiny model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from soloist.config_files import load_config, packaged_recipes
from soloist.metrics import read_metrics
from soloist.runtime.ledger import read_rollouts
from soloist.training.observer import SilentObserver
from soloist.training.stages import run_stages

METHODS = sorted(name for name in packaged_recipes() if name.startswith("methods/"))
SMALL = {
    "environment.name": "two-turns", "model.hidden_size": "32", "model.layers": "1", "model.heads": "2",
    "model.mlp_size": "64", "engine.max_length": "48", "rollout.max_new_tokens": "4", "rollout.max_tokens": "40",
    "rollout.max_turns": "2", "steps": "2", "rollouts_per_step": "16", "players": "16",
    "sft.steps": "120", "sft.lr": "5e-3", "sft.batch_size": "32",
    "eval.problems": "2", "eval.samples": "1",
}  # fmt: skip
CRITIC = {"value_pretraining.rollouts": "192", "value_pretraining.epochs": "1", "value_pretraining.gate": "-1e9"}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an SFT model and a critic, for all recipes."""
    home = tmp_path_factory.mktemp("start")
    config = load_config("methods/dis", SMALL | CRITIC | {"name": "start", "runs_dir": str(home)})
    run_stages(config, ("sft", "pretrain-value"), resume=False, skip_done=True, observer=SilentObserver())
    return home / "start"


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", METHODS)
def test_each_method_takes_two_steps(name: str, start: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for part in ("model", "sft", "value_pretraining"):
        shutil.copytree(start / part, folder / part)
    changes = SMALL | {"name": "run", "runs_dir": str(tmp_path)}
    if name == "methods/spo":
        changes |= {"environment.distinct_tasks": "8"}
    config = load_config(name, changes)
    stages = ("train",) if config.has_critic else ("pretrain-value", "train")
    summary = run_stages(config, stages, resume=False, skip_done=True, observer=SilentObserver())
    assert summary["train"]["steps"] == 2
    assert (folder / "weights" / "step_2" / "model.safetensors").is_file()
    steps = read_metrics(folder / "metrics.jsonl", "train")
    assert [step["step"] for step in steps] == [0, 1]
    assert all(step["actor/grad_norm"] > 0 for step in steps)
    assert all(("critic/loss" in step) == config.has_critic for step in steps)
    trained = [row for row in read_rollouts(folder / "ledger.sqlite") if row.fate == "trained"]
    assert len(trained) == 32
