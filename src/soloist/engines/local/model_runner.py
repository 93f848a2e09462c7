"""One step of all slots: rows arranged, one forward pass, one token sampled for everybody.

Guarantees: one host synchronisation a decode step, whatever the number of rows; each sampled token is stamped with the
version of the weights whose logits it came from, in the same step; logits beyond the vocabulary are cut off before the
softmax. Known architectures take the fused forward when it agrees with the model's own. With `fixed_shapes` rows stay
where they are and the model's own forward runs in passes of two shapes, so that a row's bits depend on its own slot,
tokens and weights only.
Not covered: who sits where (`SlotTable`) and requests as such (`ContinuousBatch`).

Legend: S slots, B decoded rows, R sampling rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from soloist.engines.local.agreement import fused_forward
from soloist.engines.local.graphs import DecodeGraphs
from soloist.engines.local.own_forward import Forward, OwnForward, Stretch
from soloist.engines.local.rows import Reach, RowOrder, Swap
from soloist.engines.local.scheduler import Seat
from soloist.engines.local.state import Ended, Running, SlotState
from soloist.models.loading import assign_weights

PASS_TOKENS = 1024
"""Prompt tokens of one pass at most: more make no token cheaper, and on CPUs their tensors leave the cache."""
SORT_STEPS = 4
"""Steps between two sortings of the rows by length."""
BAND = 64
"""Columns by which rows must differ for their order to matter."""
WASTE = 0.1
"""Share of the columns read for nothing that makes sorting worth its copies."""


NOTHING = Reach([])


@dataclass
class _Plan:
    """Rows 0 … B−1, valid while the same slots run."""

    rows: Running
    reach: Reach
    step: int
    """The step for which `reach` holds; all rows grow by one a step."""

    def reach_at(self, step: int) -> Reach:
        """What attention must see in this step."""
        return Reach(self.reach.longest, step - self.step)


class ModelRunner:
    """A model, its cache and the state of its slots.

    Raises ValueError for models with layers that can't be cached, and for `cuda_graphs` where there can be none.
    """

    def __init__(
        self,
        model: Any,
        *,
        slots: int,
        max_length: int,
        vocab_size: int | None = None,
        fixed_shapes: bool = False,
        fused: bool = True,
        cuda_graphs: bool = False,
    ) -> None:
        self.model = model
        self.device: torch.device = model.device
        self.slots = slots
        self.max_length = max_length
        self.fixed_shapes = fixed_shapes
        # Never wider than the embedding, or a sampled id could not be read back.
        self.vocab_size = min(vocab_size or model.config.vocab_size, model.config.vocab_size)
        self.version = 0
        self._state = SlotState(slots, max_length, self.device)
        self._order = RowOrder(slots)
        # Also where it does not serve, as it refuses what nothing here can cache.
        own = OwnForward(model, self._state, self.vocab_size, fixed_shapes=fixed_shapes)
        better = fused_forward(model, self._state, self.vocab_size) if fused and not fixed_shapes else None
        self._forward: Forward = better or own
        self.fused = better is not None
        self._graphs = DecodeGraphs.build(better, self._state, self.device) if cuda_graphs else None
        self._step = 0
        self._sorted_at = 0
        self._starts: dict[int, int] = {}
        """Length of each running slot minus the step at which it was that: no counting per token."""
        self._cached = [0] * slots
        """Columns in use of slots that don't run."""
        self._plan: _Plan | None = None

    @property
    def running(self) -> int:
        """Slots that sample a token in the next step."""
        return len(self._starts)

    def cached(self, slot: int) -> int:
        """Tokens of a slot whose keys and values are stored."""
        # The newest token has not been an input yet.
        return self._length(slot) - 1 if slot in self._starts else self._cached[slot]

    def _length(self, slot: int) -> int:
        return self._starts[slot] + self._step

    @torch.inference_mode()
    def seat(self, seats: Sequence[Seat]) -> None:
        """Put the prompts and settings of new requests into their slots."""
        self._state.seat(seats)
        for seat in seats:
            self._cached[seat.slot] = seat.reused

    @torch.inference_mode()
    def step(self, stretches: Sequence[Stretch], ready: Sequence[int]) -> list[Ended]:
        """Sample one token in each running slot and compute these stretches of prompts beside.

        `ready` are the slots whose prompt is complete with that; they sample their first token now and run from here
        on. Returns the rows that stop.
        """
        plan = self._arranged()
        apart = self.fixed_shapes or self._graphs is not None
        stopped = self._apart(plan, stretches, ready) if apart else self._together(plan, stretches, ready)
        # One more token in every running slot; the newcomers hold their prompt and one.
        self._step += 1
        for stretch in stretches:
            self._cached[stretch.slot] = stretch.end
            if stretch.slot in ready:
                self._starts[stretch.slot] = stretch.end + 1 - self._step
                self._plan = None
        return self.stop(stopped) if stopped else []

    def _together(self, plan: _Plan, stretches: Sequence[Stretch], ready: Sequence[int]) -> list[int]:
        """One pass for running rows and prompts."""
        reach, running = plan.reach_at(self._step), plan.rows
        if not stretches:
            return self._append(running, self._forward.decode(running.slots_R, reach))
        rows = [self._order.row_of[stretch.slot] for stretch in stretches]
        logits_RV = self._forward.advance(running.slots_R, reach, stretches, rows)
        count = len(running.slots)
        if len(ready) < len(stretches):
            # A prompt that goes on next step predicts nothing yet.
            whole = [count + i for i, stretch in enumerate(stretches) if stretch.slot in ready]
            logits_RV = logits_RV[[*range(count), *whole]]
        slots = [*running.slots, *(stretch.slot for stretch in stretches if stretch.slot in ready)]
        if not slots:
            return []
        if len(slots) > count:
            running = self._state.running(slots)
            self._state.active_S.index_fill_(0, running.slots_R, True)
        return self._append(running, logits_RV)

    def _append(self, rows: Running, logits_RV: Tensor) -> list[int]:
        return _chosen(rows.slots, self._state.append_running(rows, logits_RV))

    def _apart(self, plan: _Plan, stretches: Sequence[Stretch], ready: Sequence[int]) -> list[int]:
        """Running rows and each prompt in passes of their own, so that the shapes of one say nothing about others."""
        stopped: list[int] = []
        if self._starts and self._graphs is not None:
            slots = self._order.slot_at
            stopped += _chosen(slots, self._graphs.decode(slots, max(self._length(slot) for slot in self._starts)))
        elif self._starts:
            slots_B = plan.rows.slots_R
            stopped += self._sample(plan.rows.slots, slots_B, self._forward.decode(slots_B, plan.reach))
        nobody = self._state.ids([])
        for stretch in stretches:
            logits_1V = self._forward.advance(nobody, NOTHING, [stretch], [self._order.row_of[stretch.slot]])
            if stretch.slot in ready:
                slots_1 = self._state.ids([stretch.slot])
                self._state.active_S[slots_1] = True
                stopped += self._sample([stretch.slot], slots_1, logits_1V)
        return stopped

    def _sample(self, slots: Sequence[int], slots_R: Tensor, logits_RV: Tensor) -> list[int]:
        return _chosen(slots, self._state.append(slots_R, logits_RV))

    def _arranged(self) -> _Plan:
        """Running slots in leading rows, longest first; the last plan while nothing changed."""
        due = self._step - self._sorted_at >= SORT_STEPS and not self.fixed_shapes
        if self._plan is not None and not due:
            return self._plan
        if self.fixed_shapes:
            reach = Reach.of([self.max_length] * self.slots)
            self._plan = _Plan(self._state.running(range(self.slots)), reach, self._step)
            return self._plan
        lengths = {slot: start + self._step for slot, start in self._starts.items()}
        self._carry_out(self._order.compact(list(lengths)))
        moved = due and self._sort(lengths)
        if self._plan is not None and not moved:
            return self._plan
        slots = self._order.slot_at[: len(lengths)]
        reach = Reach.of([lengths[slot] for slot in slots])
        self._plan = _Plan(self._state.running(slots), reach, self._step)
        return self._plan

    def _sort(self, lengths: Mapping[int, int]) -> bool:
        """Longest rows first, when they are so mixed up that it pays. Returns whether it did."""
        self._sorted_at = self._step
        bands = {slot: -(-length // BAND) for slot, length in lengths.items()}
        in_order = Reach.of([bands[slot] for slot in self._order.slot_at[: len(bands)]])
        pays = -sum(in_order.longest) > (1 + WASTE) * sum(bands.values())
        if pays:
            self._carry_out(self._order.sort(bands))
        return pays

    def _carry_out(self, swaps: Sequence[Swap]) -> None:
        for swap in swaps:
            columns = max(self.cached(swap.left_slot), self.cached(swap.right_slot))
            self._forward.swap(swap.left, swap.right, columns)

    @torch.inference_mode()
    def recompute(self, slots: Sequence[int]) -> None:
        """Compute the stored tokens of these slots into the cache anew, with the weights in use. Samples nothing."""
        pieces = [
            Stretch(slot, start, min(start + PASS_TOKENS, self.cached(slot)))
            for slot in slots
            for start in range(0, self.cached(slot), PASS_TOKENS)
        ]
        nobody = self._state.ids([])
        while pieces:
            batch, pieces = first_tokens(pieces, PASS_TOKENS)
            self._forward.advance(nobody, NOTHING, batch, [self._order.row_of[piece.slot] for piece in batch])

    @torch.inference_mode()
    def stop(self, slots: Sequence[int]) -> list[Ended]:
        """Take rows out and read back what they sampled."""
        ended = self._state.read_back(slots)
        for row in ended:
            self._cached[row.slot] = self.cached(row.slot)
            self._starts.pop(row.slot, None)
            if not row.finite:
                self._forward.clear(self._order.row_of[row.slot])
                self._cached[row.slot] = 0
        self._plan = self._plan if self.fixed_shapes else None
        return ended

    def load(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Swap the weights; the next token is stamped with `version`. The tensors must have been verified."""
        assign_weights(self.model, tensors)
        self._forward.refresh()
        self._state.version_1.fill_(version)
        self.version = version


def first_tokens(stretches: Sequence[Stretch], limit: int) -> tuple[list[Stretch], list[Stretch]]:
    """Cut off the first `limit` tokens: the stretches that they make, and what is left."""
    taken: list[Stretch] = []
    for i, stretch in enumerate(stretches):
        end = min(stretch.end, stretch.start + limit)
        if end > stretch.start:
            taken.append(Stretch(stretch.slot, stretch.start, end))
        limit -= end - stretch.start
        if end < stretch.end:
            return taken, [Stretch(stretch.slot, end, stretch.end), *stretches[i + 1 :]]
    return taken, []


def _chosen(slots: Sequence[int], stopped_R: Tensor) -> list[int]:
    """The slots for which it is true. The one synchronisation of a step."""
    return [slots[i] for i in stopped_R.nonzero().flatten().tolist()]
