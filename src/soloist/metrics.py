"""Metric names with unit and meaning, and the log that writes them. Floor 0; knows nothing of what is measured.

Guarantees: only registered names are written (`docs/metrics.md` is compared with `METRICS` by a test); NaN and ±inf
become null; a failing disk never stops training, it is reported once.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

METRICS: dict[str, tuple[str, str]] = {
    "reward/mean": ("reward", "mean reward of the trained rollouts"),
    "reward/std": ("reward", "standard deviation of the trained rollouts' rewards"),
    "rollout/length": ("tokens", "mean action tokens of trained rollouts"),
    "rollout/length_started": (
        "tokens",
        "mean action tokens of all rollouts that ended since the last step",
    ),
    "rollout/truncated_ratio": ("share", "trained rollouts that a budget cut"),
    "rollout/failed_ratio": ("share", "rollouts that failed, of those that ended since the last step"),
    "rollout/turns": ("turns", "mean actions of trained rollouts"),
    "rollout/tool_calls": ("calls", "mean tool calls of trained rollouts"),
    "actor/pg_loss": ("loss", "policy loss of the step, with divergence and entropy bonus where set"),
    "actor/grad_norm": ("norm", "policy gradient before clipping"),
    "actor/entropy": ("nats", "mean entropy of the trained tokens' distributions"),
    "actor/ppo_kl": ("nats", "mean of log μ − log π over trained tokens"),
    "actor/kl_to_reference": ("nats", "mean of exp(x) − 1 − x, x = log π_ref − log π, when kl_coef is above 0"),
    "actor/lr": ("1", "learning rate of the policy"),
    "critic/loss": ("loss", "value loss of the last of the K updates"),
    "critic/explained_var": ("share", "1 − Var(return − value) / Var(return), per token, before the K updates"),
    "critic/skill": ("share", "1 − mean((return − value)²) / Var(return), per rollout, before the K updates"),
    "critic/grad_norm": ("norm", "value gradient before clipping"),
    "critic/lr": ("1", "learning rate of the value model"),
    "dis/masked_frac": ("share", "trained tokens outside the band"),
    "dis/masked_frac_low": ("share", "trained tokens with a ratio at or below 1 − eps_low"),
    "dis/masked_frac_high": ("share", "trained tokens with a ratio at or above 1 + eps_high"),
    "dis/ess": ("share", "effective sample size of the ratios, (Σr)² / (n·Σr²)"),
    "ppo/clip_frac": ("share", "trained tokens whose clipped term was the smaller one"),
    "correction/truncated_frac": ("share", "trained tokens whose correction was cut at the cap, or 0"),
    "cispo/clip_frac": ("share", "trained tokens whose ratio was outside 1 − eps_low … 1 + eps_high"),
    "m2po/masked_frac": ("share", "trained tokens left out so that the second moment stays below m2_threshold"),
    "tv/masked_frac": ("share", "trained tokens whose probability moved by more than tv_delta as the advantage asks"),
    "sat/gate_rate": ("share", "trained tokens staler than the quantile, whose interval shrank"),
    "sat/radius_low": ("1", "mean way from 1 to the lower end of the interval"),
    "sat/radius_high": ("1", "mean way from 1 to the upper end of the interval"),
    "sat/contraction_min": ("1", "smallest factor of an interval; 1 when none shrank"),
    "sat/proxy": ("nats", "mean distance of log π from log μ, of tokens or of their sequences"),
    "mismatch_kl/mean": ("nats", "mean of exp(log π − log μ) − 1 − (log π − log μ), over the updates of the step"),
    "advantage/mean": ("reward", "mean advantage over trained tokens"),
    "advantage/std": ("reward", "standard deviation of advantages over trained tokens"),
    "advantage/zero_frac": ("share", "trained tokens whose advantage is exactly 0"),
    "off_policy/staleness/mean": ("versions", "version being trained minus version of the rollout's oldest token"),
    "off_policy/staleness/max": ("versions", "largest staleness of the step"),
    "off_policy/staleness/p95": ("versions", "95th percentile of staleness"),
    "off_policy/versions_per_rollout": ("versions", "mean number of versions whose tokens a rollout holds"),
    "off_policy/spanning_frac": ("share", "trained rollouts with tokens of more than one version"),
    "queue/size": ("rollouts", "scored rollouts waiting when the step began"),
    "queue/age_s": ("s", "mean time between scoring and training"),
    "queue/dropped": (
        "rollouts",
        "given up since the start: for age (on_stale = drop), without a sign of life, uniform",
    ),
    "queue/dropped_length": ("tokens", "mean action tokens of the rollouts dropped since the last step"),
    "group/uniform_frac": ("share", "trained rollouts in groups whose rewards are all equal, which teach nothing"),
    "group/dropped": ("groups", "dropped since the last step because their rewards were all equal"),
    "time/step": ("s", "whole step"),
    "time/wait_for_rollouts": ("s", "waiting for a full step of rollouts"),
    "time/weight_sync": ("s", "publishing and loading the weights"),
    "time/update_value": ("s", "the K value updates"),
    "time/update_policy": ("s", "advantages and policy update"),
    "time/commit": ("s", "writing the step into the ledger"),
    "time/checkpoint": ("s", "copying the state for the snapshot after the step before"),
    "trainer/idle_ratio": ("share", "part of the step in which the learner waited for rollouts"),
    "rollouter/idle_ratio": ("share", "part of the step in which the engines computed nothing"),
    "perf/tokens_per_s": ("tokens/s", "tokens sampled by the engines"),
    "perf/trained_tokens_per_s": ("tokens/s", "action tokens trained"),
    "loop/delay_p99_ms": ("ms", "event-loop delay, 99th percentile since the start"),
    "loop/delay_max_ms": ("ms", "event-loop delay, largest since the last step"),
    "process/rss_mb": ("MB", "memory of the training process, engines not included"),
    "process/open_files": ("files", "open files and sockets of the training process"),
    "process/threads": ("threads", "threads of the training process"),
    "sft/loss": ("nats", "mean negative log-likelihood of demonstration tokens"),
    "sft/lr": ("1", "learning rate of the SFT stage"),
    "value_pretraining/loss": ("loss", "mean squared error of the epoch"),
    "value_pretraining/explained_var": ("share", "explained variance on held-out rollouts, per rollout"),
    "value_pretraining/skill": ("share", "skill on held-out rollouts, per rollout"),
    "eval/*/avg@k": ("share", "mean success over held-out tasks and k samples each, of one version"),
}


def is_registered(name: str) -> bool:
    """Whether a metric has a unit and a meaning in `METRICS` (`*` stands for an environment's name)."""
    if name in METRICS:
        return True
    parts = name.split("/")
    return len(parts) == 3 and parts[0] == "eval" and parts[2].startswith("avg@")


class MetricsLog:
    """Appends one JSON object a record to `metrics.jsonl`.

    Example line: `{"stage": "train", "step": 3, "time": 1790000000.0, "reward/mean": 0.4}`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._complained = False

    def write(self, stage: str, step: int, time: float, values: Mapping[str, float | None]) -> None:
        """Write one record. Raises ValueError for an unregistered name; disk errors are reported once and ignored."""
        unknown = sorted(name for name in values if not is_registered(name))
        if unknown:
            raise ValueError(f"metrics {unknown} have no entry in soloist.metrics.METRICS; add name, unit and meaning")
        record: dict[str, Any] = {"stage": stage, "step": step, "time": round(time, 3)}
        record.update({name: _finite(value) for name, value in values.items()})
        try:
            with self._path.open("a", encoding="utf-8", errors="replace") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            if not self._complained:
                print(f"metrics can't be written to {self._path} ({error}); training goes on without", file=sys.stderr)
            self._complained = True


def read_metrics(path: Path, stage: str | None = None) -> list[dict[str, Any]]:
    """All complete records of a log, of one stage if named. Torn lines are left out."""
    if not path.is_file():
        return []
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict) and stage in (None, record.get("stage")):
            records.append(record)
    return records


def mean(values: Iterable[float | None]) -> float | None:
    """Arithmetic mean of the finite values, or None of nothing; one NaN doesn't erase the rest."""
    found = _all_finite(values)
    return sum(found) / len(found) if found else None


def percentile(values: Iterable[float | None], share: float) -> float | None:
    """The value below which `share` of the finite values lie (nearest rank), or None of nothing."""
    found = sorted(_all_finite(values))
    return found[min(len(found) - 1, int(share * len(found)))] if found else None


def _all_finite(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
