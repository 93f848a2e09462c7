"""Deterministic mode: the asynchronous loop gives the bytes of a plain sequential loop, however many players it has."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from soloist.config import RunConfig, build_config
from soloist.metrics import read_metrics
from soloist.rollout.play import new_rollout
from soloist.runtime.ledger import read_rollouts, read_steps
from soloist.seams import SystemClock
from soloist.training.checkpoint import Checkpoints
from soloist.training.observer import SilentObserver
from soloist.training.run_folder import RunFolder
from soloist.training.setup import build_learner, open_bench
from soloist.training.stages import run_stages

STEPS = 5
PARTS = ("policy", "value", "policy_optimizer", "value_optimizer")


def config_for(folder: Path, name: str, **changes: Any) -> RunConfig:
    raw: dict[str, Any] = {
        "name": name,
        "runs_dir": str(folder),
        "steps": STEPS,
        "deterministic": True,
        "rollouts_per_step": 8,
        "players": 8,
        "checkpoint_every": STEPS,
        "environment": {"name": "two-turns"},
        "model": {"hidden_size": 32, "layers": 2, "heads": 2, "mlp_size": 64},
        "engine": {"max_length": 48, "slots": 8, **changes.pop("engine", {})},
        "rollout": {"max_new_tokens": 4, "max_tokens": 40, "max_turns": 2},
        "sft": {"steps": 60, "lr": 1e-2, "threads": 1, "batch_size": 16},
        "value_pretraining": {"rollouts": 64, "epochs": 1, "gate": -1e9},
        "eval": {"problems": 8, "samples": 1},
    }
    if "lag" not in changes:
        raw["max_staleness"] = 0
    return build_config(raw | changes, "test")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with SFT and value pretraining done, from which every run below starts."""
    folder = tmp_path_factory.mktemp("runs")
    config = config_for(folder, "prepared")
    run_stages(config, ["sft", "pretrain-value"], resume=False, skip_done=True, observer=SilentObserver())
    return folder


def state_after(config: RunConfig) -> dict[str, torch.Tensor]:
    """All tensors of the last checkpoint, by part and name."""
    parts = Checkpoints(config.folder / "checkpoints").load(config.steps)
    return {f"{part}/{name}": tensor for part in PARTS for name, tensor in parts[part][0].items()}


def trained(prepared: Path, name: str, **changes: Any) -> tuple[RunConfig, dict[str, torch.Tensor]]:
    config = config_for(prepared, name, **changes)
    shutil.copytree(prepared / "prepared", config.folder)
    (config.folder / "config.resolved.toml").unlink()
    run_stages(config, ["train"], resume=False, skip_done=True, observer=SilentObserver())
    return config, state_after(config)


async def reference(config: RunConfig) -> dict[str, torch.Tensor]:
    """The method as a plain loop: play one rollout after the other, update, load, repeat."""
    folder, clock, size = RunFolder(config), SystemClock(), config.rollouts_per_step
    learner = build_learner(config, folder)
    async with open_bench(config, folder.sft_model, clock) as bench:
        for step in range(STEPS):
            await bench.engines.load(learner.publish(config.folder / "reference"))
            rollouts = []
            for place in range(step * size, (step + 1) * size):
                task = bench.environment.train_task(place)
                fresh = new_rollout(
                    rollout_id=f"r{place}", group_id=f"g{place}", place=place, attempt=0, task=task,
                    sampling=bench.sampling, now=0.0,
                )  # fmt: skip
                rollouts.append(await bench.episodes.play(fresh, task, slot=place % size))
            for _ in range(config.value.updates_per_step):
                learner.update_value(rollouts)
            learner.update_policy(rollouts)
    state = learner.state()
    return {f"{part}/{name}": tensor for part in PARTS for name, tensor in state[part][0].items()}


def different(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.timeout(240)
async def test_five_steps_equal_a_plain_loop_byte_for_byte(prepared: Path) -> None:
    config, state = await asyncio.to_thread(trained, prepared, "asynchronous")
    assert different(state, await reference(config)) == []
    assert different(state, (await asyncio.to_thread(trained, prepared, "few", players=3))[1]) == []
    steps = list(read_steps(config.folder / "ledger.sqlite"))
    assert [step.rollout_ids for step in steps][:2] == [[f"r{n}" for n in range(8)], [f"r{n}" for n in range(8, 16)]]
    moved = [name for name in state if name.startswith("policy/")]
    start = dict(build_learner(config, RunFolder(config)).policy.named_parameters())
    assert any(not torch.equal(state[name], start[name.removeprefix("policy/")]) for name in moved), "it did train"


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_lag_of_two_gives_the_same_bits_again_and_every_rollout_is_exactly_so_old(prepared: Path) -> None:
    """Generation overlaps with training here, and the order of arrival is another one each time."""
    config, state = trained(prepared, "lag", lag=2)
    again, same = trained(prepared, "lag again", lag=2, players=5)
    hashes = [[step.state_hash for step in read_steps(one.folder / "ledger.sqlite")] for one in (config, again)]
    assert hashes[0] == hashes[1]
    assert different(state, same) == []
    ages = set()
    for row in read_rollouts(config.folder / "ledger.sqlite", state="trained"):
        assert row.rollout is not None
        assert row.step is not None
        ages |= {(row.step, row.step - span.version) for span in row.rollout.spans()}
    assert ages == {(step, min(step, 2)) for step in range(STEPS)}
    synchronous = read_steps(trained(prepared, "no lag")[0].folder / "ledger.sqlite")
    assert [one.state_hash for one in synchronous][:1] == hashes[0][:1]
    assert [one.state_hash for one in synchronous][1:] != hashes[0][1:]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_mismatch_that_is_measured_grows_with_the_alteration_and_comes_again_bit_for_bit(prepared: Path) -> None:
    """Engine and learner disagree on purpose, and the probe at the start says by how much."""
    said: list[str] = []

    class Hearing(SilentObserver):
        def note(self, text: str) -> None:
            said.append(text)

    def mismatch(name: str, **engine: Any) -> tuple[float, str]:
        config = config_for(prepared, name, steps=1, engine=engine)
        shutil.copytree(prepared / "prepared", config.folder)
        (config.folder / "config.resolved.toml").unlink()
        run_stages(config, ["train"], resume=False, skip_done=True, observer=Hearing())
        (record,) = read_metrics(config.folder / "metrics.jsonl", "train")
        return record["mismatch_kl/mean"], read_steps(config.folder / "ledger.sqlite")[0].state_hash

    rounded, much = mismatch("rounded", rounding="float8_e4m3fn"), mismatch("much", noise=0.2)
    assert 1e-6 < rounded[0] < much[0] / 4
    assert mismatch("much again", noise=0.2) == much
    assert [text.partition(":")[0] for text in said if "|ratio - 1|" in text][:2] == [
        "engine weights are altered (noise = 0, rounding = 'float8_e4m3fn')",
        "engine weights are altered (noise = 0.2, rounding = 'none')",
    ]
