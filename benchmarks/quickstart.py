"""Does the quickstart learn, for three seeds, and does it learn nothing when rewards are shuffled?

    python benchmarks/quickstart.py [--seeds 0 1 2] [--runs-dir runs/quickstart]

For each seed: `soloist run calculator` from nothing (timed), then value pretraining and RL once more from the same SFT
model with `shuffle_rewards = true` (the critic's gate is off: there is nothing to predict). Writes
benchmarks/results/quickstart.json, from which `readme.py` takes README's figures.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "quickstart.json"
COMMAND = "python benchmarks/quickstart.py"


def soloist(*arguments: str) -> None:
    """Run the command line in a process of its own; its output is shown."""
    subprocess.run([sys.executable, "-m", "soloist", *arguments], check=True)


def summaries(folder: Path) -> dict[str, Any]:
    """What the stages of a run reported."""
    found: dict[str, Any] = json.loads((folder / "stages.json").read_text())
    return found


def overlap(folder: Path) -> float:
    """Share of the learner's computing time during which the engine sampled tokens for some rollout."""
    events = [json.loads(line) for line in (folder / "timeline.jsonl").read_text().splitlines()]
    computing = [(e["start"], e["end"]) for e in events if str(e["what"]).startswith("update")]
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    train = [record for line in lines if (record := json.loads(line))["stage"] == "train"]
    busy = sum((1 - record["rollouter/idle_ratio"]) * record["time/step"] for record in train)
    total = sum(record["time/step"] for record in train)
    learning = sum(end - start for start, end in computing)
    # Both can't fit into the wall-clock time one after the other, so the excess ran at the same time.
    return max(0.0, busy + learning - total) / learning


def one_seed(seed: int, runs: Path) -> dict[str, Any]:
    """Train seed `seed` as a newcomer would, then the shuffled control."""
    name, control = f"seed{seed}", f"shuffled{seed}"
    for old in (name, control):
        shutil.rmtree(runs / old, ignore_errors=True)
    common = ["--runs_dir", str(runs), "--seed", str(seed)]
    start = time.monotonic()
    soloist("run", "calculator", "--name", name, *common)
    seconds = time.monotonic() - start
    (runs / control).mkdir(parents=True)
    for part in ("model", "sft"):
        shutil.copytree(runs / name / part, runs / control / part)
    stages = summaries(runs / name)
    (runs / control / "stages.json").write_text(json.dumps({"sft": stages["sft"]}))
    nothing_to_learn = ["--shuffle_rewards=true", "--value_pretraining.gate=-1"]
    soloist("run", "calculator", "--name", control, *common, *nothing_to_learn)
    return {
        "sft": stages["sft"]["eval"]["avg"],
        "sao": stages["eval"]["avg"],
        "shuffled": summaries(runs / control)["eval"]["avg"],
        "problems": stages["eval"]["problems"],
        "seconds": round(seconds, 1),
        "mean_staleness": stages["train"]["mean_staleness"],
        "spanning_fraction": stages["train"]["spanning_fraction"],
        "masked_frac": stages["train"]["masked_frac"],
        "critic_skill": stages["pretrain-value"]["skill"],
        "loop_delay_p99_ms": stages["train"]["loop_delay_p99_ms"],
        "overlap": overlap(runs / name),
    }


def main() -> None:
    """Run all seeds and write the lists."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs-dir", type=Path, default=Path("runs/quickstart"))
    arguments = parser.parse_args()
    rows = [one_seed(seed, arguments.runs_dir) for seed in arguments.seeds]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    result: dict[str, Any] = {key: [row[key] for row in rows] for key in rows[0]}
    result |= {"seeds": arguments.seeds, "commit": commit, "command": COMMAND}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
