"""Value loss and the two scores of a critic."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from soloist.algorithms.values import explained_variance, skill, value_loss


def test_the_loss_is_weighted_squared_error_without_a_half() -> None:
    values = torch.tensor([1.0, 2.0, -1.0], requires_grad=True)
    targets, weights = torch.tensor([0.0, 2.0, 1.0], requires_grad=True), torch.tensor([0.5, 0.25, 0.25])
    loss = value_loss(values, targets, weights)
    loss.backward()
    assert loss.item() == 0.5 * 1 + 0.25 * 4
    assert values.grad is not None
    assert values.grad.tolist() == [1.0, 0.0, -1.0]
    assert targets.grad is None


def test_large_errors_are_not_clipped() -> None:
    values = torch.tensor([100.0], requires_grad=True)
    loss = value_loss(values, torch.zeros(1), torch.ones(1))
    loss.backward()
    assert loss.item() == 10_000.0
    assert values.grad is not None
    assert values.grad.item() == 200.0


def test_the_gradient_agrees_with_finite_differences() -> None:
    source = torch.Generator().manual_seed(0)
    values, targets, weights = (torch.rand(6, dtype=torch.float64, generator=source) for _ in range(3))
    values.requires_grad_()
    assert torch.autograd.gradcheck(lambda v: value_loss(v, targets, weights), (values,))
    assert float(value_loss(targets, targets, weights)) == 0.0


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_absent_tokens_change_no_bit(garbage: float, dtype: torch.dtype) -> None:
    weights = torch.tensor([0.5, 0.0, 0.5])
    outcomes = []
    for filler in (garbage, 0.0):
        values = torch.tensor([1.0, filler, 3.0], dtype=dtype, requires_grad=True)
        loss = value_loss(values, torch.tensor([0.5, filler, 1.0]), weights)
        loss.backward()
        outcomes.append((loss.detach(), values.grad))
    assert torch.equal(outcomes[0][0], outcomes[1][0])
    assert outcomes[0][1].tolist() == outcomes[1][1].tolist() == [0.5, 0.0, 2.0]
    assert outcomes[0][0].dtype == torch.float32


def test_nan_at_a_live_token_shows() -> None:
    values = torch.tensor([math.nan, 1.0], requires_grad=True)
    loss = value_loss(values, torch.zeros(2), torch.ones(2))
    loss.backward()
    assert loss.isnan()
    assert values.grad is not None
    assert values.grad.isnan().tolist() == [True, False]


def test_scores_of_perfect_constant_biased_and_useless_critics() -> None:
    targets = torch.tensor([0.0, 1.0, 1.0, 0.0])
    assert (explained_variance(targets, targets), skill(targets, targets)) == (1.0, 1.0)
    constant = torch.full((4,), 0.5)
    assert (explained_variance(constant, targets), skill(constant, targets)) == (0.0, 0.0)
    # A constant bias is forgiven by the explained variance and not by the skill.
    biased = targets + 10.0
    assert explained_variance(biased, targets) == 1.0
    assert skill(biased, targets) == 1.0 - 100.0 / 0.25
    assert explained_variance(1.0 - targets, targets) == -3.0


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=2, max_size=12))
def test_skill_is_never_above_explained_variance(pairs: list[tuple[float, float]]) -> None:
    values, targets = (torch.tensor(column, dtype=torch.float64) for column in zip(*pairs, strict=True))
    explained, skilled = explained_variance(values, targets), skill(values, targets)
    if float(targets.max() - targets.min()) < 1e-3:
        return
    assert explained is not None
    assert skilled is not None
    assert skilled <= explained + 1e-6 * (1 + abs(explained))
    bias = float((targets - values).mean())
    variance = float(targets.var(correction=0))
    assert skilled == pytest.approx(explained - bias**2 / variance, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("targets", [[], [1.0], [0.1] * 7, [0.0, 0.0]])
def test_returns_without_variance_have_no_score(targets: list[float]) -> None:
    values = torch.arange(len(targets), dtype=torch.float32)
    assert explained_variance(values, torch.tensor(targets)) is None
    assert skill(values, torch.tensor(targets)) is None


def test_shapes_that_would_broadcast_are_refused() -> None:
    with pytest.raises(ValueError, match=r"values_T \(3, 1\), targets_T \(3,\)"):
        value_loss(torch.zeros(3, 1), torch.zeros(3), torch.zeros(3))
    with pytest.raises(ValueError, match=r"targets_N \(2,\)"):
        skill(torch.zeros(3), torch.zeros(2))
