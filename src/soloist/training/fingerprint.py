"""A hash of a learner's state, made where the tensors are: equal exactly when names, shapes, types and all bits are.

    h(tensor) = Σᵢ (2i + 1) · uᵢ  mod 2⁶⁴,   uᵢ the i-th 32-bit word of the tensor's bytes

The weights are odd, so a change of any single word changes the sum; sums of integers do not depend on their order, so
the number is the same on every device and with any number of threads. SHA-256 over names, shapes, types, sums and the
JSON parts makes the hash. It finds accidents, not forgeries: two changes could be made to cancel out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_CHUNK = 2**20
"""Words hashed at once: what bounds the memory."""


def fingerprint(state: Mapping[str, tuple[Mapping[str, Tensor], Mapping[str, Any]]]) -> str:
    """Hex digest of named (tensors, JSON) parts."""
    digest = hashlib.sha256()
    for part, (tensors, data) in sorted(state.items()):
        digest.update(f"{part} {json.dumps(data, sort_keys=True)}\n".encode())
        for name, tensor in sorted(tensors.items()):
            digest.update(f"{name} {list(tensor.shape)} {tensor.dtype} {_sum(tensor)}\n".encode())
    return digest.hexdigest()


@torch.no_grad()
def _sum(tensor: Tensor) -> int:
    # Byte-wise when the bytes don't make whole words; such tensors are tiny.
    words = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if words.numel() % 4 == 0:
        words = words.view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, words.numel(), _CHUNK):
        chunk = words[start : start + _CHUNK].to(torch.int64)
        odd = torch.arange(start, start + chunk.numel(), device=tensor.device, dtype=torch.int64) * 2 + 1
        total += (chunk * odd).sum()
    return int(total)
