"""Does the nemesis find what it is there for? Breaks the product, one line at a time, and plays until it shows.

    python tests/nemesis/mutations.py [--runs 60] [--only NAME] [--out benchmarks/results/mutations.json]

Each mutation is a text replacement in a copy of `src`; it must apply exactly once, or the script stops, so that it is
kept up with the code. For each, runs are played in order of their number until one has findings. Exit code 1 if some
mutation survives all runs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plans import SLOW_SHARE, plan_of
from run import run_all

HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One broken promise."""

    name: str
    file: str
    before: str
    after: str
    slow: bool = False
    """Only runs whose episodes outlast a lease can show it."""


MUTATIONS = [
    Mutation(
        name="no fsync of files",
        file="soloist/seams.py",
        before="        self.put(path, data)\n        self.sync(path)\n",
        after="        self.put(path, data)\n",
    ),
    Mutation(
        name="no fsync of folders after a rename",
        file="soloist/seams.py",
        before="        self.replace(source, target)\n        self.sync(target.parent)\n",
        after="        self.replace(source, target)\n",
    ),
    Mutation(
        name="no fsync of the ledger's commits",
        file="soloist/runtime/ledger.py",
        before='"PRAGMA synchronous = FULL"',
        after='"PRAGMA synchronous = NORMAL"',
    ),
    Mutation(
        name="no fence for late and double results",
        file="soloist/runtime/ledger_changes.py",
        before="WHERE rollout_id = ? AND attempt = ? AND life = ? AND state = 'running' AND fate IS NULL\n",
        after="WHERE rollout_id = ? AND attempt = ? AND life = ?\n",
    ),
    Mutation(
        name="no renewal of leases",
        file="soloist/runtime/places.py",
        before="            running.expires = self._clock.monotonic() + self._config.health.lease_seconds\n",
        after="",
        slow=True,
    ),
    Mutation(
        name="published before it is committed",
        file="soloist/training/loop.py",
        before='            await timed("commit", run.commit(step, rollouts))  # what was trained is on record …\n',
        after="",
    ),
    Mutation(
        name="a step is trained in another order after a crash",
        file="soloist/runtime/ledger_rows.py",
        before="SELECT rollout_id, payload FROM rollouts WHERE step = ? ORDER BY position",
        after="SELECT rollout_id, payload FROM rollouts WHERE step = ? ORDER BY place",
    ),
    Mutation(
        name="finished rollouts are forgotten in a crash",
        file="soloist/runtime/ledger_changes.py",
        before="WHERE state != 'scored' AND fate IS NULL\n",
        after="WHERE fate IS NULL\n",
    ),
]


def mutate(mutation: Mutation, source: Path, target: Path) -> None:
    """A copy of the package with the mutation. Raises ValueError unless its text is there exactly once."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    path = target / mutation.file
    text = path.read_text()
    if text.count(mutation.before) != 1:
        raise ValueError(f"{mutation.name}: its text is {text.count(mutation.before)} times in {mutation.file}")
    text = text.replace(mutation.before, mutation.after)
    if mutation.name.startswith("published"):
        text = _commit_after_publish(text)
    path.write_text(text)


def _commit_after_publish(text: str) -> str:
    line = "            await run.record(step, rollouts)\n"
    if text.count(line) != 1:
        raise ValueError("the loop's record of a step is not where it was")
    return text.replace(line, f'            await timed("commit", run.commit(step, rollouts))\n{line}')


def hunt(mutation: Mutation, runs: int, seed: int, source: Path) -> dict[str, Any]:
    """Play until the mutation shows; what was found, and in which run."""
    candidates = [number for number in range(100_000) if plan_of(seed, number).kind == "stand-in"]
    if mutation.slow:
        candidates = [number for number in candidates if number % SLOW_SHARE == SLOW_SHARE // 2]
    with tempfile.TemporaryDirectory() as name:
        mutate(mutation, source, Path(name) / "src")
        for played, number in enumerate(candidates[:runs], 1):
            findings = _play(number, seed, Path(name) / "src")
            # What the unbroken product shows, too, is no catch.
            if findings and not _play(number, seed, source):
                kind, text = findings[0]
                return {"found": True, "run": number, "seed": seed, "runs_played": played, "kind": kind, "what": text}
    return {"found": False, "seed": seed, "runs_played": runs}


def _play(number: int, seed: int, source: Path) -> list[tuple[str, str]]:
    return run_all([number], seed=seed, only="", jobs=1, source=source, keep=None, verbose=False)[0].findings


def main() -> int:
    """Hunt all mutations, print and write what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="")
    parser.add_argument("--source", type=Path, default=HERE.parents[1] / "src", help="the package that is broken")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {}
    for mutation in MUTATIONS:
        if options.only in mutation.name:
            found[mutation.name] = hunt(mutation, options.runs, options.seed, options.source.resolve())
            print(mutation.name, json.dumps(found[mutation.name]), flush=True)
    if options.out is not None:
        command = "python tests/nemesis/mutations.py " + " ".join(sys.argv[1:])
        options.out.write_text(json.dumps({"mutations": found, "command": command}, indent=1) + "\n")
    return int(not all(one["found"] for one in found.values()))


if __name__ == "__main__":
    sys.exit(main())
