"""Global norm of gradients, and scaling down to it."""

import math

import pytest
import torch

from soloist.algorithms.gradients import clip_by_global_norm_


def parameters(*gradients: list[float] | None) -> list[torch.nn.Parameter]:
    made = []
    for gradient in gradients:
        parameter = torch.nn.Parameter(torch.zeros(len(gradient or [0.0])))
        parameter.grad = None if gradient is None else torch.tensor(gradient)
        made.append(parameter)
    return made


def test_all_gradients_are_one_vector() -> None:
    first, unused, second = parameters([3.0, 0.0], None, [4.0])
    norm = clip_by_global_norm_([first, unused, second], 1.0)
    assert float(norm) == 5.0
    assert first.grad is not None
    assert second.grad is not None
    assert [*first.grad.tolist(), *second.grad.tolist()] == pytest.approx([0.6, 0.0, 0.8], rel=1e-5)
    assert unused.grad is None


def test_a_gradient_below_the_limit_keeps_every_bit() -> None:
    (parameter,) = parameters([0.3, -0.4])
    norm = clip_by_global_norm_(iter([parameter]), 1.0)
    assert parameter.grad is not None
    assert torch.equal(parameter.grad, torch.tensor([0.3, -0.4]))
    assert float(norm) == pytest.approx(0.5)


def test_parameters_without_gradients_have_norm_zero() -> None:
    assert float(clip_by_global_norm_(parameters(None, None), 1.0)) == 0.0
    assert float(clip_by_global_norm_([], 1.0)) == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_norm_is_returned_for_the_caller_to_judge(bad: float) -> None:
    norm = clip_by_global_norm_(parameters([1.0, bad]), 1.0)
    assert not torch.isfinite(norm)
    assert norm.isnan() == math.isnan(bad)


@pytest.mark.parametrize("limit", [0.0, -1.0, math.nan])
def test_a_limit_that_would_stop_or_reverse_learning_is_refused(limit: float) -> None:
    (parameter,) = parameters([1.0])
    with pytest.raises(ValueError, match=f"found {limit}"):
        clip_by_global_norm_([parameter], limit)
    assert parameter.grad is not None
    assert parameter.grad.item() == 1.0
