"""What is said before anything starts: the machine, the cost of a config, and what can't run here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from soloist.config import RunConfig, build_config
from soloist.errors import UserError
from soloist.models.tiny import build_tiny, tiny_policy
from soloist.models.tokenizer import build_tokenizer
from soloist.report.check import describe_machine, describe_plan, parameters, refuse_missing_devices


def plan(raw: dict[str, Any]) -> str:
    return "\n".join(describe_plan(build_config(raw, "test")))


def test_the_plan_multiplies_what_the_config_asks_for() -> None:
    said = plan(
        {
            "steps": 10,
            "rollouts_per_step": 8,
            "checkpoint_every": 4,
            "rollout": {"max_tokens": 100},
            "policy": {"epochs": 3, "minibatches": 2},
            "value": {"updates_per_step": 5},
            "value_pretraining": {"rollouts": 100, "holdout": 0.2, "batch_size": 30, "epochs": 4},
            "eval": {"problems": 7, "samples": 3},
        }
    )
    assert "80 rollouts, 8,000 tokens at most; 60 policy and 50 value updates; staleness at most 2" in said
    assert "100 rollouts, 10,000 tokens at most; 12 value updates at most" in said
    assert "21 rollouts, 2,100 tokens at most of 7 held-out tasks" in said
    assert "checkpoints    3 of about" in said


def test_the_plan_names_what_is_skipped_and_what_is_unbounded() -> None:
    said = plan({"sft": {"steps": 0}, "on_stale": "train"})
    assert "no training, since sft.steps = 0" in said
    assert "staleness without a bound" in said
    assert describe_plan(RunConfig(), ("eval",))[2].startswith("eval ")


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_parameters_are_those_of_the_model_that_would_be_built(family: str, tmp_path: Path) -> None:
    shape = {"family": family, "hidden_size": 32, "layers": 2, "heads": 2, "mlp_size": 48}
    config = build_config({"model": shape}, "test")
    real = sum(p.numel() for p in tiny_policy(config.model, 0, build_tokenizer()).parameters())
    assert parameters(config) == real
    folder = build_tiny(config.model, 0, tmp_path / "model")
    assert parameters(build_config({"model": {"path": str(folder)}}, "test")) == real


def test_a_missing_model_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere"):
        plan({"model": {"path": str(tmp_path / "nowhere")}})
    with pytest.raises(UserError, match=r"config\.json"):
        plan({"model": {"path": str(tmp_path)}})


def test_the_machine_is_described_with_versions_sandboxes_and_engines() -> None:
    said = "\n".join(describe_machine())
    assert f"torch {torch.__version__}" in said
    assert "local: works on cpu" in said
    assert "monty: works" in said
    assert "cores usable" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the device that must be missing")
@pytest.mark.parametrize(("section", "device"), [("model", "cuda"), ("engine", "cuda:3"), ("model", "banana")])
def test_a_device_that_is_not_there_is_refused_in_one_sentence(section: str, device: str) -> None:
    """RB-152: a CPU build of torch stops before workers start, and not with an assertion deep inside one."""
    with pytest.raises(UserError) as caught:
        refuse_missing_devices(build_config({section: {"device": device}}, "test"))
    assert f"{section}.device: found '{device}'" in str(caught.value)
    assert "expected one of cpu" in str(caught.value)
    refuse_missing_devices(RunConfig())
