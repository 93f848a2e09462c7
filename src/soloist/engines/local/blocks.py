"""Key/value cache of the fused forward: blocks of columns, in each of which all rows lie side by side.

Decoding is bound by memory, and memory is fast when it is read in one long run: a cache that holds each row in one
piece of `max_length` columns is read in short runs with long gaps, four times slower on the machine of docs/log.md.
Here the leading rows of a block are one run, and a row costs no block that it has not reached.

Guarantees: rows that hold nothing are zero or stale, never non-finite. The last column is scratch.
Not covered: which rows are read (`rows.Reach`).
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

BLOCK = 64
"""Columns of a block on CPUs: fewer cost more calls, more are read in vain at the ends of rows (docs/log.md)."""

VIEWS = 512
"""Slices of blocks that are kept ready: making one costs as much as a product of few rows."""


class BlockCache:
    """[layers, blocks, 2, rows, heads, columns of a block, dim], keys first. One block for all columns on GPUs."""

    def __init__(self, layers: int, rows: int, max_length: int, heads: int, like: Tensor, dim: int) -> None:
        columns = max_length + 1
        # GPU kernels hide the gaps and want each row in one piece.
        self.size = min(BLOCK, columns) if like.device.type == "cpu" else columns
        self.count = -(-columns // self.size)
        # Zeros rather than uninitialised memory: a masked key has weight 0, and 0 · NaN would still be NaN.
        self.data = like.new_zeros((layers, self.count, 2, rows, heads, self.size, dim))
        # Views made once: keys [rows · heads, dim, columns] and values [rows · heads, columns, dim] of each block.
        self.products = [
            [(keys.flatten(0, 1).transpose(1, 2), values.flatten(0, 1)) for keys, values in layer]
            for layer in self.data
        ]
        self.leading = lru_cache(maxsize=VIEWS)(self._leading)
        # Each layer as lines of one head and column: a token is 2 · heads of them, at these distances.
        self._lines = [layer.view(-1, dim) for layer in self.data]
        self._row_lines = heads * self.size
        self._block_lines = 2 * rows * self._row_lines
        keys_values = torch.arange(2, device=like.device)[:, None] * rows * self._row_lines
        self._offsets = (keys_values + torch.arange(heads, device=like.device) * self.size).flatten()

    def _leading(self, block: int, count: int) -> list[tuple[Tensor, Tensor]]:
        """Of each layer the first `count` rows · heads of a block: keys, transposed, and values."""
        return [(layer[block][0][:count], layer[block][1][:count]) for layer in self.products]

    def places(self, rows_T: Tensor, columns_T: Tensor) -> Tensor:
        """Where tokens of these rows and columns go, for `write`: [T · 2 · heads]."""
        # Columns count one by one within a block, and by whole blocks beyond.
        first_T = columns_T.div(self.size, rounding_mode="floor").mul_(self._block_lines - self.size).add_(columns_T)
        first_T.add_(rows_T, alpha=self._row_lines)
        return (first_T[:, None] + self._offsets).flatten()

    def write(self, layer: int, places: Tensor, stored: Tensor) -> None:
        """Store keys and values [T, 2 · heads, dim], keys first."""
        self._lines[layer].index_copy_(0, places, stored.flatten(0, 1))

    def rows(self, layer: int, first: int, end: int, columns: int) -> Tensor:
        """Keys and values of neighbouring rows, [2, rows, heads, columns, dim]. A copy where there are blocks."""
        blocks = -(-columns // self.size)
        part = self.data[layer, :blocks, :, first:end].permute(1, 2, 3, 0, 4, 5)
        return part.flatten(3, 4)[:, :, :, :columns]

    @torch.inference_mode()
    def swap(self, left: int, right: int, columns: int) -> None:
        """Exchange two rows of which at most so many columns are in use."""
        blocks = -(-columns // self.size)
        ours, theirs = self.data[:, :blocks, :, left], self.data[:, :blocks, :, right]
        kept = ours.clone()
        ours.copy_(theirs)
        theirs.copy_(kept)

    def clear(self, row: int) -> None:
        """Zero a row, so that non-finite values of a failed request can't leak into the next one."""
        self.data[:, :, :, row].zero_()
