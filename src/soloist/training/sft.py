"""Supervised stage: imitate demonstrations, token by token. Resumable; its result is a Hugging Face folder.

Guarantees: only tokens that a policy would have sampled are trained (no headers, no observations); the loss is a mean
over all trained tokens of a step; the same seed gives the same demonstrations in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from transformers import PreTrainedModel

from soloist.algorithms.gradients import clip_by_global_norm_
from soloist.config import RunConfig
from soloist.environments.base import Environment
from soloist.errors import RunError
from soloist.metrics import MetricsLog
from soloist.models.loading import load_policy, load_tokenizer, save_folder
from soloist.models.optimizers import WarmupSchedule, build_optimizer, load_optimizer_state, optimizer_state
from soloist.models.packed import packs
from soloist.models.policy import action_log_probs
from soloist.models.rows import MicroBatch, build_micro_batches
from soloist.rollout.rendering import Rendering
from soloist.seams import Clock
from soloist.training.checkpoint import Checkpoints
from soloist.training.observer import Observer
from soloist.training.run_folder import RunFolder

CHECKPOINT_EVERY = 200


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
    batches = Batches(config, environment, rendering, packs(model))
    for step, micros in enumerate(batches.of_steps(first), first):
        lr = schedule.apply(optimizer, step)
        nll = loss_of(model, micros)
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


class Batches:
    """Micro-batches of each step, made on a thread of its own while the step before computes."""

    def __init__(self, config: RunConfig, environment: Environment, rendering: Rendering, packed: bool) -> None:
        self._config = config
        self._environment = environment
        self._rendering = rendering
        self._packed = packed

    def of_steps(self, first: int) -> Iterator[list[MicroBatch]]:
        """Batches of all steps from `first` on, in order."""
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="demonstrations") as thread:
            steps = range(first, self._config.sft.steps)
            coming = [thread.submit(self._of_step, step) for step in steps[:1]]
            for step in steps:
                micros = coming.pop().result()
                if step + 1 in steps:
                    coming.append(thread.submit(self._of_step, step + 1))
                yield micros

    def _of_step(self, step: int) -> list[MicroBatch]:
        size = self._config.sft.batch_size
        sequences, segments, positions = [], [], []
        for row in range(size):
            demonstration = self._environment.demonstration(step * size + row)
            ids, sampled = self._rendering.training_tokens(demonstration.messages, demonstration.tools)
            trained = np.flatnonzero(sampled)
            positions.append(trained[trained > 0])  # nothing predicts the first token
            segments.append(np.full(len(positions[-1]), row))
            sequences.append(np.array(ids, dtype=np.int64))
        return build_micro_batches(
            sequences,
            np.concatenate(segments),
            np.concatenate(positions),
            token_budget=self._config.token_budget,
            packed=self._packed,
            device=self._config.model.device,
        )


def loss_of(model: PreTrainedModel, micros: Sequence[MicroBatch]) -> torch.Tensor:
    """Mean −log π of the trained tokens of a step; gradients are left in the parameters."""
    tokens = sum(len(micro.tokens_t) for micro in micros)
    total = torch.zeros((), device=micros[0].tokens_t.device)
    for micro in micros:
        log_probs_t, _ = action_log_probs(model, micro, temperature=1.0)
        loss = -log_probs_t.sum() / tokens
        loss.backward()
        total += loss.detach()
    return total
