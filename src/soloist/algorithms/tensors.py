"""What every function of this room does first: check that packed tensors fit together, and compute in fp32 or better.

Guarantees: bf16 and fp16 become fp32, fp32 and fp64 stay. A tensor of the wrong rank is refused, never broadcast: `[T]`
minus `[T, 1]` would silently be `[T, T]`.
Legend of the whole room: T packed trainable tokens of a step or micro-batch, R rollouts, S positions of one sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """`x` in fp64 if it is fp64, else in fp32. Differentiable; any shape."""
    return x if x.dtype == torch.float64 else x.to(torch.float32)


def check_packed(**tensors: Tensor) -> None:
    """Raise ValueError unless all tensors are one-dimensional and of one length."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if any(len(shape) != 1 for shape in shapes.values()) or len(set(shapes.values())) > 1:
        found = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"packed tensors must be one-dimensional and of one length, found {found}; flatten them alike")
