"""Skip-observation GAE against literal numbers, a slow loop, and the properties that make it skip observations."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from soloist.algorithms.advantages import (
    bootstrap_values,
    gae_over_rollouts,
    gae_with_observations,
    length_adaptive_lambda,
    on_tokens,
    returns_to_go,
    rewards_to_actions,
    rollout_index,
    skip_observation_gae,
    sums_of_runs,
    value_targets,
)

NAN = math.nan
BELOW_ONE = st.floats(0.0, 0.99)
SMALL = st.floats(-10, 10)
CRITIC_NOISE = st.sampled_from([NAN, math.inf, -math.inf, 1e9, -37.0, 0.0])


def slow_gae(
    rewards: list[float], values: list[float], gamma: float, lam: float, bootstrap: float = 0.0
) -> list[float]:
    """The definition as a double sum: A_t = Σ_k (γλ)^k δ_{t+k}."""
    after = [*values[1:], bootstrap][: len(values)]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, after, values, strict=True)]
    return [sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t:])) for t in range(len(deltas))]


def tensors(*lists: list[float]) -> list[torch.Tensor]:
    return [torch.tensor(numbers, dtype=torch.float64) for numbers in lists]


def packed(batch: list[tuple[list[float], list[float]]]) -> list[torch.Tensor]:
    """Rewards and values of all rollouts, one after the other."""
    return tensors([r for rewards, _ in batch for r in rewards], [v for _, values in batch for v in values])


@st.composite
def rollouts(draw: st.DrawFn, max_tokens: int = 8) -> list[tuple[list[float], list[float]]]:
    """(rewards, values) of one to four rollouts, some of them empty."""
    lengths = draw(st.lists(st.integers(0, max_tokens), min_size=1, max_size=4))
    numbers = [st.lists(SMALL, min_size=n, max_size=n) for n in lengths]
    return [(draw(n), draw(n)) for n in numbers]


@pytest.mark.parametrize("leak", [37.0, NAN, math.inf])
def test_a_critic_value_at_a_masked_position_does_not_leak(leak: float) -> None:
    """RB-001."""
    rewards, values = tensors([0, 0, 1, 0], [0.2, 0.4, 0.1, leak])
    mask = torch.tensor([True, True, True, False])
    advantages = gae_with_observations(rewards, values, mask, gamma=1.0, lam=0.9)
    assert advantages.tolist() == pytest.approx([0.659, 0.51, 0.9, 0.0])
    assert advantages[3] == 0.0


@pytest.mark.parametrize(
    ("gamma", "expected"),
    [(1.0, [1.3141, 1.278, 0, 0, 1.24, 1.2, 0]), (0.0, [-0.5, -0.6, 0, 0, -0.7, 1.2, 0])],
)
def test_a_reward_on_the_last_observation_lands_on_the_last_action(gamma: float, expected: list[float]) -> None:
    """RB-002: neither decayed nor lost, and equal to GAE with the observations deleted."""
    mask = torch.tensor([1, 1, 0, 0, 1, 1, 0]).bool()
    rewards, values = tensors([0, 0, 0, 0, 0, 0, 2], [0.5, 0.6, 9, 9, 0.7, 0.8, 9])
    advantages = gae_with_observations(rewards, values, mask, gamma=gamma, lam=0.95)
    assert advantages.tolist() == pytest.approx(expected, abs=1e-9)
    deleted = skip_observation_gae(*tensors([0, 0, 0, 2], [0.5, 0.6, 0.7, 0.8]), gamma=gamma, lam=0.95)
    assert torch.equal(advantages[mask], deleted)


@pytest.mark.parametrize("k", [0, 1, 50])
def test_any_number_of_observation_tokens_changes_nothing(k: int) -> None:
    """RB-003: advantages and returns of action tokens are identical for k = 0, 1, 50."""
    mask = torch.tensor([True] * 3 + [False] * k + [True] * 2)
    noise = torch.randn(k, dtype=torch.float64, generator=torch.Generator().manual_seed(k)) * 100
    values = torch.cat([torch.tensor([0.1, 0.2, 0.3]), noise, torch.tensor([0.4, 0.5])])
    rewards = torch.cat([torch.tensor([0.0, 0.0, 0.5]), torch.zeros(k), torch.tensor([0.0, 1.0])])
    advantages = gae_with_observations(rewards, values, mask, gamma=0.99, lam=0.95)
    plain = slow_gae([0, 0, 0.5, 0, 1.0], values[mask].tolist(), 0.99, 0.95)
    assert advantages[mask].tolist() == pytest.approx(plain, abs=1e-12)
    assert (advantages[~mask] == 0).all()


def test_critic_noise_on_padding_gives_exactly_zero_advantages() -> None:
    """RB-004: three real tokens padded to six, +5 on every pad."""
    mask = torch.tensor([True] * 3 + [False] * 3)
    values = torch.tensor([0.0, 0.0, 0.0, 5.0, 5.0, 5.0])
    advantages = gae_with_observations(torch.zeros(6), values, mask, gamma=1.0, lam=0.95)
    assert advantages.tolist() == [0.0] * 6
    assert advantages.dtype == torch.float32


@settings(max_examples=100, deadline=None)
@given(st.data(), st.lists(st.tuples(SMALL, SMALL), min_size=1, max_size=8), BELOW_ONE, BELOW_ONE)
def test_observations_inserted_anywhere_change_no_bit_of_action_tokens(
    data: st.DataObject, actions: list[tuple[float, float]], gamma: float, lam: float
) -> None:
    """Trap 1, with γ and λ both below 1, where the bug can't hide."""
    rewards, values, mask = [], [], []
    for reward, value in actions:
        noise = data.draw(st.lists(CRITIC_NOISE, max_size=4))
        rewards += [*[0.0] * len(noise), reward]
        values += [*noise, value]
        mask += [*[False] * len(noise), True]
    tail = data.draw(st.lists(CRITIC_NOISE, max_size=3))
    full = tensors(rewards + [0.0] * len(tail), values + tail)
    mask_tensor = torch.tensor(mask + [False] * len(tail))
    with_observations = gae_with_observations(*full, mask_tensor, gamma=gamma, lam=lam)
    compact = skip_observation_gae(*tensors(*map(list, zip(*actions, strict=True))), gamma=gamma, lam=lam)
    assert torch.equal(with_observations[mask_tensor], compact)
    assert (with_observations[~mask_tensor] == 0).all()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(SMALL, SMALL, st.booleans()), min_size=1, max_size=10))
def test_no_reward_is_lost_wherever_it_stands(tokens: list[tuple[float, float, bool]]) -> None:
    """With λ = γ = 1, Â + V of the first action is the sum of all rewards, also those on observations at either end."""
    rewards, values = tensors([t[0] for t in tokens], [t[1] for t in tokens])
    mask = torch.tensor([t[2] for t in tokens])
    if not mask.any():
        mask[0] = True
    moved = rewards_to_actions(rewards, mask)
    assert float(moved.sum()) == pytest.approx(float(rewards.sum()), abs=1e-9)
    advantages = gae_with_observations(rewards, values, mask, gamma=1.0, lam=1.0)
    first = int(mask.nonzero()[0])
    assert float(advantages[first] + values[first]) == pytest.approx(float(rewards.sum()), abs=1e-9)


def test_rewards_move_to_the_last_action_at_or_before_them() -> None:
    mask = torch.tensor([0, 0, 1, 1, 0, 1, 0, 0]).bool()
    rewards = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0])
    # Positions 0 and 1 precede every action, so they go to the first one.
    assert rewards_to_actions(rewards, mask).tolist() == [7.0, 24.0, 224.0]
    with pytest.raises(ValueError, match=r"rewards of 255.0 in all, but no trainable token"):
        rewards_to_actions(rewards, torch.zeros(8, dtype=torch.bool))
    assert rewards_to_actions(torch.zeros(8), torch.zeros(8, dtype=torch.bool)).shape == (0,)


def test_exactly_the_answer_tokens_receive_advantages() -> None:
    """RB-025: a prompt of 1 token and an answer of 4 including its end token: 4 positions, the first one among them."""
    mask = torch.tensor([False, True, True, True, True])
    rewards, values = tensors([0, 0, 0, 0, 1], [NAN, 0, 0, 0, 0])
    advantages = gae_with_observations(rewards, values, mask, gamma=1.0, lam=1.0)
    assert advantages.tolist() == [0.0, 1.0, 1.0, 1.0, 1.0]
    assert int((advantages != 0).sum()) == 4


@settings(max_examples=80, deadline=None)
@given(rollouts(), st.floats(0, 1), st.data())
def test_many_rollouts_at_once_equal_the_slow_definition(
    batch: list[tuple[list[float], list[float]]], gamma: float, data: st.DataObject
) -> None:
    lams = [data.draw(st.floats(0, 1)) for _ in batch]
    bootstraps = [data.draw(SMALL) for _ in batch]
    rewards, values = packed(batch)
    lengths = torch.tensor([len(r) for r, _ in batch])
    lam_R, bootstrap_R = tensors(lams, bootstraps)
    together = gae_over_rollouts(rewards, values, lengths, gamma=gamma, lam=lam_R, bootstrap_R=bootstrap_R)
    expected = [
        advantage
        for (r, v), lam, bootstrap in zip(batch, lams, bootstraps, strict=True)
        for advantage in slow_gae(r, v, gamma, lam, bootstrap)
    ]
    assert together.tolist() == pytest.approx(expected, abs=1e-9)
    backwards = torch.arange(len(lengths)).flip(0)
    pieces = [torch.split(x, lengths.tolist()) for x in (rewards, values, together)]
    flipped = [torch.cat([piece[i] for i in backwards]) for piece in pieces]
    again = gae_over_rollouts(
        flipped[0],
        flipped[1],
        lengths[backwards],
        gamma=gamma,
        lam=lam_R[backwards],
        bootstrap_R=bootstrap_R[backwards],
    )
    assert torch.equal(again, flipped[2])


@pytest.mark.parametrize(
    ("terminated", "truncated", "expected"),
    [(True, False, [0.25, 0.5]), (False, True, [3.25, 3.5]), (True, True, [0.25, 0.5]), (False, False, [0.25, 0.5])],
)
def test_only_a_truncated_rollout_bootstraps_and_termination_wins(
    terminated: bool, truncated: bool, expected: list[float]
) -> None:
    """Trap 2, by hand: rewards [0, 1], values [.75, .5], V after the last token 3, γ = λ = 1."""
    rewards, values = tensors([0, 1], [0.75, 0.5])
    flags = torch.tensor([terminated]), torch.tensor([truncated])
    bootstrap_R = bootstrap_values(torch.tensor([3.0 if truncated else NAN]), *flags)
    advantages = gae_over_rollouts(rewards, values, torch.tensor([2]), gamma=1.0, lam=1.0, bootstrap_R=bootstrap_R)
    assert advantages.tolist() == pytest.approx(expected)
    mask = torch.tensor([True, True])
    bootstrap = 3.0 if truncated else 0.0
    alone = gae_with_observations(rewards, values, mask, gamma=1.0, lam=1.0, bootstrap=bootstrap, terminated=terminated)
    assert torch.equal(alone, advantages)


def test_a_bootstrap_is_discounted_once_into_advantage_and_target() -> None:
    rewards, values = tensors([0.0, 1.0], [0.2, 0.4])
    lengths, bootstrap = torch.tensor([2]), torch.tensor([2.0])
    targets = value_targets(rewards, values, lengths, gamma=0.5, lam=1.0, bootstrap_R=bootstrap)
    assert targets.tolist() == pytest.approx([0.5 * (1 + 0.5 * 2.0), 1 + 0.5 * 2.0])
    advantages = gae_over_rollouts(rewards, values, lengths, gamma=0.5, lam=0.0, bootstrap_R=bootstrap)
    assert advantages.tolist() == pytest.approx([0.5 * 0.4 - 0.2, 1 + 0.5 * 2.0 - 0.4])


@settings(max_examples=40, deadline=None)
@given(rollouts(), st.sampled_from([1.0, 1e9]))
def test_targets_at_lambda_and_gamma_one_are_monte_carlo_returns(
    batch: list[tuple[list[float], list[float]]], scale: float
) -> None:
    """Whatever the critic says, in fp32 too."""
    rewards, values = (x.float() for x in packed(batch))
    values = values * scale
    lengths = torch.tensor([len(r) for r, _ in batch])
    targets = value_targets(rewards, values, lengths, gamma=1.0, lam=1.0)
    pieces = [piece.tolist() for piece in rewards.split(lengths.tolist())]
    expected = [sum(piece[t:]) for piece in pieces for t in range(len(piece))]
    assert targets.dtype == torch.float32
    assert targets.tolist() == pytest.approx(expected, abs=1e-4, rel=1e-5)


def test_segments_in_time_order_are_one_sequence() -> None:
    """A rewrite of the history between two segments costs nothing: concatenated actions give the same advantages."""
    first, second = tensors([0.0, 0.5], [0.1, 0.2]), tensors([0.0, 1.0], [0.3, 0.4])
    joined = skip_observation_gae(
        torch.cat([first[0], second[0]]), torch.cat([first[1], second[1]]), gamma=0.9, lam=0.8
    )
    assert joined.tolist() == pytest.approx(slow_gae([0, 0.5, 0, 1], [0.1, 0.2, 0.3, 0.4], 0.9, 0.8))
    assert joined[1] != skip_observation_gae(*first, gamma=0.9, lam=0.8)[1]


def test_lambda_adapts_to_the_length_and_is_clamped_at_zero() -> None:
    lam = length_adaptive_lambda(torch.tensor([0, 1, 2, 10, 131072]), 1.5)
    assert lam.tolist() == pytest.approx([0.0, 1 / 3, 2 / 3, 1 - 1 / 15, 1 - 1 / 196608], rel=1e-15)
    assert length_adaptive_lambda(torch.tensor([5, 20, 40]), 0.05).tolist() == pytest.approx([0.0, 0.0, 0.5])
    with pytest.raises(ValueError, match="found 0"):
        length_adaptive_lambda(torch.tensor([1]), 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_results_are_detached_and_in_fp32_or_better(dtype: torch.dtype) -> None:
    rewards, values = torch.tensor([0.0, 1.0], dtype=dtype), torch.tensor([0.5, 0.25], dtype=dtype, requires_grad=True)
    advantages = skip_observation_gae(rewards, values, gamma=1.0, lam=1.0, bootstrap=0.5)
    assert advantages.tolist() == [1.0, 1.25]
    assert advantages.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert not advantages.requires_grad
    targets = value_targets(rewards, values, torch.tensor([2]), gamma=1.0, lam=1.0)
    assert not targets.requires_grad


def test_shapes_that_do_not_fit_are_refused() -> None:
    two, three = torch.zeros(2), torch.zeros(3)
    with pytest.raises(ValueError, match=r"rewards_T \(2,\), values_T \(3,\)"):
        gae_over_rollouts(two, three, torch.tensor([2]), gamma=1.0, lam=1.0)
    with pytest.raises(ValueError, match="sum to 3 tokens"):
        gae_over_rollouts(three, three, torch.tensor([2]), gamma=1.0, lam=1.0)
    with pytest.raises(ValueError, match=r"lam has shape \(3,\), but there are 2 rollouts"):
        gae_over_rollouts(three, three, torch.tensor([1, 2]), gamma=1.0, lam=three)
    with pytest.raises(ValueError, match=r"action_mask_S must be bool, found torch.float32"):
        gae_with_observations(three, three, three, gamma=1.0, lam=1.0)
    with pytest.raises(ValueError, match="one-dimensional"):
        bootstrap_values(torch.zeros(2, 1), two.bool(), two.bool())


def test_no_rollouts_and_no_tokens_give_nothing() -> None:
    empty, none = torch.zeros(0), torch.zeros(0, dtype=torch.long)
    assert gae_over_rollouts(empty, empty, none, gamma=1.0, lam=1.0).shape == (0,)
    assert value_targets(empty, empty, torch.tensor([0, 0]), gamma=1.0, lam=1.0).shape == (0,)
    masked = gae_with_observations(torch.zeros(3), torch.full((3,), NAN), torch.zeros(3).bool(), gamma=1.0, lam=1.0)
    assert masked.tolist() == [0.0, 0.0, 0.0]


def test_returns_are_discounted_over_the_later_tokens_of_the_same_rollout() -> None:
    """Rollouts of 3, 0 and 2 tokens, γ = ½: 1 + 2/2 + 4/4, 2 + 4/2, 4 and 8 + 16/2, 16."""
    rewards, lengths = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0]), torch.tensor([3, 0, 2])
    returns = returns_to_go(rewards, lengths, gamma=0.5)
    assert returns.tolist() == [3.0, 4.0, 4.0, 16.0, 16.0]
    assert returns.dtype == torch.float32
    assert returns_to_go(rewards, lengths, gamma=0.0).tolist() == rewards.tolist()


@settings(max_examples=60, deadline=None)
@given(rollouts(), st.floats(0, 1))
def test_returns_equal_their_definition_whatever_a_critic_would_say(
    batch: list[tuple[list[float], list[float]]], gamma: float
) -> None:
    rewards, values = packed(batch)
    lengths = torch.tensor([len(r) for r, _ in batch])
    returns = returns_to_go(rewards, lengths, gamma=gamma)
    expected = [sum(gamma**k * r for k, r in enumerate(own[t:])) for own, _ in batch for t in range(len(own))]
    assert returns.tolist() == pytest.approx(expected, abs=1e-9)
    targets = value_targets(rewards, values, lengths, gamma=gamma, lam=1.0)
    assert returns.tolist() == pytest.approx(targets.tolist(), abs=1e-9)


def test_a_number_per_rollout_reaches_all_its_tokens_and_no_others() -> None:
    index = rollout_index(torch.tensor([2, 0, 1]), 3)
    assert index.tolist() == [0, 0, 2]
    numbers = torch.tensor([0.5, NAN, -1.0], requires_grad=True)
    assert on_tokens(numbers, index).tolist() == [0.5, 0.5, -1.0]
    assert not on_tokens(numbers, index).requires_grad
    assert on_tokens(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)
    for wrong in (-1, 3):
        with pytest.raises(ValueError, match=f"0 … 2, found .*{wrong}"):
            on_tokens(numbers, torch.tensor([0, wrong]))
    with pytest.raises(ValueError, match="sum to 4 tokens"):
        rollout_index(torch.tensor([2, 0, 1]), 4)


def test_sums_of_runs_are_in_fp64_and_a_run_sees_no_other() -> None:
    sums = sums_of_runs(torch.tensor([1e8, 1.0, NAN, 2.0]), torch.tensor([2, 0, 1, 1]))
    assert sums.tolist()[:2] == [100000001.0, 0.0]
    assert sums[2].isnan()
    assert float(sums[3]) == 2.0
    assert sums_of_runs(torch.zeros(0), torch.tensor([0, 0])).tolist() == [0.0, 0.0]
