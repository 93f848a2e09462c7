"""Attention of decoded rows by matrix products: one query a row, over the cache block by block.

Each block is read once, by the leading rows that have reached it. What a step needs beside the cache, that is memory
for scores and views of everything, stays as it is while the same numbers of rows reach the same blocks: on few rows
making views costs more than the products.

Guarantees: softmax(q·k·scale + mask)·v up to the order of sums; columns that a row does not see weigh 0.
Not covered: GPUs, whose kernels want each row in one piece (`fused`).

Legend: B decoded rows, H query heads, G key/value heads, D head size.
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
    scores: Tensor
    weights: Tensor
    out: Tensor
    cached: list[tuple[Tensor, Tensor]]
    """Of each layer: keys, transposed, and values."""


class Room:
    """Serves rows of which `counts[i]` have reached block i; the first block has all of them."""

    def __init__(self, cache: BlockCache, counts: Sequence[int], heads: int, key_heads: int) -> None:
        like, rows, columns = cache.data, counts[0], cache.size
        self.counts = list(counts)
        self._lowest = torch.finfo(like.dtype).min
        self._queries_BHD = like.new_empty((rows, heads, like.shape[-1]))
        self._out_BHD = torch.empty_like(self._queries_BHD)
        # Zeros, as no product writes where a row has not come to; finite is enough, for the mask covers it.
        self._scores = like.new_zeros((len(counts), rows, heads, columns))
        self._weights = torch.empty_like(self._scores)
        self._mask = like.new_empty((len(counts), rows, 1, columns))
        self._columns = torch.arange(len(counts) * columns, device=like.device).view(len(counts), 1, 1, columns)
        grouped = (rows * key_heads, heads // key_heads)
        queries, out = (x.view(*grouped, -1) for x in (self._queries_BHD, self._out_BHD))
        scores, weights = (x.view(len(counts), *grouped, columns) for x in (self._scores, self._weights))
        self._parts = [
            _Part(queries[:n], scores[i, :n], weights[i, :n], out[:n], cache.leading(i, n))
            for i, n in enumerate(count * key_heads for count in counts)
        ]

    def see(self, positions_B: Tensor) -> None:
        """Rows see columns up to these; once a step, for all layers."""
        later = self._columns > positions_B[:, None, None]
        self._mask.zero_().masked_fill_(later, self._lowest)

    def attend(self, layer: int, queries_BHD: Tensor, scaling: float) -> Tensor:
        """Attention [B, H, D], valid until the next call."""
        # In base 2, as the usual exponential of masked scores takes a path seven times slower.
        torch.mul(queries_BHD, scaling * LOG2_E, out=self._queries_BHD)
        for part in self._parts:
            torch.bmm(part.queries, part.cached[layer][0], out=part.scores)
        # The softmax goes over blocks and columns; its denominator is cheaper on the outputs.
        weights = torch.add(self._scores, self._mask, out=self._weights)
        weights.sub_(weights.amax((0, 3), keepdim=True)).exp2_()
        first, *others = self._parts
        torch.bmm(first.weights, first.cached[layer][1], out=first.out)
        for part in others:
            part.out.baddbmm_(part.weights, part.cached[layer][1])
        return self._out_BHD.div_(weights.sum((0, 3))[..., None])
