"""Forward passes over slots: prefill and decode, with all per-slot state in tensors.

Guarantees: one forward pass and one host synchronisation a decode step, whatever the number of rows; each sampled token
is stamped with the version of the weights whose logits it came from, in the same step; logits beyond the vocabulary are
cut off before the softmax. With `fixed_shapes` every pass has one of two shapes, so that a row's bits depend on its own
slot, tokens and weights only.
Not covered: who sits where (`SlotTable`) and requests as such (`ContinuousBatch`).

Legend: S slots, B rows of a pass, Q new tokens a row, K keys seen, V vocabulary; P = max_length + 1 columns, the last
one being scratch for padding and for rows that are not running.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from soloist.engines.local.cache import Placement, SlotCache
from soloist.engines.local.sampler import keyed_uniforms, sample, stream_key
from soloist.engines.local.scheduler import Seat
from soloist.models.loading import assign_weights

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


@dataclass(frozen=True)
class Ended:
    """A row that has stopped, read back from the device; the lists cover its sampled tokens."""

    slot: int
    token_ids: list[int]
    log_probs: list[float]
    versions: list[int]
    finite: bool
    """False when the logits of the last token were not; its numbers mean nothing then."""


class ModelRunner:
    """A model, its cache and the state of its slots. Raises ValueError for models with layers it can't cache."""

    def __init__(
        self, model: Any, *, slots: int, max_length: int, vocab_size: int | None = None, fixed_shapes: bool = False
    ) -> None:
        self.model = model
        self.device: torch.device = model.device
        self.slots = slots
        self.max_length = max_length
        self.fixed_shapes = fixed_shapes
        # Never wider than the embedding, or a sampled id could not be read back.
        self.vocab_size = min(vocab_size or model.config.vocab_size, model.config.vocab_size)
        self.version = 0
        self._windows = attention_windows(model.config)
        if fixed_shapes and hasattr(model, "set_experts_implementation"):
            # Grouped experts see as many rows as tokens were routed to them, a shape that depends on the neighbours.
            model.set_experts_implementation("batched_mm")
        self._cache = SlotCache(model.config.num_hidden_layers, slots, max_length)
        columns = (slots, max_length + 1)
        self._tokens_SP = self._zeros(columns, torch.int64)
        self._log_probs_SP = self._zeros(columns, torch.float32)
        self._versions_SP = self._zeros(columns, torch.int64)
        self._lengths_S = self._zeros(slots, torch.int64)
        self._prompts_S = self._zeros(slots, torch.int64)
        self._ends_S = self._zeros(slots, torch.int64)
        self._active_S = self._zeros(slots, torch.bool)
        self._finite_S = self._zeros(slots, torch.bool)
        self._streams_S = self._zeros(slots, torch.int64)
        self._temperatures_S = self._zeros(slots, torch.float32)
        self._stops_SN = self._zeros((slots, 1), torch.int64) - 1
        self._all_slots_S = torch.arange(slots, device=self.device)
        self._all_positions_P = torch.arange(max_length + 1, device=self.device)

    def _zeros(self, size: int | tuple[int, int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=self.device)

    @torch.inference_mode()
    def seat(self, seats: Sequence[Seat]) -> None:
        """Put the prompts and settings of new requests into their slots."""
        # Lists first and one transfer a table: 64 requests arrive together, and each transfer costs as much as all.
        slots = [seat.slot for seat in seats]
        requests = [seat.request for seat in seats]
        longest = max(len(request.prompt_ids) for request in requests)
        most_stops = max(len(request.sampling.stop_token_ids) for request in requests)
        # −1 is no id, so unused places never match.
        if most_stops > self._stops_SN.shape[1]:
            grown = self._zeros((self.slots, most_stops), torch.int64) - 1
            grown[:, : self._stops_SN.shape[1]] = self._stops_SN
            self._stops_SN = grown
        prompts = [request.prompt_ids + [0] * (longest - len(request.prompt_ids)) for request in requests]
        room = self._stops_SN.shape[1]
        stops = [[*r.sampling.stop_token_ids, *[-1] * (room - len(r.sampling.stop_token_ids))] for r in requests]
        lengths = [len(request.prompt_ids) for request in requests]
        ends = [min(n + r.sampling.max_new_tokens, self.max_length) for n, r in zip(lengths, requests, strict=True)]
        # Padding overwrites what older requests left; it is sampled over before it is read.
        self._tokens_SP[slots, :longest] = self._tensor(prompts)
        self._stops_SN[slots] = self._tensor(stops)
        self._lengths_S[slots] = self._prompts_S[slots] = self._tensor(lengths)
        self._ends_S[slots] = self._tensor(ends)
        self._streams_S[slots] = self._tensor([stream_key(r.sampling.seed, r.key) for r in requests])
        self._temperatures_S[slots] = torch.tensor(
            [r.sampling.temperature for r in requests], dtype=torch.float32, device=self.device
        )
        self._active_S[slots] = True
        self._finite_S[slots] = True

    def _tensor(self, rows: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(rows, dtype=torch.int64, device=self.device)

    @torch.inference_mode()
    def prefill(self, stretches: Sequence[Stretch]) -> list[Ended]:
        """Compute prompts into the cache and sample the first token of each. Returns rows that stopped at once."""
        ended: list[Ended] = []
        for batch in self._batches(stretches):
            logits_BV = self._compute(batch)
            slots_B = self._tensor([stretch.slot for stretch in batch])
            ended += self._append(slots_B, logits_BV)
        return ended

    @torch.inference_mode()
    def recompute(self, stretches: Sequence[Stretch]) -> None:
        """Compute stored tokens into the cache anew, with the weights in use. Samples nothing."""
        for batch in self._batches([stretch for stretch in stretches if stretch.end > stretch.start]):
            self._compute(batch)

    def _batches(self, stretches: Sequence[Stretch]) -> list[list[Stretch]]:
        """Stretches of similar length together, at most `PREFILL_TOKENS` with padding; one by one in fixed shapes."""
        if self.fixed_shapes:
            return [[stretch] for stretch in stretches]
        batches: list[list[Stretch]] = []
        # Longest first: the first of a batch decides its padded length, and neighbours in order waste little.
        for stretch in sorted(stretches, key=lambda s: s.start - s.end):
            longest = batches[-1][0] if batches else stretch
            if batches and (len(batches[-1]) + 1) * (longest.end - longest.start) <= PREFILL_TOKENS:
                batches[-1].append(stretch)
            else:
                batches.append([stretch])
        return batches

    def _compute(self, batch: Sequence[Stretch]) -> Tensor:
        """Forward the stretches, right-aligned so that the last column predicts; returns its logits [B, V]."""
        slots_B = self._tensor([stretch.slot for stretch in batch])
        starts_B = self._tensor([stretch.start for stretch in batch])
        ends_B = self._tensor([stretch.end for stretch in batch])
        longest = max(stretch.end - stretch.start for stretch in batch)
        width = max(stretch.end for stretch in batch)
        step = longest
        if self.fixed_shapes:
            step, width = CHUNK, self.max_length
            # Up to whole chunks; the first one is padded on its left.
            longest = -(-longest // CHUNK) * CHUNK
        # Only the last pass holds the last token, so its logits are the ones that stay.
        logits_BV = torch.empty(0)
        for first in range(-longest, 0, step):
            columns_Q = torch.arange(first, first + step, device=self.device)
            positions_BQ = ends_B[:, None] + columns_Q
            logits_BV = self._forward(slots_B, False, positions_BQ, positions_BQ >= starts_B[:, None], width)
        return logits_BV

    @torch.inference_mode()
    def decode(self, rows: int, width: int) -> list[Ended]:
        """Sample one token in each running slot below `rows`; `width` is the longest sequence among them."""
        if self.fixed_shapes:
            rows, width = self.slots, self.max_length
        slots_B = self._all_slots_S[:rows]
        # The newest token was sampled but never read: it is the input of this step.
        positions_BQ = self._lengths_S[:rows, None] - 1
        logits_BV = self._forward(slots_B, True, positions_BQ, self._active_S[:rows, None], width)
        return self._append(slots_B, logits_BV)

    def _forward(self, slots_B: Tensor, leading: bool, positions_BQ: Tensor, valid_BQ: Tensor, width: int) -> Tensor:
        """Logits [B, V] of the last column. Columns that are not valid compute something that nobody reads."""
        writes_BQ = torch.where(valid_BQ, positions_BQ, self.max_length)
        # Invalid columns look at key 0 only: every softmax has a finite key, and no row costs more than its own.
        positions_BQ = torch.where(valid_BQ, positions_BQ, 0)
        self._cache.place(Placement(slots_B=slots_B, leading=leading, writes_BQ=writes_BQ, width=width))
        output = self.model(
            input_ids=self._tokens_SP[slots_B[:, None], writes_BQ],
            attention_mask=self._masks(positions_BQ, width),
            position_ids=positions_BQ,
            cache=self._cache,
            use_cache=True,
            # Right-aligned columns make the last one predict in every row; all V logits of Q columns are too many.
            logits_to_keep=1,
        )
        logits_BV: Tensor = output.logits[:, -1, : self.vocab_size]
        return logits_BV

    def _masks(self, positions_BQ: Tensor, width: int) -> Tensor | dict[str, Tensor]:
        """Additive masks [B, 1, Q, K], one a kind of attention: seen are keys that are not later and in the window."""
        distances_BQK = positions_BQ[:, :, None] - self._all_positions_P[:width]
        masks = {}
        for kind, window in self._windows.items():
            seen_BQK = distances_BQK >= 0
            if window is not None:
                seen_BQK = seen_BQK & (distances_BQK < window)
            # Additive, made once a step: sdpa would convert a boolean mask in every layer again.
            masks[kind] = torch.zeros(seen_BQK.shape, dtype=self.model.dtype, device=self.device).masked_fill_(
                ~seen_BQK, torch.finfo(self.model.dtype).min
            )[:, None]
        # Models with one kind of attention take a plain tensor only.
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _append(self, slots_B: Tensor, logits_BV: Tensor) -> list[Ended]:
        """Sample, stamp and store one token in each running row; return the rows that stop with it."""
        # Idle rows are computed along, which is cheaper than packing the others; they write to the scratch column.
        running_B = self._active_S[slots_B]
        columns_B = torch.where(running_B, self._lengths_S[slots_B], self.max_length)
        uniforms_B = keyed_uniforms(self._streams_S[slots_B], columns_B)
        ids_B, log_probs_B, finite_B = sample(logits_BV, self._temperatures_S[slots_B], uniforms_B)
        self._tokens_SP[slots_B, columns_B] = ids_B
        self._log_probs_SP[slots_B, columns_B] = log_probs_B
        # Stamped where it is sampled, so that no later swap can change what a token says about itself.
        self._versions_SP[slots_B, columns_B] = self.version
        lengths_B = self._lengths_S[slots_B] + running_B
        self._lengths_S[slots_B] = lengths_B
        self._finite_S[slots_B] = finite_B
        stops_B = (ids_B[:, None] == self._stops_SN[slots_B]).any(-1)
        stopped_B = running_B & (stops_B | (lengths_B >= self._ends_S[slots_B]) | ~finite_B)
        stopped = slots_B[stopped_B].tolist()  # the one synchronisation of the step
        return self.stop(stopped) if stopped else []

    @torch.inference_mode()
    def stop(self, slots: Sequence[int]) -> list[Ended]:
        """Take running rows out and read back what they sampled."""
        self._active_S[slots] = False
        ended = []
        lengths, prompts = self._lengths_S[slots].tolist(), self._prompts_S[slots].tolist()
        finite = self._finite_S[slots].tolist()
        for slot, start, end, is_finite in zip(slots, prompts, lengths, finite, strict=True):
            if not is_finite:
                self._cache.clear(slot)
            ended.append(
                Ended(
                    slot=slot,
                    token_ids=self._tokens_SP[slot, start:end].tolist(),
                    log_probs=self._log_probs_SP[slot, start:end].tolist(),
                    versions=self._versions_SP[slot, start:end].tolist(),
                    finite=is_finite,
                )
            )
        return ended

    def load(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Swap the weights; the next token is stamped with `version`. The tensors must have been verified."""
        assign_weights(self.model, tensors)
        self.version = version


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
