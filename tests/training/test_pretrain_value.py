"""Value pretraining on a tiny model: it learns what the tokens show, resumes bit for bit, and its gate can fail."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from soloist.config import ModelConfig, RunConfig
from soloist.errors import RunError
from soloist.metrics import MetricsLog, read_metrics
from soloist.models.tiny import tiny_policy
from soloist.models.tokenizer import build_tokenizer
from soloist.models.value import ValueModel
from soloist.seams import Storage, SystemClock
from soloist.training.checkpoint import Checkpoints
from soloist.training.observer import SilentObserver
from soloist.training.pretrain_value import ValuePretraining, store_rollouts, stored_rollouts
from soloist.types import Rollout, Segment, Turn, VersionSpan

TINY = ModelConfig(hidden_size=32, layers=2, heads=2, mlp_size=64)
GOOD, BAD = 40, 41
"""Prompt tokens that say what the reward will be."""


def rollouts_of(count: int, visible: bool, seed: int = 0, reward: float | None = None) -> list[Rollout]:
    """Rollouts whose reward is shown by the second prompt token, or by nothing, or is always the same."""
    chance = random.Random(seed)
    made = []
    for place in range(count):
        success = chance.random() < 0.5
        shown = success if visible else chance.random() < 0.5
        action = [chance.randrange(5, 30) for _ in range(chance.randrange(2, 6))]
        ids = [3, GOOD if shown else BAD, 4, *action]
        segment = Segment(
            token_ids=ids,
            action_mask=[False] * 3 + [True] * len(action),
            rollout_log_probs=[None] * 3 + [-1.0] * len(action),
            version_spans=[VersionSpan(version=0, start=3, end=len(ids))],
        )
        made.append(
            Rollout(
                rollout_id=f"v{place}",
                task_id=f"t{place}",
                group_id=f"v{place}",
                place=place,
                environment="e",
                status="completed",
                state="scored",
                segments=[segment],
                score=float(success) if reward is None else reward,
                turns=[Turn(segment=0, start=3, end=len(ids), finish_reason="stop")],
            )
        )
    return made


def config_of(**changes: Any) -> RunConfig:
    settings = {"holdout": 0.25, "epochs": 4, "patience": 4, "batch_size": 16, "lr": 5e-3}
    return RunConfig(model=TINY, token_budget=256, value_pretraining=settings | changes)


def value_model() -> ValueModel:
    return ValueModel.from_policy(tiny_policy(TINY, 0, build_tokenizer()))


class Listener(SilentObserver):
    """Remembers what it was told, and may end the run at an epoch."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.notes: list[str] = []
        self.epochs: list[int] = []
        self._stop_at = stop_at

    def progress(self, stage: str, step: int, values: Mapping[str, float | None]) -> None:
        self.epochs.append(step)
        if step == self._stop_at:
            raise KeyboardInterrupt

    def note(self, text: str) -> None:
        self.notes.append(text)


def run(
    folder: Path, rollouts: list[Rollout], config: RunConfig, listener: Listener | None = None
) -> tuple[dict[str, Any], ValueModel]:
    value = value_model()
    fitting = ValuePretraining(value, config, rollouts)
    folder.mkdir(exist_ok=True)
    checkpoints = Checkpoints(folder / "checkpoints", keep=config.value_pretraining.patience + 1)
    log = MetricsLog(folder / "metrics.jsonl")
    return fitting.run(checkpoints, log, listener or Listener(), SystemClock()), value


def bits(value: ValueModel) -> dict[str, bytes]:
    return {name: p.detach().contiguous().numpy().tobytes() for name, p in value.named_parameters()}


def skills(folder: Path) -> list[float]:
    return [record["value_pretraining/skill"] for record in read_metrics(folder / "metrics.jsonl")]


def test_a_reward_that_the_tokens_show_is_learned_on_held_out_rollouts(tmp_path: Path) -> None:
    summary, value = run(tmp_path, rollouts_of(96, visible=True), config_of(epochs=6, patience=6))
    found = skills(tmp_path)
    assert max(found) == summary["skill"] > 0.5
    assert found[-1] > found[0]
    assert (summary["held_out"], summary["epochs"]) == (24, 6)
    assert summary["explained_var"] >= summary["skill"]
    # The head starts at zero, so anything else was learned.
    assert any(name.startswith("backbone") and p.abs().sum() > 0 for name, p in value.named_parameters())


def test_the_weights_that_come_out_are_those_of_the_best_epoch(tmp_path: Path) -> None:
    """What is trained on shows the opposite of what is held out, so that the best epoch is not the last one."""
    config = config_of(epochs=5, patience=5, gate=-99.0)
    rollouts = rollouts_of(96, visible=True)
    opposite = [msgspec.structs.replace(rollout, score=1.0 - (rollout.score or 0.0)) for rollout in rollouts[24:]]
    rollouts = [*rollouts[:24], *opposite]
    summary, value = run(tmp_path, rollouts, config)
    best = summary["best_epoch"]
    assert best < summary["epochs"] == 5
    assert summary["skill"] == skills(tmp_path)[best - 1] == max(skills(tmp_path))
    stored = Checkpoints(tmp_path / "checkpoints").load(best)["value"][0]
    assert all(torch.equal(p, stored[name]) for name, p in value.named_parameters())
    again = ValuePretraining(value, config, rollouts)
    assert again._measure()["skill"] == summary["skill"]


def test_a_critic_that_is_no_better_than_a_constant_does_not_pass(tmp_path: Path) -> None:
    """methods §1.3: the gate is the held-out skill; rewards that nothing shows can't be predicted."""
    with pytest.raises(RunError, match=r"held-out skill is -?\d.*not above value_pretraining\.gate = 0: .*constant"):
        run(tmp_path, rollouts_of(64, visible=False), config_of(epochs=2))
    with pytest.raises(RunError, match=r"not above value_pretraining\.gate = 0\.999"):
        run(tmp_path / "high", rollouts_of(64, visible=True), config_of(epochs=2, gate=0.999))


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1])
def test_rewards_that_never_vary_are_said_to_be_the_reason(tmp_path: Path, reward: float) -> None:
    """R17: there is nothing to learn, and the message says what to change."""
    rollouts = rollouts_of(32, visible=True, reward=reward)
    with pytest.raises(RunError, match="8 held-out rollouts all have one return"):
        run(tmp_path, rollouts, config_of(epochs=1))
    assert skills(tmp_path) == [None]


def test_it_stops_on_a_plateau_and_keeps_the_best(tmp_path: Path) -> None:
    """A learning rate of almost nothing: the second epoch on is a plateau at the first one's level, or falls below."""
    rollouts = rollouts_of(48, visible=True)
    listener = Listener()
    with pytest.raises(RunError, match="held-out skill"):
        run(tmp_path, rollouts, config_of(epochs=50, patience=2, lr=1e-30), listener)
    assert listener.epochs == [1, 2, 3]
    assert Checkpoints(tmp_path / "checkpoints").steps() == [1, 2, 3]


@pytest.mark.parametrize("stopped_at", [1, 2, 3])
def test_a_resumed_run_gives_the_same_bits_as_an_uninterrupted_one(tmp_path: Path, stopped_at: int) -> None:
    """R2: weights, figures and the best epoch; stopped before the checkpoint of epoch `stopped_at` is written."""
    rollouts = rollouts_of(64, visible=True)
    straight, straight_value = run(tmp_path / "straight", rollouts, config_of())
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", rollouts, config_of(), Listener(stop_at=stopped_at))
    listener = Listener()
    resumed, resumed_value = run(tmp_path / "cut", rollouts, config_of(), listener)
    assert resumed == straight
    assert bits(resumed_value) == bits(straight_value)
    assert listener.epochs == list(range(stopped_at, 5))
    said = [f"pretrain-value goes on after epoch {stopped_at - 1}"] if stopped_at > 1 else []
    assert listener.notes == said


def test_a_damaged_checkpoint_costs_one_epoch_and_no_bit(tmp_path: Path) -> None:
    """R3: the epoch is made again from the checkpoint before it."""
    rollouts = rollouts_of(64, visible=True)
    straight, straight_value = run(tmp_path / "straight", rollouts, config_of())
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", rollouts, config_of(), Listener(stop_at=4))
    (tmp_path / "cut" / "checkpoints" / "step_3" / "optimizer.safetensors").write_bytes(b"")
    listener = Listener()
    resumed, resumed_value = run(tmp_path / "cut", rollouts, config_of(), listener)
    assert "step_3 is damaged and skipped" in listener.notes[0]
    assert listener.epochs == [3, 4]
    assert (resumed, bits(resumed_value)) == (straight, bits(straight_value))


def test_micro_batches_do_not_change_what_is_learned(tmp_path: Path) -> None:
    rollouts = rollouts_of(48, visible=True)
    results = []
    for budget in (16, 4096):
        config = config_of(epochs=2, gate=-9.0).model_copy(update={"token_budget": budget})
        results.append(run(tmp_path / str(budget), rollouts, config)[0])
    assert results[0]["skill"] == pytest.approx(results[1]["skill"], abs=1e-3)
    assert results[0]["best_epoch"] == results[1]["best_epoch"]


def test_failed_and_unscored_rollouts_are_neither_trained_nor_held_out(tmp_path: Path) -> None:
    """R7: they don't even move the split."""
    good = rollouts_of(32, visible=True)
    bad = [msgspec.structs.replace(r, status="failed", score=None) for r in rollouts_of(9, visible=True, seed=1)]
    config = config_of(epochs=1, gate=-9.0)
    with_bad, value = run(tmp_path / "a", [*bad[:5], *good, *bad[5:]], config)
    without, other = run(tmp_path / "b", good, config)
    assert with_bad == without
    assert bits(value) == bits(other)


@pytest.mark.parametrize("usable", [0, 1])
def test_too_few_rollouts_are_refused_with_their_number(usable: int) -> None:
    with pytest.raises(RunError, match=f"{usable} usable rollouts leave none to train on"):
        ValuePretraining(value_model(), config_of(), rollouts_of(usable, visible=True))
    assert ValuePretraining(value_model(), config_of(), rollouts_of(2, visible=True))._held_out.rollouts == 1


def test_a_gradient_that_is_not_finite_ends_the_stage_before_the_optimizer_moves(tmp_path: Path) -> None:
    """R8: the message says which setting to lower."""
    value = value_model()
    with torch.no_grad():
        value.head.bias.fill_(float("nan"))
    before = bits(value)
    fitting = ValuePretraining(value, config_of(), rollouts_of(32, visible=True))
    with pytest.raises(RunError, match=r"gradient norm nan; lower value_pretraining\.lr"):
        fitting.run(Checkpoints(tmp_path), MetricsLog(tmp_path / "m.jsonl"), Listener(), SystemClock())
    assert bits(value) == before


def test_stored_rollouts_are_the_same_when_read_and_none_before(tmp_path: Path) -> None:
    path = tmp_path / "value_pretraining" / "rollouts.msgpack.zlib"
    assert stored_rollouts(path) is None
    rollouts = rollouts_of(9, visible=True)
    store_rollouts(path, rollouts, Storage())
    assert stored_rollouts(path) == rollouts
    assert [found.name for found in path.parent.iterdir()] == [path.name]


class TornStorage(Storage):
    def write(self, path: Path, data: bytes) -> None:
        path.write_bytes(data[: len(data) // 2])
        raise OSError("disk full")


def test_rollouts_that_were_half_written_are_not_there(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.msgpack.zlib"
    with pytest.raises(OSError, match="disk full"):
        store_rollouts(path, rollouts_of(9, visible=True), TornStorage())
    assert stored_rollouts(path) is None
    store_rollouts(path, rollouts_of(3, visible=True), Storage())
    assert len(stored_rollouts(path) or []) == 3


@pytest.mark.parametrize("damage", ["half", "flip", "empty", "other"])
def test_a_damaged_file_of_rollouts_is_named_with_the_way_out(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "rollouts.msgpack.zlib"
    store_rollouts(path, rollouts_of(9, visible=True), Storage())
    content = path.read_bytes()
    middle = len(content) // 2
    damaged = {
        "half": content[:middle],
        "flip": content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :],
        "empty": b"",
        "other": b"not compressed",
    }
    path.write_bytes(damaged[damage])
    with pytest.raises(RunError, match=r"is damaged .*delete it, and the rollouts are made again") as caught:
        stored_rollouts(path)
    assert str(path) in str(caught.value)
