"""One run from its first start to its last check: lives, signals, power cuts, damaged snapshots, and what was found."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
from checker import Checker
from history import Facts
from plans import Life, Plan
from powercut import Disk

HERE = Path(__file__).parent
LIFE_SECONDS = {"stand-in": 60.0, "tiny": 180.0}
"""A process that has not ended by then hangs, which is a finding."""


@dataclass(kw_only=True)
class Outcome:
    """What became of one run."""

    plan: Plan
    findings: list[tuple[str, str]] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    points: Counter[str] = field(default_factory=Counter)
    crashes: int = 0
    """Lives that did not end by themselves with all steps."""
    checks: int = 0
    seconds: float = 0.0
    exits: list[str] = field(default_factory=list)
    compared: bool = False
    """Whether its hashes were compared with those of a run that nothing happened to."""


class Nursery:
    """A process that has done the imports and forks lives; the shim sleeps in it until a life wakes it."""

    def __init__(self, shim: Path | None, source: Path, kind: str) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(source), "HF_HUB_OFFLINE": "1"}
        if shim is not None:
            environment["LD_PRELOAD"] = str(shim)
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "life.py"), kind],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, spec: dict[str, Any]) -> int:
        """Fork a life; returns its process id."""
        assert self._process.stdin is not None
        print(json.dumps(spec), file=self._process.stdin, flush=True)
        return int(self._line())

    def wait(self) -> int:
        """Exit code of the life, negative for a signal."""
        return int(self._line())

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the nursery is gone")
        return line


class Trial:
    """One run from its first start to its last check."""

    def __init__(self, plan: Plan, nursery: Nursery, home: Path, shim: Path | None, base: Path | None) -> None:
        self.plan = plan
        self.outcome = Outcome(plan=plan)
        self._nursery = nursery
        self._home = home
        self._has_shim = shim is not None
        self._folder = home / "runs" / "run"
        self._journal = home / "journal"
        self._fired = home / "fired"
        self._damaged: list[int] = []
        self._base = base
        if base is None:
            self._folder.mkdir(parents=True)
            self._write_tasks()
        else:
            shutil.copytree(base / "runs", home / "runs")
        self._disk = Disk(self._folder)

    def run(self) -> Outcome:
        """Live all lives, check after each, and say what was found."""
        began = time.monotonic()
        for number, life in enumerate(self.plan.lives):
            last = number == len(self.plan.lives) - 1
            code = self._live(number, life)
            self.outcome.exits.append(str(code))
            self.outcome.crashes += code != 0
            if code and life.power_cut and self._has_shim:
                self._cut_power(number, life.power_cut)
            if code and life.damage:
                self._damage(number, life.damage)
            if code == 0 or last:
                self._check(f"end (life {number}, exit {code})", complete=True)
                self._compare_with_straight()
                break
            self._check(f"crash {number} (exit {code})", complete=False)
        self.outcome.seconds = time.monotonic() - began
        return self.outcome

    def _live(self, number: int, life: Life) -> int:
        spec = {
            "plan": self.plan.as_json(),
            "number": number,
            "home": str(self._home),
            "base": str(self._base),
            "points": life.points,
            "environment": {
                "NEMESIS_ROOT": str(self._folder),
                "NEMESIS_STORAGE": life.storage if self._has_shim else "",
                "NEMESIS_FIRED": str(self._fired),
            }
            | ({"NEMESIS_JOURNAL": str(self._journal)} if self.plan.journal else {}),
        }
        self._fired.unlink(missing_ok=True)
        pid = self._nursery.start(spec)
        # A life may be over before it is looked at.
        with contextlib.suppress(psutil.NoSuchProcess):
            self._signal_in_time(psutil.Process(pid), list(life.signals))
        code = self._nursery.wait()
        unborn = "did not start" in self._last_words() and any("engine" in what for _, what, _ in life.signals)
        if not self._count_fired() and code not in (0, -signal.SIGKILL) and not unborn:
            # Broken engines, sandboxes and episodes are data; only a disk that fails may end a run, and an engine that
            # is killed before it served for the first time.
            text = f"life {number} ended with code {code}, but no storage failed: {self._last_words()}"
            self.outcome.findings.append(("unexplained", text))
        return code

    def _signal_in_time(self, process: psutil.Process, due: list[tuple[float, str, float]]) -> None:
        """Send the signals of a life; kill it when it hangs. Returns when it has ended."""
        began = time.monotonic()
        going_on: list[tuple[float, psutil.Process]] = []
        while _lives(process):
            now = time.monotonic() - began
            if now > LIFE_SECONDS[self.plan.kind]:
                self.outcome.findings.append(("unexplained", f"it hangs: {self._last_words()}"))
                process.send_signal(signal.SIGKILL)
            for one in [one for one in due if one[0] <= now]:
                due.remove(one)
                going_on += [(now + one[2], target) for target in self._signal(process, one[1])]
            for at, target in [one for one in going_on if one[0] <= now]:
                going_on.remove((at, target))
                _send(target, signal.SIGCONT)
            time.sleep(0.005)
        # A stopped child whose parent is gone would never end by itself.
        for _, target in going_on:
            _send(target, signal.SIGKILL)

    def _signal(self, process: psutil.Process, what: str) -> list[psutil.Process]:
        """Do `kill run`, `stop engine` …; returns whom to wake again."""
        verb, who = what.split()
        targets = [process] if who == "run" else _children(process, {"engine": "stub_worker", "sandbox": "monty"}[who])
        if who == "engine" and not targets:
            targets = _children(process, "engines.local.worker")
        sent = [one for one in targets if _send(one, signal.SIGKILL if verb == "kill" else signal.SIGSTOP)]
        self.outcome.faults[what.replace(" ", "_")] += bool(sent)
        return sent if verb == "stop" else []

    def _count_fired(self) -> bool:
        """Add up what happened; says whether a storage operation failed."""
        failed = False
        for line in self._fired.read_text().splitlines() if self._fired.exists() else []:
            what, _, where = line.partition(" ")
            if what == "point":
                self.outcome.points[where] += 1
                self.outcome.faults["kill_at_point"] += 1
            elif what in ("duplicate", "reorder", "broken"):
                self.outcome.faults[what] += 1
            else:
                op, _, action = what.split(":")
                self.outcome.faults[f"storage_{op}_{action}"] += 1
                failed = True
        return failed

    def _cut_power(self, number: int, how: str) -> None:
        rng = random.Random(f"cut/{self.plan.number}/{number}")
        self._disk.replay(self._journal, rng if how == "partial" else None)
        self._disk.cut(self._folder, rng, strict=how == "strict")
        self._journal.unlink(missing_ok=True)
        self.outcome.faults[f"power_cut_{how}"] += 1

    def _damage(self, number: int, how: str) -> None:
        """Change bytes of the newest snapshot, but only while an older one is there to fall back to."""
        rng = random.Random(f"damage/{self.plan.number}/{number}")
        steps = sorted(int(path.name.removeprefix("step_")) for path in self._folder.glob("checkpoints/step_*"))
        if len(steps) < 2 or set(steps[:-1]) <= set(self._damaged):
            return
        folder = self._folder / "checkpoints" / f"step_{steps[-1]}"
        victim = rng.choice(sorted(folder.iterdir()))
        data = bytearray(victim.read_bytes())
        match how:
            case "flip" if data:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
                victim.write_bytes(data)
            case "truncate":
                victim.write_bytes(data[: len(data) // 2])
            case "delete":
                victim.unlink()
            case _:
                # Nothing is damaged: names that only look like snapshots.
                (folder.parent / "step_x").mkdir(exist_ok=True)
                (folder.parent / ".staged_999").mkdir(exist_ok=True)
        if how != "clutter":
            self._damaged.append(steps[-1])
        self.outcome.faults[f"snapshot_{how}"] += 1
        # Not by the process, so the journal doesn't know it.
        self._disk = Disk(self._folder)
        self._journal.unlink(missing_ok=True)

    def _check(self, when: str, *, complete: bool) -> None:
        for clutter in self._folder.glob("checkpoints/step_x"):
            shutil.rmtree(clutter)
        checker = Checker(self._folder, self._facts(), self._home / "witness.jsonl")
        try:
            found = checker.check(complete=complete)
        except Exception as error:  # a history that the checker can't even read is a finding of its own
            found = [*checker.findings, ("unexplained", f"the checker failed: {type(error).__name__}: {error}")]
        if complete and found:
            found.append(("unexplained", f"its last words: {self._last_words()}")) if len(found) > 99 else None
        self.outcome.findings += [(kind, f"{when}: {text}") for kind, text in found]
        self.outcome.checks += 1

    def _compare_with_straight(self) -> None:
        """In deterministic mode a run that nothing happens to has the same hash after every step."""
        plan = self.plan
        timed = plan.stopped or plan.slow or plan.broken or plan.poison >= 0
        if not plan.config["deterministic"] or timed or self.outcome.findings:
            return
        found, (code, expected) = hashes_of(self._folder), self._straight_hashes()
        if code or found != expected:
            step = next((n for n, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), len(found))
            text = f"the hash after step {step} is not that of a straight run (which ended with code {code})"
            self.outcome.findings.append(("unexplained", text))
        self.outcome.compared = True

    def _straight_hashes(self) -> tuple[int, list[str]]:
        """Exit code and hashes of a run without faults; played once for runs that must all be equal."""
        # How many play and how often is saved must make no difference.
        free = {"players", "checkpoint_every", "keep_rollouts"}
        plan, settings = self.plan, {key: value for key, value in self.plan.config.items() if key not in free}
        key = json.dumps([str(self._base or self._home), settings], sort_keys=True)
        if key not in _straight:
            calm = replace(plan, journal=False, duplicate=0.0, reorder=0.0, lives=[Life()])
            trial = Trial(calm, self._nursery, self._home / "control", None, self._base)
            code = trial._live(0, Life())
            _straight[key] = code, hashes_of(trial._folder)
        return _straight[key]

    def _facts(self) -> Facts:
        config = self.plan.config
        tiny = self.plan.kind == "tiny"
        return Facts(
            steps=config["steps"],
            size=4 if tiny else config["rollouts_per_step"],
            group=config.get("group_size", 1),
            epoch=0 if tiny else self.plan.rows,
            max_staleness=config["max_staleness"],
            on_stale=config.get("on_stale", "wait"),
            publish_every=config.get("publish_every", 1),
            checkpoint_every=config["checkpoint_every"],
            value_updates=2 if tiny else config["value"]["updates_per_step"],
            attempts=config["rollout"].get("attempts", 3),
            seed=config.get("seed", 0),
            pruned=config.get("keep_rollouts") is not None,
            numeric=not tiny,
            lag=config.get("lag"),
            drop_uniform="advantage" in config,
            stopped=self.plan.stopped,
            damaged=self._damaged,
        )

    def _write_tasks(self) -> None:
        rng = random.Random(f"tasks/{self.plan.number}")
        problems: dict[str, int] = {}
        while len(problems) < self.plan.rows:
            a, b, c = (rng.randint(1, 99) for _ in range(3))
            problems[f"{a}+{b}*{c}"] = a + b * c
        rows = [json.dumps({"problem": problem, "answer": answer}) + "\n" for problem, answer in problems.items()]
        (self._home / "tasks.jsonl").write_text("".join(rows))
        (self._home / "model").mkdir()
        (self._home / "model" / "config.json").write_text("{}")

    def _last_words(self) -> str:
        log = self._home / "log"
        return " | ".join(log.read_text(errors="replace").splitlines()[-4:]) if log.exists() else ""


_straight: dict[str, tuple[int, list[str]]] = {}


def hashes_of(folder: Path) -> list[str]:
    """State hash after each step of the chain."""
    with sqlite3.connect(folder / "ledger.sqlite") as db:
        rows = db.execute("SELECT step, max(lineage), state_hash FROM steps GROUP BY step ORDER BY step").fetchall()
    db.close()
    return [digest for _, _, digest in rows]


def _children(process: psutil.Process, name: str) -> list[psutil.Process]:
    try:
        return [one for one in process.children(recursive=True) if name in " ".join(one.cmdline())]
    except psutil.Error:
        return []


def _send(process: psutil.Process, number: int) -> bool:
    try:
        process.send_signal(number)
    except psutil.Error:
        return False
    return True


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
