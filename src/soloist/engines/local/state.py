"""What the engine knows of each slot, as tensors: tokens, log-probabilities, versions, budgets, stop tokens.

Guarantees: a step reads and writes all running slots at once, without Python work per token; each sampled token is
stamped, in the step that samples it, with the version of the weights whose logits it came from; nothing here waits for
the device but `read_back`.
Not covered: keys and values (`cache`), forward passes (`own_forward`, `fused`).

Legend: S slots, R sampling rows of a step, N stop tokens, V vocabulary; P = max_length + 1 columns, the last one being
scratch for rows that are not running.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from soloist.engines.local.sampler import keyed_uniforms, sample, stream_key
from soloist.engines.local.scheduler import Seat


@dataclass(frozen=True)
class Ended:
    """A row that has stopped, read back from the device; the lists cover its sampled tokens."""

    slot: int
    token_ids: list[int]
    log_probs: list[float]
    versions: list[int]
    finite: bool
    """False when the logits of the last token were not; its numbers mean nothing then."""


@dataclass(frozen=True)
class Running:
    """Slots that sample, and what a step needs of their tables; valid while these slots run and nobody joins them."""

    slots: list[int]
    slots_R: Tensor
    lengths_R: Tensor
    """Advances with each token, as do the places."""
    places_R: Tensor
    """Of the next token, in the tables as one long line."""
    ends_R: Tensor
    temperatures_R: Tensor | None
    """None when all are 1."""
    stops_RN: Tensor | None
    """None when nobody has stop tokens."""


class SlotState:
    """The tables of all slots on one device."""

    def __init__(self, slots: int, max_length: int, device: torch.device) -> None:
        self.device = device
        self.slots = slots
        self.max_length = max_length
        columns = (slots, max_length + 1)
        self.tokens_SP = self._zeros(columns, torch.int64)
        self.log_probs_SP = self._zeros(columns, torch.float32)
        self.versions_SP = self._zeros(columns, torch.int64)
        self.uniforms_SP = self._zeros(columns, torch.float64)
        self.lengths_S = self._zeros(slots, torch.int64)
        self.active_S = self._zeros(slots, torch.bool)
        self.version_1 = self._zeros(1, torch.int64)
        """Of the weights in use. On the device, so that a recorded CUDA graph reads the present one."""
        self.stops_SN = self._zeros((slots, 1), torch.int64) - 1
        self._prompts_S = self._zeros(slots, torch.int64)
        self._ends_S = self._zeros(slots, torch.int64)
        self._finite_S = self._zeros(slots, torch.bool)
        self._temperatures_S = self._zeros(slots, torch.float32)
        self._tempered: set[int] = set()
        """Slots whose logits must be divided; known on the host, as are the next ones."""
        self._stopping: set[int] = set()

    def _zeros(self, size: int | tuple[int, int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=self.device)

    def ids(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        """Integers as a tensor on the device."""
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def seat(self, seats: Sequence[Seat]) -> None:
        """Write the prompts and settings of new requests. They sample nothing before `active_S` says so."""
        # Lists first and one transfer a table: 64 requests arrive together, and each transfer costs as much as all.
        slots = [seat.slot for seat in seats]
        requests = [seat.request for seat in seats]
        longest = max(len(request.prompt_ids) for request in requests)
        most_stops = max(len(request.sampling.stop_token_ids) for request in requests)
        # −1 is no id, so unused places never match.
        if most_stops > self.stops_SN.shape[1]:
            grown = self._zeros((self.slots, most_stops), torch.int64) - 1
            grown[:, : self.stops_SN.shape[1]] = self.stops_SN
            self.stops_SN = grown
        prompts = [request.prompt_ids + [0] * (longest - len(request.prompt_ids)) for request in requests]
        room = self.stops_SN.shape[1]
        stops = [[*r.sampling.stop_token_ids, *[-1] * (room - len(r.sampling.stop_token_ids))] for r in requests]
        lengths = [len(request.prompt_ids) for request in requests]
        ends = [min(n + r.sampling.max_new_tokens, self.max_length) for n, r in zip(lengths, requests, strict=True)]
        where = self.ids(slots)
        # Padding overwrites what older requests left; it is sampled over before it is read.
        self.tokens_SP[where, :longest] = self.ids(prompts)
        self.stops_SN[where] = self.ids(stops)
        self.lengths_S[where] = self._prompts_S[where] = self.ids(lengths)
        self._ends_S[where] = self.ids(ends)
        temperatures = [r.sampling.temperature for r in requests]
        self._temperatures_S[where] = torch.tensor(temperatures, dtype=torch.float32, device=self.device)
        self._finite_S[where] = True
        for slot, request in zip(slots, requests, strict=True):
            (self._tempered.discard if request.sampling.temperature == 1 else self._tempered.add)(slot)
            (self._stopping.add if request.sampling.stop_token_ids else self._stopping.discard)(slot)
        self._draw(where, [stream_key(r.sampling.seed, r.key) for r in requests], min(lengths), max(ends))

    def _draw(self, where: Tensor, streams: list[int], first: int, end: int) -> None:
        """The random numbers of all positions that these requests may sample, in one go."""
        positions = torch.arange(first, end, device=self.device)
        self.uniforms_SP[where, first:end] = keyed_uniforms(self.ids(streams)[:, None], positions)

    def tokens_at(self, slots_R: Tensor, columns_R: Tensor) -> Tensor:
        """Ids [R] in these columns."""
        return self.tokens_SP.view(-1).index_select(0, self._flat(slots_R, columns_R))

    def _flat(self, slots_R: Tensor, columns_R: Tensor) -> Tensor:
        """Places in the tables as one long line, where reading and writing cost half."""
        return torch.add(columns_R, slots_R, alpha=self.max_length + 1)

    def running(self, slots: Sequence[int]) -> Running:
        """For `append_running`. All of these slots are active."""
        slots_R = self.ids(slots)
        lengths_R = self.lengths_S.index_select(0, slots_R)
        plain, stopless = (special.isdisjoint(slots) for special in (self._tempered, self._stopping))
        return Running(
            slots=list(slots),
            slots_R=slots_R,
            lengths_R=lengths_R,
            places_R=self._flat(slots_R, lengths_R),
            ends_R=self._ends_S.index_select(0, slots_R),
            temperatures_R=None if plain else self._temperatures_S.index_select(0, slots_R),
            stops_RN=None if stopless else self.stops_SN.index_select(0, slots_R),
        )

    def append_running(self, rows: Running, logits_RV: Tensor) -> Tensor:
        """As `append`, for rows that all run: fewer calls, which are what few rows cost."""
        uniforms_R = self.uniforms_SP.view(-1).index_select(0, rows.places_R)
        ids_R, log_probs_R, finite_R = sample(logits_RV, rows.temperatures_R, uniforms_R)
        self.tokens_SP.view(-1).index_copy_(0, rows.places_R, ids_R)
        self.log_probs_SP.view(-1).index_copy_(0, rows.places_R, log_probs_R)
        self.versions_SP.view(-1).index_copy_(0, rows.places_R, self.version_1.expand(ids_R.shape))
        rows.places_R.add_(1)
        self.lengths_S.index_copy_(0, rows.slots_R, rows.lengths_R.add_(1))
        self._finite_S.index_copy_(0, rows.slots_R, finite_R)
        goes_on_R = (rows.lengths_R < rows.ends_R).logical_and_(finite_R)
        if rows.stops_RN is not None:
            goes_on_R &= (ids_R[:, None] != rows.stops_RN).all(-1)
        return goes_on_R.logical_not_()

    def append(self, slots_R: Tensor, logits_RV: Tensor) -> Tensor:
        """Sample, stamp and store one token in each active row of `slots_R`; returns which of them stop with it."""
        active_R = self.active_S[slots_R]
        lengths_R = self.lengths_S[slots_R]
        columns_R = torch.where(active_R, lengths_R, self.max_length)
        ids_R, log_probs_R, finite_R = sample(
            logits_RV, self._temperatures_S[slots_R], self.uniforms_SP[slots_R, columns_R]
        )
        self.tokens_SP[slots_R, columns_R] = ids_R
        self.log_probs_SP[slots_R, columns_R] = log_probs_R
        # Stamped where it is sampled, so that no later swap can change what a token says about itself.
        self.versions_SP[slots_R, columns_R] = self.version_1
        lengths_R = lengths_R + active_R
        self.lengths_S[slots_R] = lengths_R
        # A row that doesn't run computes anything at all, which says nothing about its request.
        finite_R = finite_R | ~active_R
        self._finite_S[slots_R] = finite_R
        stops_R = (ids_R[:, None] == self.stops_SN[slots_R]).any(-1)
        return active_R & (stops_R | (lengths_R >= self._ends_S[slots_R]) | ~finite_R)

    def read_back(self, slots: Sequence[int]) -> list[Ended]:
        """Take rows out and fetch what they sampled, in one transfer a table for all of them."""
        where = self.ids(slots)
        self.active_S[where] = False
        starts, ends = self._prompts_S[where].tolist(), self.lengths_S[where].tolist()
        finite = self._finite_S[where].tolist()
        first, last = min(starts), max(ends)
        tokens = self.tokens_SP[where, first:last].tolist()
        log_probs = self.log_probs_SP[where, first:last].tolist()
        versions = self.versions_SP[where, first:last].tolist()
        return [
            Ended(
                slot=slot,
                token_ids=tokens[i][start - first : end - first],
                log_probs=log_probs[i][start - first : end - first],
                versions=versions[i][start - first : end - first],
                finite=finite[i],
            )
            for i, (slot, start, end) in enumerate(zip(slots, starts, ends, strict=True))
        ]
