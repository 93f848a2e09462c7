"""Attention of decoded rows over blocks, against a plain softmax over each row's own keys."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from soloist.engines.local.blocks import BLOCK, BlockCache
from soloist.engines.local.products import Room

LAYERS, ROWS, MAX_LENGTH, KEY_HEADS, DIM = 2, 6, 4 * BLOCK - 1, 2, 4


def filled_cache(lengths: list[int], keys_values: torch.Tensor) -> BlockCache:
    """A cache into which every row's tokens were written in one go; everything else is stale numbers."""
    cache = BlockCache(LAYERS, ROWS, MAX_LENGTH, KEY_HEADS, torch.zeros(1, dtype=torch.float64), DIM)
    cache.data.normal_(generator=torch.Generator().manual_seed(5)).mul_(3)
    rows = torch.cat([torch.full((length,), row) for row, length in enumerate(lengths)])
    columns = torch.cat([torch.arange(length) for length in lengths])
    for layer in range(LAYERS):
        stored = keys_values[layer, rows, columns]
        cache.write(layer, cache.places(rows, columns), stored)
    return cache


def plain_attention(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> torch.Tensor:
    """softmax(q·k·scale)·v for one query of each head; keys and values [K, G, D]."""
    group = queries.shape[0] // KEY_HEADS
    keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
    weights = torch.einsum("hd,khd->hk", queries, keys).mul(scaling).softmax(-1)
    return torch.einsum("hk,khd->hd", weights, values)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, MAX_LENGTH), min_size=1, max_size=ROWS),
    heads=st.sampled_from([KEY_HEADS, 2 * KEY_HEADS]),
    seed=st.integers(0, 99),
)
def test_a_room_gives_every_row_the_softmax_over_its_own_keys(lengths: list[int], heads: int, seed: int) -> None:
    lengths = sorted(lengths, reverse=True)
    generator = torch.Generator().manual_seed(seed)
    size = (LAYERS, len(lengths), MAX_LENGTH, 2 * KEY_HEADS, DIM)
    keys_values = torch.randn(size, generator=generator, dtype=torch.float64)
    cache = filled_cache(lengths, keys_values)
    counts = [sum(length > first for length in lengths) for first in range(0, lengths[0], BLOCK)]
    room = Room(cache, counts, heads, KEY_HEADS)
    room.see(torch.tensor(lengths) - 1)
    # Twice over both layers, as a room serves many steps and must keep nothing of the last one.
    for layer in (0, 1, 0, 1):
        queries = torch.randn((len(lengths), heads, DIM), generator=generator, dtype=torch.float64)
        found = room.attend(layer, queries, 0.7)
        for row, length in enumerate(lengths):
            keys, values = keys_values[layer, row, :length].chunk(2, dim=1)
            torch.testing.assert_close(found[row], plain_attention(queries[row], keys, values, 0.7))
    assert found.shape == (len(lengths), heads, DIM)


def test_kept_views_are_of_the_memory_that_is_written() -> None:
    cache = BlockCache(LAYERS, ROWS, MAX_LENGTH, KEY_HEADS, torch.zeros(1), DIM)
    keys, values = cache.leading(1, 3 * KEY_HEADS)[1]
    assert cache.leading(1, 3 * KEY_HEADS)[1][0] is keys
    cache.write(1, cache.places(torch.tensor([2]), torch.tensor([BLOCK + 7])), torch.ones(1, 2 * KEY_HEADS, DIM))
    assert keys[2 * KEY_HEADS :, :, 7].eq(1).all()
    assert values[2 * KEY_HEADS :, 7].eq(1).all()
    assert float(keys.sum() + values.sum()) == 2 * KEY_HEADS * DIM
