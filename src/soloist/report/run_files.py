"""A run folder as data: everything that a report reads, each part on its own.

Guarantees: nothing is written; a run that is going on, was killed or is years old can be read; a torn last line is left
out, and what is missing or can't be read is a sentence in `missing`, never an exception.
Not covered: checkpoints and weights, which a report doesn't need.
"""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from soloist.errors import UserError
from soloist.metrics import read_metrics
from soloist.runtime.ledger import StoredRollout, read_rollouts

T = TypeVar("T")
Rows = list[dict[str, Any]]
Attempts = Counter[tuple[str, int | None, int]]
"""(fate, or state of what has none yet; staleness when trained; action tokens) → attempts."""

MARKS = ("config.resolved.toml", "metrics.jsonl", "ledger.sqlite", "stages.json")
"""A folder with one of these is a run."""
MOST_UNTRAINED = 2000
"""Records of rollouts that were not trained that are looked through for a timeline."""


@dataclass(kw_only=True)
class RunFiles:
    """What a run folder holds. Absent parts are empty.

    Example: `read_run(Path("runs/calculator")).metrics[-1]["reward/mean"]`.
    """

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    stages: dict[str, Any] = field(default_factory=dict)
    metrics: Rows = field(default_factory=list)
    """Records of all stages; of a step that was trained again, the last counts."""
    timeline: Rows = field(default_factory=list)
    staleness: Rows = field(default_factory=list)
    """One row for each trained step: rollouts, tokens and masked tokens by staleness."""
    samples: Rows = field(default_factory=list)
    origins: Rows = field(default_factory=list)
    attempts: Attempts = field(default_factory=Counter)
    """How many attempts of each kind the ledger holds."""
    steps: set[int] = field(default_factory=set)
    """Steps that trained a rollout of the ledger."""
    missing: list[str] = field(default_factory=list)
    """What a reader should know about the parts that are not there."""

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.folder.resolve().name

    def rollouts_of(self, step: int) -> list[StoredRollout]:
        """Trained rollouts of a step with their records; none when they can't be read."""
        return self._read(lambda: list(read_rollouts(self.folder / "ledger.sqlite", step=step)), [])

    def untrained(self) -> list[StoredRollout]:
        """Some ended rollouts that no step has trained, with their records."""
        path = self.folder / "ledger.sqlite"

        def found() -> Iterator[StoredRollout]:
            for state in ("scored", "finished", "running"):
                yield from read_rollouts(path, state=state)

        return self._read(lambda: list(islice(found(), MOST_UNTRAINED)), [])

    def _read(self, read: Callable[[], T], otherwise: T) -> T:
        try:
            return read()
        # A damaged page of a database or a record of another version is worth a sentence, and the rest of the report.
        except Exception as error:
            self.miss(f"The ledger can't be read ({type(error).__name__}: {error}).")
            return otherwise

    def miss(self, sentence: str) -> None:
        """Note once what is not there."""
        if sentence not in self.missing:
            self.missing.append(sentence)


def find_run(name: str, runs_dir: Path) -> Path:
    """The folder of a run: a path, or a name under `runs_dir`. Raises UserError when it is none."""
    candidates = [Path(name), runs_dir / name]
    for folder in candidates:
        if any((folder / mark).is_file() for mark in MARKS):
            return folder
    if Path(name).is_dir():
        raise UserError(f"{name} is no run folder: it holds none of {', '.join(MARKS)}; name the folder of a run")
    known = sorted(path.parent.name for path in runs_dir.glob(f"*/{MARKS[0]}"))[:10]
    there = f"runs there: {', '.join(known)}" if known else "there are no runs there"
    raise UserError(f"no run '{name}', neither as a folder nor under {runs_dir} ({there}); see --runs_dir")


def read_run(folder: Path) -> RunFiles:
    """Everything but the rollouts' records, which are read when asked for."""
    files = RunFiles(folder=folder)
    files.config = _parsed(files, "config.resolved.toml", tomllib.loads)
    files.stages = _parsed(files, "stages.json", json.loads)
    for name, lost in (
        ("metrics", "figures by step"),
        ("timeline", "the learner's timeline"),
        ("staleness", "masked tokens by staleness"),
        ("samples", "ratios, advantages and values of sample tokens"),
    ):
        rows = read_metrics(folder / f"{name}.jsonl")
        setattr(files, name, rows)
        if not rows:
            files.miss(f"{name}.jsonl is missing or empty, so there are no {lost}.")
    files.origins = read_metrics(folder / "origin.jsonl")
    path = folder / "ledger.sqlite"
    if path.is_file():
        nothing: tuple[Attempts, set[int]] = Counter(), set()
        files.attempts, files.steps = files._read(lambda: _counted(path), nothing)
    else:
        files.miss("ledger.sqlite is missing, so there are no rollouts: nothing has been trained yet.")
    return files


def _counted(ledger: Path) -> tuple[Attempts, set[int]]:
    # Counted while reading: a long run has millions of rows, but few kinds of them.
    attempts: Attempts = Counter()
    steps: set[int] = set()
    for row in read_rollouts(ledger, payloads=False):
        age = None if row.step is None or row.oldest_version is None else row.step - row.oldest_version
        attempts[row.fate or row.state, age, row.action_tokens] += 1
        steps |= {row.step} if row.step is not None else set()
    return attempts, steps


def _parsed(files: RunFiles, name: str, parse: Callable[[str], Any]) -> dict[str, Any]:
    path = files.folder / name
    try:
        found = parse(path.read_text(encoding="utf-8"))
    except OSError:
        files.miss(f"{name} is missing.")
        return {}
    except ValueError as error:
        files.miss(f"{name} can't be read ({error}).")
        return {}
    return found if isinstance(found, dict) else {}
