"""Batches of the supervised stage: made ahead, the same as made at once; the loss is the mean over trained tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from soloist.config import ModelConfig, RunConfig, build_config
from soloist.environments.registry import build_environment
from soloist.models.loading import save_folder
from soloist.models.packed import packs
from soloist.models.tiny import tiny_policy
from soloist.models.tokenizer import build_tokenizer
from soloist.rollout.rendering import build_renderer
from soloist.training.sft import Batches, loss_of

CONFIG = build_config(
    {"token_budget": 200, "sft": {"steps": 4, "batch_size": 6}, "model": {"hidden_size": 32, "layers": 2, "heads": 2}},
    "test",
)


def batches(config: RunConfig = CONFIG, packed: bool = True) -> Batches:
    environment = build_environment(config.environment, config.seed)
    return Batches(config, environment, build_renderer(build_tokenizer(), "auto"), packed)


def test_batches_made_ahead_are_those_of_their_steps_from_any_step_on() -> None:
    made = [[micro.input_ids_BL.tolist() for micro in micros] for micros in batches().of_steps(0)]
    resumed = [[micro.input_ids_BL.tolist() for micro in micros] for micros in batches().of_steps(2)]
    assert len(made) == 4
    assert made[2:] == resumed
    assert made[0] != made[1]
    assert list(batches().of_steps(4)) == []


@pytest.mark.parametrize("packed", [True, False])
def test_the_loss_and_its_gradient_are_the_mean_over_all_trained_tokens(packed: bool) -> None:
    """Against one forward of each demonstration; headers and observations are not trained."""
    model = tiny_policy(ModelConfig(hidden_size=32, layers=2, heads=2), 0, build_tokenizer())
    assert packs(model)
    environment, rendering = build_environment(CONFIG.environment, 0), build_renderer(build_tokenizer(), "auto")
    losses = []
    for index in range(6):
        demonstration = environment.demonstration(index)
        ids, sampled = rendering.training_tokens(demonstration.messages, demonstration.tools)
        log_probs = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0], -1)
        losses += [-log_probs[t - 1, ids[t]] for t in range(1, len(ids)) if sampled[t]]
    expected = torch.stack(losses).mean()
    weight = model.model.norm.weight
    (gradient,) = torch.autograd.grad(expected, weight)
    found = loss_of(model, next(batches(packed=packed).of_steps(0)))
    assert found.item() == pytest.approx(expected.item(), abs=1e-5)
    torch.testing.assert_close(weight.grad, gradient, atol=1e-6, rtol=1e-4)


def test_a_packed_model_is_saved_like_any_other(tmp_path: Path) -> None:
    model = tiny_policy(ModelConfig(hidden_size=32, layers=1, heads=2), 0, build_tokenizer())
    assert packs(model)
    save_folder(model, build_tokenizer(), tmp_path / "model")
    text = (tmp_path / "model" / "config.json").read_text()
    assert "soloist" not in text
    assert json.loads(text)["model_type"] == "qwen3"
