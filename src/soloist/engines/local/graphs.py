"""CUDA graphs of the decode step: the whole step, sampling included, is launched as one thing.

Guarantees: the same computation as without; a graph reads weights, version and slots where they stand, so loads and
new requests need no new graph. Every row is computed, whether it runs or not, and read up to a rounded width.
Not covered: prompts, which run as usual between two replays; devices other than CUDA.

Legend: S slots, which is also the number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from soloist.engines.local.own_forward import Forward
from soloist.engines.local.rows import Reach
from soloist.engines.local.state import SlotState

WIDTH_STEP = 256
"""Widths are rounded up to a multiple, one graph each."""


class DecodeGraphs:
    """Records a graph for each width when it is first needed."""

    def __init__(self, forward: Forward, state: SlotState) -> None:
        self._forward = forward
        self._state = state
        self._slots_S = torch.zeros(state.slots, dtype=torch.int64, device=state.device)
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool: Any = None

    @classmethod
    def build(cls, forward: Forward | None, state: SlotState, device: torch.device) -> DecodeGraphs:
        """Graphs for this forward. Raises ValueError where there can be none."""
        if device.type != "cuda":
            raise ValueError(
                f"engine.cuda_graphs is true on device {device.type}, expected cuda; set it to false or move the engine"
            )
        if forward is None:
            raise ValueError(
                "engine.cuda_graphs is true for a model without fused forward (or with deterministic = true), whose "
                "steps can't be recorded; set it to false"
            )
        return cls(forward, state)

    def decode(self, slot_at: Sequence[int], longest: int) -> Tensor:
        """Sample one token in each active slot; returns which rows stop, bool [S]. `slot_at` is each row's slot."""
        width = min(-(-longest // WIDTH_STEP) * WIDTH_STEP, self._state.max_length)
        # A table of stop tokens that grew is another tensor, which older graphs don't know.
        key = (width, self._state.stops_SN.data_ptr())
        self._slots_S.copy_(self._state.ids(slot_at))
        if key not in self._graphs:
            self._graphs[key] = self._record(width)
        graph, stopped_S = self._graphs[key]
        graph.replay()
        return stopped_S

    def _record(self, width: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Capture one step. Nobody runs meanwhile, so that the warm-up samples nothing."""
        active_S = self._state.active_S.clone()
        self._state.active_S.fill_(False)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        # Libraries choose kernels and allocate work space in the first calls, which must not be recorded.
        with torch.cuda.stream(side):
            for _ in range(2):
                self._body(width)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            stopped_S = self._body(width)
        self._pool = self._pool or graph.pool()
        self._state.active_S.copy_(active_S)
        return graph, stopped_S

    def _body(self, width: int) -> Tensor:
        logits_SV = self._forward.decode(self._slots_S, Reach.of([width] * self._state.slots))
        return self._state.append(self._slots_S, logits_SV)
