"""Engine, learner and plain float64 forwards give the same numbers; benchmarks/parity.py measures, this sets bounds."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from soloist.training import objective

PATH = Path(__file__).parents[1] / "benchmarks" / "parity.py"


@pytest.fixture(scope="module")
def parity() -> ModuleType:
    spec = importlib.util.spec_from_file_location("parity", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "llama", "gemma3"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_ratios_and_gradients_agree_with_float64(parity: Any, family: str, temperature: float) -> None:
    found = parity.measure(family, temperature, count=6)

    assert found["spanning"] > 0.5, "loads must fall into the middle of rollouts"
    assert found["fresh_tokens"] > 10
    assert found["engine_log_prob"] < 1e-5
    assert found["learner_log_prob"] < 1e-5
    assert found["ratio"] < 1e-5
    assert found["value_gradient"] < 2e-5
    assert found["policy_gradient"] < 2e-5
    assert found["packed"] == 1.0
    assert 0 < found["packed_against_padded"] < 2e-5, "another order of sums, but no other numbers"


def test_an_error_of_a_thousandth_in_the_learner_is_seen(parity: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    true_log_probs = objective.action_log_probs

    def scaled(*arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs, entropy = true_log_probs(*arguments, **options)
        return log_probs * 1.001, entropy

    monkeypatch.setattr(objective, "action_log_probs", scaled)
    found = parity.measure("qwen3", 1.0, count=3)

    assert found["ratio"] > 1e-4
    assert found["policy_gradient"] > 1e-4
    assert found["engine_log_prob"] < 1e-5
    assert found["value_gradient"] < 2e-5
