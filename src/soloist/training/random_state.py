"""The random states of the process as a part of a snapshot: torch on every device, and Python's own.

The learner draws only from generators that are keyed by seed and step; what a model or a library draws beside that
(dropout) must continue where it was. Not covered: NumPy's global generator, which nothing here uses.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

Part = tuple[dict[str, Tensor], dict[str, Any]]


def random_state() -> Part:
    """Everything that decides the next random numbers."""
    tensors = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors |= {f"cuda_{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    version, words, gauss = random.getstate()
    return tensors, {"python": [version, list(words), gauss]}


def load_random_state(part: Part) -> None:
    """Take back what `random_state` gave; devices that are gone are left out."""
    tensors, data = part
    torch.set_rng_state(tensors["cpu"])
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(devices):
        if f"cuda_{index}" in tensors:
            torch.cuda.set_rng_state(tensors[f"cuda_{index}"], index)
    version, words, gauss = data["python"]
    random.setstate((version, tuple(words), gauss))
