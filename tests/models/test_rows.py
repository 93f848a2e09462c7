"""Micro-batches: what stands before each selected token, read back from the layout; budgets, buckets and prefixes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from soloist.models.rows import MicroBatch, build_layout, build_micro_batches, common_prefix, padded_rows


@st.composite
def selections(draw: st.DrawFn) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Sequences of tokens 0 … 3, many with a common beginning, and some positions in them."""
    shared = draw(st.lists(st.integers(0, 3), max_size=14))
    rests = draw(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=6))
    sequences = [np.array(shared + rest) for rest in rests]
    places = [(s, p) for s, sequence in enumerate(sequences) for p in range(1, len(sequence) + 1)]
    chosen = draw(st.lists(st.sampled_from(places), min_size=1, max_size=20)) if places else []
    segments, positions = zip(*chosen, strict=True)
    return sequences, np.array(segments), np.array(positions)


def contexts(micro: MicroBatch) -> list[list[int]]:
    """The tokens that each place of the flattened micro-batch may see, its own included, as the layout says."""
    rows = micro.input_ids_BL.tolist()
    if micro.layout is None:
        return [row[: place + 1] for row in rows for place in range(len(row))]
    (row,) = rows
    prefix, rest = row[: micro.layout.prefix], row[micro.layout.prefix :]
    found = [prefix[: place + 1] for place in range(len(prefix))]
    for length in micro.layout.lengths:
        own, rest = rest[:length], rest[length:]
        found += [prefix + own[: place + 1] for place in range(length)]
    assert not rest
    return found


@given(selections(), st.integers(1, 60), st.booleans())
def test_every_selected_token_is_there_once_with_all_that_stands_before_it(
    selection: tuple[list[np.ndarray], np.ndarray, np.ndarray], budget: int, packed: bool
) -> None:
    sequences, segments, positions = selection
    names = 100 + np.arange(len(segments))
    micros = build_micro_batches(sequences, segments, positions, token_budget=budget, packed=packed, names=names)
    seen = [name for micro in micros for name in micro.tokens_t.tolist()]
    assert sorted(seen) == names.tolist()
    for micro in micros:
        visible = contexts(micro)
        for name, before, target in zip(micro.tokens_t, micro.before_t, micro.targets_t, strict=True):
            sequence, position = sequences[segments[name - 100]].tolist(), int(positions[name - 100])
            assert visible[int(before)] == sequence[:position]
            assert int(target) == (sequence[position] if position < len(sequence) else 0)
        if micro.position_ids_BL is not None:
            assert [len(context) - 1 for context in visible] == micro.position_ids_BL[0].tolist()


@given(selections(), st.integers(1, 60), st.booleans())
def test_the_budget_is_exceeded_only_by_a_single_sequence(
    selection: tuple[list[np.ndarray], np.ndarray, np.ndarray], budget: int, packed: bool
) -> None:
    sequences, segments, positions = selection
    micros = build_micro_batches(sequences, segments, positions, token_budget=budget, packed=packed)
    for micro in micros:
        rows = micro.input_ids_BL.shape[0] if micro.layout is None else len(micro.layout.lengths)
        assert micro.input_ids_BL.numel() <= budget or rows == 1
    assert 1 <= len(micros) <= len(set(segments.tolist()))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.sampled_from([0.0, 0.1, 0.5]))
def test_buckets_hold_all_segments_in_order_and_little_padding(lengths: list[int], padding: float) -> None:
    lengths.sort(reverse=True)
    layout = build_layout(lengths, padding=padding)
    places = sum(rows * width for rows, width in layout.shapes)
    assert sum(rows for rows, _ in layout.shapes) == len(lengths)
    assert sum(lengths) >= (1 - padding) * places - 1e-9
    if layout.gather_P is None or layout.scatter_N is None:
        assert places == sum(lengths)
        return
    assert len(layout.gather_P) == places
    assert torch.equal(layout.gather_P[layout.scatter_N], torch.arange(sum(lengths)))


def test_buckets_by_literal_numbers() -> None:
    layout = build_layout([5, 5, 4])
    assert layout.shapes == ((3, 5),)
    assert layout.gather_P is not None
    assert layout.gather_P.tolist() == [*range(10), 10, 11, 12, 13, 13]
    assert build_layout([9, 9, 3]).shapes == ((2, 9), (1, 3))
    assert build_layout([9, 9, 3]).gather_P is None
    assert build_layout([4, 2], prefix=3).starts.tolist() == [0, 3, 7, 9]


def test_a_common_beginning_leaves_one_token_of_each_and_must_be_long_enough() -> None:
    beginning = np.arange(10)
    longer = np.arange(20)
    assert common_prefix([beginning, longer]) == 9
    assert common_prefix([longer, longer]) == 19
    assert common_prefix([np.array([7, *range(1, 20)]), longer]) == 0
    assert common_prefix([longer]) == 0
    assert common_prefix([np.arange(5000), np.arange(5000)]) == 0, "its mask would be large"
    assert common_prefix([np.array([*range(7), 99, 99, 99]), longer]) == 0


@pytest.mark.parametrize(("segment", "position"), [(0, 0), (0, 4), (1, 3), (0, -1)])
def test_positions_without_a_predecessor_or_beyond_the_end_are_refused(segment: int, position: int) -> None:
    sequences = [np.arange(3), np.arange(2)]
    with pytest.raises(ValueError, match=f"token 1 is at position {position} of a sequence of {3 - segment} tokens"):
        build_micro_batches(sequences, np.array([0, segment]), np.array([1, position]), token_budget=9, packed=True)
    assert build_micro_batches(sequences, np.array([], int), np.array([], int), token_budget=9, packed=True) == []


def test_given_rows_may_ask_for_the_state_after_their_end() -> None:
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    micro = padded_rows(ids, torch.tensor([0, 1, 1]), torch.tensor([1, 2, 3]))
    assert micro.before_t.tolist() == [0, 4, 5]
    assert micro.targets_t.tolist() == [2, 6, 0]
