"""Keyed sampling against a slow reference, and the log-probabilities that public bug reports got wrong."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from soloist.engines.local.sampler import keyed_uniforms, sample, stream_key

MASK = (1 << 64) - 1
anything = st.integers(-(2**63), 2**63 - 1)


def reference_uniform(seed: int, key: int, position: int) -> float:
    """The same numbers from the published splitmix64, with Python's unbounded integers."""

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)

    golden = 0x9E3779B97F4A7C15
    stream = mix(mix((seed + golden) & MASK) ^ ((key * golden) & MASK))
    return (mix((stream + (position + 1) * golden) & MASK) >> 12) / 2**52


def uniforms(seed: int, key: int, positions: range) -> torch.Tensor:
    streams = torch.full((len(positions),), stream_key(seed, key), dtype=torch.int64)
    return keyed_uniforms(streams, torch.tensor(list(positions)))


def draw(logits: torch.Tensor, temperature: float, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return sample(logits.expand(len(u), -1), torch.full((len(u),), temperature), u)


@given(anything, anything, st.integers(0, 10**6))
def test_uniforms_equal_splitmix64_with_unbounded_integers(seed: int, key: int, position: int) -> None:
    (u,) = uniforms(seed, key, range(position, position + 1)).tolist()
    assert u == reference_uniform(seed, key, position)
    assert 0 <= u < 1


def test_uniforms_look_uniform_and_streams_look_independent() -> None:
    first, second = uniforms(0, 1, range(20_000)), uniforms(0, 2, range(20_000))
    counts = torch.histc(first, bins=20, min=0, max=1)
    chi_square = float(((counts - 1000) ** 2 / 1000).sum())
    assert chi_square < 43.8, "19 degrees of freedom, p = 0.001"
    for left, right in ((first, second), (first[1:], first[:-1])):
        correlation = float(torch.corrcoef(torch.stack([left, right]))[0, 1])
        assert abs(correlation) < 4 / math.sqrt(20_000)


def test_a_row_draws_the_same_number_in_every_batch() -> None:
    streams = torch.tensor([stream_key(0, key) for key in range(8)])
    positions = torch.arange(8) * 3
    together = keyed_uniforms(streams, positions)
    alone = torch.cat([keyed_uniforms(streams[i : i + 1], positions[i : i + 1]) for i in range(8)])
    assert torch.equal(together, alone)
    assert torch.equal(together[[5, 2]], keyed_uniforms(streams[[5, 2]], positions[[5, 2]]))


def test_log_probability_is_that_of_logits_divided_by_temperature() -> None:
    """RB-037: logits [2, 1, 0] at T = 0.5, token 0: −0.142932. RB-038: −0.815212 (log-prob / T) is wrong."""
    ids, log_probs, finite = draw(torch.tensor([[2.0, 1.0, 0.0]]), 0.5, torch.tensor([0.0], dtype=torch.float64))
    assert ids.tolist() == [0]
    assert log_probs.item() == pytest.approx(-0.142932, abs=1e-6)
    assert finite.tolist() == [True]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_frequencies_follow_the_distribution_of_the_recorded_log_probabilities(temperature: float) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, 0.5]])
    ids, log_probs, _ = draw(logits, temperature, uniforms(3, 7, range(40_000)))
    wanted = torch.softmax(logits[0].double() / temperature, -1)
    counts = torch.bincount(ids, minlength=5).double()
    assert float(((counts - 40_000 * wanted) ** 2 / (40_000 * wanted)).sum()) < 18.5, "4 degrees, p = 0.001"
    torch.testing.assert_close(log_probs.double(), wanted.log()[ids], atol=1e-6, rtol=0)


@given(st.lists(st.sampled_from([0.0, -3.0, 5.0, -1000.0, 90.0]), min_size=1, max_size=12))
def test_tokens_of_probability_zero_are_never_drawn(values: list[float]) -> None:
    extreme = torch.tensor([0.0, 2.0**-52, 0.5, 1 - 2.0**-52], dtype=torch.float64)
    ids, log_probs, _ = draw(torch.tensor([values]), 0.7, extreme)
    probabilities = torch.log_softmax(torch.tensor(values) / 0.7, -1).double().exp()
    assert bool((probabilities[ids] > 0).all())
    assert bool((log_probs <= 0).all())


def test_temperature_zero_takes_the_most_likely_token_and_records_its_plain_log_probability() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    ids, log_probs, _ = draw(logits, 0.0, torch.tensor([0.99, 0.01], dtype=torch.float64))
    assert ids.tolist() == [1, 1]
    torch.testing.assert_close(log_probs, torch.log_softmax(logits, -1)[:, 1].expand(2))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_logits_are_reported_and_spoil_no_other_row(bad: float) -> None:
    """RB-045, RB-046: a broken row is named, never filled with a number."""
    logits = torch.tensor([[0.0, 1.0, 2.0], [0.0, bad, 2.0]])
    u = torch.tensor([0.5, 0.5], dtype=torch.float64)
    ids, log_probs, finite = sample(logits, torch.ones(2), u)
    alone = sample(logits[:1], torch.ones(1), u[:1])
    assert finite.tolist() == [True, False]
    assert (ids[0], log_probs[0]) == (alone[0][0], alone[1][0])
    assert 0 <= int(ids[1]) < 3


def test_temperature_one_left_out_gives_the_same_bits() -> None:
    logits = torch.randn(40, 60, generator=torch.Generator().manual_seed(0))
    logits[3, 5], logits[7, 9] = math.nan, -math.inf
    u = torch.rand(40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    told, left_out = sample(logits, torch.ones(40), u), sample(logits, None, u)
    assert all(torch.equal(a, b) for a, b in zip(told[::2], left_out[::2], strict=True))
    torch.testing.assert_close(told[1], left_out[1], rtol=0, atol=0, equal_nan=True)
    assert told[2].sum() == 38
