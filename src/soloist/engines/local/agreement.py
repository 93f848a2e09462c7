"""Whether the fused forward may serve a model: it must give the numbers of the model's own forward.

Guarantees: compared at start with the weights in use, over a prompt, a prompt in two pieces and a decode step, before
any request comes; when they differ the model's own forward serves, which is slower and right.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from soloist.engines.local.fused import FusedForward, known
from soloist.engines.local.own_forward import Stretch
from soloist.engines.local.rows import Reach
from soloist.engines.local.state import SlotState

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Distance allowed, relative to the size of the logits. A wrong formula is off by about 1."""
PROBE = 12
"""Tokens of the probe; fewer where a slot holds fewer."""

_log = logging.getLogger("soloist.engines")


@torch.inference_mode()
def fused_forward(model: Any, state: SlotState, vocab_size: int) -> FusedForward | None:
    """The fused forward for this model, or None when there is none or its logits differ from the model's own."""
    length = min(PROBE, state.max_length)
    if not known(model) or length < 3:
        return None
    with torch.inference_mode(False):
        forward = FusedForward(model, state, vocab_size)
    # Tokens spread over the vocabulary: a probe of one token would make every attention the same.
    ids_T = torch.arange(length, device=state.device) * 7919 % vocab_size
    wanted_TV = model(input_ids=ids_T[None], use_cache=False).logits[0, :, :vocab_size]
    found = _probe(forward, state, ids_T)
    error = max(_distance(found[end], wanted_TV[end - 1]) for end in found)
    if error <= TOLERANCE.get(wanted_TV.dtype, 0.1):
        return forward
    _log.warning(
        "the fused forward of %s differs from the model's own by %.2g of its logits; the model's own serves, slower",
        model.config.model_type,
        error,
    )
    return None


def _probe(forward: FusedForward, state: SlotState, ids_T: Tensor) -> dict[int, Tensor]:
    """Logits after so many tokens: a prompt in two pieces and a decode step. Leaves slot 0 idle."""
    length, nobody = len(ids_T), ids_T[:0]
    state.tokens_SP[0, :length] = ids_T
    found = {
        end: forward.advance(nobody, Reach.of([]), [Stretch(0, start, end)], [0])[0]
        for start, end in ((0, length - 2), (length - 2, length - 1))
    }
    state.lengths_S[0], state.active_S[0] = length, True
    found[length] = forward.decode(ids_T[:1] * 0, Reach.of([length]))[0]
    state.lengths_S[0], state.active_S[0] = 0, False
    return found


def _distance(found_V: Tensor, wanted_V: Tensor) -> float:
    """‖found − wanted‖ ÷ ‖wanted‖."""
    return float((found_V - wanted_V).double().norm() / wanted_V.double().norm().clamp(min=1e-30))
