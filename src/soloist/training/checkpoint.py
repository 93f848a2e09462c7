"""Checkpoints: snapshots whose tensors are torch's, as safetensors. What is guaranteed: `snapshots.py`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load, save
from torch import Tensor

from soloist.seams import Storage
from soloist.training.snapshots import SnapshotFolder


class Checkpoints(SnapshotFolder):
    """The checkpoints of one folder, `step_N` each.

    Example: `Checkpoints(run / "checkpoints").save(20, {"policy": (tensors, {"version": 20})})`.
    """

    def __init__(self, folder: Path, *, keep: int = 2, storage: Storage | None = None) -> None:
        super().__init__(folder, _encode, load, keep=keep, storage=storage)


def _encode(tensors: Mapping[str, Tensor]) -> bytes:
    encoded: bytes = save({name: tensor.contiguous() for name, tensor in tensors.items()})
    return encoded
