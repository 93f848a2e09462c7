"""The overlong penalty against DAPO's own numbers and the three cases of its formula."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from soloist.algorithms.shaping import overlong_penalty


def slow(length: int, limit: int, buffer: int, penalty: float) -> float:
    if length <= limit - buffer:
        return 0.0
    if length <= limit:
        return penalty * (limit - buffer - length) / buffer
    return -penalty


def test_the_numbers_are_those_of_dapo() -> None:
    """§4.1 of the paper: 16 384 tokens expected, 4 096 more as buffer, so 20 480 at most."""
    lengths = torch.tensor([0, 16384, 17408, 18432, 20480, 20481, 10**9])
    penalties = overlong_penalty(lengths, limit=20480, buffer=4096)
    assert penalties.tolist() == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0, -1.0]
    assert penalties.dtype == torch.float32
    assert overlong_penalty(lengths, limit=20480, buffer=4096, penalty=0.5).tolist()[2:4] == [-0.125, -0.25]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 300), max_size=6), st.integers(1, 200), st.data(), st.floats(0, 10))
def test_it_follows_the_three_cases_and_falls_with_length(
    lengths: list[int], limit: int, data: st.DataObject, penalty: float
) -> None:
    buffer = data.draw(st.integers(1, limit))
    lengths.sort()
    penalties = overlong_penalty(torch.tensor(lengths, dtype=torch.int64), limit=limit, buffer=buffer, penalty=penalty)
    assert penalties.tolist() == pytest.approx([slow(n, limit, buffer, penalty) for n in lengths], abs=1e-6)
    assert bool((penalties.diff() <= 0).all())
    assert all(-penalty - 1e-6 <= p <= 0 for p in penalties.tolist())


def test_no_room_below_the_buffer_makes_every_token_cost() -> None:
    assert overlong_penalty(torch.tensor([0, 1, 4]), limit=4, buffer=4).tolist() == [0.0, -0.25, -1.0]
    assert overlong_penalty(torch.tensor([3, 4, 5]), limit=4, buffer=1).tolist() == [0.0, -1.0, -1.0]


def test_settings_that_make_no_sense_are_refused() -> None:
    lengths = torch.tensor([1])
    for buffer in (0, 5, -1):
        with pytest.raises(ValueError, match=rf"within 1 … limit = 4 tokens, found {buffer}"):
            overlong_penalty(lengths, limit=4, buffer=buffer)
    for penalty in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"0 or more, found {penalty}"):
            overlong_penalty(lengths, limit=4, buffer=1, penalty=penalty)
    with pytest.raises(ValueError, match="found -1"):
        overlong_penalty(-lengths, limit=4, buffer=1)
    with pytest.raises(ValueError, match="one-dimensional"):
        overlong_penalty(torch.zeros(1, 1), limit=4, buffer=1)
