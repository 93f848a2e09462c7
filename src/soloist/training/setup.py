"""Builds what a stage needs from the config: the bench (environment, renderer, engines) and the learner.

Guarantees: whatever was started is stopped in every case, engines and sandboxes included; before the first step a probe
compares the engine's log-probabilities with the learner's, so a wrong temperature or processing never trains.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedModel

from soloist.config import RunConfig
from soloist.engines.pool import EngineSet, pinned_engine, sampling_engines
from soloist.environments.base import Environment, keyed_random
from soloist.environments.registry import build_environment
from soloist.errors import RunError, UserError
from soloist.models.loading import load_policy, load_tokenizer
from soloist.models.value import ValueModel
from soloist.rollout.play import EpisodePlayer
from soloist.rollout.rendering import Rendering, build_renderer
from soloist.seams import Clock
from soloist.training.checkpoint import Checkpoints
from soloist.training.evaluation import play_tasks
from soloist.training.learner import Learner
from soloist.training.learner_thread import LearnerThread
from soloist.training.observer import Observer
from soloist.training.run_folder import RunFolder
from soloist.training.samples import Samples
from soloist.types import Sampling, Task, WeightsRef

# |π/μ − 1| that the start-up probe accepts. bf16 engines sample from rounded logits; fp32 ones differ in last bits.
PROBE_LIMIT = {"float32": 1e-4, "bfloat16": 0.2}


def build_rendered(config: RunConfig, model: Path) -> tuple[Environment, Rendering]:
    """Environment and renderer of a run. Raises UserError for names, folders or task files that are wrong."""
    rendering = build_renderer(load_tokenizer(model), config.model.renderer)
    environment = build_environment(
        config.environment, config.seed, good=config.sft.good, miscopied=config.sft.miscopied
    )
    return environment, rendering


@dataclass(kw_only=True)
class Bench:
    """What plays episodes: an environment, a renderer and engines with weights."""

    config: RunConfig
    clock: Clock
    environment: Environment
    rendering: Rendering
    engines: EngineSet
    episodes: EpisodePlayer
    sampling: Sampling


@dataclass(kw_only=True)
class TrainingBench:
    """A bench as training sees it (`durable.Players`)."""

    bench: Bench
    learner: LearnerThread
    folder: Path
    observer: Observer
    _tasks: list[Task] = field(default_factory=list)

    @property
    def engines(self) -> EngineSet:
        """All engines as one."""
        return self.bench.engines

    @property
    def episodes(self) -> EpisodePlayer:
        """Plays one rollout."""
        return self.bench.episodes

    @property
    def sampling(self) -> Sampling:
        """How action tokens are drawn."""
        return self.bench.sampling

    def train_task(self, index: int) -> Task:
        """Training task number `index`; for SPO one that is drawn by how much there is to learn from it."""
        config, environment = self.bench.config, self.bench.environment
        if config.advantage.adv_estimator != "spo":
            return environment.train_task(index)
        if not self._tasks:
            self._tasks = distinct_tasks(environment)
        weights = [self.learner.task_weight(task.task_id) for task in self._tasks]
        return keyed_random(config.seed, "spo", index).choices(self._tasks, weights)[0]

    async def ready(self) -> None:
        """The probe of `probe_parity`, told to the observer."""
        error, engine = await probe_parity(self.bench, self.learner), self.bench.config.engine
        found = "engine and learner agree"
        if engine.noise or engine.rounding != "none":
            found = f"engine weights are altered (noise = {engine.noise:g}, rounding = '{engine.rounding}')"
        self.observer.note(f"{found}: largest |ratio - 1| is {error:.1e}")

    def samples(self, first_step: int) -> Samples:
        """What keeps a few rollouts for the report."""
        text_of, per_step = self.bench.rendering.text_of, self.bench.config.samples
        return Samples(self.folder, per_step, text_of, self.observer.note, first_step=first_step)


def distinct_tasks(environment: Environment) -> list[Task]:
    """Each training task once, in the order of the first epoch. Raises UserError when tasks never repeat."""
    if not environment.distinct_tasks:
        raise UserError(
            f"the tasks of '{environment.name}' never come again, so nothing can be remembered of them; set "
            "environment.distinct_tasks or environment.tasks"
        )
    return [environment.train_task(index) for index in range(environment.distinct_tasks)]


@asynccontextmanager
async def open_bench(
    config: RunConfig,
    model: Path,
    clock: Clock,
    weights: WeightsRef | None = None,
    pinned: bool = False,
) -> AsyncIterator[Bench]:
    """Start environment and engines, load `weights` if given, and stop both at the end. `pinned` means one engine."""
    environment, rendering = build_rendered(config, model)
    if pinned:
        engines = EngineSet([pinned_engine(model, config.engine, fixed_shapes=config.deterministic)])
    else:
        engines = sampling_engines(model, config.engine, fixed_shapes=config.deterministic, seed=config.seed)
    try:
        await asyncio.gather(environment.start(), engines.start())
        if weights is not None:
            await engines.load(weights)
        yield Bench(
            config=config,
            clock=clock,
            environment=environment,
            rendering=rendering,
            engines=engines,
            episodes=EpisodePlayer(
                environment=environment,
                engine=engines,
                rendering=rendering,
                budget=config.rollout,
                max_length=config.engine.max_length,
                clock=clock,
            ),
            sampling=Sampling(
                temperature=config.rollout.temperature,
                max_new_tokens=config.rollout.max_new_tokens,
                stop_token_ids=tuple(rendering.stop_token_ids),
                seed=config.seed,
            ),
        )
    finally:
        await engines.close()
        await environment.close()


def build_learner(config: RunConfig, folder: RunFolder) -> Learner:
    """Policy (and reference) from the SFT folder, value model from its pretraining. Raises UserError or RunError."""
    torch.set_num_threads(config.threads)
    policy = load_policy(folder.sft_model, config.model.dtype, config.model.device)
    reference = None
    if config.loss.kl_coef:
        reference = load_policy(folder.sft_model, config.model.dtype, config.model.device).requires_grad_(False)
    value = _value_model(policy, folder) if config.has_critic else None
    learner = Learner(policy, value, config, reference)
    if config.advantage.spo_offline_samples:
        learner.start_rates(_offline_scores(folder))
    return learner


def _offline_scores(folder: RunFolder) -> dict[str, list[float]]:
    try:
        scores: dict[str, list[float]] = json.loads(folder.success_rates.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(
            f"{folder.success_rates} can't be read ({error}); run `soloist pretrain-value` first, which plays the "
            "tasks for advantage.spo_offline_samples"
        ) from error
    return scores


def _value_model(policy: PreTrainedModel, folder: RunFolder) -> ValueModel:
    value = ValueModel.from_policy(policy)
    found = Checkpoints(folder.value_pretraining / "best").load_newest(lambda text: None)
    if found is None:
        raise RunError(f"{folder.value_pretraining} holds no value model; run `soloist pretrain-value` first")
    with torch.no_grad():
        for name, parameter in value.named_parameters():
            parameter.copy_(found[1]["value"][0][name])
    return value


async def probe_parity(bench: Bench, learner: LearnerThread) -> float:
    """Largest |π/μ − 1| over a few episodes with tool turns.

    Raises RunError when engine and learner disagree, unless `engine.noise` or `engine.rounding` want it so.
    """
    config = bench.config
    tasks = [bench.environment.heldout_task(index) for index in range(4)]
    rollouts = await play_tasks(
        bench.episodes, tasks, sampling=bench.sampling, config=config, clock=bench.clock, prefix="probe"
    )
    usable = [rollout for rollout in rollouts if rollout.trainable]
    error = max(await learner.log_prob_errors(usable), default=0.0)
    limit = max(PROBE_LIMIT[config.model.dtype], PROBE_LIMIT[config.engine.dtype])
    wanted = config.engine.noise > 0 or config.engine.rounding != "none"
    if not error <= limit and not wanted:
        raise RunError(
            f"engine and learner disagree before the first step: some |π/μ − 1| is {error:.3g}, expected ≤ {limit:g} "
            f"at temperature {config.rollout.temperature:g}; the engine must return processed log-probabilities (after "
            "temperature, without top-p or top-k) of the same weights"
        )
    return error
