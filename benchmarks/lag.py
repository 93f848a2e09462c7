"""Which methods stay stable while the data is stale? Six arms under an exact lag, on the calculator.

    python benchmarks/lag.py [--start RUN] [--lags 2 8] [--steps 40] [--jobs 1]

Every rollout is exactly min(step, lag) updates old. The learning rate is swept over one grid on one seed for every
arm; then three seeds run at each arm's best rate and at the highest rate of the grid. All runs start from one SFT model
(and one critic), made first when RUN doesn't exist, and have the same seeds, tasks and lag; a step has as many rollouts
for every arm. Finished runs stay in `results/lag.json`: start it again to go on. About two hours on two cores.

Reported for each arm, lag and rate, as mean over seeds: reward of the last `WINDOW` steps, worst window after the
first, spread over seeds (largest - smallest final reward), mismatch (k3), tokens masked, clipped or gated, and the step
of the collapse: the first whose window falls below half of the best window before it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from harness import RESULTS, write_results

from soloist.config_files import load_config
from soloist.errors import RunError
from soloist.metrics import read_metrics
from soloist.training.observer import SilentObserver
from soloist.training.stages import run_stages

ROOT = Path(__file__).parents[1]
GRID = (1e-4, 2e-4, 4.5e-4, 1e-3)
SEEDS = (0, 1, 2)
WINDOW = 8
GROUPS = {"advantage.adv_estimator": "group_relative", "group_size": "8"}
ARMS: dict[str, dict[str, str]] = {
    "sao": {},
    "grpo_clip_higher": GROUPS | {"loss.policy_loss": "clip_higher"},
    "grpo_dis": GROUPS,
    # With SAT's own intervals, so that the two differ in the contraction alone.
    "gspo": GROUPS | {"loss.policy_loss": "gspo", "loss.eps_low": "0.2", "loss.eps_high": "0.2"},
    "sat_grpo": GROUPS | {"loss.policy_loss": "sat_grpo"},
    "sat_gspo": GROUPS | {"loss.policy_loss": "sat_gspo"},
}
TOUCHED = ("dis/masked_frac", "ppo/clip_frac", "sat/gate_rate")
"""What a method did to tokens: masked, clipped, or their interval contracted (a tenth of them, by SAT's quantile)."""
RECIPE = """# The calculator's RL stage under an exact lag; SFT and value pretraining as in the packaged recipe.
rollouts_per_step = 64
players = 64
token_budget = 2048
samples = 0
keep_rollouts = 0
checkpoint_every = 1000

[sft]
steps = 800
good = 0.55
miscopied = 0.08
"""

Row = dict[str, Any]


def key_of(arm: str, lag: int, lr: float, seed: int) -> str:
    """Name of one run."""
    return f"{arm} lag {lag} lr {lr:g} seed {seed}"


def start_of(folder: Path, recipe: Path) -> Path:
    """The run that all arms start from, made when it isn't there."""
    if not (folder / "stages.json").is_file():
        overrides = {"name": folder.name, "runs_dir": str(folder.parent), "eval.problems": "128"}
        config = load_config(str(recipe), overrides)
        run_stages(config, ("sft", "pretrain-value"), resume=False, skip_done=True, observer=SilentObserver())
    return folder


def play(arm: str, lag: int, lr: float, seed: int, start: Path, scratch: Path, recipe: Path, steps: int) -> Row:
    """One run's figures."""
    folder = scratch / key_of(arm, lag, lr, seed).replace(" ", "_")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for part in ("model", "sft", "value_pretraining"):
        shutil.copytree(start / part, folder / part)
    overrides = ARMS[arm] | {"name": folder.name, "runs_dir": str(scratch), "steps": str(steps)}
    overrides |= {"lag": str(lag), "policy.lr": str(lr), "seed": str(seed)}
    row: Row = {"arm": arm, "lag": lag, "lr": lr, "seed": seed}
    try:
        config = load_config(str(recipe), overrides)
        run_stages(config, ("train",), resume=False, skip_done=True, observer=SilentObserver())
    except RunError as error:
        # A policy that went to pieces may end in a non-finite gradient; that is a result, too.
        row["ended"] = str(error)[:300]
    row |= figures_of(read_metrics(folder / "metrics.jsonl", "train"))
    shutil.rmtree(folder, ignore_errors=True)
    return row


def figures_of(train: list[Row]) -> Row:
    """Figures of one run from its step records."""
    rewards = [float(record["reward/mean"]) for record in train]
    windows = [statistics.fmean(rewards[end - WINDOW : end]) for end in range(WINDOW, len(rewards) + 1)]
    if not windows:
        return {"steps": len(rewards), "rewards": rewards}
    touched = [name for name in TOUCHED if train[0].get(name) is not None]
    best, collapse = windows[0], None
    for number, window in enumerate(windows):
        if collapse is None and window < best / 2:
            collapse = number + WINDOW - 1
        best = max(best, window)
    return {
        "steps": len(rewards),
        "final": windows[-1],
        "worst": min(windows[WINDOW:] or windows),
        "collapse_step": collapse,
        "mismatch_kl": statistics.fmean(float(record["mismatch_kl/mean"] or 0.0) for record in train),
        "touched": {name: statistics.fmean(float(record[name] or 0.0) for record in train) for name in touched},
        "touched_max": {name: max(float(record[name] or 0.0) for record in train) for name in touched},
        "staleness_max": max(float(record["off_policy/staleness/max"]) for record in train),
        "seconds": sum(float(record["time/step"]) for record in train),
        "rewards": [round(reward, 4) for reward in rewards],
    }


def plan(lags: Sequence[int], rows: dict[str, Row]) -> Iterator[tuple[str, int, float, int]]:
    """What is still to be run: first the sweeps, then, once an arm's sweep is there, its further seeds."""
    for lag in lags:
        for lr in GRID:
            for arm in ARMS:
                yield arm, lag, lr, SEEDS[0]
    for lag in lags:
        for seed in SEEDS[1:]:
            for arm in ARMS:
                for lr in sorted({best_rate(arm, lag, rows), GRID[-1]}):
                    yield arm, lag, lr, seed


def best_rate(arm: str, lag: int, rows: dict[str, Row]) -> float:
    """The rate with the highest final reward on the first seed; NaN-free, as a run without a window counts as 0."""
    return max(GRID, key=lambda lr: float(rows.get(key_of(arm, lag, lr, SEEDS[0]), {}).get("final") or 0.0))


def table_of(lags: Sequence[int], rows: dict[str, Row]) -> list[Row]:
    """One line for each arm, lag and rate that has all seeds."""
    table = []
    for lag in lags:
        for arm in ARMS:
            for lr in sorted({best_rate(arm, lag, rows), GRID[-1]}):
                own = [rows[key] for seed in SEEDS if (key := key_of(arm, lag, lr, seed)) in rows]
                if own:
                    table.append(
                        {"arm": arm, "lag": lag, "lr": lr, "best": lr == best_rate(arm, lag, rows)} | mean_of(own)
                    )
    return table


def mean_of(own: list[Row]) -> Row:
    """Means over seeds."""
    finals = [float(row.get("final") or 0.0) for row in own]
    names = sorted({name for row in own for name in row.get("touched", {})})

    def average(read: Callable[[Row], float]) -> float:
        return round(statistics.fmean(read(row) for row in own), 5)

    return {
        "seeds": len(own),
        "final": average(lambda row: float(row.get("final") or 0.0)),
        "worst": average(lambda row: float(row.get("worst") or 0.0)),
        "spread": round(max(finals) - min(finals), 5),
        "mismatch_kl": average(lambda row: float(row.get("mismatch_kl") or 0.0)),
        "touched": {name: average(lambda row, name=name: row.get("touched", {}).get(name, 0.0)) for name in names},  # type: ignore[misc]
        "collapsed": sum(row.get("collapse_step") is not None or "ended" in row for row in own),
        "collapse_steps": [row.get("collapse_step") for row in own],
    }


def draw(lags: Sequence[int], rows: dict[str, Row], path: Path) -> None:
    """Reward over steps: a column for each lag, the best rate above, the highest rate below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(lags), figsize=(5.5 * len(lags), 7), sharex=True, sharey=True, squeeze=False)
    for column, lag in enumerate(lags):
        for line, title in enumerate(("best rate of each arm", f"highest rate, {GRID[-1]:g}")):
            axis = axes[line][column]
            axis.set_title(f"lag {lag}: {title}", fontsize=10)
            for arm in ARMS:
                lr = GRID[-1] if line else best_rate(arm, lag, rows)
                curves = [rows[key]["rewards"] for seed in SEEDS if (key := key_of(arm, lag, lr, seed)) in rows]
                curves = [curve for curve in curves if curve]
                if not curves:
                    continue
                length = min(map(len, curves))
                mean = [statistics.fmean(curve[step] for curve in curves) for step in range(length)]
                smooth = [statistics.fmean(mean[max(0, step - 3) : step + 1]) for step in range(length)]
                axis.plot(smooth, label=f"{arm} ({lr:g})", linewidth=1.5)
            axis.legend(fontsize=7)
            axis.grid(alpha=0.3)
    axes[-1][0].set_xlabel("policy updates")
    axes[0][0].set_ylabel("mean reward")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run what is missing, then write the table and the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=Path, default=ROOT / "runs" / "lag-start")
    parser.add_argument("--scratch", type=Path, default=ROOT / "runs" / "lag")
    parser.add_argument("--lags", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--jobs", type=int, default=1)
    arguments = parser.parse_args()
    scratch, lags, steps = arguments.scratch.resolve(), arguments.lags, arguments.steps
    scratch.mkdir(parents=True, exist_ok=True)
    recipe = scratch / "lag.toml"
    recipe.write_text(RECIPE)
    start = start_of(arguments.start.resolve(), recipe)
    path = RESULTS / "lag.json"
    known: Row = json.loads(path.read_text()) if path.is_file() else {"steps": steps, "runs": {}}
    if known["steps"] != steps:
        raise SystemExit(f"{path} holds runs of {known['steps']} steps, found --steps {steps}; move it away first")
    rows: dict[str, Row] = known["runs"]

    def keep(row: Row) -> None:
        key = key_of(row["arm"], row["lag"], row["lr"], row["seed"])
        rows[key] = row
        print(f"{key:44} final {row.get('final')} worst {row.get('worst')} {row.get('touched')}", flush=True)
        figures = {"steps": steps, "grid": GRID, "seeds": SEEDS, "window": WINDOW, "options": ARMS, "recipe": RECIPE}
        write_results("lag", {**figures, "table": table_of(lags, rows), "runs": rows})

    # A process for each job that goes on from run to run; forked ones would share torch's threads.
    with ProcessPoolExecutor(arguments.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        while missing := [job for job in plan(lags, rows) if key_of(*job) not in rows]:
            # Rates for further seeds are known only once the sweep is done.
            jobs = [job for job in missing if job[3] == SEEDS[0]] or missing
            for future in as_completed([pool.submit(play, *job, start, scratch, recipe, steps) for job in jobs]):
                keep(future.result())
    draw(lags, rows, RESULTS / "lag.png")
    for line in table_of(lags, rows):
        print(json.dumps(line))


if __name__ == "__main__":
    main()
