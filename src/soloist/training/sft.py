"""Supervised stage: imitate demonstrations, token by token. Resumable; its result is a Hugging Face folder.

Guarantees: only tokens that a policy would have sampled are trained (no headers, no observations); the loss is a mean
over all trained tokens of a step; the same seed gives the same demonstrations in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from soloist.algorithms.gradients import clip_by_global_norm_
from soloist.config import RunConfig
from soloist.environments.base import Environment
from soloist.errors import RunError
from soloist.metrics import MetricsLog
from soloist.models.loading import load_policy, load_tokenizer, save_folder
from soloist.models.optimizers import WarmupSchedule, build_optimizer, load_optimizer_state, optimizer_state
from soloist.models.policy import action_log_probs
from soloist.rollout.rendering import Rendering
from soloist.seams import Clock
from soloist.training.checkpoint import Checkpoints
from soloist.training.observer import Observer
from soloist.training.run_folder import RunFolder

CHECKPOINT_EVERY = 200


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """One batch of demonstrations, right-padded, and the places of its trained tokens."""

    input_ids_BL: torch.Tensor
    rows_T: torch.Tensor
    positions_T: torch.Tensor


def run_sft(
    config: RunConfig,
    folder: RunFolder,
    environment: Environment,
    rendering: Rendering,
    observer: Observer,
    clock: Clock,
) -> dict[str, float]:
    """Train `sft.steps` steps and write the model folder; returns the last loss. Raises RunError if it diverges."""
    torch.set_num_threads(config.sft.threads)
    model = load_policy(folder.base_model, config.model.dtype, config.model.device)
    optimizer = build_optimizer(model.parameters(), config.sft.lr, config.sft.weight_decay)
    schedule = WarmupSchedule(peak=config.sft.lr, warmup=config.sft.warmup_steps, total=config.sft.steps)
    checkpoints = Checkpoints(folder.sft_checkpoints, keep=1)
    log = MetricsLog(folder.metrics)
    first = _resume(checkpoints, model, optimizer, observer)
    observer.stage_started("sft", config.sft.steps)
    loss = float("nan")
    for step in range(first, config.sft.steps):
        start = step * config.sft.batch_size
        rows = _batch(environment, rendering, range(start, start + config.sft.batch_size), config.model.device)
        lr = schedule.apply(optimizer, step)
        log_probs_T, _ = action_log_probs(model, rows.input_ids_BL, rows.rows_T, rows.positions_T, temperature=1.0)
        nll = -log_probs_T.mean()
        nll.backward()
        norm = float(clip_by_global_norm_(model.parameters(), config.sft.max_grad_norm))
        loss = nll.item()
        if not norm < float("inf"):
            raise RunError(f"sft step {step}: loss {loss}, gradient norm {norm}; lower sft.lr = {config.sft.lr}")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 25 == 0 or step + 1 == config.sft.steps:
            values: dict[str, float | None] = {"sft/loss": loss, "sft/lr": lr}
            log.write("sft", step, clock.now(), values)
            observer.progress("sft", step + 1, values)
        if (step + 1) % CHECKPOINT_EVERY == 0:
            weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
            moments = optimizer_state(optimizer, model.named_parameters())
            checkpoints.save(step + 1, {"model": (weights, {"step": step + 1}), "optimizer": moments})
    save_folder(model, load_tokenizer(folder.base_model), folder.sft_model)
    return {"loss": loss}


def _resume(
    checkpoints: Checkpoints, model: torch.nn.Module, optimizer: torch.optim.Optimizer, observer: Observer
) -> int:
    found = checkpoints.load_newest(observer.note)
    if found is None:
        return 0
    step, parts = found
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(parts["model"][0][name])
    load_optimizer_state(optimizer, model.named_parameters(), *parts["optimizer"])
    observer.note(f"sft goes on at step {step}")
    return step


def _batch(environment: Environment, rendering: Rendering, indices: Sequence[int], device: str) -> _Rows:
    sequences: list[torch.Tensor] = []
    rows: list[int] = []
    positions: list[int] = []
    for row, index in enumerate(indices):
        demonstration = environment.demonstration(index)
        ids, sampled = rendering.training_tokens(demonstration.messages, demonstration.tools)
        sequences.append(torch.tensor(ids))
        trained = [position for position, is_sampled in enumerate(sampled) if is_sampled and position > 0]
        rows += [row] * len(trained)
        positions += trained
    return _Rows(
        input_ids_BL=torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True).to(device),
        rows_T=torch.tensor(rows, device=device),
        positions_T=torch.tensor(positions, device=device),
    )
