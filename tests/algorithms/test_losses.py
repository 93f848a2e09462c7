"""Policy losses: formulas against slow loops and finite differences, extremes, absent tokens, sums of metrics."""

import math

import pytest
import torch
from torch import Tensor

from soloist.algorithms.losses import (
    POLICY_LOSSES,
    PolicyLoss,
    dis_loss,
    importance_weighting_loss,
    metrics_of,
    ppo_loss,
)
from soloist.metrics import METRICS

BAND = {"eps_low": 0.3, "eps_high": 5.0}
GARBAGE = [math.nan, math.inf, -math.inf, 1e9]
EVERY_LOSS = pytest.mark.parametrize("name", sorted(POLICY_LOSSES))


def batch(n: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities of both policies (some tokens outside the band), advantages, token-mean weights."""
    source = torch.Generator().manual_seed(seed)
    recorded = -torch.rand(n, generator=source, dtype=torch.float64) * 3 - 0.1
    current = recorded + torch.randn(n, generator=source, dtype=torch.float64) * 0.8
    advantages = torch.randn(n, generator=source, dtype=torch.float64)
    weights = torch.full((n,), 1 / n, dtype=torch.float64)
    return current.to(dtype).requires_grad_(), recorded.to(dtype), advantages.to(dtype), weights


def slow_term(name: str, current: float, recorded: float, advantage: float) -> tuple[float, float]:
    """(term, its derivative in log π) of one token, straight from the formulas."""
    ratio = math.exp(current - recorded)
    if name == "importance_weighting":
        return -ratio * advantage, -ratio * advantage
    low, high = 1 - BAND["eps_low"], 1 + BAND["eps_high"]
    if name == "dis":
        kept = ratio if low < ratio < high else 0.0
        return -kept * advantage * current, -kept * advantage
    clipped = min(max(ratio, low), high)
    if clipped * advantage < ratio * advantage:
        return -clipped * advantage, 0.0
    return -ratio * advantage, -ratio * advantage


def gradient(loss: Tensor, of: Tensor) -> Tensor:
    (result,) = torch.autograd.grad(loss, of)
    return result


@EVERY_LOSS
def test_loss_and_gradient_equal_the_formula_token_by_token(name: str) -> None:
    current, recorded, advantages, weights = batch(40)
    loss, _ = POLICY_LOSSES[name](current, recorded, advantages, weights, **BAND)
    rows = zip(current.tolist(), recorded.tolist(), advantages.tolist(), strict=True)
    terms = [slow_term(name, *row) for row in rows]
    assert loss.item() == pytest.approx(sum(t for t, _ in terms) / 40, rel=1e-9)
    assert gradient(loss, current).tolist() == pytest.approx([g / 40 for _, g in terms], rel=1e-9, abs=1e-15)
    assert any(g == 0 for _, g in terms) == (name != "importance_weighting")


@EVERY_LOSS
def test_gradients_agree_with_finite_differences(name: str) -> None:
    """DIS is detached on purpose, so its surrogate is differenced with the coefficient held fixed."""
    current, recorded, advantages, weights = batch(8, seed=3)
    loss, _ = POLICY_LOSSES[name](current, recorded, advantages, weights, **BAND)
    exact, step = gradient(loss, current), 1e-6

    def value(log_probs: Tensor) -> float:
        if name != "dis":
            return POLICY_LOSSES[name](log_probs, recorded, advantages, weights, **BAND)[0].item()
        held = (current - recorded).exp()
        held = torch.where((held > 0.7) & (held < 6.0), held, 0.0)
        return float(-(weights * held * advantages * log_probs).sum())

    for i in range(8):
        moved = torch.zeros(8, dtype=torch.float64)
        moved[i] = step
        with torch.no_grad():
            difference = (value(current + moved) - value(current - moved)) / (2 * step)
        assert difference == pytest.approx(float(exact[i]), abs=1e-7)


@EVERY_LOSS
def test_only_the_current_policy_gets_a_gradient(name: str) -> None:
    leaves = [x.detach().requires_grad_() for x in batch(6)]
    loss, sums = POLICY_LOSSES[name](*leaves, **BAND)
    loss.backward()
    assert leaves[0].grad is not None
    assert [leaf.grad for leaf in leaves[1:]] == [None, None, None]
    assert not any(value.requires_grad for value in sums.values())


def test_one_overflowing_stale_token_is_masked_and_counted() -> None:
    """RB-016: log-ratio 93.5 beside a token with ratio 1."""
    current = torch.tensor([-1.5, -0.7], requires_grad=True)
    recorded, ones = torch.tensor([-95.0, -0.7]), torch.ones(2)
    loss, sums = dis_loss(current, recorded, ones, ones / 2, **BAND)
    metrics = metrics_of([sums])
    assert loss.item() == pytest.approx(0.35)
    assert gradient(loss, current).tolist() == [0.0, -0.5]
    assert metrics["dis/masked_frac"] == metrics["dis/masked_frac_high"] == 0.5
    assert metrics["dis/masked_frac_low"] == 0.0


@EVERY_LOSS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_extreme_log_ratios_stay_finite_in_every_float_type(name: str, dtype: torch.dtype, advantage: float) -> None:
    """RB-017: nothing is NaN or infinite; the first token is ordinary, the rest are 93.5, 750 and −750 away."""
    current = torch.tensor([-1.0, -1.5, -1.0, -751.0], dtype=dtype, requires_grad=True)
    recorded = torch.tensor([-1.0, -95.0, -751.0, -1.0], dtype=dtype)
    advantages = torch.full((4,), advantage, dtype=dtype)
    loss, sums = POLICY_LOSSES[name](current, recorded, advantages, torch.full((4,), 0.25), **BAND)
    slopes = gradient(loss, current)
    assert torch.isfinite(loss)
    assert all(torch.isfinite(value) for value in sums.values())
    assert slopes.tolist() == [-0.25 * advantage, 0.0, 0.0, 0.0]
    assert loss.dtype == torch.float32


@pytest.mark.parametrize("loss_of", [ppo_loss, importance_weighting_loss])
def test_a_large_ratio_does_not_overflow_the_gradient_of_fp16(loss_of: PolicyLoss) -> None:
    """exp(15) is fine in fp32, where the loss is computed, but not in the fp16 tensor that receives the gradient."""
    current = torch.tensor([-1.0, -1.0], dtype=torch.float16, requires_grad=True)
    recorded = torch.tensor([-16.0, -6.0], dtype=torch.float16)
    loss, _ = loss_of(current, recorded, -torch.ones(2), torch.ones(2), **BAND)
    assert torch.isfinite(loss)
    assert gradient(loss, current).tolist() == pytest.approx([0.0, math.exp(5)], rel=1e-3)


def test_an_impossible_token_outside_the_band_costs_nothing() -> None:
    """log π = −inf: the product 0 · inf must not appear, forward or backward."""
    current = torch.tensor([-math.inf, -1.0], requires_grad=True)
    loss, _ = dis_loss(current, torch.tensor([-1.0, -1.0]), torch.ones(2), torch.ones(2), **BAND)
    assert loss.item() == 1.0
    assert gradient(loss, current).tolist() == [0.0, -1.0]


def test_the_loss_depends_on_the_recorded_log_probability() -> None:
    """RB-026: with recorded −1.0 and current −0.7 the gradient is exp(0.3); a self-made ratio would give 1."""
    current, ones = torch.tensor([-0.7], requires_grad=True), torch.ones(1)
    for loss_of in POLICY_LOSSES.values():
        stale = gradient(loss_of(current, torch.tensor([-1.0]), ones, ones, **BAND)[0], current)
        fresh = gradient(loss_of(current, torch.tensor([-0.7]), ones, ones, **BAND)[0], current)
        assert float(stale) == pytest.approx(-1.34986, abs=1e-5)
        assert float(fresh) == pytest.approx(-1.0)


@EVERY_LOSS
@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_absent_tokens_change_no_bit_of_loss_gradient_or_metric(name: str, garbage: float, dtype: torch.dtype) -> None:
    """A token of weight 0 is absent, whatever is stored there."""
    current, recorded, advantages, weights = batch(9, dtype)
    absent = torch.tensor([0, 1, 0, 0, 1, 0, 0, 0, 1]).bool()
    weights = torch.where(absent, 0.0, weights)

    def outcome(filler: float) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        inputs = [torch.where(absent, filler, x.detach()) for x in (current, recorded, advantages)]
        inputs[0].requires_grad_()
        loss, sums = POLICY_LOSSES[name](*inputs, weights, **BAND)
        return loss, gradient(loss, inputs[0]), sums

    clean_loss, clean_gradient, clean_sums = outcome(0.0)
    loss, slopes, sums = outcome(garbage)
    assert torch.equal(loss, clean_loss)
    assert torch.equal(slopes, clean_gradient)
    assert (slopes[absent] == 0).all()
    assert sums.keys() == clean_sums.keys()
    assert all(torch.equal(sums[key], clean_sums[key]) for key in sums)
    assert sums["tokens"] == 6
    removed = [x[~absent] for x in (current, recorded, advantages, weights)]
    expected = metrics_of([POLICY_LOSSES[name](*removed, **BAND)[1]])
    assert metrics_of([sums]) == pytest.approx(expected, rel=1e-12)


@EVERY_LOSS
@pytest.mark.parametrize("filler", [1.0, 0.0, math.nan])
def test_fillers_of_observation_tokens_are_in_no_ratio_kl_or_count(name: str, filler: float) -> None:
    """RB-044: two action tokens around three observation tokens for which the engine has no log-probability."""
    mask = torch.tensor([True, False, False, False, True])
    current = torch.tensor([-0.5, -9.0, -9.0, -9.0, -0.7], requires_grad=True)
    recorded = torch.where(mask, torch.tensor([-0.5, 0, 0, 0, -0.7]), filler)
    ones = torch.ones(5)
    packed = [x[mask] for x in (current, recorded, ones, ones / 2)]
    for inputs in (packed, [current, recorded, ones, ones / 2 * mask]):
        loss, sums = POLICY_LOSSES[name](*inputs, **BAND)
        metrics = metrics_of([sums])
        assert gradient(loss, current).tolist() == [-0.5, 0.0, 0.0, 0.0, -0.5]
        assert (metrics["mismatch_kl/mean"], metrics["actor/ppo_kl"], float(sums["tokens"])) == (0.0, 0.0, 2.0)


def test_reported_kl_is_per_action_token() -> None:
    """RB-058: 10 action tokens with KL 0.01 each, 200 observation tokens with a difference of −3."""
    mask = torch.tensor([True] * 10 + [False] * 200)
    recorded = torch.full((210,), -1.0)
    current = recorded - torch.where(mask, 0.01, 3.0)
    _, sums = dis_loss(current, recorded, torch.ones(210), mask / 10, **BAND)
    metrics = metrics_of([sums])
    assert metrics["actor/ppo_kl"] == pytest.approx(0.01, rel=1e-4)
    assert metrics["mismatch_kl/mean"] == pytest.approx(math.exp(-0.01) - 1 + 0.01, abs=1e-6)


@EVERY_LOSS
def test_nan_at_a_live_token_shows_in_loss_and_gradient(name: str) -> None:
    """RB-046: hiding NaN is harmful. It must reach the finiteness check, not be counted as a masked token."""
    current, recorded, advantages, weights = batch(3, torch.float32)
    for place in range(3):
        inputs = [x.detach().clone() for x in (current, recorded, advantages)]
        inputs[0][0] = inputs[1][0] + 0.1
        inputs[place][0] = math.nan
        inputs[0].requires_grad_()
        loss, _ = POLICY_LOSSES[name](*inputs, weights, **BAND)
        assert loss.isnan()
        assert gradient(loss, inputs[0])[0].isnan()


@EVERY_LOSS
def test_nothing_and_all_absent_give_zero_not_nan(name: str) -> None:
    """RB-024, last sentence."""
    empty = torch.zeros(0, requires_grad=True)
    loss, sums = POLICY_LOSSES[name](empty, torch.zeros(0), torch.zeros(0), torch.zeros(0), **BAND)
    loss.backward()
    assert loss.item() == 0.0
    assert set(metrics_of([sums]).values()) == {None}
    current, recorded, advantages, _ = batch(4)
    loss, sums = POLICY_LOSSES[name](current, recorded, advantages, torch.zeros(4), **BAND)
    assert loss.item() == 0.0
    assert gradient(loss, current).tolist() == [0.0] * 4
    assert float(sums["tokens"]) == 0.0


def test_metrics_have_the_values_of_their_definitions() -> None:
    ratios = torch.tensor([0.5, 1.0, 1.1, 7.0], dtype=torch.float64)
    current = ratios.log() - 3.0
    recorded, quarter = torch.full_like(current, -3.0), torch.full_like(current, 0.25)
    metrics = metrics_of([dis_loss(current, recorded, torch.ones_like(current), quarter, **BAND)[1]])
    d = ratios.log()
    assert (metrics["dis/masked_frac"], metrics["dis/masked_frac_low"], metrics["dis/masked_frac_high"]) == (
        0.5,
        0.25,
        0.25,
    )
    assert metrics["dis/ess"] == pytest.approx(float(ratios.sum() ** 2 / (4 * ratios.square().sum())))
    assert metrics["actor/ppo_kl"] == pytest.approx(float(-d.mean()))
    assert metrics["mismatch_kl/mean"] == pytest.approx(float((ratios - 1 - d).mean()))
    # Outside the interval a token is clipped only where that lowers the objective.
    for first_sign, share in ((-1.0, 0.5), (1.0, 0.25)):
        signs = torch.tensor([first_sign, 1.0, 1.0, 1.0])
        clipped = metrics_of([ppo_loss(current, recorded, signs, quarter, eps_low=0.2, eps_high=0.2)[1]])
        assert clipped["ppo/clip_frac"] == share


@EVERY_LOSS
def test_metric_names_are_registered_and_add_up_over_parts(name: str) -> None:
    inputs = batch(30, seed=5)
    whole = metrics_of([POLICY_LOSSES[name](*inputs, **BAND)[1]])
    parts = [
        POLICY_LOSSES[name](*(x[part] for x in inputs), **BAND)[1] for part in torch.arange(30).split([1, 12, 0, 17])
    ]
    assert set(whole) <= set(METRICS)
    assert metrics_of(parts) == pytest.approx(whole, rel=1e-12)
    assert metrics_of([]) == {}


def test_the_importance_weighted_baseline_ignores_the_band() -> None:
    inputs = batch(5)
    narrow, _ = importance_weighting_loss(*inputs, eps_low=0.0, eps_high=0.0)
    wide, _ = importance_weighting_loss(*inputs, eps_low=0.9, eps_high=9.0)
    assert torch.equal(narrow, wide)
    assert torch.equal(narrow, importance_weighting_loss(*inputs)[0])


@EVERY_LOSS
def test_tensors_that_would_broadcast_are_refused(name: str) -> None:
    current, recorded, advantages, weights = batch(4)
    with pytest.raises(ValueError, match=r"rollout_log_probs_T \(4, 1\)"):
        POLICY_LOSSES[name](current, recorded[:, None], advantages, weights, **BAND)
    with pytest.raises(ValueError, match=r"advantages_T \(1,\)"):
        POLICY_LOSSES[name](current, recorded, advantages[:1], weights, **BAND)
