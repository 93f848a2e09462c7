"""The nemesis: seeded runs that are killed, starved of disk, stopped and resumed until they end, and then judged.

    python tests/nemesis/run.py --runs 500 --seed 0 [--only stand-in|tiny] [--run N] [--jobs 2] [--out FILE]

Run N does the same on every machine up to the instants at which signals arrive. After every crash, and at the end, the
checker reads what is on disk. Exit code 1 unless lost, duplicated and unexplained are all 0. A compiler is needed for
`shim.c`; without one the faults of storage and the power cuts are left out, and the result says so.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from plans import Plan, plan_of
from trial import Nursery, Outcome, Trial

HERE = Path(__file__).parent


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
        # Dealt out by kind, since runs with the tiny model take ten times as long as the others.
        dealt = sorted(plans, key=lambda plan: plan.kind)
        shares = [dealt[job::jobs] for job in range(jobs)]

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


def summary_of(outcomes: list[Outcome], command: str, commit: str, seconds: float) -> dict[str, Any]:
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
        "commit": commit,
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
    # Before anything is played: the package is loaded then, and may be edited meanwhile.
    began, commit = time.monotonic(), _commit()
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
    summary = summary_of(outcomes, command, commit, time.monotonic() - began)
    print(json.dumps(summary, indent=1))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(summary, indent=1) + "\n")
    return int(bool(summary["failed_runs"]))


if __name__ == "__main__":
    sys.exit(main())
