"""Losses that TRL 1.16 has, too, are TRL's losses, in value and gradient (fixtures/make_trl_fixtures.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from soloist.algorithms.aggregation import LossAggregation, aggregation_weights
from soloist.algorithms.losses import LossInputs, policy_loss
from soloist.algorithms.step_statistics import step_statistics
from soloist.methods import LOSS_METHODS, Setting

FOUND = json.loads((Path(__file__).parent / "fixtures" / "trl_losses.json").read_text(encoding="utf-8"))
CASES: dict[str, dict[str, Any]] = {case["name"]: case for case in FOUND["cases"]}


def ours(case: dict[str, Any]) -> tuple[str, LossAggregation | None, dict[str, Setting]]:
    """(method, aggregation where it isn't the method's own, settings) of a case; the script's docstring has the map."""
    epsilons: dict[str, Setting] = {"eps_low": case["epsilon_low"], "eps_high": case["epsilon_high"]}
    if case["mode"] is not None:
        over, kind = case["mode"].split("_")
        if kind == "truncate":
            return "tis", None, epsilons | {"correction_over": over, "truncation_cap": case["clip_max"]}
        ends: dict[str, Setting] = {"icepop_low": case["clip_min"], "icepop_high": case["clip_max"]}
        return "icepop", None, epsilons | ends | {"correction_over": over}
    if case["importance_sampling_level"] == "sequence":
        return "gspo", None, epsilons
    if case["loss_type"] == "cispo":
        return "cispo", None, {"eps_low": 1.0, "eps_high": case["epsilon_high"] - 1.0}
    if case["loss_type"] in ("dr_grpo", "dapo"):
        return case["loss_type"], None, epsilons
    return "ppo", "seq-mean-token-mean" if case["loss_type"] == "grpo" else "token-mean", epsilons


def our_loss(case: dict[str, Any], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(loss, gradient of the trained tokens, TRL's gradient of them), packed."""
    inputs = FOUND["inputs"][case["inputs"]]
    trained = torch.tensor(inputs["completion_mask"]) * torch.tensor(inputs["tool_mask"]) > 0
    rollout = torch.arange(len(trained))[:, None].expand_as(trained)[trained]
    columns = {name: torch.tensor(inputs[name], dtype=dtype)[trained] for name in ("now", "old", "sampling")}
    name, aggregation, given = ours(case)
    method = LOSS_METHODS[name]
    mode: Any = aggregation or method.loss_agg_mode
    weights = aggregation_weights(mode, rollout, len(trained), FOUND["max_completion_length"], dtype)
    # Without a correction TRL knows no third policy: the old one stands for the engine's.
    recorded = columns["sampling"] if case["mode"] is not None else columns["old"]
    statistics = step_statistics(
        method, given, log_probs_T=columns["now"], old_log_probs_T=columns["old"], rollout_log_probs_T=recorded,
        weights_T=weights, rollout_T=rollout, n_rollouts=len(trained),
    )  # fmt: skip
    now = columns["now"].requires_grad_()
    loss, _ = policy_loss(method, given, LossInputs(
        log_probs_T=now, rollout_log_probs_T=recorded, old_log_probs_T=columns["old"],
        advantages_T=torch.tensor(inputs["advantages"], dtype=dtype)[rollout], weights_T=weights,
        staleness_T=torch.zeros_like(rollout), statistics=statistics,
    ))  # fmt: skip
    (gradient,) = torch.autograd.grad(loss, now)
    return loss, gradient, torch.tensor(case["gradient"], dtype=dtype)[trained]


@pytest.mark.parametrize("name", sorted(CASES))
def test_loss_and_gradient_are_those_of_trl(name: str) -> None:
    loss, gradient, theirs = our_loss(CASES[name], torch.float64)
    assert loss.item() == pytest.approx(CASES[name]["loss"], rel=1e-10)
    torch.testing.assert_close(gradient, theirs, rtol=1e-9, atol=1e-12)
    single, _, _ = our_loss(CASES[name], torch.float32)
    assert single.item() == pytest.approx(CASES[name]["loss"], abs=1e-5)


def test_the_fixture_holds_every_loss_that_both_have_and_reaches_every_edge() -> None:
    assert FOUND["trl"].startswith("1.16")
    assert {ours(case)[0] for case in CASES.values()} == {"ppo", "dr_grpo", "dapo", "cispo", "gspo", "tis", "icepop"}
    for case in CASES.values():
        gradient = torch.tensor(case["gradient"])
        assert gradient.any()
        assert len({round(other["loss"], 9) for other in CASES.values()}) == len(CASES)
