"""Ratios and KL estimate: literal numbers, extreme log-ratios in every float type, sequences, A-3PO's policy."""

import math

import pytest
import torch

from soloist.algorithms.ratios import (
    interpolated_correction,
    interpolated_log_ratio,
    k3_divergence,
    log_ratio,
    saturated_ratio,
    saturation,
    with_gradient_of,
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def test_the_ratio_depends_on_the_recorded_log_probability() -> None:
    """RB-026: behaviour −1.0, current −0.7: the ratio is exp(0.3), not 1, and only the current one gets a gradient."""
    current, recorded = torch.tensor([-0.7], requires_grad=True), torch.tensor([-1.0], requires_grad=True)
    ratio = saturated_ratio(log_ratio(current, recorded))
    assert ratio.item() == pytest.approx(1.34986, abs=1e-5)
    ratio.sum().backward()
    assert current.grad is not None
    assert current.grad.item() == pytest.approx(1.34986, abs=1e-5)
    assert recorded.grad is None


@pytest.mark.parametrize("temperature", [0.3, 0.5, 0.7, 1.0, 1.5])
def test_an_unchanged_policy_has_ratio_one_at_every_temperature(temperature: float) -> None:
    """RB-037: both sides use softmax(logits / T); at T = 0.5 the recorded log-probability is −0.142932."""
    logits = torch.tensor([2.0, 1.0, 0.0])
    recorded = torch.log_softmax(logits.double() / temperature, -1)[:1].float()
    current = torch.log_softmax(logits / temperature, -1)[:1]
    assert float(saturated_ratio(log_ratio(current, recorded))) == pytest.approx(1.0, abs=1e-5)
    if temperature == 0.5:
        assert recorded.item() == pytest.approx(-0.142932, abs=1e-6)


def test_a_ratio_against_raw_log_probabilities_is_visibly_not_one() -> None:
    """RB-038: neither the raw −0.407606 nor it divided by T is what was sampled at T = 0.5."""
    current = torch.log_softmax(torch.tensor([2.0, 1.0, 0.0]) / 0.5, -1)[:1]
    for wrong in (-0.407606, -0.815212):
        ratio = saturated_ratio(log_ratio(current, torch.tensor([wrong])))
        assert abs(float(ratio) - 1.0) > 0.25
        assert float(ratio) == pytest.approx(math.exp(-0.142932 - wrong), rel=1e-5)


@pytest.mark.parametrize(("dtype", "at"), [(torch.float32, 120.0), (torch.float16, 15.0), (torch.bfloat16, 93.5)])
def test_the_kl_estimate_saturates_with_finite_value_and_zero_gradient(dtype: torch.dtype, at: float) -> None:
    """RB-020: k3 with a log-ratio of 120 in fp32 and 15 in fp16."""
    d = torch.tensor([at, -at, 750.0, -750.0, 0.5], dtype=dtype, requires_grad=True)
    k3 = k3_divergence(d)
    k3.sum().backward()
    assert torch.isfinite(k3).all()
    assert d.grad is not None
    assert d.grad[:4].tolist() == [0.0, 0.0, 0.0, 0.0]
    assert float(d.grad[4]) == pytest.approx(math.expm1(0.5), rel=1e-2)


def test_the_kl_estimate_equals_a_float64_reference_in_the_ordinary_range() -> None:
    """RB-020, second half."""
    grid = torch.linspace(-9.0, 9.0, 181, dtype=torch.float64)
    k3 = k3_divergence(grid.float())
    reference = torch.tensor([math.exp(d) - 1.0 - d for d in grid.float().double().tolist()], dtype=torch.float64)
    torch.testing.assert_close(k3.double(), reference, rtol=1e-6, atol=1e-6)
    assert (k3 >= 0).all()
    assert k3_divergence(torch.zeros(1)).item() == 0.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_saturated_ratio_is_finite_with_a_finite_gradient(dtype: torch.dtype) -> None:
    d = torch.tensor([0.0, 93.5, 750.0, -750.0, -math.inf], dtype=dtype, requires_grad=True)
    ratio = saturated_ratio(d)
    ratio.sum().backward()
    assert ratio[0] == 1.0
    assert ratio[3:].tolist() == [0.0, 0.0]
    assert torch.isfinite(ratio).all()
    assert d.grad is not None
    assert d.grad.tolist() == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_saturation_leaves_room_in_every_float_type() -> None:
    assert saturation(torch.float32) == saturation(torch.bfloat16) == saturation(torch.float32, factors=2) == 20.0
    assert math.exp(saturation(torch.float16)) < torch.finfo(torch.float16).max / 2
    assert math.exp(2 * saturation(torch.float16, factors=2)) < torch.finfo(torch.float16).max / 2


def test_nan_is_hidden_nowhere() -> None:
    d = torch.tensor([math.nan, 0.0], requires_grad=True)
    ratio = saturated_ratio(d)
    ratio.sum().backward()
    assert ratio[0].isnan()
    assert d.grad is not None
    assert d.grad[0].isnan()
    assert k3_divergence(d)[0].isnan()
    broken, fine, ages = torch.tensor([math.nan, -1.0]), torch.tensor([-1.0, -1.0]), torch.tensor([0, 0])
    assert with_gradient_of(broken, fine).isnan().tolist() == [True, False]
    assert interpolated_correction(broken, fine, ages).isnan().tolist() == [True, False]


def test_a_carried_value_has_the_gradient_of_its_token() -> None:
    log_probs = torch.tensor([-0.3, -5.0, -math.inf], requires_grad=True)
    carried = with_gradient_of(log_probs, torch.tensor([0.125, -2.0, 1.0], dtype=torch.float64))
    assert carried.tolist() == [0.125, -2.0, 1.0]
    assert carried.dtype == torch.float32
    carried.sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [1.0, 1.0, 0.0]


def test_the_interpolated_policy_lies_a_dth_of_the_way_back() -> None:
    """A-3PO: from log π = −1 to log μ = −3 with d = 0, 1, 2, 4: log π_prox = −3, −3, −2, −1.5."""
    current, recorded = torch.full((4,), -1.0, requires_grad=True), torch.full((4,), -3.0)
    ages = torch.tensor([0, 1, 2, 4])
    ratio = interpolated_log_ratio(current, recorded, ages)
    assert ratio.tolist() == [2.0, 2.0, 1.0, 0.5]
    assert interpolated_correction(current, recorded, ages).tolist() == [0.0, 0.0, 1.0, 1.5]
    ratio.sum().backward()
    assert current.grad is not None
    assert current.grad.tolist() == [1.0] * 4, "without a factor α: the proximal policy is detached"


def test_an_impossible_token_needs_no_correction_when_it_is_fresh() -> None:
    gone, recorded, ages = torch.tensor([-math.inf, -math.inf]), torch.tensor([-1.0, -1.0]), torch.tensor([1, 2])
    assert interpolated_correction(gone, recorded, ages).tolist() == [0.0, -math.inf]
    assert interpolated_log_ratio(gone, recorded, ages).tolist() == [-math.inf, -math.inf]
