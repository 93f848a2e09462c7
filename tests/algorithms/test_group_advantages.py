"""Group advantages against `statistics`, and what must not matter: order, names and sizes of groups."""

import math
import statistics
from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from soloist.algorithms.group_advantages import group_mean, group_relative, uniform_groups

FLOATS = st.floats(-10, 10).map(lambda x: round(x, 3))
BITS = st.sampled_from([0.0, 1.0])


@st.composite
def grouped(draw: st.DrawFn, rewards: st.SearchStrategy[float] = FLOATS | BITS) -> tuple[list[float], list[int]]:
    """(rewards, group numbers) of one to four groups of two to six rollouts, mixed in any order."""
    names = draw(st.lists(st.integers(-(2**62), 2**62), min_size=1, max_size=4, unique=True))
    rows = [(draw(rewards), name) for name in names for _ in range(draw(st.integers(2, 6)))]
    rows = draw(st.permutations(rows))
    return [reward for reward, _ in rows], [name for _, name in rows]


def slow(rewards: list[float], groups: list[int], *, divide: bool) -> list[float]:
    members = defaultdict(list)
    for reward, group in zip(rewards, groups, strict=True):
        members[group].append(reward)
    result = []
    for reward, group in zip(rewards, groups, strict=True):
        centred = reward - statistics.fmean(members[group])
        std = statistics.stdev(members[group])
        result.append((centred / std if std else 0.0) if divide else centred)
    return result


def tensors(batch: tuple[list[float], list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(batch[0], dtype=torch.float64), torch.tensor(batch[1])


def test_the_numbers_are_those_worked_out_by_hand() -> None:
    """Groups 7 and −3, mixed: rewards 1, 0, 0, 0 (mean ¼, variance 3·1/16 + 9/16 over 3 = ¼) and 2, 4."""
    rewards = torch.tensor([1.0, 2.0, 0.0, 0.0, 4.0, 0.0])
    groups = torch.tensor([7, -3, 7, 7, -3, 7])
    half = math.sqrt(0.5)
    assert group_relative(rewards, groups).tolist() == pytest.approx([1.5, -half, -0.5, -0.5, half, -0.5])
    assert group_mean(rewards, groups).tolist() == [0.75, -1.0, -0.25, -0.25, 1.0, -0.25]
    assert group_mean(rewards, groups).dtype == torch.float32


@settings(max_examples=100, deadline=None)
@given(grouped())
def test_groups_of_any_sizes_equal_the_slow_definition(batch: tuple[list[float], list[int]]) -> None:
    assert group_relative(*tensors(batch)).tolist() == pytest.approx(slow(*batch, divide=True), abs=1e-9)
    assert group_mean(*tensors(batch)).tolist() == pytest.approx(slow(*batch, divide=False), abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(grouped(), st.data())
def test_permuting_the_rollouts_permutes_the_result_bit_for_bit(
    batch: tuple[list[float], list[int]], data: st.DataObject
) -> None:
    rewards, groups = tensors(batch)
    order = torch.tensor(data.draw(st.permutations(range(len(rewards)))))
    assert torch.equal(group_relative(rewards, groups)[order], group_relative(rewards[order], groups[order]))
    assert torch.equal(group_mean(rewards, groups)[order], group_mean(rewards[order], groups[order]))
    assert torch.equal(uniform_groups(rewards, groups)[order], uniform_groups(rewards[order], groups[order]))


@settings(max_examples=60, deadline=None)
@given(grouped())
def test_a_group_sees_no_other_group_and_sums_to_nothing(batch: tuple[list[float], list[int]]) -> None:
    rewards, groups = tensors(batch)
    together, centred = group_relative(rewards, groups), group_mean(rewards, groups)
    for name in groups.unique():
        own = groups == name
        assert torch.equal(together[own], group_relative(rewards[own], torch.zeros_like(groups[own])))
        assert float(centred[own].sum()) == pytest.approx(0.0, abs=1e-9)
        squares = float(together[own].square().sum())
        assert squares == pytest.approx(0.0 if uniform_groups(rewards, groups)[own][0] else int(own.sum()) - 1)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1e30, -1e-30])
@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_group_without_variance_gets_exactly_nothing(reward: float, size: int, dtype: torch.dtype) -> None:
    """0.1 three times has a mean that is not 0.1; that rounding must not become an advantage."""
    rewards = torch.tensor([reward] * size + [0.0, 1.0], dtype=dtype)
    groups = torch.tensor([0] * size + [1, 1])
    for advantages in (group_relative(rewards, groups), group_mean(rewards, groups)):
        assert advantages[:size].tolist() == [0.0] * size
        assert bool((advantages[size:] != 0).all())
    assert uniform_groups(rewards, groups).tolist() == [True] * size + [False] * 2


def test_rewards_that_differ_by_a_rounding_are_equal_and_close_ones_are_not() -> None:
    sums, groups = torch.tensor([0.1 + 0.2, 0.3], dtype=torch.float64), torch.tensor([5, 5])
    assert sums[0] != sums[1]
    assert group_relative(sums, groups).tolist() == [0.0, 0.0]
    assert uniform_groups(sums, groups).tolist() == [True, True]
    close = torch.tensor([1.0, 1.0 + 1e-9], dtype=torch.float64)
    assert group_relative(close, groups).tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)])
    assert uniform_groups(close, groups).tolist() == [False, False]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-1e150, 1e150), min_size=2, max_size=6))
def test_results_are_finite_for_any_finite_rewards(rewards: list[float]) -> None:
    """And bounded: no deviation is more than (n − 1)/√n standard deviations."""
    batch = torch.tensor(rewards, dtype=torch.float64), torch.zeros(len(rewards), dtype=torch.int64)
    bound = (len(rewards) - 1) / math.sqrt(len(rewards)) * (1 + 1e-9)
    assert float(group_relative(*batch).abs().max()) <= bound
    assert bool(group_mean(*batch).isfinite().all())


@pytest.mark.parametrize("function", [group_relative, group_mean, uniform_groups])
def test_a_group_of_one_is_refused_with_the_way_out(function: object) -> None:
    assert callable(function)
    with pytest.raises(ValueError, match=r"group 9 has a single rollout.*sample 2 rollouts or more.*running mean"):
        function(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([4, 9, 4]))
    with pytest.raises(ValueError, match=r"group 4 has reward nan; failed rollouts"):
        function(torch.tensor([1.0, math.nan]), torch.tensor([4, 4]))
    with pytest.raises(ValueError, match=r"group_R must hold whole numbers, found torch\.float32"):
        function(torch.zeros(2), torch.zeros(2))
    with pytest.raises(ValueError, match=r"rewards_R \(2,\), group_R \(3,\)"):
        function(torch.zeros(2), torch.tensor([1, 1, 1]))
    assert function(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_results_are_detached_and_in_fp32_or_better(dtype: torch.dtype) -> None:
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=dtype, requires_grad=True)
    advantages = group_relative(rewards, torch.tensor([1, 1, 1, 1]))
    assert advantages.tolist() == pytest.approx([math.sqrt(3) / 2, -math.sqrt(3) / 2] * 2)
    assert advantages.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert not advantages.requires_grad
