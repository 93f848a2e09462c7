"""Band, ratios and KL estimate: literal numbers, strict ends, and extreme log-ratios in every float type."""

import math

import pytest
import torch

from soloist.algorithms.trust_regions import (
    band_mask,
    band_sides,
    k3_divergence,
    log_ratio,
    masked_ratio,
    saturated_ratio,
    saturation,
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
EXTREMES = [93.5, 750.0, -750.0, math.inf, -math.inf]


def test_the_band_is_strict_at_both_ends() -> None:
    ratios = [0.69, 0.7, 0.71, 1.0, 5.99, 6.0, 6.01]
    for dtype in (torch.float32, torch.float64):
        d = torch.tensor([math.log(r) for r in ratios], dtype=dtype)
        assert band_mask(d, 0.3, 5.0).tolist() == [False, False, True, True, True, False, False]
        below, above = band_sides(d, 0.3, 5.0)
        assert below.tolist() == [True, True, False, False, False, False, False]
        assert above.tolist() == [False, False, False, False, False, True, True]


def test_no_width_masks_everything_and_no_limit_masks_nothing_finite() -> None:
    d = torch.tensor([-700.0, -0.1, 0.0, 0.1, 700.0])
    assert not band_mask(d, 0.0, 0.0).any()
    assert band_mask(d, 1.0, math.inf).all()
    assert not band_mask(torch.tensor([math.inf, -math.inf]), 1.0, math.inf).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rejected_token_is_exactly_zero_in_value_and_gradient(dtype: torch.dtype) -> None:
    """RB-017: log-ratios [0, 750], acceptance interval (0.4, 4), advantages [1, 1] → terms [−1, 0], gradient 0."""
    d = torch.tensor([0.0, 750.0, *EXTREMES], dtype=dtype, requires_grad=True)
    terms = -masked_ratio(d, 0.6, 3.0) * 1.0
    terms.sum().backward()
    assert terms.tolist() == [-1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert d.grad is not None
    assert d.grad.tolist() == [-1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_the_ratio_depends_on_the_recorded_log_probability() -> None:
    """RB-026: behaviour −1.0, current −0.7: the ratio is exp(0.3), not 1, and only the current one gets a gradient."""
    current, recorded = torch.tensor([-0.7], requires_grad=True), torch.tensor([-1.0], requires_grad=True)
    ratio = masked_ratio(log_ratio(current, recorded), 0.3, 5.0)
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
    assert float(masked_ratio(log_ratio(current, recorded), 0.3, 5.0)) == pytest.approx(1.0, abs=1e-5)
    if temperature == 0.5:
        assert recorded.item() == pytest.approx(-0.142932, abs=1e-6)


def test_a_ratio_against_raw_log_probabilities_is_visibly_not_one() -> None:
    """RB-038: neither the raw −0.407606 nor it divided by T is what was sampled at T = 0.5."""
    current = torch.log_softmax(torch.tensor([2.0, 1.0, 0.0]) / 0.5, -1)[:1]
    for wrong in (-0.407606, -0.815212):
        ratio = masked_ratio(log_ratio(current, torch.tensor([wrong])), 0.3, 5.0)
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
    d = torch.tensor([0.0, 93.5, 750.0, -750.0], dtype=dtype, requires_grad=True)
    ratio = saturated_ratio(d)
    ratio.sum().backward()
    assert ratio[0] == 1.0
    assert torch.isfinite(ratio).all()
    assert d.grad is not None
    assert d.grad.tolist() == [1.0, 0.0, 0.0, 0.0]


def test_saturation_leaves_room_in_every_float_type() -> None:
    assert saturation(torch.float32) == saturation(torch.bfloat16) == 20.0
    assert math.exp(saturation(torch.float16)) < torch.finfo(torch.float16).max / 2


def test_nan_is_not_hidden_by_the_band() -> None:
    d = torch.tensor([math.nan, 0.0])
    assert band_mask(d, 0.3, 5.0).tolist() == [True, True]
    assert masked_ratio(d, 0.3, 5.0)[0].isnan()
    assert k3_divergence(d)[0].isnan()
