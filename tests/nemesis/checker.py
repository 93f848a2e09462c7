"""Judges a run by its durable history alone: ledger, snapshots, published weights, the data, and what was acknowledged.

Shares no code with the product: sqlite3, json, hashlib, zlib and a msgpack decoder read what is on disk.

    lost         an accepted rollout that is neither trained nor waiting nor has a fate with its reason; a prompt of an
                 epoch that was handed out and is neither trained, nor open, nor quarantined with a reason; anything
                 that was acknowledged and is not there any more
    duplicated   a place, rollout or prompt that contributes twice to the lineage; a step committed twice
    unexplained  everything else that doesn't follow from what is on record: sums that don't close, hashes that differ
                 from the recomputed ones, weights without a commit, staleness above the bound, undecodable payloads,
                 damaged snapshots, tokens that the stamped version can't have sampled

`complete` asks in addition that the run reached its last step. `witness.jsonl` is what the run's process was told was
on disk: `{"ended": [rollout_id, attempt]}`, `{"committed": [step, hash]}`; it lies outside the run folder.
Runs with the tiny model are checked without the recomputation: nobody else can compute their weights.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, Literal

import msgspec
from history import Facts, Row, read_tables
from recompute import Straight, number_of, wrong_token

Kind = Literal["lost", "duplicated", "unexplained"]
LIVE = {"running", "finished", "scored"}
FILES = {"policy": "policy", "policy_m": "policy_optimizer", "value": "value", "value_m": "value_optimizer"}
"""Vectors of the stand-in, and the parts of a snapshot that hold them."""


class Checker:
    """One look at one run folder.

    Example: `findings = Checker(folder, facts, witness).check(complete=True)`; empty means 0 / 0 / 0.
    """

    def __init__(self, folder: Path, facts: Facts, witness: Path | None = None) -> None:
        self.folder = folder
        self.facts = facts
        self.witness = witness
        self.findings: list[tuple[Kind, str]] = []
        self.rows: list[Row] = []
        self.tables: dict[str, list[Row]] = {}
        self.chain: list[Row] = []
        self.snapshots: dict[int, bool] = {}
        """Visible snapshots, and whether they are whole."""
        self.straight = Straight(facts.seed, facts.value_updates)

    def check(self, *, complete: bool) -> list[tuple[Kind, str]]:
        """All findings, as (kind, sentence)."""
        if not self._read():
            if complete or self._acknowledged("committed") or self._acknowledged("ended"):
                self._find("lost", "there is no readable ledger")
            return self.findings
        for path in sorted((self.folder / "checkpoints").glob("step_*")):
            step = int(path.name.removeprefix("step_"))
            self.snapshots[step] = self._is_whole(path, step)
        self._check_chain(complete)
        self._check_trained()
        self._check_fates()
        self._check_attempts()
        self._check_tasks()
        self._check_payloads()
        self._check_weights()
        self._check_snapshots()
        self._check_witness()
        return self.findings

    def _find(self, kind: Kind, text: str) -> None:
        self.findings.append((kind, text))

    def _unless(self, holds: object, text: str) -> None:
        if not holds:
            self._find("unexplained", text)

    # Reading.

    def _read(self) -> bool:
        """Whether there is a ledger with tables to judge."""
        self.tables, complaint = read_tables(self.folder / "ledger.sqlite")
        self._unless(not complaint, complaint)
        self.rows = sorted(self.tables.get("rollouts", []), key=lambda row: row["lease"])
        # A ledger whose tables are not there yet holds nothing; what was acknowledged is looked for all the same.
        return "rollouts" in self.tables

    def _acknowledged(self, what: str) -> list[Any]:
        if self.witness is None or not self.witness.exists():
            return []
        lines = self.witness.read_text().split("\n")[:-1]
        return [one[what] for one in map(json.loads, lines) if what in one]

    # The chain of steps.

    def _check_chain(self, complete: bool) -> None:
        best: dict[int, Row] = {}
        for row in sorted(self.tables["steps"], key=lambda row: row["lineage"]):
            best[row["step"]] = row
        self.chain = [best[step] for step in sorted(best)]
        found = sorted(best)
        self._unless(found == list(range(len(found))), f"steps of the chain are {found}, not 0 … {len(found) - 1}")
        lineages = {row["lineage"]: row for row in self.tables["lineages"]}
        self._unless({row["lineage"] for row in self.chain} <= set(lineages), "a step belongs to no lineage on record")
        order = [row["lineage"] for row in self.chain]
        self._unless(order == sorted(order), f"lineages along the chain are {order}")
        if self.facts.numeric:
            # The stand-in is exact on every machine, so no retraining can give another hash.
            self._unless(len(lineages) <= 1, f"{len(lineages)} lineages: {list(lineages.values())}")
        if complete:
            kind: Kind = "lost" if len(self.chain) < self.facts.steps else "unexplained"
            if len(self.chain) != self.facts.steps:
                self._find(kind, f"{len(self.chain)} steps on record, the run has {self.facts.steps}")

    def _check_trained(self) -> None:
        """Each step's rows are its record, in order; each place, rollout and task contributes once."""
        trained = [row for row in self.rows if row["state"] == "trained" or row["fate"] == "trained"]
        by_step: dict[int, list[Row]] = defaultdict(list)
        for row in trained:
            by_step[row["step"]].append(row)
        for step, record in enumerate(self.chain):
            rows = sorted(by_step.pop(step, []), key=lambda row: row["position"])
            body = json.loads(record["record"])
            listed = list(zip(body["rollout_ids"], body["attempts"], strict=True))
            found = [(row["rollout_id"], row["attempt"]) for row in rows]
            self._unless(found == listed, f"step {step} lists {listed}, trained rows are {found}")
            self._unless([row["position"] for row in rows] == list(range(len(rows))), f"positions of step {step}")
            self._unless(len(listed) == self.facts.size, f"step {step} has {len(listed)} rollouts")
            units = Counter(row["unit"] for row in rows)
            self._unless(set(units.values()) <= {self.facts.group}, f"step {step} splits groups: {dict(units)}")
        for step, rows in by_step.items():
            self._find("unexplained", f"{len(rows)} rollouts are trained at step {step}, which is not on record")
        for what in ("place", "rollout_id"):
            for value, count in Counter(row[what] for row in trained).items():
                if count > 1:
                    self._find("duplicated", f"{what} {value} is trained {count} times")
        keys = Counter((row["step"], row["lineage"]) for row in self.tables["steps"])
        for key, count in keys.items():
            if count > 1:
                self._find("duplicated", f"step and lineage {key} are committed {count} times")

    # Attempts and tasks.

    def _check_fates(self) -> None:
        fates = Counter(row["fate"] or f"live {row['state']}" for row in self.rows)
        known = {"trained", "failed", "dropped", "lost"} | {f"live {state}" for state in LIVE}
        self._unless(set(fates) <= known, f"fates are {dict(fates)}")
        for row in self.rows:
            name = f"{row['rollout_id']} attempt {row['attempt']}"
            self._unless((row["fate"] == "trained") == (row["state"] == "trained") == (row["step"] is not None), name)
            match row["fate"]:
                case "failed":
                    self._unless(row["boundary"] and row["reason"], f"{name} failed without boundary or reason")
                case "dropped":
                    if not row["reason"]:
                        self._find("lost", f"{name} was dropped without a reason")
                    self._check_drop(row, name)
                case "lost":
                    self._unless(row["reason"], f"{name} is lost without a reason")
                    # Only what had not ended may go with the process that played it.
                    if row["payload"] is not None or row["state"] == "scored":
                        self._find("lost", f"{name} was scored and on record, and then called lost")
                case None:
                    if row["state"] == "scored" and row["payload"] is None:
                        self._find("lost", f"{name} waits for training without its payload")

    def _check_drop(self, row: Row, name: str) -> None:
        reason = row["reason"]
        if "lease" in reason or "expired" in reason:
            self._unless(self.facts.stopped, f"{name}: {reason}, but nothing stood still for so long")
            early = row["ended_at"] is not None and row["ended_at"] < row["expires_at"] - 0.05
            self._unless(not early, f"{name}: expired {row['expires_at']}, but dropped at {row['ended_at']}")
        if "stale" in reason:
            self._unless(self.facts.on_stale == "drop", f"{name}: {reason}, under on_stale = {self.facts.on_stale}")

    def _check_attempts(self) -> None:
        by_place: dict[int, list[Row]] = defaultdict(list)
        for row in self.rows:
            by_place[row["place"]].append(row)
            self._unless(row["rollout_id"] == f"r{row['place']}", f"{row['rollout_id']} at place {row['place']}")
            self._unless(row["unit"] == row["place"] // self.facts.group, f"{row['rollout_id']} in {row['unit']}")
        for place, rows in by_place.items():
            numbers = [row["attempt"] for row in rows]
            self._unless(numbers == sorted(set(numbers)), f"attempts at place {place} in order of lease: {numbers}")
            lives = [row["life"] for row in rows]
            self._unless(lives == sorted(lives), f"lives at place {place} in order of lease: {lives}")
            current = [row for row in rows if row["fate"] in (None, "trained")]
            if len(current) > 1:
                self._find("duplicated", f"place {place} has {len(current)} attempts that are live or trained")
        keys = {(row["rollout_id"], row["attempt"]) for row in self.rows}
        for row in self.tables.get("refused", []):
            self._unless((row["rollout_id"], row["attempt"]) in keys, f"refused without an attempt: {row}")

    def _check_tasks(self) -> None:
        tasks = {row["unit"]: row for row in self.tables["tasks"]}
        for unit in set(range(max(tasks, default=-1) + 1)) - set(tasks):
            self._find("lost", f"task {unit} was skipped: {max(tasks)} came after it")
        attempts: dict[int, list[Row]] = defaultdict(list)
        for row in self.rows:
            attempts[row["unit"]].append(row)
            if row["unit"] not in tasks:
                self._find("unexplained", f"{row['rollout_id']} plays task {row['unit']}, which is not on record")
        for unit, task in tasks.items():
            done = {row["place"] for row in attempts[unit] if row["fate"] == "trained"}
            complete = len(done) == self.facts.group
            if (task["state"] == "trained") != complete:
                kind: Kind = "lost" if task["state"] == "trained" else "unexplained"
                self._find(kind, f"task {unit} is {task['state']}, but {len(done)} of its places are trained")
            if task["state"] == "quarantined":
                tries = [row for row in attempts[unit] if row["fate"] in ("failed", "dropped")]
                self._unless(task["reason"], f"task {unit} is quarantined without a reason")
                self._unless(len(tries) >= self.facts.attempts, f"task {unit} is quarantined after {len(tries)} tries")
            self._unless({row["task_id"] for row in attempts[unit]} <= {task["task_id"]}, f"task {unit} changed")
            self._check_uniform(unit, task["state"], attempts[unit])
        if self.facts.epoch:
            self._check_epochs(tasks)
        self._check_overtaken(tasks)

    def _check_uniform(self, unit: int, state: str, rows: list[Row]) -> None:
        """A task is left out exactly when a whole group of it was dropped for equal rewards, and then for good."""
        dropped = [row for row in rows if row["reason"] == "uniform" and row["fate"] == "dropped"]
        if not dropped and state != "uniform":
            whole = [row["reward"] for row in rows if row["fate"] == "trained"]
            even = self.facts.drop_uniform and whole and len(set(whole)) == 1
            self._unless(not even, f"task {unit} is trained, although its rewards are all {whole[:1]}")
            return
        self._unless(self.facts.drop_uniform, f"task {unit} is {state} with {len(dropped)} uniform rollouts")
        places = sorted(row["place"] for row in dropped)
        if state != "uniform" or places != list(range(unit * self.facts.group, (unit + 1) * self.facts.group)):
            self._find("lost", f"task {unit} is {state}, places {places} of it were dropped as uniform")
        self._unless(len({row["reward"] for row in dropped}) <= 1, f"task {unit} was dropped with different rewards")
        if any(row["fate"] in (None, "trained") or row["lease"] > max(d["lease"] for d in dropped) for row in rows):
            self._find("duplicated", f"task {unit} was played again after it was dropped as uniform")

    def _check_epochs(self, tasks: dict[int, Row]) -> None:
        """Within an epoch every row of the task file comes exactly once, whatever the order of arrival."""
        for first in range(0, max(tasks, default=-1) + 1, self.facts.epoch):
            names = [tasks[unit]["task_id"] for unit in range(first, first + self.facts.epoch) if unit in tasks]
            for name, count in Counter(names).items():
                if count > 1:
                    self._find("duplicated", f"prompt {name} comes {count} times in the epoch from task {first}")

    def _check_overtaken(self, tasks: dict[int, Row]) -> None:
        """A task that stays open while whole windows of later ones are trained is as good as skipped."""
        if self.facts.on_stale != "wait":
            return
        window = (self.facts.max_staleness + 2) * self.facts.size // self.facts.group + self.facts.size
        trained = sorted(unit for unit, task in tasks.items() if task["state"] == "trained")
        for unit, task in tasks.items():
            later = sum(other > unit for other in trained)
            if task["state"] == "open" and later > 2 * window:
                self._find("lost", f"task {unit} is still open, but {later} later ones are trained")

    # What the records contain.

    def _check_payloads(self) -> None:
        payloads: dict[tuple[str, int], dict[str, Any]] = {}
        for row in self.rows:
            if row["payload"] is None:
                continue
            try:
                payload = msgspec.msgpack.decode(zlib.decompress(row["payload"]))
            except (zlib.error, msgspec.MsgspecError) as error:
                self._find("lost", f"payload of {row['rollout_id']}: {error}")
                continue
            payloads[row["rollout_id"], row["attempt"]] = payload
            named = payload["rollout_id"], payload.get("attempt", 0), payload["place"]
            expected = row["rollout_id"], row["attempt"], row["place"]
            self._unless(named == expected, f"the payload of {expected} is that of {named}")
            self._check_versions(row, payload)
        self._retrain(payloads)
        if not self.facts.numeric:
            return
        if self.facts.pruned:
            # Nobody can know the weights of steps whose rollouts are forgotten.
            self.straight.weights += [None] * (len(self.chain) + 1 - len(self.straight.weights))
        for payload in payloads.values():
            wrong = wrong_token(payload, self.straight.weights)
            self._unless(not wrong, wrong)

    def _check_versions(self, row: Row, payload: dict[str, Any]) -> None:
        spans = [span for segment in payload["segments"] for span in segment["version_spans"]]
        oldest = min((span["version"] for span in spans if span["end"] > span["start"]), default=None)
        name = f"{row['rollout_id']} attempt {row['attempt']}"
        self._unless(oldest == row["oldest_version"], f"{name}: oldest version {oldest}, row {row['oldest_version']}")
        newest = max((span["version"] for span in spans), default=0)
        self._unless(newest <= len(self.chain), f"{name} has tokens of version {newest} of {len(self.chain)} steps")
        if row["step"] is None:
            return
        self._unless(newest <= row["step"], f"{name} has tokens of version {newest}, trained at step {row['step']}")
        lag = row["step"] - (oldest or 0)
        bounded = self.facts.on_stale != "train"
        self._unless(not bounded or lag <= self.facts.max_staleness, f"{name} is trained at staleness {lag}")
        if self.facts.lag is not None:
            due = row["step"] - min(row["step"], self.facts.lag)
            self._unless((oldest, newest) == (due, due), f"{name} has versions {oldest} to {newest}, step needs {due}")

    def _retrain(self, payloads: dict[tuple[str, int], dict[str, Any]]) -> None:
        """The stand-in's arithmetic over the recorded rollouts gives the recorded hashes."""
        first = self._first_needed() if self.facts.pruned else 0
        for step, record in enumerate(self.chain):
            body = json.loads(record["record"])
            keys = list(zip(body["rollout_ids"], body["attempts"], strict=True))
            missing = [key for key in keys if key not in payloads]
            # Recovery never goes back behind the snapshot before the newest, so rollouts before it may be forgotten.
            if step < first:
                continue
            if missing:
                self._find("lost", f"step {step} can't be replayed: no payload of {missing}")
                return
            if not self.facts.numeric:
                continue
            if self.straight.version < step:
                self._skip_to(step)
            self.straight.train([number_of(payloads[key]) for key in keys])
            expected = self.straight.fingerprints[-1]
            self._unless(record["state_hash"] == expected, f"step {step} has another hash than its rollouts give")

    def _first_needed(self) -> int:
        """Step of the snapshot that recovery may have to start from: the one before the newest.

        Older ones may be there, too, when a power cut forgot that they were removed.
        """
        whole = sorted(step for step, is_whole in self.snapshots.items() if is_whole)
        spare = len(whole) > 1 and not self.facts.damaged
        return whole[-2] if spare else whole[-1] if whole else 0

    def _skip_to(self, step: int) -> None:
        """Begin the recomputation at a snapshot whose hash is on record."""
        path = self.folder / "checkpoints" / f"step_{step}"
        if not self.snapshots.get(step):
            self._find("lost", f"rollouts before step {step} are gone, but there is no snapshot of it")
            return
        parts = {
            name: json.loads((path / f"{file}.safetensors").read_bytes())["weight"] for name, file in FILES.items()
        }
        found, expected = self.straight.skip_to(step, parts), self.chain[step - 1]["state_hash"]
        self._unless(found == expected, f"{path.name} has hash {found[:12]}, on record is {expected[:12]}")

    def _check_weights(self) -> None:
        for path in sorted((self.folder / "weights").glob("step_*/model.safetensors")):
            version = int(path.parent.name.removeprefix("step_"))
            if version > len(self.chain):
                self._find("unexplained", f"version {version} is published, but {len(self.chain)} steps are on record")
            elif self.facts.numeric and version < len(self.straight.weights):
                whole = self.straight.weights[version] in (None, path.read_bytes())
                self._unless(whole, f"{path.parent.name} holds other weights than version {version}")

    def _check_snapshots(self) -> None:
        sealed = [row["step"] for row in self.tables.get("snapshots", [])]
        whole = [step for step, is_whole in self.snapshots.items() if is_whole]
        self._unless(not sealed or whole, f"snapshots {sealed} are on record, but no valid one is left")
        for step in whole:
            if step > len(self.chain):
                self._find("unexplained", f"the snapshot of step {step} is there, but the step is not on record")
            else:
                self._check_state(self.folder / "checkpoints" / f"step_{step}", step)

    def _is_whole(self, path: Path, step: int) -> bool:
        """A visible snapshot is complete, unless the harness damaged it."""
        if step in self.facts.damaged:
            return False
        try:
            manifest = json.loads((path / "manifest.json").read_bytes())
            different = [
                name
                for name, digest in manifest["files"].items()
                if hashlib.sha256((path / name).read_bytes()).hexdigest() != digest
            ]
        except (OSError, ValueError, KeyError) as error:
            self._find("unexplained", f"{path.name} is visible and not whole: {error}")
            return False
        self._unless(not different, f"{path.name} is visible, but differs from its manifest: {different}")
        return not different

    def _check_state(self, path: Path, step: int) -> None:
        """A snapshot belongs to the chain, and holds what the step led to."""
        progress = json.loads((path / "progress.json").read_bytes())
        recorded = self.chain[step - 1]["state_hash"] if step else progress["state_hash"]
        self._unless(progress["state_hash"] == recorded, f"{path.name} is of another lineage than the chain")
        expected = self.straight.parts[step] if self.facts.numeric and step < len(self.straight.parts) else None
        if expected is None:
            return
        for name, file in FILES.items():
            found = json.loads((path / f"{file}.safetensors").read_bytes())["weight"]
            self._unless(found == expected[name], f"{path.name}: {file} is not that of {path.name}")

    def _check_witness(self) -> None:
        """What the process was told was on disk is there."""
        keys = {(row["rollout_id"], row["attempt"]): row for row in self.rows}
        for rollout_id, attempt in self._acknowledged("ended"):
            row = keys.get((rollout_id, attempt))
            forgotten = self.facts.pruned and row is not None and row["fate"] is not None
            if row is None or (row["payload"] is None and not forgotten):
                self._find("lost", f"{rollout_id} attempt {attempt} was stored, and is not there any more")
        hashes = {(row["step"], row["state_hash"]) for row in self.tables["steps"]}
        committed = [(step, digest) for step, digest in self._acknowledged("committed")]
        for one in committed:
            if one not in hashes:
                self._find("lost", f"step {one[0]} was committed with hash {one[1][:12]}, and is not there any more")
        for step, count in Counter(step for step, _ in committed).items():
            if self.facts.numeric and count > 1:
                self._find("duplicated", f"step {step} was committed {count} times")
