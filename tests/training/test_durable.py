"""Durable training with a numeric stand-in for the learner: death at every fault point, lineages, damaged snapshots.

The stand-in's state is a hash of everything that it was given in its order, so that equal states mean equal training.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import sqlite3
import subprocess
import sys
import time
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from soloist.config import RunConfig, build_config
from soloist.errors import RunError, UserError
from soloist.metrics import read_metrics
from soloist.runtime.ledger import read_counts, read_lineages, read_rollouts, read_steps
from soloist.seams import Storage, installed_faults
from soloist.training import run as run_module
from soloist.training.durable import Job, train_durably
from soloist.training.run_folder import RunFolder
from soloist.training.snapshots import SnapshotFolder
from soloist.training.weights import PublishedWeights, versions_kept
from soloist.types import Failure, Rollout, Sampling, Segment, Task, VersionSpan, WeightsRef

STEPS, SIZE, EVERY = 6, 3, 2


class NumericLearner:
    """Remembers by hashing; `salt` makes it another machine."""

    tokens = None

    def __init__(self, salt: str = "") -> None:
        self.version, self.policy, self.value, self.salt = 0, "", "", salt

    def prepare(self, rollout: Rollout) -> None:
        pass

    async def update_value(self, rollouts: Sequence[Rollout]) -> dict[str, float | None]:
        self.value = digest(self.value, self.salt, *map(content, rollouts))
        return {"critic/loss": 1.0}

    async def update_policy(self, rollouts: Sequence[Rollout]) -> dict[str, float | None]:
        self.policy = digest(self.policy, self.value, *map(content, rollouts))
        self.version += 1
        return {"actor/pg_loss": 0.5}

    async def fingerprint(self) -> str:
        return digest(self.policy, self.value, str(self.version))

    async def publish(self, folder: Path) -> WeightsRef:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.safetensors").write_text(self.policy)
        return WeightsRef(path=str(folder), version=self.version, sha256=self.policy)

    async def state(self) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
        return {"policy": ({"p": self.policy}, {"version": self.version}), "value": ({"v": self.value}, {})}

    async def load_state(self, state: dict[str, tuple[dict[str, Any], dict[str, Any]]]) -> None:
        self.policy, self.version = state["policy"][0]["p"], state["policy"][1]["version"]
        self.value = state["value"][0]["v"]

    async def close(self) -> None:
        pass


class Stage:
    """Engines, episodes and tasks in one; `mood(rollout)` may delay or break a rollout."""

    def __init__(self, mood: Callable[[Rollout], Any]) -> None:
        self.engines = self.episodes = self
        self.sampling = Sampling()
        self.version = 0
        self.mood = mood

    def version_for(self, rollout_id: str) -> int:
        return self.version

    def engine_of(self, rollout_id: str) -> str:
        return "numeric"

    async def load(self, weights: WeightsRef) -> None:
        self.version = weights.version

    async def abort(self, rollout_ids: list[str] | None = None) -> None:
        pass

    async def health(self) -> dict[str, Any]:
        return {}

    def train_task(self, index: int) -> Task:
        return Task(task_id=f"t{index}", environment="numbers", data={})

    async def ready(self) -> None:
        pass

    def samples(self, first_step: int) -> None:
        return None

    async def play(
        self, rollout: Rollout, task: Task, slot: int | None = None, progress: Callable[[str], None] = print
    ) -> Rollout:
        progress("a number")
        version = self.version
        broken = await self.mood(rollout)
        if broken:
            failure = Failure(boundary="environment", reason="moody")
            return msgspec.structs.replace(rollout, status="failed", state="finished", failure=failure)
        segment = Segment(
            token_ids=[1, 100 * rollout.place + version],
            action_mask=[False, True],
            rollout_log_probs=[None, -0.5],
            version_spans=[VersionSpan(version=version, start=1, end=2)],
        )
        score = float(rollout.place % 3 == 0)
        return msgspec.structs.replace(rollout, status="completed", state="scored", segments=[segment], score=score)


async def calm(rollout: Rollout) -> bool:
    await asyncio.sleep(0)
    return False


def moods(seed: int) -> Callable[[Rollout], Any]:
    """Rollouts of random length; one in ten breaks."""
    rng = random.Random(seed)

    async def mood(rollout: Rollout) -> bool:
        for _ in range(rng.randint(0, 8)):
            await asyncio.sleep(0)
        return rng.random() < 0.1

    return mood


def digest(*parts: str) -> str:
    return hashlib.sha256("/".join(parts).encode()).hexdigest()


def content(rollout: Rollout) -> str:
    return f"{rollout.place}:{rollout.segments}"


def config_for(folder: Path, **changes: Any) -> RunConfig:
    """A deterministic run, synchronous unless a `lag` or another bound is given."""
    raw: dict[str, Any] = {
        "runs_dir": str(folder), "name": "run", "steps": STEPS, "rollouts_per_step": SIZE, "players": 4,
        "checkpoint_every": EVERY, "deterministic": True,
        "rollout": {"retry_seconds": 0, "attempts": 50}, "health": {"max_failed_ratio": 1.0},
    }  # fmt: skip
    if changes.get("lag") is None:
        raw["max_staleness"] = 0
    return build_config(raw | changes, "test")


def snapshots_of(config: RunConfig, storage: Storage | None = None) -> SnapshotFolder:
    return SnapshotFolder(
        RunFolder(config).checkpoints, lambda tensors: json.dumps(tensors).encode(), json.loads, storage=storage
    )


def trained(
    config: RunConfig,
    mood: Callable[[Rollout], Any] = calm,
    salt: str = "",
    storage: Storage | None = None,
    learner: NumericLearner | None = None,
    stage: type[Stage] = Stage,
) -> tuple[str, list[str]]:
    """Train in the config's folder; returns the learner's hash and what the run said."""
    folder = RunFolder(config)
    folder.path.mkdir(parents=True, exist_ok=True)
    base = folder.path / "base"
    base.mkdir(exist_ok=True)
    learner, said = learner or NumericLearner(salt), Notes()

    @asynccontextmanager
    async def open_players(weights: WeightsRef) -> AsyncIterator[Stage]:
        players = stage(mood)
        await players.load(weights)
        yield players

    job = Job(
        config=config, folder=folder, learner=learner, snapshots=snapshots_of(config, storage),
        weights=PublishedWeights(folder.weights, base, keep=versions_kept(config)), open_players=open_players,
        observer=said,
    )  # fmt: skip
    asyncio.run(train_durably(job))
    return asyncio.run(learner.fingerprint()), said.notes


class Notes:
    """An observer that remembers what it was told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def stage_started(self, stage: str, total: int) -> None:
        pass

    def progress(self, stage: str, step: int, values: Any) -> None:
        pass

    def stage_finished(self, stage: str, summary: Any) -> None:
        pass

    def note(self, text: str) -> None:
        self.notes.append(text)


class Dead(BaseException):
    """From a fault point on nothing more gets past any fault point, as in a process that was killed."""


def dying_at(number: int, names: list[str]) -> Callable[[str], None]:
    def plan(name: str) -> None:
        names.append(name)
        if len(names) >= number:
            raise Dead(name)

    return plan


def survives(config: RunConfig, mood: Callable[[Rollout], Any], deaths: Sequence[int]) -> str:
    """Train, dying at the n-th fault point of each life in turn, until a life ends by itself."""
    for number in deaths:
        try:
            with installed_faults(dying_at(number, [])):
                return trained(config, mood)[0]
        except BaseException as error:
            if "Dead" not in repr(error):
                raise
    return trained(config, mood)[0]


def check_history(config: RunConfig) -> None:
    """R1, R5: from the durable history alone. Nothing lost, nothing twice, everything explained."""
    path = RunFolder(config).ledger
    steps, rows = read_steps(path), list(read_rollouts(path, payloads=False))
    assert [step.step for step in steps] == list(range(config.steps))
    names = [name for step in steps for name in step.rollout_ids]
    assert len(names) == len(set(names)) == config.steps * config.rollouts_per_step
    by_step = {s.step: [(row.position, row.rollout_id) for row in rows if row.step == s.step] for s in steps}
    assert all([name for _, name in sorted(by_step[s.step])] == s.rollout_ids for s in steps)
    counts = read_counts(path)
    assert sum(counts["attempts"].values()) == len(rows)
    assert counts["attempts"]["trained"] == len(names)
    with closing(sqlite3.connect(path)) as db:
        tasks = dict(db.execute("SELECT unit, state FROM tasks").fetchall())
    assert sorted(tasks) == list(range(len(tasks))), "no prompt is skipped"
    units = {int(name[1:]) // config.group_size for name in names}
    assert {unit for unit, state in tasks.items() if state == "trained"} == units
    for row in rows:
        assert row.fate is not None or row.state in ("running", "scored"), row


def test_the_loop_and_the_run_load_without_torch() -> None:
    code = "import sys, soloist.training.durable; print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert done.stderr == ""


def staleness_in(config: RunConfig) -> dict[int, set[int]]:
    """Staleness values of each step's trained rollouts, from the ledger."""
    found: dict[int, set[int]] = {}
    for row in read_rollouts(RunFolder(config).ledger, state="trained"):
        assert row.rollout is not None
        assert row.step is not None
        found.setdefault(row.step, set()).update(row.step - span.version for span in row.rollout.spans())
    return found


@pytest.mark.timeout(240)
@pytest.mark.parametrize("lag", [None, 2])
def test_a_run_that_dies_once_at_any_fault_point_ends_with_the_same_bits(tmp_path: Path, lag: int | None) -> None:
    """R1, R2, RB-103, RB-106: every named instant in turn, around every write, sync, rename, update and publish."""
    names: list[str] = []
    straight = config_for(tmp_path / "straight", lag=lag)
    with installed_faults(dying_at(10**9, names)):
        expected, _ = trained(straight)
    check_history(straight)
    must = {"ledger:rollouts", "ledger:commit", "ledger:sealed", "update_policy", "commit", "weight_sync", "checkpoint"}
    assert {f"{name}:{when}" for name in must for when in ("before", "after")} <= set(names)
    assert {"publish:written", "publish:loaded", "rename:step_2", "write:manifest.json", "sync:.staged_2"} <= set(names)
    # The first of each kind, and as many others as time allows.
    firsts = {name: number for number, name in reversed(list(enumerate(names, start=1)))}
    others = random.Random(0).sample(range(1, len(names) + 1), 25)
    for number in sorted({*firsts.values(), *others}):
        config = config_for(tmp_path / f"{number}", lag=lag)
        assert survives(config, calm, [number]) == expected, names[number - 1]
        check_history(config)
        assert staleness_in(config) == {step: {min(step, lag or 0)} for step in range(STEPS)}, names[number - 1]


@pytest.mark.parametrize("lag", [0, 1, 3, 9])
@pytest.mark.parametrize("seed", range(6))
def test_ten_deaths_and_another_number_of_players_change_no_bit(tmp_path: Path, seed: int, lag: int) -> None:
    """R2: deterministic mode, dying at random points, some of them during recovery, with rollouts that break."""
    rng = random.Random(seed)
    expected, _ = trained(config_for(tmp_path / "straight", lag=lag))
    config = config_for(tmp_path / "dying", lag=lag, players=1 + seed)
    assert survives(config, moods(seed), [rng.randint(2, 60) for _ in range(10)]) == expected
    check_history(config)
    assert staleness_in(config) == {step: {min(step, lag)} for step in range(STEPS)}
    assert {record["step"] for record in read_metrics(RunFolder(config).metrics, "train")} == set(range(STEPS))


@pytest.mark.parametrize("on_stale", ["wait", "drop", "train"])
@pytest.mark.parametrize("seed", range(4))
def test_asynchronous_runs_lose_nothing_keep_the_bound_and_replay_to_the_same_bits(
    tmp_path: Path, on_stale: str, seed: int
) -> None:
    """R1, R4, RB-089, RB-091: whatever order rollouts arrive in, in every mode, through ten deaths, groups included."""
    rng = random.Random(seed)
    sizes = {"rollouts_per_step": 4, "group_size": 1 + seed % 2, "max_staleness": 1 + seed // 2, "on_stale": on_stale}
    config = config_for(tmp_path, deterministic=False, players=7, **sizes)
    final = survives(config, moods(seed), [rng.randint(2, 120) for _ in range(10)])
    check_history(config)
    learner = NumericLearner()
    for step in read_steps(RunFolder(config).ledger):
        stored = {row.rollout_id: row for row in read_rollouts(RunFolder(config).ledger, step=step.step)}
        rollouts = [stored[name].rollout for name in step.rollout_ids]
        assert all(rollout is not None for rollout in rollouts)
        lags = [step.step - (row.oldest_version or 0) for row in stored.values()]
        assert min(lags) >= 0
        assert on_stale == "train" or max(lags) <= config.max_staleness
        for update in (learner.update_value, learner.update_value, learner.update_policy):
            asyncio.run(update([rollout for rollout in rollouts if rollout is not None]))
        assert asyncio.run(learner.fingerprint()) == step.state_hash
    assert asyncio.run(learner.fingerprint()) == final


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("seed", range(4))
def test_uniform_groups_stay_dropped_through_ten_deaths_and_change_no_bit(tmp_path: Path, seed: int, lag: int) -> None:
    """A third of the groups: neither played again nor lost, and the next tasks take their places in order."""
    rng = random.Random(seed)
    mode: dict[str, Any] = {
        "lag": lag, "rollouts_per_step": 4, "group_size": 2, "advantage": {"drop_uniform_groups": True}
    }  # fmt: skip
    straight, config = config_for(tmp_path / "straight", **mode), config_for(tmp_path / "dying", players=7, **mode)
    expected, _ = trained(straight)
    assert survives(config, moods(seed), [rng.randint(2, 60) for _ in range(10)]) == expected
    check_history(config)
    assert staleness_in(config) == {step: {min(step, lag)} for step in range(STEPS)}
    with closing(sqlite3.connect(RunFolder(config).ledger)) as db:
        uniform = dict(db.execute("SELECT unit, reason FROM tasks WHERE state = 'uniform'").fetchall())
        rows = db.execute("SELECT unit, fate, reward FROM rollouts WHERE reason = 'uniform'").fetchall()
        again = db.execute(
            "SELECT unit FROM rollouts GROUP BY place HAVING sum(reason = 'uniform') > 0 AND max(lease) != "
            "max(CASE WHEN reason = 'uniform' THEN lease END)"
        ).fetchall()
    last = max(int(name[1:]) // 2 for step in read_steps(RunFolder(config).ledger) for name in step.rollout_ids)
    assert {unit for unit in uniform if unit < last} == {unit for unit in range(last) if unit % 3 == 2}
    assert set(uniform.values()) == {"all rewards are 0"}
    assert sorted(rows) == [(unit, "dropped", 0.0) for unit in sorted(uniform) for _ in range(2)]
    assert again == []


@pytest.mark.parametrize("lag", [0, 1, 2, 4])
def test_a_second_resume_goes_on_where_the_first_one_ended(tmp_path: Path, lag: int) -> None:
    """RB-094, RB-095: more steps are asked for twice; the log says where it goes on and with which tasks."""
    expected, _ = trained(config_for(tmp_path / "straight", steps=9, lag=lag))
    for steps in (3, 5):
        trained(config_for(tmp_path / "parts", steps=steps, lag=lag))
    found, said = trained(config_for(tmp_path / "parts", steps=9, lag=lag))
    assert found == expected
    assert said[0].startswith("train goes on at step 5: snapshot of step 5, 0 recorded steps trained again")
    with pytest.raises(UserError, match="has 9 steps already, found steps = 4"):
        trained(config_for(tmp_path / "parts", steps=4))


def die_in(config: RunConfig, when: Callable[[list[str]], bool], salt: str = "") -> None:
    """Train until the names of the fault points so far fulfil a condition, and die there."""
    seen: list[str] = []

    def plan(name: str) -> None:
        seen.append(name)
        if when(seen):
            raise Dead(name)

    with installed_faults(plan), pytest.raises((Dead, BaseExceptionGroup)):
        trained(config, salt=salt)


def after_the_first_snapshot(seen: list[str]) -> bool:
    """With a snapshot of step 3 and at least the steps 3 and 4 committed after it."""
    return seen.count("commit:after") >= 5 and "ledger:sealed:after" in seen


def test_another_machine_begins_a_lineage_and_says_so(tmp_path: Path) -> None:
    """Steps after the snapshot come out differently: their rollouts stay trained, and the new hashes are on record."""
    config = config_for(tmp_path, checkpoint_every=3, steps=8)
    die_in(config, after_the_first_snapshot)
    first = {step.step: step.state_hash for step in read_steps(RunFolder(config).ledger)}
    _, said = trained(config, salt="other machine")
    assert [line.partition(":")[0] for line in said if "lineage" in line] == ["lineage 2 begins"]
    assert "step 3 trained again gave hash" in said[0]
    check_history(config)
    steps = read_steps(RunFolder(config).ledger)
    assert [step.lineage for step in steps] == [1, 1, 1, 2, 2, 2, 2, 2]
    assert [step.state_hash == first[step.step] for step in steps[:5]] == [True, True, True, False, False]
    assert [one.first_step for one in read_lineages(RunFolder(config).ledger)] == [0, 3]


def test_a_death_while_a_lineage_is_written_needs_no_third_one(tmp_path: Path) -> None:
    config = config_for(tmp_path, checkpoint_every=3, steps=8)
    die_in(config, after_the_first_snapshot)
    die_in(config, lambda seen: seen.count("ledger:lineage:before") == 3, salt="other machine")
    assert [step.lineage for step in read_steps(RunFolder(config).ledger)][:5] == [1, 1, 1, 2, 1]
    trained(config, salt="other machine")
    assert [one.lineage for one in read_lineages(RunFolder(config).ledger)] == [1, 2]
    assert [step.lineage for step in read_steps(RunFolder(config).ledger)] == [1, 1, 1, 2, 2, 2, 2, 2]


@pytest.mark.parametrize("damage", ["truncate", "delete manifest", "flip", "foreign hash"])
def test_a_damaged_snapshot_is_named_and_the_one_before_retrains_more(tmp_path: Path, damage: str) -> None:
    """R3, RB-098, RB-099, RB-104: whatever happened to the newest one, the bits are the same in the end."""
    expected, _ = trained(config_for(tmp_path / "straight", steps=8))
    config = config_for(tmp_path / "damaged")
    trained(config)
    newest = RunFolder(config).checkpoints / "step_6"
    if damage == "truncate":
        (newest / "policy.safetensors").write_bytes((newest / "policy.safetensors").read_bytes()[:9])
    elif damage == "flip":
        (newest / "value.json").write_bytes(b"{ }")
    elif damage == "delete manifest":
        (newest / "manifest.json").unlink()
    else:
        parts = snapshots_of(config).load(6)
        parts["progress"][1]["state_hash"] = "of another lineage"
        snapshots_of(config).save(6, parts)
    found, said = trained(config_for(tmp_path / "damaged", steps=8))
    assert found == expected
    assert "step_6" in said[0]
    assert "skipped" in said[0]
    assert said[1].startswith("train goes on at step 6: snapshot of step 4, 2 recorded steps trained again")


def test_without_any_snapshot_everything_is_trained_again_from_the_stored_rollouts(tmp_path: Path) -> None:
    expected, _ = trained(config_for(tmp_path / "straight", steps=7))
    config = config_for(tmp_path / "bare")
    trained(config)
    for step in snapshots_of(config).steps():
        (RunFolder(config).checkpoints / f"step_{step}" / "manifest.json").write_text("{}")
    found, said = trained(config_for(tmp_path / "bare", steps=7))
    assert found == expected
    assert said[2].startswith("train goes on at step 6: snapshot of step 0, 6 recorded steps trained again")


def test_payloads_stay_as_long_as_the_older_snapshot_needs_them(tmp_path: Path) -> None:
    """R13: keep_rollouts = 0 keeps what a resume may need, also when the newest snapshot is damaged, and no more."""
    expected, _ = trained(config_for(tmp_path / "straight", steps=8))
    config = config_for(tmp_path / "pruned", keep_rollouts=0)
    trained(config)
    kept = {row.step for row in read_rollouts(RunFolder(config).ledger, state="trained") if row.rollout is not None}
    assert kept == {4, 5}
    (RunFolder(config).checkpoints / "step_6" / "manifest.json").unlink()
    again = config_for(tmp_path / "pruned", keep_rollouts=0, steps=8)
    assert trained(again)[0] == expected
    assert snapshots_of(config).steps() == [4, 8], "the one before is a good one"
    (RunFolder(config).checkpoints / "step_4" / "manifest.json").unlink()
    (RunFolder(config).checkpoints / "step_8" / "manifest.json").unlink()
    with pytest.raises(RunError, match="step 0 can't be trained again: the tokens of 3 of its 3 rollouts"):
        trained(config_for(tmp_path / "pruned", steps=9))


class FullDisk(Storage):
    """No space for the manifests of some steps."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def put(self, path: Path, data: bytes) -> None:
        if path.name == "manifest.json" and path.parent.name in {f".staged_{step}" for step in self.steps}:
            raise OSError(28, "No space left on device")
        super().put(path, data)


def test_a_full_disk_costs_a_snapshot_and_no_step_but_is_an_error_at_the_end(tmp_path: Path) -> None:
    _, said = trained(config_for(tmp_path / "middle"), storage=FullDisk(2))
    assert [line for line in said if "could not be written" in line] == [
        "snapshot of step 2 could not be written ([Errno 28] No space left on device); training goes on, with the "
        "snapshot before"
    ]
    check_history(config_for(tmp_path / "middle"))
    with pytest.raises(RunError, match=r"snapshot of step 6 could not be written .* go on with --resume"):
        trained(config_for(tmp_path / "end"), storage=FullDisk(6))
    found, said = trained(config_for(tmp_path / "end"))
    assert snapshots_of(config_for(tmp_path / "end")).steps() == [4, 6]
    assert found == trained(config_for(tmp_path / "straight"))[0]


def test_a_rollout_that_hangs_loses_its_lease_and_costs_no_step(tmp_path: Path) -> None:
    """R6, RB-117, RB-119: the first attempt at two places never returns; others play them, and the run ends."""

    async def hang(rollout: Rollout) -> bool:
        if rollout.place in (1, 7) and rollout.attempt == 0:
            await asyncio.Event().wait()
        return await calm(rollout)

    config = config_for(
        tmp_path,
        rollout={"max_seconds": 0.1, "retry_seconds": 0},
        health={"lease_seconds": 0.2, "max_failed_ratio": 1.0},
    )
    trained(config, hang)
    check_history(config)
    rows = [row for row in read_rollouts(RunFolder(config).ledger) if row.fate == "dropped"]
    assert {(row.place, row.attempt) for row in rows} == {(1, 0), (7, 0)}
    assert {row.reason for row in rows} == {"lease expired while it waited for a number"}


def test_a_failed_rollout_waits_before_the_next_try_and_keeps_its_place(tmp_path: Path) -> None:
    """RB-138: retries are bounded, with a pause that grows; order and weights stay those of a run without failures."""
    times: list[float] = []

    async def fail_twice(rollout: Rollout) -> bool:
        await calm(rollout)
        if rollout.place == 1:
            times.append(asyncio.get_running_loop().time())
        return rollout.place == 1 and rollout.attempt < 2

    config = config_for(tmp_path / "failing", rollout={"retry_seconds": 0.05}, health={"max_failed_ratio": 1.0})
    assert trained(config, fail_twice)[0] == trained(config_for(tmp_path / "straight"))[0]
    assert times[1] - times[0] >= 0.05
    assert times[2] - times[1] >= 0.1


def test_a_task_that_always_fails_is_quarantined_and_replaced(tmp_path: Path) -> None:
    """RB-121, RB-127: with its reason; no prompt after it is skipped, and a resume does not try it again."""

    async def fail(rollout: Rollout) -> bool:
        await calm(rollout)
        return rollout.place == 2

    changes = {"rollout": {"retry_seconds": 0, "attempts": 2}, "health": {"max_failed_ratio": 1.0}}
    trained(config_for(tmp_path, steps=3, **changes), fail)
    trained(config_for(tmp_path, **changes), fail)
    rows = [row for row in read_rollouts(RunFolder(config_for(tmp_path)).ledger) if row.place == 2]
    assert [(row.attempt, row.fate) for row in rows] == [(0, "failed"), (1, "failed")]
    assert {row.boundary for row in rows} == {"environment"}
    assert read_counts(RunFolder(config_for(tmp_path)).ledger)["tasks"]["quarantined"] == 1


def test_the_error_of_a_player_ends_the_run_as_it_is(tmp_path: Path) -> None:
    """RB-120: a producer that fails is not the end of the data; the original error says why, and the run can go on."""

    async def die(rollout: Rollout) -> bool:
        await calm(rollout)
        if rollout.place == 5:
            raise RunError("no engine is left")
        return False

    config = config_for(tmp_path)
    with pytest.raises(BaseExceptionGroup) as ended:
        trained(config, die)
    assert ended.group_contains(RunError, match="no engine is left")
    assert len(read_steps(RunFolder(config).ledger)) >= 1
    trained(config)
    check_history(config)


def test_with_a_lag_every_version_samples_its_step_also_with_groups_and_rollouts_that_break(tmp_path: Path) -> None:
    """Methods §8: exactly min(step, lag), in runs that promise no bits, too, and whatever breaks."""
    for lag, seed in ((1, 0), (3, 1)):
        config = config_for(
            tmp_path / f"lag {lag}", deterministic=False, lag=lag, rollouts_per_step=4, group_size=2, players=5
        )
        trained(config, moods(seed))
        check_history(config)
        assert staleness_in(config) == {step: {min(step, lag)} for step in range(STEPS)}
        assert config.max_staleness == lag


def test_publishing_every_n_steps_is_the_other_controlled_lag(tmp_path: Path) -> None:
    """SAT's configured lag: with max_staleness = publish_every - 1 a rollout of step b is b mod publish_every old."""
    config = config_for(tmp_path, deterministic=False, publish_every=3, max_staleness=2, steps=8)
    trained(config, moods(1))
    check_history(config)
    assert staleness_in(config) == {step: {step % 3} for step in range(8)}


def test_a_resume_with_a_lag_names_the_weights_that_it_needs_and_can_not_find(tmp_path: Path) -> None:
    config = config_for(tmp_path, lag=2, steps=4)
    trained(config)
    kept = sorted(path.name for path in RunFolder(config).weights.iterdir())
    assert kept == ["step_1", "step_2", "step_3", "step_4"]
    (RunFolder(config).weights / "step_2" / "model.safetensors").unlink()
    with pytest.raises(RunError, match=r"step_2/model.safetensors is gone, but with a lag the next rollouts"):
        trained(config_for(tmp_path, lag=2, steps=6))


def test_with_a_lag_players_go_on_beside_the_learner_and_no_further_than_the_last_step(tmp_path: Path) -> None:
    """Pipelined from a lag of 1 on, and nothing is sampled that this run can't train."""
    ahead: list[int] = []
    begun: list[int] = []

    class Slow(NumericLearner):
        async def update_value(self, rollouts: Sequence[Rollout]) -> dict[str, float | None]:
            for _ in range(200):
                await asyncio.sleep(0)
            ahead.append(len(begun) - SIZE * (self.version + 1))
            return await super().update_value(rollouts)

    async def count(rollout: Rollout) -> bool:
        begun.append(rollout.place)
        return await calm(rollout)

    for lag in (0, 1):
        ahead.clear(), begun.clear()
        trained(config_for(tmp_path / f"{lag}", lag=lag, players=40), count, learner=Slow())
        assert len(begun) == STEPS * SIZE
        expected = [min(lag, STEPS - 1 - step) * SIZE for step in range(STEPS)]
        assert ahead[1::2] == expected, "what is under way when the second value update of each step begins"


def test_players_go_on_while_results_wait_for_their_write_and_a_hungry_learner_ends_the_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results share a write while the learner computes (here: for a minute); nobody may feel it."""
    monkeypatch.setattr(run_module, "SHARED_WRITE_S", 60.0)
    begun: set[int] = set()

    class Slow(NumericLearner):
        async def update_value(self, rollouts: Sequence[Rollout]) -> dict[str, float | None]:
            # The only player plays all that may be played now, although no result of it is on disk yet.
            async with asyncio.timeout(20):
                while len(begun) < min(STEPS, self.version + 2) * SIZE:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            return await super().update_value(rollouts)

    async def count(rollout: Rollout) -> bool:
        begun.add(rollout.place)
        return await calm(rollout)

    config = config_for(tmp_path, deterministic=False, players=1, max_staleness=1)
    began = time.monotonic()
    trained(config, count, learner=Slow())
    check_history(config)
    assert time.monotonic() - began < 50, "the learner's hunger ended every wait"


class Side(dict[str, Any]):
    """Notes of a rollout, which can be watched."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def test_side_data_of_a_rollout_is_gone_once_it_was_trained(tmp_path: Path) -> None:
    """RB-140, R13: 200 steps with a megabyte beside each rollout; memory and file hold what is under way only."""
    alive: weakref.WeakSet[Side] = weakref.WeakSet()
    megabyte = 1 << 20

    class Heavy(Stage):
        async def play(self, *args: Any, **named: Any) -> Rollout:
            rollout = await super().play(*args, **named)
            side = Side(text=f"{rollout.place:07}\n" * (megabyte // 8))
            alive.add(side)
            return msgspec.structs.replace(rollout, info=side)

    seen: list[tuple[int, int]] = []

    class Watching(NumericLearner):
        async def update_policy(self, rollouts: Sequence[Rollout]) -> dict[str, float | None]:
            seen.append((len(alive), psutil.Process().memory_info().rss))
            return await super().update_policy(rollouts)

    config = config_for(
        tmp_path, steps=200, rollouts_per_step=1, players=2, deterministic=False, max_staleness=1, keep_rollouts=0,
        checkpoint_every=10,
    )  # fmt: skip
    trained(config, learner=Watching(), stage=Heavy)
    check_history(config)
    counts, memory = zip(*seen, strict=True)
    assert len(counts) == 200
    assert max(counts) <= 8, "the trained one, and those that may still enter the next steps"
    assert memory[-1] - memory[40] < 16 * megabyte, "a tenth of what went through since"
    assert RunFolder(config).ledger.stat().st_size < 4 * megabyte


@pytest.mark.parametrize("on_stale", ["wait", "drop", "train"])
def test_a_producer_that_is_faster_than_the_learner_is_paused(tmp_path: Path, on_stale: str) -> None:
    """RB-102, RB-139, R13: however many players there are, started and untrained rollouts have a bound."""
    ahead: list[int] = []
    begun: set[int] = set()

    class Slow(NumericLearner):
        async def update_value(self, rollouts: Sequence[Rollout]) -> dict[str, float | None]:
            for _ in range(200):
                await asyncio.sleep(0)
            ahead.append(len(begun) - SIZE * self.version)
            return await super().update_value(rollouts)

    async def count(rollout: Rollout) -> bool:
        begun.add(rollout.place)
        return await calm(rollout)

    config = config_for(tmp_path, deterministic=False, players=40, max_staleness=1, on_stale=on_stale)
    trained(config, count, learner=Slow())
    check_history(config)
    # Places of the step that is being trained, and of the two that its version may still reach.
    assert max(ahead) <= 3 * SIZE
