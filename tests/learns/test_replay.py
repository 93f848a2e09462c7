"""Replay of an asynchronous run: its final weights bit for bit, what-ifs beside it, and the run itself untouched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from soloist.cli import main
from soloist.config import RunConfig, build_config
from soloist.config_files import load_config
from soloist.errors import RunError, UserError
from soloist.metrics import read_metrics
from soloist.runtime.ledger import read_steps
from soloist.seams import sha256_of
from soloist.training.observer import SilentObserver
from soloist.training.replay import replay, without_old_method
from soloist.training.stages import run_stages

STEPS = 5


def config_for(folder: Path, **changes: Any) -> RunConfig:
    raw: dict[str, Any] = {
        "name": "run",
        "runs_dir": str(folder),
        "steps": STEPS,
        "max_staleness": 2,
        "checkpoint_every": 2,
        "rollouts_per_step": 8,
        "players": 16,
        "environment": {"name": "two-turns"},
        "model": {"hidden_size": 32, "layers": 2, "heads": 2, "mlp_size": 64},
        "engine": {"max_length": 48, "slots": 8},
        "rollout": {"max_new_tokens": 4, "max_tokens": 40, "max_turns": 2},
        "sft": {"steps": 60, "lr": 1e-2, "threads": 1, "batch_size": 16},
        "value_pretraining": {"rollouts": 64, "epochs": 1, "gate": -1e9},
        "eval": {"problems": 8, "samples": 1},
    }
    return build_config(raw | changes, "test")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An asynchronous run that was interrupted once and resumed."""
    folder = tmp_path_factory.mktemp("runs")
    stages = ["sft", "pretrain-value", "train"]
    run_stages(config_for(folder, steps=3), stages, resume=False, skip_done=True, observer=SilentObserver())
    run_stages(config_for(folder), ["train"], resume=True, skip_done=True, observer=SilentObserver())
    return folder / "run"


def files_of(folder: Path) -> dict[str, str]:
    """Every file with its hash; what SQLite keeps beside a database that is read is its own affair."""
    paths = [path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(("-wal", "-shm"))]
    return {str(path): sha256_of(path) for path in paths}


@pytest.mark.timeout(240)
def test_an_asynchronous_run_is_trained_again_to_the_same_bits(run: Path) -> None:
    """R2: free-running generation gives no bits twice, but its training can be repeated from what was recorded."""
    before = files_of(run)
    found = replay(run, SilentObserver())
    assert (found.steps, found.equal, found.first_difference) == (STEPS, STEPS, None)
    folder = Path(found.folder)
    assert folder == run.with_name("run-replay")
    file = f"weights/step_{STEPS}/model.safetensors"
    weights, expected = load_file(folder / file), load_file(run / file)
    assert weights.keys() == expected.keys()
    assert all(tensor.equal(expected[name]) for name, tensor in weights.items())
    assert files_of(run) == before
    recorded = {record["step"]: record["actor/pg_loss"] for record in read_metrics(run / "metrics.jsonl", "train")}
    assert {r["step"]: r["actor/pg_loss"] for r in read_metrics(folder / "metrics.jsonl", "train")} == recorded


def test_a_changed_setting_is_a_what_if_in_a_folder_of_its_own(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    before = files_of(run)
    assert main(["replay", "run", "--runs_dir=.", "--to", "2", "--set", "policy.lr=1e-3"]) == 0
    assert "equal bits for 0 of 3 steps, different from step 0 on; metrics and weights: " in capsys.readouterr().out
    (written,) = [
        path for path in run.parent.glob("run-replay*/replay.json") if json.loads(path.read_text())["changes"]
    ]
    assert json.loads(written.read_text())["changes"] == {"policy.lr": "1e-3"}
    assert [r["step"] for r in read_metrics(written.with_name("metrics.jsonl"), "train")] == [0, 1, 2]
    assert files_of(run) == before


def test_another_method_is_replayed_with_its_own_settings_and_not_those_of_the_old_one(run: Path) -> None:
    changes = {"loss.policy_loss": "gspo", "advantage.adv_estimator": "reinforce_pp"}
    found = replay(run, SilentObserver(), to_step=1, changes=changes)
    config = load_config(str(Path(found.folder) / "config.resolved.toml"))
    assert (config.loss.eps_low, config.loss.eps_high) == (3e-4, 4e-4)
    assert (config.loss.loss_agg_mode, config.has_critic) == ("seq-mean-token-mean", False)
    steps = read_metrics(Path(found.folder) / "metrics.jsonl", "train")
    assert [step["step"] for step in steps] == [0, 1]
    assert "ppo/clip_frac" in steps[0]
    assert "critic/loss" not in steps[0]


def test_a_method_named_again_keeps_the_settings_of_the_run() -> None:
    raw = {"loss": {"policy_loss": "dis", "eps_low": 0.1}, "advantage": {"adv_estimator": "spo", "whiten": True}}
    again = {"loss.policy_loss": "dis", "advantage.adv_estimator": "spo"}
    assert without_old_method(raw, again) == raw
    other = without_old_method(raw, {"loss.policy_loss": "ppo", "advantage.adv_estimator": "group_mean"})
    assert other == {"loss": {}, "advantage": {"whiten": True}}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "rollout.max_turns=3"], "--set rollout.max_turns = '3' can't matter when stored rollouts"),
        (["--set", "policy.lr"], "--set policy.lr has no value"),
        (["--set", "loss.policy_loss=magic"], "loss.policy_loss: found 'magic'"),
        (["--to", "99"], "--to 99 is not a step of"),
        (["--seed", "3"], "a replay has no config, found --seed"),
    ],
)
def test_what_a_replay_can_not_do_is_refused(
    run: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = sorted(path.name for path in run.parent.iterdir())
    assert main(["replay", str(run), *arguments]) == 2
    assert said in capsys.readouterr().err
    assert sorted(path.name for path in run.parent.iterdir()) == folders


def test_other_bits_without_a_change_are_an_error_that_names_the_step(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on another machine: the record of step 1 is another one."""
    steps = read_steps(run / "ledger.sqlite")
    altered = [step if step.step != 1 else type(step)(**{**as_fields(step), "state_hash": "other"}) for step in steps]
    monkeypatch.setattr("soloist.training.replay.read_steps", lambda path: altered)
    with pytest.raises(RunError, match=r"equal bits for 2 of 3 steps, different from step 1 on, although nothing was"):
        replay(run, SilentObserver(), to_step=2)
    monkeypatch.setattr("soloist.training.replay.read_steps", lambda path: [])
    with pytest.raises(UserError, match="has no committed step"):
        replay(run, SilentObserver())


def as_fields(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__struct_fields__}
