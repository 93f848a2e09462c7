"""Step-level GAE against literal numbers, a loop over turns, and token-level GAE where the two must agree."""

import math
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from soloist.algorithms.advantages import gae_over_rollouts, gae_with_observations, length_adaptive_lambda
from soloist.algorithms.step_gae import TurnValue, step_gae

SMALL = st.floats(-10, 10)
VALUES = get_args(TurnValue)
Turn = list[tuple[float, float]]


def slow_step_gae(turns: list[Turn], gamma: float, lam: float, value_of: TurnValue, bootstrap: float) -> list[float]:
    """One number per token of one rollout: the definition, walked backwards turn by turn."""
    result: list[float] = []
    advantage, next_value = 0.0, bootstrap
    for turn in reversed(turns):
        values = [value for _, value in turn]
        value = sum(values) / len(values) if value_of == "mean" else values[-1]
        advantage = sum(r for r, _ in turn) + gamma * next_value - value + gamma * lam * advantage
        next_value = value
        result = [advantage] * len(turn) + result
    return result


@st.composite
def batches(draw: st.DrawFn) -> list[list[Turn]]:
    """One to four rollouts of up to four turns with one to three (reward, value) tokens each; some are empty."""
    turn = st.lists(st.tuples(SMALL, SMALL), min_size=1, max_size=3)
    return draw(st.lists(st.lists(turn, max_size=4), min_size=1, max_size=4))


def packed(batch: list[list[Turn]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(rewards_T, values_T, lengths_R, turn_T), turns numbered 0, 1, …"""
    tokens = [token for rollout in batch for turn in rollout for token in turn]
    numbers = [number for rollout in batch for number, turn in enumerate(rollout) for _ in turn]
    rewards, values = ([token[side] for token in tokens] for side in (0, 1))
    lengths = [sum(map(len, rollout)) for rollout in batch]
    return (
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(values, dtype=torch.float64),
        torch.tensor(lengths),
        torch.tensor(numbers, dtype=torch.int64),
    )


@pytest.mark.parametrize(("value_of", "expected"), [("mean", [1.09, 1.09, 0.4]), ("last", [0.84, 0.84, 0.4])])
def test_the_numbers_are_those_worked_out_by_hand(value_of: TurnValue, expected: list[float]) -> None:
    """Turns of 2 and 1 tokens, rewards .5 and 1, V of the first .25 or .5, of the second .6; α = 1.25 makes λ = .6.

    δ_0 = .5 + .6 − V_0 is .85 or .6, δ_1 = 1 − .6 = .4, A_0 = δ_0 + .6·.4.
    """
    rewards, values = torch.tensor([0.25, 0.25, 1.0]), torch.tensor([0.0, 0.5, 0.6])
    layout = torch.tensor([3]), torch.tensor([0, 0, 1])
    advantages = step_gae(rewards, values, *layout, gamma=1.0, alpha=1.25, value_of=value_of)
    assert advantages.tolist() == pytest.approx(expected)
    assert advantages.dtype == torch.float32


@settings(max_examples=80, deadline=None)
@given(batches(), st.floats(0, 0.99), st.floats(0, 0.99), st.sampled_from(VALUES), st.booleans(), st.data())
def test_many_rollouts_at_once_equal_a_loop_over_turns(
    batch: list[list[Turn]], gamma: float, lam: float, value_of: TurnValue, adaptive: bool, data: st.DataObject
) -> None:
    bootstraps = [data.draw(SMALL) for _ in batch]
    advantages = step_gae(
        *packed(batch),
        gamma=gamma,
        alpha=1.5,
        lam=None if adaptive else lam,
        value_of=value_of,
        bootstrap_R=torch.tensor(bootstraps, dtype=torch.float64),
    )
    expected: list[float] = []
    for rollout, bootstrap in zip(batch, bootstraps, strict=True):
        own = max(0.0, 1 - 1 / (1.5 * len(rollout))) if adaptive and rollout else lam
        expected += slow_step_gae(rollout, gamma, own, value_of, bootstrap)
    assert advantages.tolist() == pytest.approx(expected, abs=1e-9)
    assert not advantages.requires_grad


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.tuples(SMALL, SMALL), max_size=6), min_size=1, max_size=4),
    st.floats(0, 0.99),
    st.sampled_from(VALUES),
)
def test_with_one_token_in_every_turn_it_is_token_gae_bit_for_bit(
    rollouts: list[Turn], gamma: float, value_of: TurnValue
) -> None:
    rewards, values, lengths, turns = packed([[[token] for token in rollout] for rollout in rollouts])
    by_turn = step_gae(rewards, values, lengths, turns, gamma=gamma, alpha=1.5, value_of=value_of)
    lam = length_adaptive_lambda(lengths, 1.5)
    assert torch.equal(by_turn, gae_over_rollouts(rewards, values, lengths, gamma=gamma, lam=lam))
    fixed = step_gae(rewards, values, lengths, turns, gamma=gamma, alpha=1.5, lam=0.7, value_of=value_of)
    assert torch.equal(fixed, gae_over_rollouts(rewards, values, lengths, gamma=gamma, lam=0.7))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.tuples(SMALL, SMALL), min_size=1, max_size=6), min_size=1, max_size=4))
def test_one_turn_per_rollout_gives_all_its_tokens_the_return_minus_its_value(rollouts: list[Turn]) -> None:
    rewards, values, lengths, turns = packed([[rollout] for rollout in rollouts])
    advantages = step_gae(rewards, values, lengths, turns, gamma=0.5, alpha=1.5, value_of="last")
    pieces = [piece.tolist() for piece in advantages.split(lengths.tolist())]
    assert [len(set(piece)) for piece in pieces] == [1] * len(rollouts)
    expected = [sum(r for r, _ in rollout) - rollout[-1][1] for rollout in rollouts]
    assert [piece[0] for piece in pieces] == pytest.approx(expected, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(batches(), st.sampled_from(VALUES), st.data())
def test_only_where_turns_begin_matters_and_not_their_numbers(
    batch: list[list[Turn]], value_of: TurnValue, data: st.DataObject
) -> None:
    """Turns without tokens leave gaps in the numbers; the number of turns, and so λ, does not count them."""
    rewards, values, lengths, turns = packed(batch)
    arguments: dict[str, Any] = {"gamma": 0.9, "alpha": 1.5, "value_of": value_of}
    plain = step_gae(rewards, values, lengths, turns, **arguments)
    gaps = torch.tensor([0, *(data.draw(st.integers(0, 3)) for _ in range(4))]).cumsum(0)
    gapped = step_gae(rewards, values, lengths, turns + gaps[turns], **arguments)
    assert torch.equal(plain, gapped)
    order = data.draw(st.permutations(range(len(batch))))
    moved = step_gae(*packed([batch[i] for i in order]), **arguments)
    pieces = plain.split(lengths.tolist())
    assert torch.equal(moved, torch.cat([pieces[i] for i in order]))


@settings(max_examples=40, deadline=None)
@given(batches(), st.sampled_from(VALUES))
def test_no_reward_is_lost_and_no_credit_is_made(batch: list[list[Turn]], value_of: TurnValue) -> None:
    """With λ = γ = 1, A + V of a rollout's first turn is the sum of all its rewards."""
    rewards, values, lengths, turns = packed(batch)
    advantages = step_gae(rewards, values, lengths, turns, gamma=1.0, alpha=1.5, lam=1.0, value_of=value_of)
    pieces = [piece.tolist() for piece in advantages.split(lengths.tolist())]
    for rollout, piece in zip(batch, pieces, strict=True):
        if rollout:
            first = [value for _, value in rollout[0]]
            value = sum(first) / len(first) if value_of == "mean" else first[-1]
            assert piece[0] + value == pytest.approx(sum(r for turn in rollout for r, _ in turn), abs=1e-9)
    assert len(advantages) == sum(map(len, pieces))


@pytest.mark.parametrize("noise", [math.nan, math.inf, 1e9])
def test_what_the_critic_says_about_observations_never_enters(noise: float) -> None:
    """Trap 1: observations are gathered out; with one token per action both levels agree on the rest."""
    mask = torch.tensor([True, False, False, True, False, True])
    values = torch.tensor([0.1, noise, noise, 0.4, noise, 0.5], dtype=torch.float64)
    rewards = torch.tensor([0, 0, 0, 0, 0, 1.0], dtype=torch.float64)
    by_token = gae_with_observations(rewards, values, mask, gamma=0.9, lam=0.8)
    layout = torch.tensor([3]), torch.tensor([0, 2, 5])
    by_turn = step_gae(rewards[mask], values[mask], *layout, gamma=0.9, alpha=1.5, lam=0.8, value_of="mean")
    assert torch.equal(by_turn, by_token[mask])
    assert bool(by_turn.isfinite().all())


def test_a_broken_value_stays_in_its_rollout_and_large_ones_stay_finite() -> None:
    values = torch.tensor([3e38, 3e38, math.nan, 0.5])
    rewards, turns = torch.tensor([0.0, -3e38, 1.0, 1.0]), torch.tensor([0, 0, 0, 0])
    advantages = step_gae(
        rewards.double(), values.double(), torch.tensor([2, 1, 1]), turns, gamma=1.0, alpha=1.5, value_of="mean"
    )
    assert advantages[:2].tolist() == pytest.approx([-6e38, -6e38], rel=1e-6)
    assert advantages.isnan().tolist() == [False, False, True, False]
    assert float(advantages[3]) == 0.5


def test_a_short_rollout_clamps_lambda_at_zero() -> None:
    """α·n = .5 would make λ negative: A of the first turn is its δ."""
    rewards, values = torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.25])
    layout = torch.tensor([2]), torch.tensor([0, 1])
    advantages = step_gae(rewards, values, *layout, gamma=1.0, alpha=0.25, value_of="mean")
    assert advantages.tolist() == [-0.25, 0.75]
    per_rollout = step_gae(rewards, values, *layout, gamma=1.0, alpha=0.25, lam=torch.tensor([1.0]), value_of="mean")
    assert per_rollout.tolist() == [0.5, 0.75]


def test_what_does_not_fit_is_refused_with_what_was_found() -> None:
    two, turns, lengths = torch.zeros(2), torch.tensor([0, 1]), torch.tensor([2])
    with pytest.raises(ValueError, match="turn 0 follows turn 1 within rollout 0"):
        step_gae(two, two, lengths, turns.flip(0), gamma=1.0, alpha=1.5, value_of="mean")
    with pytest.raises(ValueError, match="value_of 'first' is none of mean, last"):
        step_gae(two, two, lengths, turns, gamma=1.0, alpha=1.5, value_of="first")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"found torch\.float32"):
        step_gae(two, two, lengths, two, gamma=1.0, alpha=1.5, value_of="mean")
    with pytest.raises(ValueError, match="sum to 2 tokens"):
        step_gae(two, two, torch.tensor([3]), turns, gamma=1.0, alpha=1.5, value_of="mean")
    with pytest.raises(ValueError, match=r"turn_T \(1,\)"):
        step_gae(two, two, lengths, turns[:1], gamma=1.0, alpha=1.5, value_of="mean")
    # A new rollout may begin with a lower number.
    both = step_gae(two, two, torch.tensor([1, 1]), turns.flip(0), gamma=1.0, alpha=1.5, value_of="mean")
    assert both.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("value_of", VALUES)
@pytest.mark.parametrize("rollouts", [0, 2])
def test_a_step_without_tokens_gives_nothing(value_of: TurnValue, rollouts: int) -> None:
    nothing, turns = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    lengths = torch.zeros(rollouts, dtype=torch.int64)
    advantages = step_gae(nothing, nothing, lengths, turns, gamma=1.0, alpha=1.5, value_of=value_of)
    assert advantages.shape == (0,)
    assert advantages.dtype == torch.float32
