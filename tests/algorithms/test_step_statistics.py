"""Statistics of a step: quantile, sequence means, M2PO's choice; absent tokens; parts of a micro-batch."""

import math
import statistics as standard

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from soloist.algorithms.losses import LossInputs, policy_loss
from soloist.algorithms.step_statistics import (
    StepStatistics,
    linear_quantile,
    needs_statistics,
    over_sequences,
    second_moment_kept,
    step_statistics,
)
from soloist.methods import LOSS_METHODS

finite = st.floats(-30.0, 30.0)


def statistics_of(name: str, now: Tensor, weights: Tensor, rollout: Tensor, **given: float | str) -> StepStatistics:
    """With log π_old = −1.5 and log μ = −1 − position/10."""
    recorded = -1.0 - torch.arange(len(now)) / 10
    return step_statistics(
        LOSS_METHODS[name], given, log_probs_T=now, old_log_probs_T=torch.full_like(now, -1.5),
        rollout_log_probs_T=recorded, weights_T=weights, rollout_T=rollout, n_rollouts=3,
    )  # fmt: skip


def test_only_the_methods_that_read_the_whole_step_need_statistics() -> None:
    needing = {name for name, method in LOSS_METHODS.items() if needs_statistics(method, {})}
    assert needing == {"gspo", "m2po", "sat_ppo", "sat_grpo", "sat_gspo"}
    assert not needs_statistics(LOSS_METHODS["sat_ppo"], {"sat_over": "micro_batch"})
    assert needs_statistics(LOSS_METHODS["sat_gspo"], {"sat_over": "micro_batch"})
    assert needs_statistics(LOSS_METHODS["tis"], {"correction_over": "sequence"})
    ones, rollout = torch.ones(4), torch.zeros(4, dtype=torch.int64)
    assert statistics_of("dis", -ones, ones, rollout) == StepStatistics()


def test_a_sequence_s_ratio_is_the_geometric_mean_of_its_tokens() -> None:
    now, rollout = torch.tensor([-1.0, -2.0, -1.5, -1.2, -0.1]), torch.tensor([0, 1, 0, 2, 2])
    found = statistics_of("gspo", now, torch.ones(5), rollout).sequence_log_ratio_T
    assert found is not None
    ratios = (now.double() + 1.5).exp().tolist()
    expected = {0: standard.geometric_mean([ratios[0], ratios[2]]), 1: ratios[1]}
    expected[2] = standard.geometric_mean(ratios[3:])
    assert found.exp().tolist() == pytest.approx([expected[r] for r in rollout.tolist()], rel=1e-6)
    assert found.dtype == torch.float64


def test_a_sequence_s_correction_is_a_product_or_as_set_a_mean() -> None:
    now, rollout = -torch.ones(4), torch.tensor([0, 0, 0, 1])
    differences = [-0.5, -0.4, -0.3, -0.2]
    product = statistics_of("tis", now, torch.ones(4), rollout, correction_over="sequence").sequence_correction_T
    mean = statistics_of("icepop", now, torch.ones(4), rollout, correction_over="sequence_mean").sequence_correction_T
    assert product is not None
    assert mean is not None
    assert product.tolist() == pytest.approx([sum(differences[:3])] * 3 + [-0.2], rel=1e-6)
    assert mean.tolist() == pytest.approx([-0.4] * 3 + [-0.2], rel=1e-6)


@given(values=st.lists(finite, min_size=2, max_size=30))
@settings(max_examples=60, deadline=None)
def test_the_quantile_is_that_of_the_standard_library(values: list[float]) -> None:
    found = linear_quantile(torch.tensor(values, dtype=torch.float64), 0.9)
    assert found.item() == pytest.approx(standard.quantiles(values, n=10, method="inclusive")[-1], abs=1e-9)
    assert min(values) <= linear_quantile(torch.tensor(values, dtype=torch.float64), 0.5).item() <= max(values)


def test_the_quantile_of_little_or_of_infinite_values() -> None:
    assert linear_quantile(torch.zeros(0), 0.9).item() == 0.0
    assert linear_quantile(torch.tensor([3.0]), 0.9).item() == 3.0
    assert linear_quantile(torch.tensor([1.0, math.inf]), 0.0).item() == 1.0
    assert linear_quantile(torch.tensor([0.0, 1.0, math.inf]), 0.5).item() == 1.0


@given(values=st.lists(finite, min_size=1, max_size=30), threshold=st.sampled_from([0.04, 1.0, 30.0]))
@settings(max_examples=80, deadline=None)
def test_m2po_keeps_the_most_tokens_whose_second_moment_stays_below(values: list[float], threshold: float) -> None:
    d = torch.tensor(values, dtype=torch.float64)
    kept = second_moment_kept(d, torch.ones(len(values), dtype=torch.bool), threshold)
    inside = sorted(x * x for x, keep in zip(values, kept.tolist(), strict=True) if keep)
    outside = sorted(x * x for x, keep in zip(values, kept.tolist(), strict=True) if not keep)
    assert not inside or math.fsum(inside) / len(inside) < threshold * (1 + 1e-12)
    assert not inside or not outside or inside[-1] <= outside[0]
    if outside:
        assert math.fsum([*inside, outside[0]]) / (len(inside) + 1) >= threshold * (1 - 1e-12)


def test_m2po_is_strict_and_drops_what_is_infinite_but_not_what_is_broken() -> None:
    live = torch.ones(4, dtype=torch.bool)
    d = torch.tensor([0.0, 0.0, 2.0, 2.0])
    assert second_moment_kept(d, live, 2.0).tolist() == [True, True, True, False], "a mean of 2 is not below 2"
    assert second_moment_kept(d, live, 2.001).all()
    d = torch.tensor([0.1, math.inf, -math.inf, math.nan])
    assert second_moment_kept(d, live, 0.04).tolist() == [True, False, False, True]
    assert not second_moment_kept(torch.ones(4), live, 0.04).any()
    assert second_moment_kept(torch.zeros(0), live[:0], 0.04).tolist() == []


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e9])
@pytest.mark.parametrize("name", ["gspo", "m2po", "sat_ppo", "sat_gspo", "icepop"])
def test_absent_tokens_change_no_statistic(name: str, garbage: float) -> None:
    given: dict[str, float | str] = {"correction_over": "sequence"} if name == "icepop" else {}
    weights, rollout = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 1, 2, 0])
    now = torch.tensor([-1.1, -1.2, -1.9, -1.4, -1.5, -0.2])
    clean = statistics_of(name, torch.where(weights > 0, now, -1.5), weights, rollout, **given)
    dirty = statistics_of(name, torch.where(weights > 0, now, garbage), weights, rollout, **given)
    live = weights > 0
    found = 0
    for column in vars(clean):
        ours, theirs = getattr(clean, column), getattr(dirty, column)
        found += ours is not None
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(
            ours if ours.ndim == 0 else ours[live], theirs if ours.ndim == 0 else theirs[live]
        )
    assert found >= 1


@pytest.mark.parametrize("name", ["sat_ppo", "sat_gspo", "gspo", "m2po"])
def test_absent_tokens_are_not_counted_as_tokens_that_did_not_move(name: str) -> None:
    """The same step with and without its absent tokens: a quantile, a mean or a moment over zeros would be smaller."""
    now, rollout = torch.tensor([-1.4, -1.3, -1.9, -1.45, -1.5, -1.2]), torch.tensor([0, 0, 1, 1, 2, 0])
    live = torch.tensor([True, False, True, True, False, True])
    whole = statistics_of(name, now, live.float(), rollout)
    alone = statistics_of(name, now[live], torch.ones(4), rollout[live])
    assert whole.quantile is None or torch.equal(whole.quantile, alone.quantile)
    assert (whole.quantile is not None) == name.startswith("sat")
    for part, column in ((whole.at(live), "sequence_log_ratio_T"), (whole.at(live), "kept_T")):
        ours, theirs = getattr(part, column), getattr(alone, column)
        assert ours is None or torch.equal(ours, theirs)


def test_a_broken_token_breaks_its_own_sequence_alone() -> None:
    now, rollout = torch.tensor([-1.0, math.nan, -1.5]), torch.tensor([0, 0, 1])
    found = statistics_of("gspo", now, torch.ones(3), rollout).sequence_log_ratio_T
    assert found is not None
    assert found.isnan().tolist() == [True, True, False]
    sums = over_sequences(torch.ones(3), torch.tensor([True, False, True]), rollout, 2, mean=False)
    assert sums.tolist() == [1.0, 1.0, 1.0]


def test_a_part_holds_the_tokens_asked_for_in_their_order() -> None:
    now, rollout = torch.tensor([-1.0, -2.0, -1.5, -1.2]), torch.tensor([0, 1, 0, 2])
    whole = statistics_of("sat_gspo", now, torch.ones(4), rollout)
    part = whole.at(torch.tensor([3, 1]))
    assert whole.sequence_log_ratio_T is not None
    assert part.sequence_log_ratio_T is not None
    assert part.sequence_log_ratio_T.tolist() == whole.sequence_log_ratio_T[[3, 1]].tolist()
    assert part.quantile is whole.quantile
    assert part.kept_T is None
    assert part.sequence_correction_T is None


@pytest.mark.parametrize("name", ["gspo", "m2po", "sat_ppo", "tis"])
def test_a_loss_without_its_statistics_says_what_is_missing(name: str) -> None:
    ones = torch.ones(2)
    inputs = LossInputs(
        log_probs_T=-ones, rollout_log_probs_T=-ones, old_log_probs_T=-ones, advantages_T=ones, weights_T=ones,
        staleness_T=torch.zeros(2, dtype=torch.int64), statistics=StepStatistics(),
    )  # fmt: skip
    given: dict[str, float | str] = {"correction_over": "sequence"} if name == "tis" else {}
    with pytest.raises(ValueError, match="found None; make it with step_statistics"):
        policy_loss(LOSS_METHODS[name], given, inputs)
    loss, _ = policy_loss(LOSS_METHODS["ppo"], {}, inputs)
    assert loss.item() == -2.0
