"""Masked statistics: defined for few places, blind to masked ones, equal to numpy elsewhere."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from soloist.algorithms.masked import masked_mean, masked_quantile, masked_var, whiten

GARBAGE = [math.nan, math.inf, -math.inf, 1e9]
FLOATS = st.floats(-100, 100, width=32)


def masked_pair(values: list[float], fillers: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Live values first at even places, fillers between them."""
    x, mask = [], []
    for i, value in enumerate(values):
        x += [value, fillers[i % len(fillers)]]
        mask += [True, False]
    return torch.tensor(x), torch.tensor(mask, dtype=torch.bool)


@settings(max_examples=60, deadline=None)
@given(st.lists(FLOATS, min_size=1, max_size=20), st.floats(0, 1))
def test_statistics_equal_numpy_on_the_selected_values(values: list[float], share: float) -> None:
    x, mask = masked_pair(values, GARBAGE)
    live = np.array(values, dtype=np.float64)
    assert float(masked_mean(x, mask)) == pytest.approx(live.mean(), rel=1e-6, abs=1e-5)
    assert float(masked_var(x, mask)) == pytest.approx(live.var(), rel=1e-5, abs=1e-9)
    assert float(masked_quantile(x, mask, share)) == pytest.approx(np.quantile(live, share), rel=1e-5, abs=1e-4)


@settings(max_examples=40, deadline=None)
@given(st.lists(FLOATS, min_size=1, max_size=10), st.lists(st.sampled_from(GARBAGE), min_size=1, max_size=4))
def test_what_stands_at_a_masked_place_changes_no_bit(values: list[float], fillers: list[float]) -> None:
    garbage, mask = masked_pair(values, fillers)
    zeros = torch.where(mask, garbage, 0.0)
    for statistic in (masked_mean, masked_var, whiten):
        assert torch.equal(statistic(garbage, mask), statistic(zeros, mask))
    assert torch.equal(masked_quantile(garbage, mask, 0.9), masked_quantile(zeros, mask, 0.9))


def test_gradients_are_exactly_zero_at_masked_places() -> None:
    x = torch.tensor([1.0, math.nan, 4.0, math.inf], requires_grad=True)
    mask = torch.tensor([True, False, True, False])
    (masked_mean(x, mask) + masked_var(x, mask)).backward()
    # d mean = 1/2 each; d var = 2·(x − 2.5)/2
    assert x.grad is not None
    assert x.grad.tolist() == [0.5 - 1.5, 0.0, 0.5 + 1.5, 0.0]
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize(
    ("values", "mean", "variance", "quantile", "white"),
    [
        ([], 0.0, 0.0, 0.0, []),
        ([3.0], 3.0, 0.0, 3.0, [0.0]),
        ([1.0, 3.0], 2.0, 1.0, 2.8, [-1.0, 1.0]),
        ([0.1] * 7, 0.1, 0.0, 0.1, [0.0] * 7),
    ],
)
def test_none_one_two_and_equal_values_have_a_defined_result(
    values: list[float], mean: float, variance: float, quantile: float, white: list[float]
) -> None:
    x = torch.tensor([*values, math.nan])
    mask = torch.tensor([True] * len(values) + [False])
    assert float(masked_mean(x, mask)) == pytest.approx(mean)
    assert float(masked_var(x, mask)) == pytest.approx(variance)
    assert float(masked_quantile(x, mask, 0.9)) == pytest.approx(quantile)
    assert whiten(x, mask).tolist() == pytest.approx([*white, 0.0])


def test_an_empty_tensor_has_statistics_too() -> None:
    x, mask = torch.zeros(0), torch.zeros(0, dtype=torch.bool)
    assert [float(s(x, mask)) for s in (masked_mean, masked_var)] == [0.0, 0.0]
    assert whiten(x, mask).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_values_have_no_variance_even_when_their_mean_rounds(dtype: torch.dtype) -> None:
    x = torch.full((1001,), 0.1, dtype=dtype)
    mask = torch.ones(1001, dtype=torch.bool)
    assert float(masked_var(x, mask)) == 0.0
    assert whiten(x, mask).abs().max() == 0.0


def test_whitened_values_have_mean_zero_and_deviation_one() -> None:
    x = torch.tensor([2.0, 2.0002, 5.0, math.nan])
    mask = torch.tensor([True, True, True, False])
    white = whiten(x, mask)
    assert float(masked_mean(white, mask)) == pytest.approx(0.0, abs=1e-6)
    assert float(masked_var(white, mask)) == pytest.approx(1.0, rel=1e-6)
    assert white[3] == 0.0


def test_nan_at_a_selected_place_shows() -> None:
    x, mask = torch.tensor([1.0, math.nan]), torch.tensor([True, True])
    assert masked_mean(x, mask).isnan()
    assert masked_var(x, mask).isnan()
    assert whiten(x, mask).isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_computed_in_fp32(dtype: torch.dtype) -> None:
    x = torch.full((4000,), 256.0, dtype=dtype)
    mask = torch.ones(4000, dtype=torch.bool)
    assert masked_mean(x, mask).dtype == torch.float32
    assert float(masked_mean(x, mask)) == 256.0


def test_masks_of_another_shape_or_type_are_refused() -> None:
    x = torch.zeros(3)
    with pytest.raises(ValueError, match=r"shape \(3,\) of x, found torch.bool \(2,\)"):
        masked_mean(x, torch.ones(2, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"found torch.float32"):
        masked_var(x, torch.ones(3))
    with pytest.raises(ValueError, match=r"found 90"):
        masked_quantile(x, torch.ones(3, dtype=torch.bool), 90)
