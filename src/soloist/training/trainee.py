"""A model in training: its optimizer, its learning rate and its counter. Policy and value model are one each.

Guarantees: a non-finite gradient never reaches the optimizer and names the rollouts it may come from; the state is
complete, so a loaded one goes on bit for bit.
Not covered: losses and backward passes (`learner.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from soloist.algorithms.gradients import clip_by_global_norm_
from soloist.config import PolicyConfig, ValueConfig
from soloist.errors import RunError
from soloist.models.optimizers import WarmupSchedule, build_optimizer, load_optimizer_state, optimizer_state
from soloist.seams import fault_point

_log = logging.getLogger("soloist.learner")


class Trainee:
    """Steps a model once its gradients are complete.

    Example: `policy = Trainee("policy", model, config.policy)`, `loss.backward()`, `norm, lr = policy.step(…)`.
    """

    def __init__(
        self,
        name: str,
        model: torch.nn.Module,
        settings: PolicyConfig | ValueConfig,
        *,
        on_non_finite: Literal["stop", "skip"] = "stop",
    ) -> None:
        """Parameters that don't require a gradient at this moment are not trained."""
        self.name = name
        self.model = model
        self.updates = 0
        """Optimizer steps so far; the learning rate depends on it."""
        self._max_grad_norm = settings.max_grad_norm
        self._on_non_finite = on_non_finite
        self._schedule = WarmupSchedule(peak=settings.lr, warmup=settings.warmup_steps)
        eps = settings.adam_eps if isinstance(settings, PolicyConfig) else 1e-8
        self.optimizer: torch.optim.Optimizer = build_optimizer(
            model.parameters(), settings.lr, settings.weight_decay, eps=eps
        )

    def step(
        self, outputs_T: Tensor, rollout_T: Tensor, rollout_ids: Sequence[str], version: int
    ) -> tuple[float, float]:
        """Clip and step; returns the gradient's norm before clipping and the learning rate.

        `outputs_T` are the model's outputs, whose non-finite places name the rollouts to blame. Raises RunError for a
        norm that is not finite, or skips the update, as set; no weight has changed then.
        """
        lr = self._schedule.apply(self.optimizer, self.updates)
        norm = float(clip_by_global_norm_(self.model.parameters(), self._max_grad_norm))
        if norm != norm or norm in (float("inf"), float("-inf")):
            self.optimizer.zero_grad(set_to_none=True)
            bad = (~outputs_T.isfinite()).nonzero().flatten().tolist()
            names = sorted({rollout_ids[int(rollout_T[token])] for token in bad})
            report = (
                f"the gradient norm is {norm} at version {version}; nothing was updated. Rollouts with non-finite "
                f"outputs: {', '.join(names) or 'none, so the loss itself overflowed'}"
            )
            if self._on_non_finite == "stop":
                raise RunError(report)
            _log.warning("this update is skipped: %s", report)
        else:
            fault_point("optimizer:before")
            self.optimizer.step()
            fault_point("optimizer:after")
            self.optimizer.zero_grad(set_to_none=True)
        self.updates += 1
        return norm, lr

    def forget_moments(self) -> None:
        """Start the optimizer anew; learning rate and counter go on."""
        self.optimizer.state.clear()

    def tensors(self, *, copied: bool = True) -> dict[str, Tensor]:
        """All parameters by name."""
        found = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        return {name: tensor.clone() for name, tensor in found.items()} if copied else found

    def optimizer_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The optimizer's part of a snapshot."""
        return optimizer_state(self.optimizer, self.model.named_parameters())

    @torch.no_grad()
    def load(
        self, tensors: dict[str, Tensor], optimizer: tuple[dict[str, Tensor], dict[str, Any]], updates: int
    ) -> None:
        """Take back what `tensors` and `optimizer_state` gave. Raises KeyError or ValueError for another model's."""
        for name, parameter in self.model.named_parameters():
            parameter.copy_(tensors[name])
        load_optimizer_state(self.optimizer, self.model.named_parameters(), *optimizer)
        self.updates = updates
