"""Key/value cache with one row a slot, preallocated, for `model.forward(cache=…)` of transformers.

Guarantees: every token is written at its own row and position, so rows of different length share one forward pass;
decoding reads views of the buffers, never copies; padding goes to a scratch column that nobody reads.
Not covered: which slot has which row (`rows`); layers that are not attention over all earlier keys (linear attention,
compressed caches): `ModelRunner` refuses such models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


@dataclass
class Placement:
    """Where the next forward pass of the model writes and reads: B rows, Q new tokens a row."""

    rows_B: Tensor
    """Row of the cache of each row of the pass, int64."""
    leading: bool
    """They are rows 0 … B−1, so that reading needs no copy."""
    writes_BQ: Tensor
    """Position of each new token; `max_length` (the scratch column) for padding."""
    width: int
    """Attention reads positions 0 … width−1."""


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer, [rows, heads, max_length + 1, dim] each; the last column is scratch."""

    def __init__(self, slots: int, max_length: int) -> None:
        super().__init__()
        self.slots = slots
        self.max_length = max_length
        self.placement: Placement | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate both buffers in the shape and type of the first keys and values."""
        # Zeros rather than uninitialised memory: a masked key has weight 0, and 0 · NaN would still be NaN.
        size = (self.slots, key_states.shape[1], self.max_length + 1)
        self.keys = key_states.new_zeros((*size, key_states.shape[-1]))
        self.values = value_states.new_zeros((*size, value_states.shape[-1]))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store new keys and values [B, heads, Q, dim]; return all of these rows up to the width."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        place = self.placement
        if place is None:
            raise RuntimeError("placement is None: call SlotCache.place before the forward pass")
        # Advanced indices on both sides of a slice put their own dimensions first: [B, Q, heads, dim].
        where = (place.rows_B[:, None], slice(None), place.writes_BQ)
        self.keys[where] = key_states.transpose(1, 2)
        self.values[where] = value_states.transpose(1, 2)
        return self._rows(self.keys, place), self._rows(self.values, place)

    @staticmethod
    def _rows(buffer: Tensor, place: Placement) -> Tensor:
        # Decoding takes this way each step; a copy of all keys would cost more than the attention itself.
        if place.leading:
            return buffer[: len(place.rows_B), :, : place.width]
        return buffer[:, :, : place.width].index_select(0, place.rows_B)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that the mask covers and where they begin; the runner brings its own mask, so this is for the record."""
        width = self.placement.width if self.placement else query_length
        return width, 0

    def get_seq_length(self) -> int:
        """Rows differ in length, so there is no common one; the runner passes positions explicitly."""
        return 0

    def get_max_length(self) -> int:
        """Tokens that one slot holds."""
        return self.max_length


class SlotCache(Cache):  # type: ignore[misc]
    """One `SlotLayer` a decoder layer, all placed together."""

    def __init__(self, layers: int, slots: int, max_length: int) -> None:
        super().__init__(layers=[SlotLayer(slots, max_length) for _ in range(layers)])

    def place(self, placement: Placement) -> None:
        """Say where the next forward pass writes and reads."""
        for layer in self.layers:
            layer.placement = placement

    def _buffers(self) -> list[Tensor]:
        ready = [layer for layer in self.layers if layer.is_initialized]
        return [buffer for layer in ready for buffer in (layer.keys, layer.values)]

    def swap(self, left: int, right: int, columns: int) -> None:
        """Exchange two rows of which at most so many columns are in use."""
        for buffer in self._buffers():
            ours, theirs = buffer[left, :, :columns], buffer[right, :, :columns]
            kept = ours.clone()
            ours.copy_(theirs)
            theirs.copy_(kept)

    def clear(self, row: int) -> None:
        """Zero a row, so that non-finite values of a failed request can't leak into the next one."""
        for buffer in self._buffers():
            buffer[row].zero_()
