"""Weights changed on purpose, so that the mismatch of engine and learner can be studied on any machine.

    w′ = round(w + noise · std(w) · ε),   ε ~ N(0, 1) from a generator keyed by (seed, version, name of the tensor)

`round` casts to a narrower type and back to the type that the engine computes in. That is what quantised or differently
fused engines do to a policy (methods §2, §8: what TIS, IcePop and SAT are for), with a size that can be set.
Rounding is torch's cast, which gives the largest number of the type where a number is larger.
Guarantees: equal bits for equal keys, on every engine and after every restart; a tied tensor is altered once, as it is
stored once; tensors whose elements are all equal (fresh norms) get no noise; what was given is not changed.
Not covered: errors of activations and of attention's cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from soloist.engines.local.messages import Alteration

ROUNDED_TO = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}


@torch.no_grad()
def altered(tensors: Mapping[str, Tensor], version: int, alteration: Alteration) -> dict[str, Tensor]:
    """The weights of `version` as the engine gets them. Raises ValueError when noise makes a number infinite."""
    if not alteration.changes:
        return dict(tensors)
    return {
        name: _altered(name, tensor, version, alteration) if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }


def _altered(name: str, tensor: Tensor, version: int, alteration: Alteration) -> Tensor:
    changed = tensor.float()
    if alteration.noise:
        # On the CPU whatever the device: its generator gives the same numbers everywhere.
        noise = torch.randn(tensor.shape, generator=_generator(alteration.seed, version, name))
        changed = changed + alteration.noise * changed.std(correction=0) * noise.to(tensor.device)
    if alteration.rounding != "none":
        changed = changed.to(ROUNDED_TO[alteration.rounding])
    changed = changed.to(tensor.dtype)
    if not bool(torch.isfinite(changed).all()):
        raise ValueError(
            f"engine.noise = {alteration.noise:g} makes numbers of {name} in version {version} infinite; choose a "
            "smaller one"
        )
    return changed


def _generator(seed: int, version: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{version}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7]))
