"""Micro-batches: token sequences as one packed row or as right-padded rows, with the tokens that are asked about.

Legend: S sequences, T selected tokens of all of them, t those of one micro-batch, B and L rows and length of what the
model gets, N tokens of a packed row, P places of its buckets.
A packed row is [prefix, rest of sequence 1, rest of sequence 2, …]: the tokens that all sequences of a micro-batch
begin with (a system prompt, a list of tools) are computed once. Causal attention makes that exact: their states do not
depend on what follows, and gradients of all sequences add up in them.

Guarantees: every selected token is in one micro-batch, with all that stands before it; sequences of similar length
share one, within a token budget. All index arithmetic is done here, on the CPU and outside the models, so that hot
loops never wait for a device. Not covered: attention over a packed row (`packed.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Integers = NDArray[np.int64]

# Buckets of a packed row may hold this share of padding. Fewer buckets mean fewer kernels, less padding less work.
PADDING = 0.1
SHORTEST_PREFIX = 8  # a shorter common beginning saves less than its masks cost
LONGEST_SHARING = 4096  # tokens of the longest sequence: its mask, [rest × sequence], must stay small


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the segments of a packed row lie in buckets of equal width, for attention.

    Example: no prefix and segments of 5, 5 and 4 tokens make one bucket (3, 5), whose place 14 is padding.
    """

    prefix: int
    """Tokens at the start of the row that all segments continue; 0 for none."""
    shapes: tuple[tuple[int, int], ...]
    """Rows and width of each bucket, in the order of the segments."""
    gather_P: Tensor | None
    """Token, counted after the prefix, of each place of the buckets; padding repeats a token. None without padding."""
    scatter_N: Tensor | None
    """Place of each token after the prefix; None without padding."""
    lengths: tuple[int, ...]
    """Tokens of each segment, prefix excluded."""
    starts: Tensor
    """Cumulated lengths from 0 on, the prefix being the first segment if there is one; int32, for varlen kernels."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Some sequences as a model takes them, and where the states before their selected tokens are found.

    Example: `padded_rows(ids_BL, rows_t, positions_t)`, or `build_micro_batches` for a whole step.
    """

    input_ids_BL: Tensor
    """Token ids, padded on the right, which real tokens never attend to as attention is causal; [1, N] if packed."""
    before_t: Tensor
    """Place, in the flattened B·L, of the state that each selected token is predicted from."""
    targets_t: Tensor
    """The selected tokens' ids; 0 for the state after the end of a sequence."""
    tokens_t: Tensor
    """Their indices among all T."""
    position_ids_BL: Tensor | None = None
    """Positions within the sequences, if packed; else they count from 0 in each row."""
    layout: Layout | None = None
    """None for padded rows."""


def padded_rows(input_ids_BL: Tensor, rows_t: Tensor, positions_t: Tensor) -> MicroBatch:
    """One micro-batch of given rows, padded on the right with anything; token t is `input_ids_BL[rows_t, positions_t]`.

    A position equal to L asks for the state after the last token. Raises ValueError unless every row is one of the
    batch and 1 ≤ position ≤ L: position 0 has no predecessor and would silently take the end of another row.
    """
    if input_ids_BL.dim() != 2 or rows_t.dim() != 1 or rows_t.shape != positions_t.shape:
        raise ValueError(
            f"found input_ids {list(input_ids_BL.shape)}, rows {list(rows_t.shape)}, positions "
            f"{list(positions_t.shape)}; expected [B, L], [T] and [T]"
        )
    count, width = input_ids_BL.shape
    if rows_t.numel() and (int(rows_t.min()) < 0 or int(rows_t.max()) >= count):
        raise ValueError(f"rows span {int(rows_t.min())} … {int(rows_t.max())}, but the batch has {count}")
    if positions_t.numel() and (int(positions_t.min()) < 1 or int(positions_t.max()) > width):
        raise ValueError(
            f"positions span {int(positions_t.min())} … {int(positions_t.max())}; a predicted one has a predecessor, "
            f"so 1 … {width}"
        )
    inside_t = positions_t < width
    return MicroBatch(
        input_ids_BL=input_ids_BL,
        before_t=rows_t * width + positions_t - 1,
        targets_t=input_ids_BL[rows_t, positions_t.clamp(max=width - 1)] * inside_t,
        tokens_t=torch.arange(len(rows_t), device=rows_t.device),
    )


def build_micro_batches(
    sequences: Sequence[Integers],
    segment_T: Integers,
    position_T: Integers,
    *,
    token_budget: int,
    packed: bool,
    device: str = "cpu",
    names: Integers | None = None,
) -> list[MicroBatch]:
    """Split the sequences that a token was selected in into micro-batches of up to `token_budget` tokens.

    Token number t is at `position_T[t]` of `sequences[segment_T[t]]`; a position equal to the sequence's length asks
    for the state after its end. In `tokens_t` it is `names[t]`, or t. The budget counts the padding of padded rows, and
    a common prefix in every sequence; a longer sequence gets a micro-batch of its own. Raises ValueError for a position
    without a predecessor or beyond the end.
    """
    if not len(segment_T):
        return []
    lengths_S = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
    _check_positions(lengths_S, segment_T, position_T)
    used = np.unique(segment_T)
    # Longest first: rows of one micro-batch are about equally long, and the order does not depend on arrival.
    order = used[np.lexsort((used, -lengths_S[used]))]
    groups = _groups(order.tolist(), lengths_S, token_budget, packed)
    group_of_S, place_of_S = np.full((2, len(sequences)), -1)
    for number, group in enumerate(groups):
        group_of_S[group] = number
        place_of_S[group] = np.arange(len(group))
    names = np.arange(len(segment_T)) if names is None else names
    by_group = np.argsort(group_of_S[segment_T], kind="stable")
    sizes = np.bincount(group_of_S[segment_T], minlength=len(groups))
    build = _packed if packed else _padded
    return [
        build([sequences[s] for s in group], place_of_S[segment_T[tokens]], position_T[tokens], names[tokens], device)
        for group, tokens in zip(groups, np.split(by_group, np.cumsum(sizes)[:-1]), strict=True)
    ]


def _check_positions(lengths_S: Integers, segment_T: Integers, position_T: Integers) -> None:
    wrong = (position_T < 1) | (position_T > lengths_S[segment_T])
    if wrong.any():
        token = int(np.flatnonzero(wrong)[0])
        raise ValueError(
            f"token {token} is at position {position_T[token]} of a sequence of {lengths_S[segment_T[token]]} tokens; "
            "a predicted one has a predecessor, so 1 … length"
        )


def _groups(order: Sequence[int], lengths_S: Integers, token_budget: int, packed: bool) -> list[list[int]]:
    """Sequences of each micro-batch. A padded row costs the width of the longest, which comes first."""
    groups: list[list[int]] = []
    cost = width = 0
    for segment in order:
        length = int(lengths_S[segment])
        if not groups or cost + (length if packed else width) > token_budget:
            groups.append([])
            cost, width = 0, length
        groups[-1].append(segment)
        cost += length if packed else width
    return groups


def _padded(
    sequences: list[Integers], rows_t: Integers, positions_t: Integers, tokens_t: Integers, device: str
) -> MicroBatch:
    width = len(sequences[0])
    ids_BL = np.zeros((len(sequences), width), dtype=np.int64)
    for row, sequence in enumerate(sequences):
        ids_BL[row, : len(sequence)] = sequence
    return MicroBatch(
        input_ids_BL=_tensor(ids_BL, device),
        before_t=_tensor(rows_t * width + positions_t - 1, device),
        targets_t=_tensor(_targets(sequences, rows_t, positions_t), device),
        tokens_t=_tensor(tokens_t, device),
    )


def _packed(
    sequences: list[Integers], rows_t: Integers, positions_t: Integers, tokens_t: Integers, device: str
) -> MicroBatch:
    prefix = common_prefix(sequences)
    lengths = np.array([len(sequence) - prefix for sequence in sequences], dtype=np.int64)
    starts = prefix + np.cumsum(lengths) - lengths
    positions_N = np.arange(prefix + lengths.sum())
    positions_N[prefix:] -= np.repeat(starts - prefix, lengths)
    ids_N = np.concatenate([sequences[0][:prefix], *(sequence[prefix:] for sequence in sequences)])
    # What follows the prefix is predicted from its last state, which is not in front of every segment.
    before_t = np.where(positions_t <= prefix, positions_t, starts[rows_t] - prefix + positions_t) - 1
    return MicroBatch(
        input_ids_BL=_tensor(ids_N[None], device),
        before_t=_tensor(before_t, device),
        targets_t=_tensor(_targets(sequences, rows_t, positions_t), device),
        tokens_t=_tensor(tokens_t, device),
        position_ids_BL=_tensor(positions_N[None], device),
        layout=build_layout(lengths.tolist(), prefix, device),
    )


def _targets(sequences: list[Integers], rows_t: Integers, positions_t: Integers) -> Integers:
    """The token at each position; 0 after the end."""
    lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
    inside_t = positions_t < lengths[rows_t]
    places_t = (np.cumsum(lengths) - lengths)[rows_t] + positions_t
    found: Integers = np.where(inside_t, np.concatenate(sequences)[np.where(inside_t, places_t, 0)], 0)
    return found


def common_prefix(sequences: Sequence[Integers]) -> int:
    """How many tokens all sequences begin with, at least one of each being left over; 0 where sharing does not pay."""
    shortest, longest = (extreme(map(len, sequences)) for extreme in (min, max))
    if len(sequences) < 2 or shortest <= SHORTEST_PREFIX or longest > LONGEST_SHARING:
        return 0
    beginnings = np.stack([sequence[: shortest - 1] for sequence in sequences])
    differs = (beginnings != beginnings[0]).any(axis=0)
    length = int(differs.argmax()) if differs.any() else shortest - 1
    return length if length >= SHORTEST_PREFIX else 0


def build_layout(lengths: Sequence[int], prefix: int = 0, device: str = "cpu", padding: float = PADDING) -> Layout:
    """Buckets for segments of these lengths, which follow the prefix in this order, best longest first.

    A bucket takes the next segment as long as at most the share `padding` of its places stays empty.
    """
    shapes: list[tuple[int, int]] = []
    filled = 0
    for length in lengths:
        rows, width = shapes[-1] if shapes else (0, 0)
        if rows and length <= width and filled + length >= (1 - padding) * (rows + 1) * width:
            shapes[-1] = rows + 1, width
            filled += length
        else:
            shapes.append((1, length))
            filled = length
    gather_P = scatter_N = None
    if sum(rows * width for rows, width in shapes) != sum(lengths):
        widths = np.concatenate([np.full(rows, width) for rows, width in shapes])
        sizes = np.asarray(lengths)
        places = np.arange(widths.sum()) - np.repeat(np.cumsum(widths) - widths, widths)
        lasts = np.repeat(sizes - 1, widths)
        gather_P = _tensor(np.repeat(np.cumsum(sizes) - sizes, widths) + np.minimum(places, lasts), device)
        scatter_N = _tensor(np.flatnonzero(places <= lasts), device)
    own = ([prefix] if prefix else []) + list(lengths)
    return Layout(
        prefix=prefix,
        shapes=tuple(shapes),
        gather_P=gather_P,
        scatter_N=scatter_N,
        lengths=tuple(lengths),
        starts=torch.tensor(np.cumsum([0, *own]), dtype=torch.int32, device=device),
    )


def _tensor(numbers: Integers, device: str) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(numbers)).to(device)
