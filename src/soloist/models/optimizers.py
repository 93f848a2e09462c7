"""AdamW over what trains, learning rates as functions of the update count, and optimizer state without pickle.

Guarantees: frozen parameters are not in the optimizer and have no state; a saved and loaded state is the same bit for
bit and goes on as if never interrupted; nothing is loaded unless names, shapes, types and options fit.
Not covered: gradient clipping (`algorithms/gradients.py`), fp32 master weights for bf16 models, sharded state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

COSINE_FLOOR = 0.1


def build_optimizer(
    params: Iterable[nn.Parameter],
    lr: float,
    weight_decay: float,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101) over the trainable ones of `params`.

    Norms and biases (less than two dimensions) are not decayed. β₂ = 0.95 forgets in ~20 updates, since in RL the
    gradient's scale moves with the rewards (Open). Where a gradient is smaller than `eps`, its steps shrink with it, as
    in plain SGD. Raises ValueError when nothing is trainable.
    """
    found = list(params)
    trainable = [p for p in found if p.requires_grad]
    if not trainable:
        raise ValueError(f"none of {len(found)} parameters is trainable; freeze fewer of them")
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    # One kernel a tensor; the plain one takes 3 to 5 times as long on a CPU.
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=lr, betas=betas, eps=eps, fused=True)


@dataclass(frozen=True, kw_only=True)
class WarmupSchedule:
    """lr(n) = peak · (n + 1)/warmup for n < warmup, then peak, or with `total` a cosine from peak to peak/10.

    A pure function of the number of updates made before, so a resumed run needs nothing but its counter.
    Example: `WarmupSchedule(peak=4e-4, warmup=5).at(0)` is 8e-5.
    """

    peak: float
    """Learning rate after the warm-up."""
    warmup: int = 0
    """Updates of linear warm-up; 0 starts at the peak."""
    total: int | None = None
    """Updates of the whole stage, the last of which has a tenth of the peak; None stays at the peak."""

    def at(self, update: int) -> float:
        """Learning rate of update number `update` (0, 1, …). Raises ValueError for a negative number."""
        if update < 0:
            raise ValueError(f"update number is {update}; updates count from 0")
        if update < self.warmup:
            return self.peak * (update + 1) / self.warmup
        if self.total is None:
            return self.peak
        progress = min(1.0, (update - self.warmup) / max(1, self.total - 1 - self.warmup))
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return self.peak * (COSINE_FLOOR + (1 - COSINE_FLOOR) * cosine)

    def apply(self, optimizer: torch.optim.Optimizer, update: int) -> float:
        """Set the learning rate of that update in all groups, and return it."""
        lr = self.at(update)
        for group in optimizer.param_groups:
            group["lr"] = lr
        return lr


def optimizer_state(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, nn.Parameter]]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state as tensors for safetensors (`parameter/key` → tensor on the CPU) and a JSON object for the rest.

    `named` is `model.named_parameters()`. Raises ValueError when the optimizer holds a parameter without a name there.
    """
    groups = _named_groups(optimizer, named)
    tensors: dict[str, Tensor] = {}
    for group in groups:
        for name, parameter in group.items():
            for key, value in optimizer.state.get(parameter, {}).items():
                tensors[f"{name}/{key}"] = value.detach().to("cpu", copy=True).contiguous()
    described = [
        {"names": list(group), "options": _options(own)}
        for group, own in zip(groups, optimizer.param_groups, strict=True)
    ]
    return tensors, {"optimizer": type(optimizer).__name__, "groups": described}


def load_optimizer_state(
    optimizer: torch.optim.Optimizer,
    named: Iterable[tuple[str, nn.Parameter]],
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
) -> None:
    """Put a state from `optimizer_state` into an optimizer that was built the same way.

    Raises ValueError, before anything changes, when optimizer, groups, names, options other than the learning rate,
    or shapes differ: a changed config must not be overruled silently by a checkpoint.
    """
    groups = _named_groups(optimizer, named)
    if meta["optimizer"] != type(optimizer).__name__:
        raise ValueError(f"state is of {meta['optimizer']}, expected {type(optimizer).__name__}")
    if len(meta["groups"]) != len(groups):
        raise ValueError(f"state has {len(meta['groups'])} parameter groups, expected {len(groups)}")
    for saved, group, own in zip(meta["groups"], groups, optimizer.param_groups, strict=True):
        _check_group(saved, list(group), _options(own))
    per_parameter = _split(tensors)
    ordered = [(name, parameter) for group in groups for name, parameter in group.items()]
    _check_tensors(per_parameter, dict(ordered))
    state = optimizer.state_dict()
    state["state"] = {
        i: {key: value.clone() for key, value in per_parameter[name].items()}
        for i, (name, _) in enumerate(ordered)
        if name in per_parameter
    }
    for group, saved in zip(state["param_groups"], meta["groups"], strict=True):
        group["lr"] = saved["options"]["lr"]
    optimizer.load_state_dict(state)


def _named_groups(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, nn.Parameter]]
) -> list[dict[str, nn.Parameter]]:
    names = {id(parameter): name for name, parameter in named}
    unnamed = [list(p.shape) for group in optimizer.param_groups for p in group["params"] if id(p) not in names]
    if unnamed:
        raise ValueError(f"{len(unnamed)} parameters of the optimizer have no name, the first of shape {unnamed[0]}")
    return [{names[id(p)]: p for p in group["params"]} for group in optimizer.param_groups]


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a group as JSON would return them, so that saved and own ones compare equal."""
    options = {key: value for key, value in group.items() if key != "params"}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in options.items()}


def _check_group(saved: Mapping[str, Any], names: list[str], options: Mapping[str, Any]) -> None:
    if saved["names"] != names:
        odd = sorted(set(saved["names"]) ^ set(names)) or ["the order"]
        raise ValueError(
            f"state is of {len(saved['names'])} parameters, expected {len(names)}; differing: {', '.join(odd[:3])}"
        )
    for key in sorted(set(saved["options"]) | set(options)):
        found, expected = saved["options"].get(key), options.get(key)
        if key != "lr" and found != expected:
            raise ValueError(f"state was made with {key} = {found}, expected {expected}; set the config as it was")


def _split(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    split: dict[str, dict[str, Tensor]] = {}
    for full_name, tensor in tensors.items():
        name, _, key = full_name.rpartition("/")
        split.setdefault(name, {})[key] = tensor
    return split


def _check_tensors(found: Mapping[str, Mapping[str, Tensor]], parameters: Mapping[str, nn.Parameter]) -> None:
    for name, values in found.items():
        if name not in parameters:
            raise ValueError(f"state has tensors of {name or 'nothing'}, which the optimizer does not train")
        if values.keys() != {"step", "exp_avg", "exp_avg_sq"}:
            raise ValueError(f"state of {name} has {sorted(values)}, expected step, exp_avg and exp_avg_sq")
        for key in ("exp_avg", "exp_avg_sq"):
            shape, own = values[key].shape, parameters[name]
            if shape != own.shape or values[key].dtype != own.dtype:
                raise ValueError(
                    f"{key} of {name} is {values[key].dtype} {list(shape)}, expected {own.dtype} {list(own.shape)}"
                )
