"""`soloist replay`: trains again from the rollouts that a run stored, in the order on record, without any engine.

With the settings of the run it says of every step whether all bits came out as recorded, which they do on the same
machine with the same versions of everything. With changed settings it is an offline what-if: the same experience under
another loss. Guarantees: the run is only read; results lie in a folder of their own beside it.
Not covered: what other weights would have sampled (a what-if trains on the old policy's rollouts), and rollouts whose
payloads `keep_rollouts` has let go.
"""

from __future__ import annotations

import asyncio
import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from soloist.config import RunConfig, build_config
from soloist.config_files import apply_overrides, dump_config
from soloist.errors import RunError, UserError
from soloist.estimators import ADV_ESTIMATORS
from soloist.metrics import MetricsLog
from soloist.runtime.ledger import StoredStep, read_step_rollouts, read_steps
from soloist.seams import Clock, Storage, SystemClock
from soloist.training.learner_thread import LearnerThread
from soloist.training.observer import Observer
from soloist.training.retraining import retrain
from soloist.training.run_folder import RunFolder
from soloist.training.setup import build_learner
from soloist.training.statistics import rollout_metrics
from soloist.training.weights import PublishedWeights

CHANGEABLE = ("policy", "loss", "advantage", "value", "token_budget", "threads", "shuffle_rewards", "health")
"""Keys (or sections) that training from stored rollouts reads; others would change nothing."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """How a replay went.

    Example: `Replay(run="runs/a", folder="runs/a-replay", changes={}, steps=40, equal=40, first_difference=None)`.
    """

    run: str
    folder: str
    """Where metrics and final weights of the replay lie."""
    changes: dict[str, str]
    steps: int
    equal: int
    """Steps whose state has the recorded hash."""
    first_difference: int | None
    """First step whose state is another one; None when all are equal."""

    def describe(self) -> str:
        """The outcome in one sentence."""
        if self.first_difference is None:
            return f"all {self.steps} steps gave the recorded bits"
        return f"equal bits for {self.equal} of {self.steps} steps, different from step {self.first_difference} on"


def replay(
    run: Path,
    observer: Observer,
    *,
    to_step: int | None = None,
    changes: Mapping[str, str] | None = None,
    clock: Clock | None = None,
) -> Replay:
    """Train steps 0 … `to_step` again (all when None) with dotted `changes` of the config.

    Raises UserError for changes that can't matter or steps that are not there; RunError when payloads are missing, or
    when nothing was changed and a step gave other bits (the folder is complete then, too).
    """
    changes = dict(changes or {})
    config, ledger = _config_of(run, changes), run / "ledger.sqlite"
    chain = read_steps(ledger)
    if to_step is not None and not 0 <= to_step < len(chain):
        raise UserError(f"--to {to_step} is not a step of {run}, which has 0 … {len(chain) - 1}; name one of those")
    chain = chain[: None if to_step is None else to_step + 1]
    if not chain:
        raise UserError(f"{run} has no committed step, so there is nothing to replay; train it first")
    folder = _new_folder(run)
    (folder / "config.resolved.toml").write_text(dump_config(config), encoding="utf-8")
    observer.stage_started("replay", len(chain))
    equal = asyncio.run(_train_again(config, RunFolder(config), folder, chain, observer, clock or SystemClock()))
    different = [step for step, same in enumerate(equal) if not same]
    found = Replay(
        run=str(run),
        folder=str(folder),
        changes=changes,
        steps=len(chain),
        equal=sum(equal),
        first_difference=different[0] if different else None,
    )
    Storage().write(folder / "replay.json", json.dumps(asdict(found), indent=1).encode())
    if different and not changes:
        raise RunError(
            f"{found.describe()}, although nothing was changed; another machine, library version or number of threads "
            f"does that (lineages of the run: see `soloist fates {run}`)"
        )
    return found


async def _train_again(
    config: RunConfig, source: RunFolder, folder: Path, chain: list[StoredStep], observer: Observer, clock: Clock
) -> list[bool]:
    """Whether the state after each step is the recorded one."""
    log, learner = MetricsLog(folder / "metrics.jsonl"), LearnerThread(build_learner(config, source))
    equal: list[bool] = []
    try:
        for stored in chain:
            rollouts = await asyncio.to_thread(read_step_rollouts, source.ledger, stored.step)
            metrics = await retrain(learner, stored.step, rollouts, config.value_updates)
            equal.append(await learner.fingerprint() == stored.state_hash)
            metrics = rollout_metrics(rollouts, stored.step, clock.now()) | metrics
            # How long they had waited is no longer known: the clock has moved on since.
            metrics["queue/age_s"] = None
            log.write("train", stored.step, clock.now(), metrics)
            observer.progress("replay", stored.step + 1, metrics)
        await learner.publish(PublishedWeights(folder / "weights", source.sft_model).folder_of(learner.version))
    finally:
        await learner.close()
    return equal


def _config_of(run: Path, changes: Mapping[str, str]) -> RunConfig:
    """The run's own config with the changes. Raises UserError."""
    path = run / "config.resolved.toml"
    useless = [key for key in changes if key.split(".")[0] not in CHANGEABLE]
    if useless:
        raise UserError(
            f"--set {useless[0]} = {changes[useless[0]]!r} can't matter when stored rollouts are trained again; give "
            f"keys of {', '.join(CHANGEABLE)}"
        )
    try:
        raw: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} can't be read ({error}); name the folder of a run that was trained") from error
    # A run may have been moved or copied since.
    place = {"runs_dir": str(run.resolve().parent), "name": run.resolve().name}
    return build_config(apply_overrides(without_old_method(raw, changes) | place, dict(changes)), source=str(path))


def without_old_method(raw: dict[str, Any], changes: Mapping[str, str]) -> dict[str, Any]:
    """A resolved config says what its methods default to; another method has defaults of its own."""
    kept, own = dict(raw), raw.get("loss", {}).get("policy_loss")
    if changes.get("loss.policy_loss", own) != own:
        shared = ("kl_coef", "entropy_coef")
        kept["loss"] = {key: value for key, value in raw.get("loss", {}).items() if key in shared}
    name, own = changes.get("advantage.adv_estimator"), raw.get("advantage", {}).get("adv_estimator")
    estimator = None if name is None or name == own else ADV_ESTIMATORS.get(name)
    if estimator is not None:
        read = ("overlong_buffer", *estimator.settings, *(() if estimator.whitens else ("whiten",)))
        kept["advantage"] = {key: value for key, value in raw.get("advantage", {}).items() if key in read}
    if estimator is not None and not estimator.critic:
        kept = {key: value for key, value in kept.items() if key not in ("value", "value_pretraining")}
    return kept


def _new_folder(run: Path) -> Path:
    """`RUN-replay`, or `-replay-2` and so on when that exists."""
    run = run.resolve()
    number = 1
    while True:
        folder = run.with_name(f"{run.name}-replay" + (f"-{number}" if number > 1 else ""))
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
            continue
        return folder
