"""Value pretraining (methods §1.3): fit the value model to the SFT policy's returns, and prove it on held-out ones.

The rollouts are made once and stored; fitting is resumable by epochs. Everything trains, nothing is frozen (Open: the
paper freezes attention "during RL"). The stage stops on a plateau of held-out skill, keeps the best epoch's weights and
fails its gate when the critic is no better than a constant.
Not covered: playing the rollouts (`evaluation.play_tasks`).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from soloist.algorithms.advantages import value_targets
from soloist.algorithms.aggregation import aggregation_weights
from soloist.algorithms.gradients import clip_by_global_norm_
from soloist.algorithms.values import explained_variance, skill, value_loss
from soloist.config import RunConfig
from soloist.environments.base import keyed_random
from soloist.errors import RunError
from soloist.metrics import MetricsLog
from soloist.models.optimizers import build_optimizer, load_optimizer_state, optimizer_state
from soloist.models.packed import packs
from soloist.models.rows import MicroBatch
from soloist.models.value import ValueModel
from soloist.seams import Clock, Storage
from soloist.training.checkpoint import Checkpoints
from soloist.training.observer import Observer
from soloist.training.pack import StepBatch, micro_batches, pack, per_rollout, rollout_arrays
from soloist.types import Rollout


def store_rollouts(path: Path, rollouts: Sequence[Rollout], storage: Storage) -> None:
    """Write rollouts as compressed msgpack, visible whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.staged")
    storage.write(staged, zlib.compress(msgspec.msgpack.encode(list(rollouts)), level=1))
    storage.rename(staged, path)


def stored_rollouts(path: Path) -> list[Rollout] | None:
    """Rollouts of an earlier attempt, or None. Raises RunError for a damaged file, naming it."""
    if not path.is_file():
        return None
    try:
        return msgspec.msgpack.decode(zlib.decompress(path.read_bytes()), type=list[Rollout])
    except (zlib.error, msgspec.DecodeError) as error:
        raise RunError(f"{path} is damaged ({error}); delete it, and the rollouts are made again") from error


def shuffled(rollouts: Sequence[Rollout], seed: int) -> list[Rollout]:
    """The same rollouts with their final rewards permuted, for the control experiment.

    A critic of true rewards would make it no control: where good play has a high value, a random reward is below it on
    average, so the advantages would punish exactly what was right.
    """
    usable = [rollout for rollout in rollouts if rollout.trainable]
    scores = [rollout.score for rollout in usable]
    keyed_random(seed, "shuffle", "value").shuffle(scores)
    return [msgspec.structs.replace(rollout, score=score) for rollout, score in zip(usable, scores, strict=True)]


class ValuePretraining:
    """Fits a value model to stored rollouts.

    Example: `ValuePretraining(value, config, rollouts).run(checkpoints, log, observer, clock)` gives the best figures.
    """

    def __init__(self, value: ValueModel, config: RunConfig, rollouts: Sequence[Rollout]) -> None:
        self._value = value
        self._config = config
        settings = config.value_pretraining
        usable = [rollout for rollout in rollouts if rollout.trainable]
        held_out = max(1, round(len(usable) * settings.holdout))
        if len(usable) <= held_out:
            raise RunError(f"{len(usable)} usable rollouts leave none to train on beside {held_out} held out")
        self._train, self._held_out = usable[held_out:], pack(usable[:held_out], config.model.device)
        self._held_out_micros = self._micro_batches(self._held_out)
        # Every epoch packs the same rollouts, in another order.
        self._arrays = [rollout_arrays(rollout) for rollout in self._train]
        self._optimizer = build_optimizer(value.parameters(), settings.lr, config.value.weight_decay)

    def run(self, checkpoints: Checkpoints, log: MetricsLog, observer: Observer, clock: Clock) -> dict[str, Any]:
        """Fit until the plateau; returns epochs, skill and explained variance. Raises RunError when the gate fails."""
        settings = self._config.value_pretraining
        first, history = self._resume(checkpoints, observer)
        observer.stage_started("pretrain-value", settings.epochs)
        for epoch in range(first, settings.epochs):
            if _plateau(history, settings.patience):
                break
            loss = self._epoch(epoch)
            figures = self._measure()
            history.append(figures)
            values: dict[str, float | None] = {
                "value_pretraining/loss": loss,
                "value_pretraining/skill": figures["skill"],
                "value_pretraining/explained_var": figures["explained_var"],
            }
            log.write("pretrain-value", epoch, clock.now(), values)
            observer.progress("pretrain-value", epoch + 1, values)
            # The best epoch must survive until the stage ends, so as many are kept as the plateau may be long.
            checkpoints.save(epoch + 1, self._parts(history))
        return self._take_best(checkpoints, history)

    def _epoch(self, epoch: int) -> float:
        """One pass over the training rollouts in a seeded order; mean loss of its updates."""
        order = list(range(len(self._train)))
        keyed_random(self._config.seed, "value", epoch).shuffle(order)
        size = self._config.value_pretraining.batch_size
        losses = [self._update(order[start : start + size]) for start in range(0, len(order), size)]
        return sum(losses) / len(losses)

    def _update(self, members: Sequence[int]) -> float:
        rollouts = [self._train[index] for index in members]
        batch = pack(rollouts, self._config.model.device, arrays=[self._arrays[index] for index in members])
        targets_T = self._targets(batch)
        weights_T = aggregation_weights("token-mean", batch.rollout_T, batch.rollouts)
        total = torch.zeros((), device=targets_T.device)
        for micro in self._micro_batches(batch):
            loss = value_loss(self._value.values(micro), targets_T[micro.tokens_t], weights_T[micro.tokens_t])
            loss.backward()
            total += loss.detach()
        norm = float(clip_by_global_norm_(self._value.parameters(), self._config.value.max_grad_norm))
        if not norm < float("inf"):
            raise RunError(f"value pretraining: gradient norm {norm}; lower value_pretraining.lr")
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(total)

    @torch.no_grad()
    def _measure(self) -> dict[str, float | None]:
        """Held-out figures, per rollout: V is averaged over the rollout's tokens, so long ones count no more."""
        batch = self._held_out
        values_T = torch.zeros(batch.tokens, device=self._config.model.device)
        for micro in self._held_out_micros:
            values_T[micro.tokens_t] = self._value.values(micro)
        targets_T = self._targets(batch)
        values_R, targets_R = per_rollout(values_T, batch), per_rollout(targets_T, batch)
        return {
            "skill": skill(values_R, targets_R),
            "explained_var": explained_variance(values_R, targets_R),
            "explained_var_per_token": explained_variance(values_T, targets_T),
        }

    def _micro_batches(self, batch: StepBatch) -> list[MicroBatch]:
        return micro_batches(batch, self._config.token_budget, packed=packs(self._value.backbone))

    def _targets(self, batch: StepBatch) -> Tensor:
        """The Monte-Carlo return of each token."""
        zeros_T = torch.zeros_like(batch.rewards_T)
        gamma = self._config.advantage.gamma
        return value_targets(batch.rewards_T, zeros_T, batch.lengths_R, gamma=gamma, lam=1.0)

    def _parts(self, history: list[dict[str, float | None]]) -> dict[str, tuple[dict[str, Tensor], dict[str, Any]]]:
        weights = {name: parameter.detach() for name, parameter in self._value.named_parameters()}
        moments = optimizer_state(self._optimizer, self._value.named_parameters())
        return {"value": (weights, {}), "optimizer": moments, "progress": ({}, {"history": history})}

    def _resume(self, checkpoints: Checkpoints, observer: Observer) -> tuple[int, list[dict[str, float | None]]]:
        found = checkpoints.load_newest(observer.note)
        if found is None:
            return 0, []
        epoch, parts = found
        self._load(parts["value"][0])
        load_optimizer_state(self._optimizer, self._value.named_parameters(), *parts["optimizer"])
        observer.note(f"pretrain-value goes on after epoch {epoch}")
        return epoch, list(parts["progress"][1]["history"])

    @torch.no_grad()
    def _load(self, tensors: dict[str, Tensor]) -> None:
        for name, parameter in self._value.named_parameters():
            parameter.copy_(tensors[name])

    def _take_best(self, checkpoints: Checkpoints, history: list[dict[str, float | None]]) -> dict[str, Any]:
        if not history:
            raise RunError("value pretraining ran 0 epochs; raise value_pretraining.epochs")
        best = max(range(len(history)), key=lambda epoch: _score(history[epoch]))
        self._load(checkpoints.load(best + 1)["value"][0])
        figures = history[best]
        gate = self._config.value_pretraining.gate
        if figures["skill"] is None:
            raise RunError(
                f"the {self._held_out.rollouts} held-out rollouts all have one return, so the critic can't be judged; "
                "the SFT policy always fails or always succeeds: change sft or the environment's difficulty"
            )
        if not figures["skill"] > gate:
            raise RunError(
                f"the critic's held-out skill is {figures['skill']:.3f}, not above value_pretraining.gate = {gate:g}: "
                "it predicts returns no better than a constant; raise value_pretraining.rollouts or epochs, or mend lr"
            )
        return {"epochs": len(history), "best_epoch": best + 1, "held_out": self._held_out.rollouts} | figures


def _score(figures: dict[str, float | None]) -> float:
    value = figures["skill"]
    return value if value is not None and math.isfinite(value) else float("-inf")


def _plateau(history: Sequence[dict[str, float | None]], patience: int) -> bool:
    """Whether the best epoch lies `patience` epochs back or more."""
    if not history:
        return False
    best = max(range(len(history)), key=lambda epoch: _score(history[epoch]))
    return len(history) - 1 - best >= patience
