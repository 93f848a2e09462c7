"""The stages of a run, in order and resumable: sft → pretrain-value → train → eval. `cli.py` calls `run_stages`.

A stage is done when its summary is in `stages.json`. `run` skips those that are done; a single stage that is done is
refused unless resumed. With more `steps` than before, a resumed run trains on and is evaluated anew. Every stage reads
only what the stages before it left in the run folder.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from soloist.config import RunConfig
from soloist.environments.registry import build_environment
from soloist.errors import RunError, UserError
from soloist.metrics import MetricsLog, mean, read_metrics
from soloist.models.folders import check_model_folder
from soloist.models.loading import load_policy
from soloist.models.tiny import build_tiny
from soloist.models.value import ValueModel
from soloist.seams import Clock, Storage, SystemClock, sha256_of
from soloist.training.checkpoint import Checkpoints
from soloist.training.durable import Job, train_durably
from soloist.training.evaluation import evaluate, play_tasks
from soloist.training.learner_thread import LearnerThread
from soloist.training.observer import Observer, log_as_notes
from soloist.training.origin import record_origin
from soloist.training.pretrain_value import ValuePretraining, shuffled, store_rollouts, stored_rollouts
from soloist.training.run_folder import RunFolder
from soloist.training.setup import Bench, TrainingBench, build_learner, build_rendered, distinct_tasks, open_bench
from soloist.training.sft import run_sft
from soloist.training.weights import PublishedWeights, versions_kept
from soloist.types import Rollout, WeightsRef

T = TypeVar("T")

STAGES = ("sft", "pretrain-value", "train", "eval")
# Tasks of value pretraining lie far away from those of RL, so that the critic is not fitted to RL's first epoch.
PRETRAINING_TASKS = 1_000_000


def run_stages(
    config: RunConfig,
    stages: Sequence[str],
    *,
    resume: bool,
    skip_done: bool,
    observer: Observer,
    clock: Clock | None = None,
) -> dict[str, Any]:
    """Run `stages` in order; returns the summaries by stage.

    Raises UserError (bad input), RunError (the run went wrong) or KeyboardInterrupt; engines and sandboxes are stopped
    in every case.
    """
    folder = RunFolder(config)
    context = _Context(config, folder, observer, clock or SystemClock())
    summaries: dict[str, Any] = {}
    # Models and task files are checked before the folder is marked, so that a corrected retry is not a second run.
    context.check_inputs()
    with folder.locked(), log_as_notes(observer):
        folder.open(config, resume=resume or skip_done, must_exist=resume)
        record_origin(folder.path, stages, context.clock.now())
        for stage in stages:
            finished = folder.done(stage)
            if finished is not None and (skip_done or resume) and _has_all_steps(stage, finished, config):
                observer.note(f"{stage} is done already, skipped")
                summaries[stage] = finished
                continue
            summaries[stage] = _WORK[stage](context)
            folder.mark_done(stage, summaries[stage])
            observer.stage_finished(stage, summaries[stage])
    return summaries


def _has_all_steps(stage: str, finished: dict[str, Any], config: RunConfig) -> bool:
    """Whether a finished stage still is what is asked for: a resumed run may ask for more steps than it had."""
    reached = {"train": "steps", "eval": "version"}.get(stage)
    return reached is None or int(finished.get(reached, 0)) >= config.steps


class _Context:
    """What every stage gets."""

    def __init__(self, config: RunConfig, folder: RunFolder, observer: Observer, clock: Clock) -> None:
        self.config = config
        self.folder = folder
        self.observer = observer
        self.clock = clock
        self.storage = Storage()

    def check_inputs(self) -> None:
        """Raises UserError for a model folder, an environment or a task file that can't work."""
        if self.config.model.path:
            check_model_folder(self.folder.base_model)
        build_environment(self.config.environment, self.config.seed)

    def require_base_model(self) -> Path:
        """The base model's folder; a tiny one is built when the config names none."""
        if not self.config.model.path and not self.folder.base_model.exists():
            build_tiny(self.config.model, self.config.seed, self.folder.base_model)
        return self.folder.base_model

    def require_sft_model(self) -> Path:
        """The folder that RL starts from. Raises UserError when SFT has not been run."""
        if not self.config.sft.steps:
            return self.require_base_model()
        if not self.folder.sft_model.exists():
            raise UserError(f"{self.folder.sft_model} does not exist; run `soloist sft` first, or set sft.steps = 0")
        return self.folder.sft_model


def _sft(context: _Context) -> dict[str, Any]:
    config, folder = context.config, context.folder
    model = context.require_base_model()
    environment, rendering = build_rendered(config, model)
    summary: dict[str, Any] = {"steps": config.sft.steps}
    if config.sft.steps and not folder.sft_model.exists():
        summary |= run_sft(config, folder, environment, rendering, context.observer, context.clock)
    # The figure that RL is measured against, taken where it can't change any more.
    return summary | {"eval": _evaluation_of(context, context.require_sft_model(), None, 0)}


def _pretrain_value(context: _Context) -> dict[str, Any]:
    config, folder = context.config, context.folder
    model = context.require_sft_model()
    if not config.has_critic:
        return _without_critic(context, model)
    path = folder.value_pretraining / "rollouts.msgpack.zlib"
    rollouts = stored_rollouts(path)
    if rollouts is None:
        rollouts = _with_bench(context, model, None, lambda bench: _play_for_critic(context, bench))
        store_rollouts(path, rollouts, context.storage)
    torch.set_num_threads(config.sft.threads)
    value = ValueModel.from_policy(load_policy(model, config.model.dtype, config.model.device))
    fitting = ValuePretraining(value, config, shuffled(rollouts, config.seed) if config.shuffle_rewards else rollouts)
    checkpoints = Checkpoints(
        folder.value_pretraining / "checkpoints", keep=config.value_pretraining.patience + 1, storage=context.storage
    )
    summary = fitting.run(checkpoints, MetricsLog(folder.metrics), context.observer, context.clock)
    weights = {name: parameter.detach() for name, parameter in value.named_parameters()}
    Checkpoints(folder.value_pretraining / "best", keep=1).save(summary["best_epoch"], {"value": (weights, {})})
    return summary | {"rollouts": len(rollouts), "reward": mean(r.reward or 0.0 for r in rollouts if r.trainable)}


def _without_critic(context: _Context, model: Path) -> dict[str, Any]:
    """No value model: nothing to do, unless SPO begins from rollouts of the SFT policy."""
    config, folder = context.config, context.folder
    name, samples = config.advantage.adv_estimator, config.advantage.spo_offline_samples
    if not samples:
        context.observer.note(f"adv_estimator = '{name}' has no value model, nothing to pretrain")
        return {"skipped": f"adv_estimator = '{name}' has no value model"}
    rollouts = _with_bench(context, model, None, lambda bench: _play_for_rates(context, bench))
    scores: dict[str, list[float]] = {}
    for rollout in rollouts:
        if rollout.trainable:
            scores.setdefault(rollout.task_id, []).append(rollout.reward or 0.0)
    context.storage.write(folder.success_rates, json.dumps(scores, indent=1).encode())
    return {"rollouts": len(rollouts), "tasks": len(scores), "reward": mean(s for own in scores.values() for s in own)}


async def _play_for_rates(context: _Context, bench: Bench) -> list[Rollout]:
    """Each distinct task `spo_offline_samples` times, as the SFT policy plays it."""
    tasks = distinct_tasks(bench.environment) * context.config.advantage.spo_offline_samples
    context.observer.stage_started("rollouts for the success rates", len(tasks))
    return await play_tasks(
        bench.episodes, tasks, sampling=bench.sampling, config=context.config, clock=context.clock, prefix="s",
        progress=_every(64, context.observer, "rollouts for the success rates"),
    )  # fmt: skip


async def _play_for_critic(context: _Context, bench: Bench) -> list[Rollout]:
    config = context.config
    count = config.value_pretraining.rollouts
    context.observer.stage_started("rollouts for the critic", count)
    tasks = [bench.environment.train_task(PRETRAINING_TASKS + index) for index in range(count)]
    return await play_tasks(
        bench.episodes,
        tasks,
        sampling=bench.sampling,
        config=config,
        clock=context.clock,
        prefix="v",
        progress=_every(64, context.observer, "rollouts for the critic"),
    )


def _train(context: _Context) -> dict[str, Any]:
    config, folder = context.config, context.folder
    model = context.require_sft_model()
    learner = LearnerThread(build_learner(config, folder))

    @asynccontextmanager
    async def open_players(weights: WeightsRef) -> AsyncIterator[TrainingBench]:
        async with open_bench(config, model, context.clock, weights) as bench:
            yield TrainingBench(bench=bench, learner=learner, folder=folder.path, observer=context.observer)

    job = Job(
        config=config,
        folder=folder,
        learner=learner,
        snapshots=Checkpoints(folder.checkpoints, storage=context.storage),
        weights=PublishedWeights(folder.weights, model, keep=versions_kept(config)),
        open_players=open_players,
        observer=context.observer,
        clock=context.clock,
    )
    _run(train_durably(job))
    return _train_summary(context)


def _train_summary(context: _Context) -> dict[str, Any]:
    # From the disk, so that a run that was resumed is summed up whole; what was trained again counts as trained last.
    records = {record["step"]: record for record in read_metrics(context.folder.metrics, "train")}
    last: dict[str, Any] = records.get(context.config.steps - 1, {})

    def average(name: str) -> float | None:
        return mean(record.get(name) for record in records.values())

    return {
        "steps": context.config.steps,
        "reward": last.get("reward/mean"),
        "mean_staleness": average("off_policy/staleness/mean"),
        "spanning_fraction": average("off_policy/spanning_frac"),
        "masked_frac": average("dis/masked_frac"),
        "loop_delay_p99_ms": last.get("loop/delay_p99_ms"),
    }


def _eval(context: _Context) -> dict[str, Any]:
    model = context.require_sft_model()
    newest = PublishedWeights(context.folder.weights, model).newest()
    if newest is None:
        return _evaluation_of(context, model, None, 0)
    version = int(newest.name.removeprefix("step_"))
    path = newest / "model.safetensors"
    return _evaluation_of(context, model, WeightsRef(path=str(path), version=version, sha256=sha256_of(path)), version)


def _evaluation_of(context: _Context, model: Path, weights: WeightsRef | None, version: int) -> dict[str, Any]:
    """Held-out evaluation on a pinned engine; also a metric."""
    config = context.config

    async def work(bench: Bench) -> dict[str, Any]:
        tasks = [bench.environment.heldout_task(index) for index in range(config.eval.problems)]
        context.observer.stage_started("eval", len(tasks) * config.eval.samples)
        return await evaluate(
            bench.episodes,
            tasks,
            config=config,
            stop_token_ids=bench.sampling.stop_token_ids,
            clock=context.clock,
            version=version,
            progress=_every(256, context.observer, "eval"),
        )

    result: dict[str, Any] = _with_bench(context, model, weights, work, pinned=True)
    name = f"eval/{config.environment.name}/avg@{config.eval.samples}"
    MetricsLog(context.folder.metrics).write("eval", version, context.clock.now(), {name: result["avg"]})
    return result


def _every(count: int, observer: Observer, stage: str) -> Callable[[int, Sequence[Rollout]], None]:
    def progress(done: int, rollouts: Sequence[Rollout]) -> None:
        if done % count == 0:
            scored = [rollout.reward or 0.0 for rollout in rollouts if rollout.trainable]
            observer.progress(stage, done, {"reward/mean": mean(scored)})

    return progress


def _with_bench(
    context: _Context,
    model: Path,
    weights: WeightsRef | None,
    work: Callable[[Bench], Awaitable[Any]],
    pinned: bool = False,
) -> Any:
    """Run `work` with engines and environment around it. The first error inside is raised as it is."""

    async def main() -> Any:
        async with open_bench(context.config, model, context.clock, weights, pinned) as bench:
            return await work(bench)

    return _run(main())


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` in an event loop. The first error of its task groups is raised as it is."""
    try:
        return asyncio.run(work)
    except BaseExceptionGroup as group:
        raise _first_cause(group) from group


def _first_cause(error: BaseException) -> BaseException:
    """The error that ended a TaskGroup: one with a message for people if there is one."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    causes = [_first_cause(inner) for inner in error.exceptions]
    return next((cause for cause in causes if isinstance(cause, RunError | UserError)), causes[0])


_WORK: dict[str, Callable[[_Context], dict[str, Any]]] = {
    "sft": _sft,
    "pretrain-value": _pretrain_value,
    "train": _train,
    "eval": _eval,
}
