"""The model's own forward over the slot cache: any architecture of transformers whose layers `SlotCache` can hold.

Guarantees: rows of different length and position share a pass; columns that are padding compute something that nobody
reads. With `fixed_shapes` every pass has one of two shapes, so that a row's bits depend on its own slot, tokens and
weights only.
Not covered: speed. `fused` computes the same for the families it knows; what this one gives is the reference there.

Legend: B rows of a pass, Q new tokens a row, K keys seen, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from soloist.engines.local.cache import Placement, SlotCache
from soloist.engines.local.rows import Reach
from soloist.engines.local.state import SlotState

PREFILL_TOKENS = 8192
"""Tokens of one padded prefill pass at most, so that memory stays bounded."""
CHUNK = 32
"""Tokens of every prefill pass in fixed shapes."""


@dataclass(frozen=True)
class Stretch:
    """Tokens `start … end−1` of a slot, to be computed into its cache."""

    slot: int
    start: int
    end: int


class Forward(Protocol):
    """Computes tokens into the cache."""

    def decode(self, slots_B: Tensor, reach: Reach) -> Tensor:
        """Logits [B, V] after the newest token of each slot; slot b of `slots_B` has row b of the cache.

        `reach` says what attention must see of them.
        """
        ...

    def advance(self, slots_B: Tensor, reach: Reach, stretches: Sequence[Stretch], rows: Sequence[int]) -> Tensor:
        """The same beside prompts: logits [B + stretches, V], those of each stretch's last token at the end.

        `rows` are those of the stretches in the cache.
        """
        ...

    def refresh(self) -> None:
        """The weights have changed."""
        ...

    def swap(self, left: int, right: int, columns: int) -> None:
        """Exchange two rows of the cache, of which at most so many columns are in use."""
        ...

    def clear(self, row: int) -> None:
        """Zero a row of the cache."""
        ...


class OwnForward:
    """Implements `Forward` with `model.forward`. Raises ValueError for models with layers that can't be cached."""

    def __init__(self, model: Any, state: SlotState, vocab_size: int, *, fixed_shapes: bool = False) -> None:
        self.model = model
        self._cache = SlotCache(model.config.num_hidden_layers, state.slots, state.max_length)
        self.swap, self.clear = self._cache.swap, self._cache.clear
        self._state = state
        self._vocab_size = vocab_size
        self._fixed_shapes = fixed_shapes
        self._windows = attention_windows(model.config)
        if fixed_shapes and hasattr(model, "set_experts_implementation"):
            # Grouped experts see as many rows as tokens were routed to them, a shape that depends on the neighbours.
            model.set_experts_implementation("batched_mm")
        self._rows_S = torch.arange(state.slots, device=state.device)
        self._positions_P = torch.arange(state.max_length + 1, device=state.device)

    def refresh(self) -> None:
        """Nothing to do: the model itself was changed."""

    def decode(self, slots_B: Tensor, reach: Reach) -> Tensor:
        """See `Forward.decode`. All rows are read as far as the longest."""
        state = self._state
        # The newest token was sampled but never read: it is the input of this step.
        positions_BQ = state.lengths_S[slots_B, None] - 1
        width = state.max_length if self._fixed_shapes else reach.width
        rows_B = self._rows_S[: len(slots_B)]
        return self._forward(slots_B, rows_B, True, positions_BQ, state.active_S[slots_B, None], width)

    def advance(self, slots_B: Tensor, reach: Reach, stretches: Sequence[Stretch], rows: Sequence[int]) -> Tensor:
        """See `Forward.advance`. Prompts go in passes of their own, padded to the longest of each."""
        found: dict[int, Tensor] = {}
        for batch in self._batches(stretches):
            at = [rows[i] for i in batch]
            found.update(zip(batch, self._prefill([stretches[i] for i in batch], at), strict=True))
        logits = [found[i] for i in range(len(stretches))]
        decoded = list(self.decode(slots_B, reach)) if len(slots_B) else []
        return torch.stack(decoded + logits)

    def _batches(self, stretches: Sequence[Stretch]) -> list[list[int]]:
        """Numbers of stretches of similar length together, at most `PREFILL_TOKENS` with padding.

        One by one in fixed shapes.
        """
        if self._fixed_shapes:
            return [[i] for i in range(len(stretches))]
        sizes = [stretch.end - stretch.start for stretch in stretches]
        batches: list[list[int]] = []
        # Longest first: the first of a batch decides its padded length, and neighbours in order waste little.
        for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
            if batches and (len(batches[-1]) + 1) * sizes[batches[-1][0]] <= PREFILL_TOKENS:
                batches[-1].append(i)
            else:
                batches.append([i])
        return batches

    def _prefill(self, batch: Sequence[Stretch], rows: Sequence[int]) -> Tensor:
        """Forward the stretches, right-aligned so that the last column predicts; returns its logits [B, V]."""
        slots_B, rows_B = (self._state.ids([s.slot for s in batch]), self._state.ids(rows))
        starts_B = self._state.ids([stretch.start for stretch in batch])
        ends_B = self._state.ids([stretch.end for stretch in batch])
        longest = max(stretch.end - stretch.start for stretch in batch)
        width = max(stretch.end for stretch in batch)
        step = longest
        if self._fixed_shapes:
            step, width = CHUNK, self._state.max_length
            # Up to whole chunks; the first one is padded on its left.
            longest = -(-longest // CHUNK) * CHUNK
        # Only the last pass holds the last token, so its logits are the ones that stay.
        logits_BV = torch.empty(0)
        for first in range(-longest, 0, step):
            columns_Q = torch.arange(first, first + step, device=self._state.device)
            positions_BQ = ends_B[:, None] + columns_Q
            valid_BQ = positions_BQ >= starts_B[:, None]
            logits_BV = self._forward(slots_B, rows_B, False, positions_BQ, valid_BQ, width)
        return logits_BV

    def _forward(
        self, slots_B: Tensor, rows_B: Tensor, leading: bool, positions_BQ: Tensor, valid_BQ: Tensor, width: int
    ) -> Tensor:
        """Logits [B, V] of the last column. Columns that are not valid compute something that nobody reads."""
        writes_BQ = torch.where(valid_BQ, positions_BQ, self._state.max_length)
        # Invalid columns look at key 0 only: every softmax has a finite key, and no row costs more than its own.
        positions_BQ = torch.where(valid_BQ, positions_BQ, 0)
        self._cache.place(Placement(rows_B=rows_B, leading=leading, writes_BQ=writes_BQ, width=width))
        output = self.model(
            input_ids=self._state.tokens_SP[slots_B[:, None], writes_BQ],
            attention_mask=self._masks(positions_BQ, width),
            position_ids=positions_BQ,
            cache=self._cache,
            use_cache=True,
            # Right-aligned columns make the last one predict in every row; all V logits of Q columns are too many.
            logits_to_keep=1,
        )
        logits_BV: Tensor = output.logits[:, -1, : self._vocab_size]
        return logits_BV

    def _masks(self, positions_BQ: Tensor, width: int) -> Tensor | dict[str, Tensor]:
        """Additive masks [B, 1, Q, K], one a kind of attention: seen are keys that are not later and in the window."""
        distances_BQK = positions_BQ[:, :, None] - self._positions_P[:width]
        masks = {}
        for kind, window in self._windows.items():
            seen_BQK = distances_BQK >= 0
            if window is not None:
                seen_BQK = seen_BQK & (distances_BQK < window)
            # Additive, made once a step: sdpa would convert a boolean mask in every layer again.
            masks[kind] = torch.zeros(seen_BQK.shape, dtype=self.model.dtype, device=self._state.device).masked_fill_(
                ~seen_BQK, torch.finfo(self.model.dtype).min
            )[:, None]
        # Models with one kind of attention take a plain tensor only.
        return masks if len(masks) > 1 else next(iter(masks.values()))


def attention_windows(config: Any) -> dict[str, int | None]:
    """Kinds of attention layers with their window (None sees everything). Raises ValueError for other layers."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["full_attention" if window is None else "sliding_attention"]
    foreign = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if foreign:
        raise ValueError(
            f"{config.model_type} has layers of type {', '.join(foreign)}; the local engine caches full_attention and "
            "sliding_attention only, so serve this model with another engine"
        )
    return {kind: window if kind == "sliding_attention" else None for kind in sorted(set(kinds))}
