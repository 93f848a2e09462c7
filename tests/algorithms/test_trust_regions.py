"""Regions: literal ends, strictness, SAT's interval inside PPO's, masks that let NaN through."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from soloist.algorithms.surrogates import detached, linear, pessimistic
from soloist.algorithms.trust_regions import (
    band_region,
    band_sides,
    clip_region,
    limited,
    no_region,
    probability_region,
    sat_kernel,
    sat_region,
    second_moment_region,
    truncation_region,
)
from soloist.methods import SETTING_CHOICES

KERNELS = SETTING_CHOICES["sat_kernel"]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
distances = st.lists(st.floats(-30.0, 30.0), min_size=1, max_size=20)
epsilons = st.floats(0.0, 0.99)


def test_the_band_is_strict_at_both_ends() -> None:
    ratios = [0.69, 0.7, 0.71, 1.0, 5.99, 6.0, 6.01]
    for dtype in (torch.float32, torch.float64):
        d = torch.tensor([math.log(r) for r in ratios], dtype=dtype)
        assert band_region(d, 0.3, 5.0).kept_T.tolist() == [False, False, True, True, True, False, False]
        below, above = band_sides(d, 0.3, 5.0)
        assert below.tolist() == [True, True, False, False, False, False, False]
        assert above.tolist() == [False, False, False, False, False, True, True]


def test_no_width_masks_everything_and_no_limit_masks_nothing_finite() -> None:
    d = torch.tensor([-700.0, -0.1, 0.0, 0.1, 700.0])
    assert not band_region(d, 0.0, 0.0).kept_T.any()
    assert band_region(d, 1.0, math.inf).kept_T.all()
    assert not band_region(torch.tensor([math.inf, -math.inf]), 1.0, math.inf).kept_T.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rejected_token_is_exactly_zero_in_value_and_gradient(dtype: torch.dtype) -> None:
    """RB-017: log-ratios [0, 750], acceptance interval (0.4, 4), advantages [1, 1] → terms [−1, 0], gradient 0."""
    d = torch.tensor([0.0, 750.0, 93.5, -750.0, math.inf, -math.inf], dtype=dtype)
    log_probs = torch.tensor([-1.0, -1.0, -1.0, -751.0, -1.0, -math.inf], requires_grad=True)
    ratio = d.float().exp().clamp(max=1e9)
    terms = detached(ratio, log_probs, torch.ones(6), band_region(d, 0.6, 3.0))
    terms.gain_T.sum().backward()
    assert terms.gain_T.tolist() == [-1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert terms.passes_T.tolist() == [True, False, False, False, False, False]


def test_the_clip_interval_has_both_epsilons() -> None:
    region = clip_region(torch.zeros(3, dtype=torch.float64), 0.2, 0.28)
    assert (float(region.low), float(region.high)) == (0.8, 1.28)
    assert region.kept_T.all()
    free = no_region(torch.zeros(3))
    assert (float(free.low), float(free.high)) == (0.0, math.inf)


def test_truncation_counts_what_it_cuts_and_has_no_lower_end_at_one() -> None:
    d = torch.tensor([0.001, 1.0, 5.0, 5.1], dtype=torch.float64).log()
    region = truncation_region(d, 1.0, 4.0)
    assert region.metrics["cispo/clip_frac"].tolist() == [False, False, False, True]
    assert limited(d.exp(), region.low, region.high).tolist() == pytest.approx([0.001, 1.0, 5.0, 5.0])


def test_limiting_keeps_the_gradient_inside_and_at_the_ends() -> None:
    ratio = torch.tensor([0.5, 0.8, 1.0, 1.2, 1.5, math.nan], dtype=torch.float64, requires_grad=True)
    region = clip_region(ratio, 0.2, 0.2)
    cut = limited(ratio, region.low, region.high)
    cut.sum().backward()
    assert cut.tolist()[:5] == [0.8, 0.8, 1.0, 1.2, 1.2]
    assert cut[5].isnan()
    assert ratio.grad is not None
    assert ratio.grad.tolist()[:5] == [0.0, 1.0, 1.0, 1.0, 0.0]


def test_sat_moves_the_end_that_a_stale_token_went_towards() -> None:
    """q = 0.5: a token at 1.0 has c = 2 / (1 + 4) = 0.4, at its own side alone; those within q have none."""
    d = torch.tensor([1.0, -1.0, 0.5, -0.3, 0.0], dtype=torch.float64)
    region = sat_region(d, torch.tensor(0.5), "hill", 0.2, 0.3)
    assert region.high.tolist() == pytest.approx([1.12, 1.3, 1.3, 1.3, 1.3])
    assert region.low.tolist() == pytest.approx([0.8, 0.92, 0.8, 0.8, 0.8])
    assert region.metrics["sat/gate_rate"].tolist() == [True, True, False, False, False]
    assert region.metrics["sat/contraction_min"].tolist() == pytest.approx([0.4, 0.4, 1.0, 1.0, 1.0])
    assert region.metrics["sat/radius_low"].tolist() == pytest.approx([0.2, 0.08, 0.2, 0.2, 0.2])
    assert region.metrics["sat/proxy"].tolist() == [1.0, 1.0, 0.5, 0.3, 0.0]


def test_the_kernels_have_their_values_at_twice_the_quantile() -> None:
    size, q = torch.tensor([1.0], dtype=torch.float64), torch.tensor(0.5, dtype=torch.float64)
    assert [sat_kernel(kernel, size, q).item() for kernel in KERNELS] == pytest.approx([0.4, 0.2, 0.5])
    assert sat_kernel("hill", q[None], q).item() == sat_kernel("hill_excess", q[None], q).item() == 1.0
    with pytest.raises(ValueError, match="sat_kernel 'hil' is none of hill"):
        sat_kernel("hil", size, q)


@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=60, deadline=None)
@given(d=distances, q=st.floats(0.0, 5.0), low=epsilons, high=epsilons, sign=st.sampled_from([1.0, -1.0]))
def test_sat_lies_inside_ppo_and_its_surrogate_is_never_above(
    kernel: str, d: list[float], q: float, low: float, high: float, sign: float
) -> None:
    for dtype in (torch.float32, torch.float64):
        distance = torch.tensor(d, dtype=dtype)
        ratio, advantages = distance.clamp(max=20).exp(), torch.full_like(distance, sign)
        sat, ppo = sat_region(distance, torch.tensor(q), kernel, low, high), clip_region(distance, low, high)
        assert (sat.low >= ppo.low).all()
        assert (sat.high <= ppo.high).all()
        assert (sat.low <= 1).all()
        assert (sat.high >= 1).all()
        gains, bounds = pessimistic(ratio, advantages, sat).gain_T, pessimistic(ratio, advantages, ppo).gain_T
        assert (gains <= bounds).all()
        # A token whose advantage pulls it back towards μ is not clipped by either.
        back = (distance * advantages) < 0
        assert torch.equal(gains[back], bounds[back])
        assert torch.equal(gains[back], (ratio * advantages)[back])


@settings(max_examples=60, deadline=None)
@given(d=distances, low=epsilons, high=epsilons)
def test_sat_without_contraction_has_the_bits_of_ppo(d: list[float], low: float, high: float) -> None:
    for dtype in (torch.float32, torch.float64):
        distance = torch.tensor(d, dtype=dtype)
        ppo = clip_region(distance, low, high)
        for quantile in (torch.tensor(0.0), distance.abs().max()):
            sat = sat_region(distance, quantile, "hill", low, high)
            assert torch.equal(sat.low, ppo.low.expand_as(sat.low))
            assert torch.equal(sat.high, ppo.high.expand_as(sat.high))
            assert not sat.metrics["sat/gate_rate"].any()


def test_an_extreme_token_contracts_to_nothing_and_stays_finite() -> None:
    d = torch.tensor([750.0, -750.0, math.inf, -math.inf])
    region = sat_region(d, torch.tensor(1e-12), "hill", 0.2, 0.2)
    assert region.high.tolist()[::2] == [1.0, 1.0]
    assert region.low.tolist()[1::2] == [1.0, 1.0]


def test_probability_differences_mask_by_the_sign_of_the_advantage() -> None:
    """0.1 → 0.35 is too far up for A > 0 and fine for A < 0; 0.9 → 0.65 the other way; 1e-6 → 1e-3 is never too far."""
    old = torch.tensor([0.1, 0.1, 0.9, 0.9, 1e-6, 0.1]).log()
    now = torch.tensor([0.35, 0.35, 0.65, 0.65, 1e-3, 0.35]).log()
    advantages = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0, 0.0])
    region = probability_region(now, old, advantages, 0.2, 20.0)
    assert region.kept_T.tolist() == [False, True, False, True, True, True]
    assert torch.equal(region.metrics["tv/masked_frac"], ~region.kept_T)
    ratio = (now - old).exp().requires_grad_()
    terms = linear(ratio, advantages, region)
    assert terms.gain_T.tolist() == pytest.approx([0.0, -3.5, 0.0, 0.65 / 0.9, 20.0, 0.0])
    assert terms.passes_T.tolist() == [False, True, False, True, False, True]


def test_nan_is_inside_every_region() -> None:
    d = torch.tensor([math.nan, 0.0])
    quantile = torch.tensor(0.5)
    regions = [
        no_region(d), band_region(d, 0.3, 5.0), clip_region(d, 0.2, 0.2), truncation_region(d, 1.0, 4.0),
        sat_region(d, quantile, "hill", 0.2, 0.2), probability_region(d, torch.zeros(2), torch.ones(2), 0.2, 20.0),
        second_moment_region(d, torch.tensor([True, True])),
    ]  # fmt: skip
    for region in regions:
        assert region.kept_T.all()
        assert linear(d, torch.ones(2), region).gain_T.isnan().tolist() == [True, False]
        assert pessimistic(d, torch.ones(2), region).gain_T.isnan().tolist() == [True, False]
