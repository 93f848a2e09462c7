"""Attention of decoded rows by matrix products: one query a row, over the cache block by block.

Each block is read once, by the leading rows that have reached it. What a step needs beside the cache, that is memory
for scores and views of everything, stays as it is while the same numbers of rows reach the same blocks: on few rows
making views costs more than the products.

Guarantees: softmax(q·k·scale + mask)·v up to the order of sums; columns that a row does not see weigh 0.
Not covered: GPUs, whose kernels want each row in one piece (`fused`).

Legend: B decoded rows, L lines (rows × blocks that they have reached), K columns of a block, H query heads, D head
size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from soloist.engines.local.blocks import BlockCache

LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class _Part:
    """Views for one block: of so many leading rows · G."""

    queries: Tensor
    weights: Tensor
    """Scores, and later their exponentials."""
    out: Tensor
    cached: list[tuple[Tensor, Tensor]]
    """Of each layer: keys, transposed, and values."""


class Room:
    """Serves rows of which `counts[i]` have reached block i; the first block has all of them.

    Scores lie block after block without gaps, L = Σ counts lines in all: a rectangle of blocks × rows would mostly be
    padding when few rows are long.
    """

    def __init__(self, cache: BlockCache, counts: Sequence[int], heads: int, key_heads: int) -> None:
        like, rows, columns, lines = cache.data, counts[0], cache.size, sum(counts)
        self.counts = list(counts)
        self._full = lines == rows * len(counts)
        self._lowest = torch.finfo(like.dtype).min
        self._queries_BHD = like.new_empty((rows, heads, like.shape[-1]))
        self._out_BHD = torch.empty_like(self._queries_BHD)
        self._weights_LHK = like.new_empty((lines, heads, columns))
        self._mask_L1K = like.new_empty((lines, 1, columns))
        places = [row + block * rows for block, count in enumerate(counts) for row in range(count)]
        self._places_L = torch.tensor(places, device=like.device)
        self._rows_L = self._places_L.remainder(rows)
        self._firsts_L = self._places_L.div(rows, rounding_mode="floor").mul_(columns)
        self._columns_K = torch.arange(columns, device=like.device)
        # By block and row, with values that change nothing where a row has not come to.
        self._tops_XH = like.new_full((rows * len(counts), heads), self._lowest)
        self._sums_XH = like.new_zeros((rows * len(counts), heads))
        group = heads // key_heads
        queries, out = (x.view(rows * key_heads, group, -1) for x in (self._queries_BHD, self._out_BHD))
        weights = self._weights_LHK.view(lines * key_heads, group, columns)
        self._parts = []
        for i, n in enumerate(count * key_heads for count in counts):
            part, weights = weights[:n], weights[n:]
            self._parts.append(_Part(queries[:n], part, out[:n], cache.leading(i, n)))

    def see(self, positions_B: Tensor) -> None:
        """Rows see columns up to these; once a step, for all layers."""
        seen_L = positions_B.index_select(0, self._rows_L).sub_(self._firsts_L)
        later_L1K = self._columns_K > seen_L[:, None, None]
        self._mask_L1K.zero_().masked_fill_(later_L1K, self._lowest)

    def attend(self, layer: int, queries_BHD: Tensor, scaling: float) -> Tensor:
        """Attention [B, H, D], valid until the next call."""
        # In base 2, as the usual exponential of masked scores takes a path seven times slower.
        torch.mul(queries_BHD, scaling * LOG2_E, out=self._queries_BHD)
        for part in self._parts:
            torch.bmm(part.queries, part.cached[layer][0], out=part.weights)
        sums_BH = self._exponentials()
        first, *others = self._parts
        torch.bmm(first.weights, first.cached[layer][1], out=first.out)
        for part in others:
            part.out.baddbmm_(part.weights, part.cached[layer][1])
        # The denominator is cheaper on the outputs.
        return self._out_BHD.div_(sums_BH[..., None])

    def _exponentials(self) -> Tensor:
        """Scores become 2^(score − the row's highest); returns their sums [B, H]."""
        weights_LHK = self._weights_LHK.add_(self._mask_L1K)
        blocks, (rows, heads, _) = len(self.counts), self._out_BHD.shape
        if self._full:
            whole = weights_LHK.view(blocks, rows, heads, -1)
            whole.sub_(whole.amax((0, 3), keepdim=True)).exp2_()
            return whole.sum((0, 3))
        tops_XH = self._tops_XH.index_copy_(0, self._places_L, weights_LHK.amax(-1))
        tops_LH = tops_XH.view(blocks, rows, heads).amax(0).index_select(0, self._rows_L)
        weights_LHK.sub_(tops_LH[..., None]).exp2_()
        sums_XH = self._sums_XH.index_copy_(0, self._places_L, weights_LHK.sum(-1))
        return sums_XH.view(blocks, rows, heads).sum(0)
