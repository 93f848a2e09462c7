"""Gradient norm of a whole step, and scaling down to a limit.

Not covered: what to do about a non-finite norm. It is returned like any other; the gradients are then worthless and the
caller must not step. Sharded gradients come with the sharded learner.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def clip_by_global_norm_(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """g ← g · min(1, max_norm / ‖g‖), in place, ‖g‖ being the Euclidean norm of all gradients taken as one vector.

    Call it once a step, after the last micro-batch. Parameters without a gradient are skipped. Returns ‖g‖ from before,
    a scalar. Raises ValueError unless max_norm > 0.
    """
    # Written so that NaN is refused too; a negative limit would turn learning around.
    if not max_norm > 0:
        raise ValueError(f"max_grad_norm must be above 0, found {max_norm}")
    with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in with_gradient if p.grad is not None])
    torch.nn.utils.clip_grads_with_norm_(with_gradient, max_norm, norm)
    return norm
