"""A loss or gradient that is not finite: the rollouts are named, no optimizer is touched, the run stops or goes on."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from soloist.config import ModelConfig, RunConfig, build_config
from soloist.errors import RunError
from soloist.models.loading import load_policy
from soloist.models.tiny import build_tiny
from soloist.models.value import ValueModel
from soloist.training.learner import Learner
from soloist.types import Rollout, Segment, VersionSpan


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    build_tiny(ModelConfig(hidden_size=16, layers=1, heads=2, mlp_size=32), 0, folder)
    return folder


def rollout(place: int, first_token: int) -> Rollout:
    segment = Segment(
        token_ids=[first_token, 5, 6],
        action_mask=[False, True, True],
        rollout_log_probs=[None, -1.0, -2.0],
        version_spans=[VersionSpan(version=0, start=1, end=3)],
    )
    return Rollout(
        rollout_id=f"r{place}", task_id="t", group_id="g", place=place, environment="x", state="scored",
        status="completed", segments=[segment], score=float(place % 2),
    )  # fmt: skip


ROLLOUTS = [rollout(0, 7), rollout(1, 8), rollout(2, 9)]


def learner_for(base: Any, on_non_finite: str) -> Learner:
    """A learner whose policy and critic answer NaN to one prompt token, which only r1 has."""
    config: RunConfig = build_config({"health": {"on_non_finite": on_non_finite}, "value": {"freeze": []}}, "test")
    policy = load_policy(base)
    learner = Learner(policy, ValueModel.from_policy(policy), config)
    set_embedding(learner, torch.nan)
    return learner


@torch.no_grad()
def set_embedding(learner: Learner, value: float) -> None:
    for model in (learner.policy, learner.value):
        next(p for name, p in model.named_parameters() if name.endswith("embed_tokens.weight"))[8] = value


def weights_of(learner: Learner) -> dict[str, torch.Tensor]:
    parts = learner.state()
    return {f"{part}/{name}": t.nan_to_num(9.0) for part in ("policy", "value") for name, t in parts[part][0].items()}


def optimizers_that_stepped(learner: Learner) -> list[str]:
    parts = learner.state()
    return [name for name in ("policy_optimizer", "value_optimizer") if parts[name][0]]


# The head is tied to the embeddings, so the policy's logits are NaN for every prompt.
@pytest.mark.parametrize(("update", "names"), [("update_value", "r1"), ("update_policy", "r0, r1, r2")])
def test_a_gradient_that_is_not_finite_stops_before_the_optimizer_and_names_the_rollouts(
    base: Any, update: str, names: str
) -> None:
    """R8: no weight and no optimizer state has changed, and no gradient is left behind."""
    learner = learner_for(base, "stop")
    before = weights_of(learner)
    with pytest.raises(RunError, match=rf"gradient norm is nan at version 0; nothing was updated.*outputs: {names}$"):
        getattr(learner, update)(ROLLOUTS)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(learner).items())
    assert (learner.version, optimizers_that_stepped(learner)) == (0, [])
    assert all(p.grad is None for model in (learner.policy, learner.value) for p in model.parameters())


def test_when_set_such_an_update_is_left_out_and_training_goes_on(base: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The version counts on, since the step is on record; weights and optimizer states keep their bits."""
    learner = learner_for(base, "skip")
    before = weights_of(learner)
    with caplog.at_level(logging.WARNING, "soloist.learner"):
        learner.update_value(ROLLOUTS)
        learner.update_policy(ROLLOUTS)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["this update is skipped"] * 2
    assert "r1" in caplog.records[0].getMessage()
    assert (learner.version, optimizers_that_stepped(learner)) == (1, [])
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(learner).items())
    set_embedding(learner, 0.01)
    learner.update_value(ROLLOUTS)
    learner.update_policy(ROLLOUTS)
    assert (learner.version, optimizers_that_stepped(learner)) == (2, ["policy_optimizer", "value_optimizer"])
