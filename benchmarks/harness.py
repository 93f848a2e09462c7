"""What every benchmark shares: fair timing of two things in one run, and results that say where they come from.

Timed on shared machines, seconds alone mean little; a ratio of two things that took turns in the same run does. So
`compare` warms both up, lets them alternate which goes first, and takes the median of the ratios of the pairs.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Comparison:
    """Seconds of two things that took turns."""

    ours_s: list[float]
    theirs_s: list[float]

    @property
    def ratio(self) -> float:
        """Median over the pairs of their seconds ÷ our seconds: above 1 we are faster."""
        return statistics.median(theirs / ours for ours, theirs in zip(self.ours_s, self.theirs_s, strict=True))

    @property
    def spread(self) -> tuple[float, float]:
        """Smallest and largest ratio of a pair."""
        ratios = [theirs / ours for ours, theirs in zip(self.ours_s, self.theirs_s, strict=True)]
        return min(ratios), max(ratios)


def seconds(work: Callable[[], object]) -> float:
    """Wall-clock seconds of one call; waits for the device before and after."""
    _synchronize()
    start = time.perf_counter()
    work()
    _synchronize()
    return time.perf_counter() - start


Work = Callable[[], object]


def compare(ours: Work, theirs: Work, *, pairs: int = 5, warm_up: int = 1) -> Comparison:
    """Time both `pairs` times in turns, after `warm_up` untimed calls of each."""
    for _ in range(warm_up):
        ours()
        theirs()
    ours_s: list[float] = []
    theirs_s: list[float] = []
    for pair in range(pairs):
        # Who goes first alternates, so that a machine that gets slower or faster favours nobody.
        first, second = ((ours, ours_s), (theirs, theirs_s))[:: 1 if pair % 2 == 0 else -1]
        for work, taken in (first, second):
            taken.append(seconds(work))
    return Comparison(ours_s, theirs_s)


def matmul_rate(size: int = 1024, repeats: int = 5) -> float:
    """FLOP/s of fp32 matrix products, [size, size] × [size, size], at the present number of threads."""
    left, right = torch.randn(2, size, size)
    left @ right
    return 2 * size**3 / statistics.median(seconds(lambda: left @ right) for _ in range(repeats))


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "torch_threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_average": os.getloadavg()[0],
    }


def write_results(name: str, figures: dict[str, Any]) -> Path:
    """Write `results/<name>.json` with commit, command and machine, and print it."""
    result = figures | {"commit": commit(), "command": command(), "machine": machine()}
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return path


def commit() -> str:
    """The commit measured; `+` when files differ from it."""
    head = _git("rev-parse", "HEAD")
    return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")


def command() -> str:
    """The command line of this process, as one would type it."""
    return shlex.join(["python", *sys.argv])


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
