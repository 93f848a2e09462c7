"""Does anything grow in a long run? 2,000 steps, a producer ten times faster than the learner, 1 % of rollouts failing.

The run is that of the nemesis without its faults: the product's loop, buffer, ledger, snapshots, engine supervision,
sandbox and calculator, with a stub for the engine's child and a numeric stand-in for the learner
(`tests/nemesis/trial_bench.py`). How fast the producer can be is measured first, without waiting for the learner (the
quickest ten of 100 steps, since others use the machine); the learner then takes ten times as long for a step.

    slope   least squares over the samples behind the first tenth, in percent of the mean for each 100 steps

Memory, open files, the write-ahead log, snapshots, published weights, bytes of logs *per step* and step time must not
grow. The ledger itself grows by one row of some hundred bytes for each attempt, payloads are kept for 20 steps here;
its bytes per step are shown, too. Step time is judged by the processor seconds of a step and by the single quickest of
each 100 steps, since the machine is shared; the plain seconds are shown with the load.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "nemesis"))
import life
import psutil
import trial_bench
from harness import write_results

from soloist.training.observer import SilentObserver

SIZE = 16
FASTER = 10
LIMIT = 1.0
"""Percent for each 100 steps."""
LOGS = ("metrics.jsonl", "timeline.jsonl")


class Gauge(SilentObserver):
    """Looks at the process and its folder after every `every`-th step."""

    def __init__(self, folder: Path, every: int) -> None:
        self._folder = folder
        self._every = every
        self._process = psutil.Process()
        self._began = time.monotonic()
        self.samples: list[dict[str, float]] = []
        self.notes: list[str] = []
        self.waited_s = 0.0
        """Seconds that the learner waited for rollouts, in all."""
        self._quickest = float("inf")

    def progress(self, stage: str, step: int, values: Mapping[str, float | None]) -> None:
        """One step is done."""
        self.waited_s += values["time/wait_for_rollouts"] or 0.0
        self._quickest = min(self._quickest, values["time/step"] or 0.0)
        if step % self._every:
            return
        children = [child for child in self._process.children(recursive=True) if child.is_running()]
        self.samples.append(
            {
                "step": step,
                "seconds": time.monotonic() - self._began,
                "processor_seconds": sum(self._process.cpu_times()[:2]),
                "quickest_step_seconds": self._quickest,
                "load": os.getloadavg()[0],
                "memory_mb": self._process.memory_info().rss / 2**20,
                "children_mb": sum(child.memory_info().rss for child in children) / 2**20,
                "processes": 1 + len(children),
                "open_files": self._process.num_fds(),
                "threads": self._process.num_threads(),
                "wal_bytes": _size(self._folder / "ledger.sqlite-wal"),
                "ledger_bytes": _size(self._folder / "ledger.sqlite"),
                "log_bytes": sum(_size(self._folder / name) for name in LOGS),
                "snapshot_bytes": _tree(self._folder / "checkpoints"),
                "weights_bytes": _tree(self._folder / "weights"),
                "files": sum(1 for _ in self._folder.rglob("*")),
            }
        )
        self._quickest = float("inf")

    def note(self, text: str) -> None:
        """Kept for the case that something is wrong."""
        self.notes.append(text)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _tree(folder: Path) -> int:
    # A snapshot may be renamed away while it is looked at.
    return sum(_size(path) for path in folder.rglob("*"))


def plan_of(steps: int, step_seconds: float) -> dict[str, Any]:
    """A run of the nemesis without faults, but with 1 % of broken episodes."""
    return {
        "kind": "stand-in",
        "number": 0,
        "poison": -1,
        "broken": 0.01,
        "token_seconds": 0.0003,
        "step_seconds": step_seconds,
        "config": {
            "steps": steps,
            "rollouts_per_step": SIZE,
            "players": 8,
            "max_staleness": 2,
            "checkpoint_every": 20,
            "keep_rollouts": 20,
            "seed": 0,
            "engine": {"slots": 8},
            "rollout": {"max_new_tokens": 8, "max_tokens": 120, "max_turns": 3, "attempts": 20, "retry_seconds": 0.05},
            "value": {"updates_per_step": 1},
        },
    }


def train(home: Path, steps: int, step_seconds: float, every: int) -> Gauge:
    """One run in `home`; returns what was seen."""
    home.mkdir(parents=True)
    rows = [
        f'{{"problem": "{a}+{b}*{c}", "answer": {a + b * c}}}\n' for a, b, c in itertools.product(range(1, 5), repeat=3)
    ]
    (home / "tasks.jsonl").write_text("".join(rows))
    (home / "model").mkdir()
    (home / "model" / "config.json").write_text("{}")
    gauge = Gauge(home / "runs" / "run", every)
    trial_bench.train(home, plan_of(steps, step_seconds), observer=gauge)
    return gauge


def slope_of(samples: list[dict[str, float]], name: str) -> float:
    """Percent of the mean for each 100 steps, by least squares behind the first tenth."""
    late = samples[len(samples) // 10 :]
    values = [sample[name] for sample in late]
    mean = statistics.fmean(values)
    if not mean or len(late) < 2:
        return 0.0
    return 100 * 100 * statistics.linear_regression([sample["step"] for sample in late], values).slope / mean


def quickest(samples: list[dict[str, float]], block: int = 10) -> list[dict[str, float]]:
    """The sample with the shortest step of each block: other programs on the machine only make steps longer."""
    blocks = [samples[start : start + block] for start in range(0, len(samples), block)]
    return [min(one, key=lambda sample: sample["quickest_step_seconds"]) for one in blocks]


def with_rates(samples: list[dict[str, float]]) -> list[dict[str, float]]:
    """Samples with what was added since the one before, for each step."""
    rates = {
        "step_seconds": "seconds",
        "step_processor_seconds": "processor_seconds",
        "log_bytes_per_step": "log_bytes",
        "ledger_bytes_per_step": "ledger_bytes",
    }
    return [
        after | {rate: (after[name] - before[name]) / (after["step"] - before["step"]) for rate, name in rates.items()}
        for before, after in itertools.pairwise(samples)
    ]


def main() -> None:
    """Measure the producer, run the soak, print and write the slopes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        life.install_breakage(plan_of(1, 0), random.Random("soak"), life.Notebook(home / "broken"))
        fast = with_rates(train(home / "fast", 100, 0.0, 10).samples)
        per_step = min(sample["step_seconds"] for sample in fast)
        # Three quarters of it are slept in updates (`standin.py`).
        gauge = train(home / "soak", options.steps, FASTER * per_step / 0.75, 10)
        broken = len((home / "broken").read_text().splitlines())
    samples = with_rates(gauge.samples)
    judged = ("memory_mb", "children_mb", "open_files", "threads", "processes", "wal_bytes", "snapshot_bytes",
              "weights_bytes", "files", "log_bytes_per_step", "step_processor_seconds")  # fmt: skip
    slopes = {one: round(slope_of(samples, one), 3) for one in (*judged, "ledger_bytes_per_step", "step_seconds")}
    slopes["quickest_step_seconds"] = round(slope_of(quickest(samples), "quickest_step_seconds"), 3)
    for one, slope in slopes.items():
        first, last = (samples[n][one] for n in (len(samples) // 10, -1))
        print(f"{one:>24}  {first:12.4g} → {last:12.4g}   slope {slope:+.3f} % per 100 steps")
    growing = [one for one in (*judged, "quickest_step_seconds") if slopes[one] > LIMIT]
    write_results(
        "soak",
        {
            "steps": options.steps,
            "rollouts_per_step": SIZE,
            "producer_seconds_per_step": round(per_step, 4),
            "learner_seconds_per_step": round(statistics.median(sample["step_seconds"] for sample in samples), 4),
            "share_waited_for_rollouts": round(gauge.waited_s / gauge.samples[-1]["seconds"], 4),
            "broken_episodes": broken,
            "slopes_percent_per_100_steps": slopes,
            "limit": LIMIT,
            "growing": growing,
            "first": samples[len(samples) // 10],
            "last": samples[-1],
            "notes": gauge.notes[:10],
        },
    )
    sys.exit(bool(growing))


if __name__ == "__main__":
    main()
