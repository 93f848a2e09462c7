"""The nemesis: seeded runs that are killed, starved of disk, stopped and resumed until they end, and then judged.

    python tests/nemesis/run.py --runs 500 --seed 0 [--only stand-in|tiny] [--run N] [--jobs 2] [--out FILE] [--keep DIR]

Run N does the same on every machine up to the instants at which signals arrive. After every crash, and at the end, the
checker reads what is on disk. Exit code 1 unless lost, duplicated and unexplained are all 0. A compiler is needed for
`shim.c`; without one the faults of storage and the power cuts are left out, and the result says so.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from checker import Checker, Facts
from plans import Life, Plan, plan_of
from powercut import Disk

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
        process = psutil.Process(self._nursery.start(spec))
        self._signal_in_time(process, list(life.signals))
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
        control = self._home / "control"
        calm = replace(plan, journal=False, duplicate=0.0, reorder=0.0, lives=[Life()])
        base = self._base
        trial = Trial(calm, self._nursery, control, None, base)
        code = trial._live(0, Life())
        found, expected = hashes_of(self._folder), hashes_of(trial._folder)
        if code or found != expected:
            step = next((n for n, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), len(found))
            text = f"the hash after step {step} is not that of a straight run (which ended with code {code})"
            self.outcome.findings.append(("unexplained", text))
        self.outcome.compared = True

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


def build_shim(folder: Path) -> Path | None:
    """Compile `shim.c`; None without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        return None
    target = folder / "shim.so"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", target, HERE / "shim.c", "-lpthread"], check=True)
    return target


def run_all(
    numbers: list[int], *, seed: int, only: str, jobs: int, source: Path, keep: Path | None, verbose: bool
) -> list[Outcome]:
    """Play the runs, `jobs` at a time."""
    plans = [plan_of(seed, number, only) for number in numbers]
    with tempfile.TemporaryDirectory(prefix="nemesis", dir=os.environ.get("NEMESIS_TMP", "/tmp")) as name:
        root = Path(name).resolve()
        shim = build_shim(root)
        shares = [plans[job::jobs] for job in range(jobs)]

        def work(share: list[Plan]) -> list[Outcome]:
            return _work(share, root, shim, source, keep, verbose)

        with ThreadPoolExecutor(jobs) as pool:
            return [outcome for outcomes in pool.map(work, shares) for outcome in outcomes]


def _work(
    plans: list[Plan], root: Path, shim: Path | None, source: Path, keep: Path | None, verbose: bool
) -> list[Outcome]:
    outcomes: list[Outcome] = []
    for kind in ("stand-in", "tiny"):
        share = [plan for plan in plans if plan.kind == kind]
        if not share:
            continue
        nursery = Nursery(shim, source, kind)
        base = _tiny_base(root / f"base{id(nursery)}", nursery) if kind == "tiny" else None
        try:
            for plan in share:
                home = root / f"{plan.number}"
                home.mkdir()
                outcome = Trial(plan, nursery, home, shim, base).run()
                outcomes.append(outcome)
                if verbose or outcome.findings:
                    _tell(outcome)
                if keep is not None:
                    shutil.copytree(home, keep / f"{plan.number}", dirs_exist_ok=True)
                shutil.rmtree(home)
        finally:
            nursery.close()
    return outcomes


def _tiny_base(home: Path, nursery: Nursery) -> Path:
    """A folder in which SFT and value pretraining of the tiny model are done."""
    (home / "runs").mkdir(parents=True)
    nursery.start({"plan": None, "home": str(home), "environment": {}})
    code = nursery.wait()
    if code:
        raise RuntimeError(f"the tiny model could not be made (exit {code}): {(home / 'log').read_text()[-2000:]}")
    return home


def _tell(outcome: Outcome) -> None:
    plan = outcome.plan
    print(
        f"run {plan.number} ({plan.kind}): {outcome.seconds:.1f} s, exits {' '.join(outcome.exits)}, "
        f"faults {dict(outcome.faults)}",
        flush=True,
    )
    for kind, text in outcome.findings[:12]:
        print(f"    {kind}: {text[:600]}", flush=True)
    if len(outcome.findings) > 12:
        print(f"    … and {len(outcome.findings) - 12} more", flush=True)


def summary_of(outcomes: list[Outcome], command: str, seconds: float) -> dict[str, Any]:
    """The figures of `benchmarks/results/nemesis.json`."""
    kinds = Counter(kind for outcome in outcomes for kind, _ in outcome.findings)
    faults: Counter[str] = sum((outcome.faults for outcome in outcomes), Counter())
    points: Counter[str] = sum((outcome.points for outcome in outcomes), Counter())
    return {
        "runs": len(outcomes),
        "stand_in": sum(outcome.plan.kind == "stand-in" for outcome in outcomes),
        "tiny": sum(outcome.plan.kind == "tiny" for outcome in outcomes),
        "lost": kinds["lost"],
        "duplicated": kinds["duplicated"],
        "unexplained": kinds["unexplained"],
        "failed_runs": sorted(outcome.plan.number for outcome in outcomes if outcome.findings),
        "crashes": sum(outcome.crashes for outcome in outcomes),
        "most_crashes": max(outcome.crashes for outcome in outcomes),
        "checks": sum(outcome.checks for outcome in outcomes),
        "compared_with_straight_runs": sum(outcome.compared for outcome in outcomes),
        "faults": dict(sorted(faults.items())),
        "fault_points": dict(sorted(points.items())),
        "storage_faults": shutil.which("cc") is not None or shutil.which("gcc") is not None,
        "seconds": round(seconds, 1),
        "command": command,
        "commit": _commit(),
        "machine": f"{os.cpu_count()} cores",
    }


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", HERE, *arguments], capture_output=True, text=True, check=False).stdout

    changed = git("status", "--porcelain", "--", "src", "tests/nemesis").strip()
    return git("rev-parse", "--short", "HEAD").strip() + ("+" if changed else "")


def main() -> int:
    """Parse, play, tell."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="number of the first run")
    parser.add_argument("--run", type=int, help="repeat this one run only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=["stand-in", "tiny"], default="")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--keep", type=Path, help="copy the folders of all runs there")
    parser.add_argument("--source", type=Path, default=HERE.parents[1] / "src", help="the package under test")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    if options.run is not None:
        numbers = [options.run]
    else:
        numbers = list(range(options.first, options.first + options.runs))
    if options.only:
        # `--only` leaves out the others; it doesn't turn them into something else.
        numbers = [n for n in numbers if plan_of(options.seed, n).kind == options.only] or numbers
    began = time.monotonic()
    outcomes = run_all(
        numbers,
        seed=options.seed,
        only="",
        jobs=options.jobs,
        source=options.source.resolve(),
        keep=options.keep,
        verbose=options.verbose or options.run is not None,
    )
    command = "python tests/nemesis/run.py " + " ".join(sys.argv[1:])
    summary = summary_of(outcomes, command, time.monotonic() - began)
    print(json.dumps(summary, indent=1))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(summary, indent=1) + "\n")
    return int(bool(summary["failed_runs"]))


if __name__ == "__main__":
    sys.exit(main())
