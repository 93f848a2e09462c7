"""How long does the quickstart's RL stage take to 95 %, before and after a change, and against TRL's GRPOTrainer?

    python benchmarks/end_to_end.py RUN --before COMMIT [--trl /tmp/trl/bin/python] [--seeds 0 1]

RUN is a folder in which `soloist run calculator` has done SFT and value pretraining; all arms start from its weights.
`before` is the same recipe file with the code of another commit, in a work tree of its own. TRL runs
`trl_grpo.py` with another Python. Arms take turns, seed after seed, so that a machine that changes favours nobody.

Seconds to 95 % count from the first step of RL until the mean reward of the last `WINDOW` trained rollouts has reached
0.95. SFT and value pretraining are not in them; value pretraining is reported apart, as TRL has no critic.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import deque
from pathlib import Path
from typing import Any

from harness import write_results

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "src" / "soloist" / "recipes" / "calculator.toml"
WINDOW = 640
GOAL = 0.95


def seconds_to_goal(steps: list[tuple[float, float, int]]) -> float | None:
    """First time at which the last WINDOW rollouts' mean reward is GOAL; steps are (seconds, mean reward, rollouts)."""
    recent: deque[float] = deque(maxlen=WINDOW)
    for seconds, reward, count in steps:
        recent.extend([reward] * count)
        if len(recent) == WINDOW and sum(recent) / WINDOW >= GOAL:
            return seconds
    return None


def soloist(source: Path, run: Path, folder: Path, seed: int) -> dict[str, Any]:
    """The RL stage with the code under `source`, from the SFT model and the critic of `run`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for part in ("model", "sft", "value_pretraining"):
        shutil.copytree(run / part, folder / part)
    stages = json.loads((run / "stages.json").read_text())
    (folder / "stages.json").write_text(json.dumps({name: stages[name] for name in ("sft", "pretrain-value")}))
    # The file rather than the name: another commit's recipe of this name has other settings.
    command = [sys.executable, "-m", "soloist", "run", str(RECIPE), "--name", folder.name]
    command += [f"--seed={seed}", f"--runs_dir={folder.parent}"]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(source)}, cwd=folder, capture_output=True)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    train = [line for line in lines if line["stage"] == "train"]
    start = train[0]["time"] - train[0]["time/step"]
    count = tomllib.loads((folder / "config.resolved.toml").read_text())["rollouts_per_step"]
    found = [(line["time"] - start, line["reward/mean"], count) for line in train]
    evaluated = json.loads((folder / "stages.json").read_text())["eval"]["avg"]
    return summary(found, evaluated)


def trl(python: Path, run: Path, options: list[str]) -> dict[str, Any]:
    """TRL's trainer on the same model."""
    command = [str(python), str(ROOT / "benchmarks" / "trl_grpo.py"), str(run), *options]
    result = subprocess.run(command, check=True, capture_output=True, text=True, cwd=run)
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith('{"')]
    found = [(line["seconds"], line["reward"], line["rollouts"]) for line in lines if "reward" in line]
    return summary(found, lines[-1]["eval"])


def summary(steps: list[tuple[float, float, int]], evaluated: float) -> dict[str, Any]:
    """What one arm of one seed is reported by."""
    return {
        "seconds_to_95": seconds_to_goal(steps),
        "seconds": steps[-1][0],
        "steps": len(steps),
        "rollouts": sum(count for _, _, count in steps),
        "heldout": evaluated,
    }


def main() -> None:
    """Run all arms in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--before", required=True)
    parser.add_argument("--trl", type=Path)
    parser.add_argument("--trl-steps", type=int, default=60)
    parser.add_argument("--trl-lr", type=float, default=2e-4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    arguments = parser.parse_args()
    run = arguments.run.resolve()
    options = ["--steps", str(arguments.trl_steps), "--lr", str(arguments.trl_lr)]
    rows: dict[str, list[dict[str, Any]]] = {"before": [], "after": []}
    with tempfile.TemporaryDirectory() as scratch:
        before = Path(scratch) / "before"
        subprocess.run(["git", "worktree", "add", "--detach", str(before), arguments.before], check=True, cwd=ROOT)
        try:
            for seed in arguments.seeds:
                for name, source in (("before", before / "src"), ("after", ROOT / "src")):
                    rows[name].append(soloist(source, run, Path(scratch) / "runs" / f"{name}{seed}", seed))
                if arguments.trl:
                    rows.setdefault("trl", []).append(trl(arguments.trl, run, options))
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(before)], check=True, cwd=ROOT)
    pretrained = json.loads((run / "stages.json").read_text())["pretrain-value"]
    figures = {"before_commit": arguments.before, "arms": rows, "value_pretraining": pretrained}
    if arguments.trl:
        figures["trl_options"] = options
    write_results("end_to_end", figures)


if __name__ == "__main__":
    main()
