"""The end of a run in one picture and a page of text, read from its folder alone.

Guarantees: only `metrics.jsonl` and `ledger.sqlite` are read, so it works during a run, after it and on another
machine; a step that was trained again after a crash counts once, as it was trained last; text of models and tools is
shown as text. Not covered: comparing runs.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from soloist.metrics import read_metrics
from soloist.report.text import printable
from soloist.runtime.ledger import read_rollouts, read_steps
from soloist.types import Rollout

SMOOTH = 5
"""Steps of the moving mean in the picture and in the final figures."""
Points = list[tuple[int, float]]

INK, REWARD, VALUE, MASK = "#333333", "#1b6ca8", "#3a7d44", "#b5502f"


def write_summary(folder: Path) -> list[str]:
    """Write `reward.png` into a run's folder; return the lines to print: final figures and one rollout.

    Raises OSError when the picture can't be written and RunError when the ledger can't be read.
    """
    records = read_metrics(folder / "metrics.jsonl")
    lines = _figures(records)
    if series(records, "reward/mean"):
        picture = folder / "reward.png"
        # Not pyplot: it keeps figures alive and may want a display.
        FigureCanvasAgg(draw(records, folder.name)).print_png(str(picture))
        lines.append(f"picture: {printable(str(picture))}")
    sample = choose_sample(folder / "ledger.sqlite")
    return [*lines, "", *describe_rollout(sample)] if sample else lines


def series(records: Sequence[dict[str, Any]], name: str, stage: str = "train") -> Points:
    """(step, value) of one metric, in order of steps, without missing values; the last record of a step counts."""
    # A dict keeps the last record of a step: after a resume, steps beyond the checkpoint are trained again.
    found = {
        record["step"]: record[name]
        for record in records
        if record.get("stage") == stage and isinstance(record.get(name), int | float)
    }
    return sorted(found.items())


def evaluations(records: Sequence[dict[str, Any]]) -> list[tuple[str, int, float]]:
    """(metric, version, value) of every evaluation, in order of versions."""
    names = sorted({name for record in records for name in record if name.startswith("eval/")})
    rows = [(name, step, value) for name in names for step, value in series(records, name, stage="eval")]
    return sorted(rows, key=lambda row: (row[1], row[0]))


def held_out(records: Sequence[dict[str, Any]], stages: Mapping[str, Any]) -> list[tuple[str, int, float]]:
    """Like `evaluations`, with what only the stages' summaries hold: a copied SFT stage brings no metrics along."""
    rows = evaluations(records)
    for summary in (stages.get("sft", {}).get("eval"), stages.get("eval")):
        if isinstance(summary, Mapping) and summary.get("version") not in {version for _, version, _ in rows}:
            rows.append((f"eval/avg@{summary['samples']}", summary["version"], summary["avg"]))
    return sorted(rows, key=lambda row: (row[1], row[0]))


def smooth(points: Points, width: int = SMOOTH) -> Points:
    """mean of the last `width` values at each point; the first points average what there is."""
    values = [value for _, value in points]
    return [(step, statistics.fmean(values[max(0, i + 1 - width) : i + 1])) for i, (step, _) in enumerate(points)]


def _figures(records: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    rewards = series(records, "reward/mean")
    if rewards:
        first, last = (statistics.fmean(v for _, v in part) for part in (rewards[:SMOOTH], rewards[-SMOOTH:]))
        span = min(SMOOTH, len(rewards))
        lines.append(
            f"reward       {first:.3f} → {last:.3f}  (mean of the first and of the last {span} of {len(rewards)} steps)"
        )
    for label, name, unit in (
        ("critic", "critic/explained_var", "explained variance per token"),
        ("masked", "dis/masked_frac", "share of the tokens, outside the band"),
        ("staleness", "off_policy/staleness/mean", "versions"),
    ):
        points = series(records, name)
        if points:
            lines.append(f"{label:12} {statistics.fmean(v for _, v in points[-SMOOTH:]):.3f}  ({unit})")
    lines += [f"{name}  {value:.3f}  (version {version})" for name, version, value in evaluations(records)]
    return lines or ["no step has been trained yet"]


def draw(records: Sequence[dict[str, Any]], title: str) -> Figure:
    """The picture: reward by step with the evaluations, below it explained variance and masked tokens."""
    figure = Figure(figsize=(8, 7), layout="constrained")
    reward, explained, masked = figure.subplots(3, 1, sharex=True, height_ratios=(3, 1, 1))
    _draw_reward(reward, records)
    figure.suptitle(printable(title), x=0.02, ha="left", color=INK, fontsize=13, parse_math=False)
    _draw_small(explained, series(records, "critic/explained_var"), VALUE, "explained\nvariance")
    # The early critic can be far below a constant; those points would flatten all that follows.
    explained.set_ylim(bottom=max(-1.0, explained.get_ylim()[0]), top=1.0)
    percent = [(step, 100 * value) for step, value in series(records, "dis/masked_frac")]
    _draw_small(masked, percent, MASK, "masked tokens\n%")
    # Shares of less than a percent are what DIS masks; from 0 they can be read as heights.
    masked.set_ylim(bottom=0.0)
    masked.set_xlabel("policy update", color=INK, fontsize=9)
    for axes in (reward, explained, masked):
        _tidy(axes)
    return figure


def _draw_reward(axes: Axes, records: Sequence[dict[str, Any]]) -> None:
    points = series(records, "reward/mean")
    axes.plot(
        *zip(*points, strict=True), "o", color=REWARD, alpha=0.35, markersize=3, label="mean of the step's rollouts"
    )
    axes.plot(*zip(*smooth(points), strict=True), color=REWARD, linewidth=2, label=f"mean of {SMOOTH} steps")
    held_out = evaluations(records)
    for (name, version, value), style in zip(_ends(held_out), ("--", ":"), strict=False):
        policy = "SFT policy" if version == 0 else f"version {version}"
        text = f"{policy}, held-out {name.rpartition('/')[2]}: {value:.2f}"
        axes.axhline(value, color=INK, linewidth=1, linestyle=style, label=text)
    axes.set_ylabel("reward", color=INK, fontsize=9)
    # Above the axes, where no line can run through it.
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, fontsize=9, labelcolor=INK)


def _ends(rows: list[tuple[str, int, float]]) -> list[tuple[str, int, float]]:
    return rows if len(rows) < 2 else [rows[0], rows[-1]]


def _draw_small(axes: Axes, points: Points, color: str, label: str) -> None:
    if points:
        axes.plot(*zip(*points, strict=True), color=color, linewidth=1.5)
    axes.set_ylabel(label, color=INK, fontsize=9)


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.tick_params(colors=INK, labelsize=9)
    axes.margins(x=0.02)


def choose_sample(ledger: Path) -> Rollout | None:
    """A rollout of the last trained step: one that used a tool if there is one, and of those the best rewarded.

    Raises RunError when the ledger can't be read.
    """
    steps = read_steps(ledger) if ledger.is_file() else []
    if not steps:
        return None
    rows = read_rollouts(ledger, step=steps[-1].step)
    rollouts = [row.rollout for row in rows if row.rollout is not None]
    return max(rollouts, key=lambda rollout: (_uses_tool(rollout), rollout.reward or 0.0), default=None)


def _uses_tool(rollout: Rollout) -> bool:
    return any(message.get("role") == "tool" for message in rollout.messages)


def describe_rollout(rollout: Rollout) -> list[str]:
    """One rollout for people: what was asked, called, observed and answered, with reward and versions."""
    reward = "not scored" if rollout.reward is None else f"{rollout.reward:g}"
    versions = sorted({span.version for span in rollout.spans()})
    span = f"{versions[0]}–{versions[-1]}" if len(versions) > 1 else "".join(map(str, versions)) or "none"
    tokens = f"{rollout.action_tokens} action tokens of version {span}"
    head = f"sample: {rollout.task_id}, {rollout.status}, reward {reward}, {tokens}"
    lines = [printable(head, keep_newlines=False)]
    for message in rollout.messages:
        lines += _describe_message(message)
    return lines


def _describe_message(message: dict[str, Any]) -> list[str]:
    role = str(message.get("role", "?"))
    lines = _indented(role, str(message.get("content") or ""))
    calls = message.get("tool_calls") or []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, dict) else call
        named = isinstance(function, dict) and "name" in function
        shown = f"{function['name']}({function.get('arguments', '')})" if named else str(function)
        lines += _indented(f"{role} calls", shown)
    return lines


def _indented(label: str, text: str) -> list[str]:
    # Indentation keeps a model's text from passing for a line of ours.
    rows = printable(text).strip("\n").split("\n") if text.strip() else []
    label = printable(label, keep_newlines=False)
    return [f"  {label if i == 0 else '':16} │ {row}" for i, row in enumerate(rows)]
