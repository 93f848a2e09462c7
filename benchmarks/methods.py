"""Does the calculator agent learn under every method? One table, one seed each.

    python benchmarks/methods.py RUN [--steps 30] [--rollouts 128] [--only gspo dapo]

RUN is a folder in which `soloist run calculator` has done SFT and value pretraining; every recipe of
`soloist/recipes/methods` starts from its weights and runs its RL stage, one after the other. The table has the mean
reward of the first and the last `WINDOW` rollouts, what the mask or clip did, and the held-out score. Finished rows
stay in the result file; run it again to go on.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import RESULTS, write_results

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "src" / "soloist" / "recipes" / "methods"
WINDOW = 512
TOUCHED = ("dis/masked_frac", "ppo/clip_frac", "cispo/clip_frac", "m2po/masked_frac", "tv/masked_frac")
"""What a method's region does to tokens; each has one of these, or none."""


def rl_stage(recipe: Path, start: Path, folder: Path, options: list[str]) -> list[dict[str, Any]]:
    """The RL stage and evaluation of a recipe from the SFT model (and critic) of the run `start`; its step records."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for part in ("model", "sft", "value_pretraining"):
        shutil.copytree(start / part, folder / part)
    stages = json.loads((start / "stages.json").read_text())
    done = ["sft"] if recipe.stem == "spo" else ["sft", "pretrain-value"]  # SPO's start is a stage of its own
    (folder / "stages.json").write_text(json.dumps({name: stages[name] for name in done}))
    command = [sys.executable, "-m", "soloist", "run", str(recipe), "--name", folder.name]
    command += [f"--runs_dir={folder.parent}", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    outcome = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    if outcome.returncode:
        raise RuntimeError(f"{recipe.stem} ended with {outcome.returncode}: {outcome.stderr[-2000:]}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["stage"] == "train"]


def row_of(steps: list[dict[str, Any]], stages: dict[str, Any], rollouts: int) -> dict[str, Any]:
    """One line of the table."""
    window = max(1, WINDOW // rollouts)
    rewards = [step["reward/mean"] for step in steps]
    touched = {name: statistics.fmean(step[name] for step in steps) for name in TOUCHED if name in steps[0]}
    return {
        "first": statistics.fmean(rewards[:window]),
        "last": statistics.fmean(rewards[-window:]),
        "heldout": stages["eval"]["avg"],
        "touched": touched,
        "mismatch_kl": statistics.fmean(step["mismatch_kl/mean"] for step in steps),
        "steps": len(steps),
        "seconds": sum(step["time/step"] for step in steps),
    }


def main() -> None:
    """Fill the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rollouts", type=int, default=128)
    parser.add_argument("--only", nargs="+", default=[])
    arguments = parser.parse_args()
    path = RESULTS / "methods.json"
    rows: dict[str, Any] = json.loads(path.read_text())["methods"] if path.is_file() else {}
    options = [f"--steps={arguments.steps}", f"--rollouts_per_step={arguments.rollouts}", "--eval.problems=128"]
    for recipe in sorted(RECIPES.glob("*.toml")):
        if recipe.stem in rows or (arguments.only and recipe.stem not in arguments.only):
            continue
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / recipe.stem
            steps = rl_stage(recipe, arguments.run.resolve(), folder, options)
            row = row_of(steps, json.loads((folder / "stages.json").read_text()), arguments.rollouts)
        rows[recipe.stem] = row
        write_results("methods", {"start": str(arguments.run), "options": options, "methods": rows})
        print(f"{recipe.stem:22} {row['first']:.3f} -> {row['last']:.3f}  held out {row['heldout']:.3f}", flush=True)


if __name__ == "__main__":
    main()
