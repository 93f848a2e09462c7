"""The panels of a report: each draws one question about a run and brings the numbers that it drew.

Guarantees: pure functions of what was read; a panel without data is None; the table holds what the lines show, at
`TABLE_ROWS` steps at most. Not covered: the page around them (`page.py`) and the timeline (`timeline.py`).
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from soloist.report.markup import number, percent, table
from soloist.report.run_files import RunFiles
from soloist.report.summary import Points, held_out, series, smooth

INK, QUIET, GRID = "#2b2b2b", "#6b6b6b", "#e4e4e4"
BLUE, ORANGE, GREEN = "#1b6ca8", "#c8641e", "#3a7d44"
SIZE = (5.2, 2.9)
"""Inches; small, so that labels stay readable when a phone shows the picture at its width."""
DPI = 144
TABLE_ROWS = 12
FEWEST_BARS = 4
"""Places for bars: two alone would fill the picture."""
AREA: dict[str, Any] = {"color": "#c9d6df"}
OUTLINE: dict[str, Any] = {"color": BLUE, "histtype": "step", "linewidth": 1.6}


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One picture with what it says.

    Example: `Panel(name="reward", title="Reward", note="…", figure=figure, alt="…", numbers="<table>…")`.
    """

    name: str
    """Of the PNG file."""
    title: str
    note: str
    """How to read it, one or two sentences of ours."""
    alt: str
    """The picture in a sentence, for those who can't see it."""
    figure: Figure
    numbers: str = ""
    """What was drawn, as HTML tables."""
    wide: bool = False

    @cached_property
    def png(self) -> bytes:
        """The picture. Not pyplot: it keeps figures alive and may want a display."""
        stream = io.BytesIO()
        self.figure.set_dpi(DPI)
        FigureCanvasAgg(self.figure).print_png(stream)
        return stream.getvalue()


def reward(files: RunFiles) -> Panel | None:
    """Reward by step, with the held-out evaluations at their versions."""
    points = series(files.metrics, "reward/mean")
    measured = held_out(files.metrics, files.stages)
    if not points and not measured:
        return None
    figure, axes = new_figure()
    if points:
        axes.plot(*_xy(points), "o", color=BLUE, alpha=0.4, markersize=3.5, markeredgewidth=0, label="mean of a step")
        axes.plot(*_xy(smooth(points)), color=BLUE, linewidth=1.8, label="mean of 5 steps")
    if measured:
        versions, values = [version for _, version, _ in measured], [value for *_, value in measured]
        axes.plot(versions, values, "D", color=ORANGE, markersize=6, label="held-out evaluation", clip_on=False)
        for version, value in zip(versions, values, strict=True):
            # Inwards and away from the line, which starts at the first and ends at the last diamond.
            side, up = (-1, -14) if version > 0 else (1, 7)
            axes.annotate(f"{value:.3f}", (version, value), (7 * side, up), textcoords="offset points",
                          ha="left" if side > 0 else "right", color=ORANGE, fontsize=9)  # fmt: skip
    finish(axes, "policy update", "reward")
    first, last = (f"{points[i][1]:.3f}" for i in (0, -1)) if points else ("–", "–")
    return Panel(
        name="reward",
        title="Reward and held-out evaluation",
        note="Training rewards are of sampled rollouts. An evaluation measures one version, at its place on the axis.",
        alt=f"Reward by policy update: {first} at the first step, {last} at the last.",
        figure=figure,
        numbers=table(("evaluation", "version", "mean"), [(n, v, f"{x:.4f}") for n, v, x in measured])
        + by_step({"reward": points}),
    )


def critic(files: RunFiles) -> Panel | None:
    """How much of the returns the value model explains."""
    explained, skill = (series(files.metrics, f"critic/{name}") for name in ("explained_var", "skill"))
    return _lines(
        files,
        name="critic",
        title="Critic",
        note="1 is perfect, 0 is no better than a constant, below 0 is worse. Judged on rollouts before the critic has "
        "trained on them. Values below −1 are drawn at −1.",
        lines={
            "explained variance, per token": (explained, GREEN),
            "skill, per rollout": (skill, BLUE),
        },
        unit="share of variance",
        floor=-1.0,
        zero=True,
    )


def masked(files: RunFiles) -> Panel | None:
    """Masked share of the tokens, by staleness."""
    counts = masked_by_staleness(files)
    if not counts:
        return None
    figure, axes = new_figure()
    ages = sorted(counts)
    shares = [100 * counts[age][1] / max(1, counts[age][0]) for age in ages]
    bars = axes.bar([str(age) for age in ages], shares, color=ORANGE, width=0.6)
    if len(ages) <= 10:
        axes.bar_label(bars, [f"{share:.2g} %" for share in shares], color=INK, fontsize=9, padding=2)
    axes.set_ylim(0, max([*shares, 0.1]) * 1.25)
    axes.set_xlim(-0.6, max(len(ages), FEWEST_BARS) - 0.4)
    finish(axes, "staleness of the rollout, in versions", "masked tokens, %")
    rows = [
        (age, f"{tokens:,}", outside, percent(outside / max(1, tokens), 3)) for age, (tokens, outside) in counts.items()
    ]
    return Panel(
        name="masked",
        title="Masked tokens by staleness",
        note="Share of the trained tokens without a gradient, because their ratio lies outside the trust region, all "
        "steps together. It should grow with staleness; much of it at 0 means that engine and learner disagree.",
        alt="Masked share by staleness: " + ", ".join(f"{a}: {s:.3f} %" for a, s in zip(ages, shares, strict=True)),
        figure=figure,
        numbers=table(("staleness", "tokens", "masked", "share"), rows),
    )


def masked_by_staleness(files: RunFiles) -> dict[int, tuple[int, int]]:
    """Staleness → (tokens, masked tokens) over all steps; a step that stands twice counts once, as it stands last."""
    steps = {row["step"]: row for row in files.staleness}
    totals: dict[int, tuple[int, int]] = {}
    for row in steps.values():
        for age, tokens, outside in zip(row["staleness"], row["tokens"], row["masked"], strict=True):
            before = totals.get(age, (0, 0))
            totals[age] = before[0] + tokens, before[1] + outside
    return dict(sorted(totals.items()))


def staleness(files: RunFiles) -> Panel | None:
    """How old the trained rollouts were."""
    ages: Counter[int] = Counter()
    for (fate, age, _), count in files.attempts.items():
        if fate == "trained" and age is not None:
            ages[age] += count
    if not ages:
        return None
    figure, axes = new_figure()
    everyone = range(max(ages) + 1)
    total = sum(ages.values())
    bars = axes.bar([str(age) for age in everyone], [ages[age] for age in everyone], color=BLUE, width=0.6)
    # Beyond a few bars the labels would run into each other; the table has them all.
    if len(everyone) <= 10:
        axes.bar_label(bars, [percent(ages[age] / total, 0) for age in everyone], color=INK, fontsize=9, padding=2)
    axes.margins(y=0.15)
    axes.set_xlim(-0.6, max(len(everyone), FEWEST_BARS) - 0.4)
    finish(axes, "version trained − version of the oldest token", "trained rollouts")
    rows = [(age, f"{ages[age]:,}", percent(ages[age] / total)) for age in everyone]
    bound = files.config.get("max_staleness", "–")
    return Panel(
        name="staleness",
        title="Staleness",
        note=f"max_staleness is {bound} and on_stale is {files.config.get('on_stale', '–')}; queue time is included.",
        alt="Trained rollouts by staleness: " + ", ".join(f"{age}: {ages[age]}" for age in everyone),
        figure=figure,
        numbers=table(("staleness", "rollouts", "share"), rows),
    )


def lengths(files: RunFiles) -> Panel | None:
    """Lengths of trained rollouts against those of all that ended: does the pipeline prefer short ones?"""
    by_fate: dict[str, Counter[int]] = {}
    for (fate, _, tokens), count in files.attempts.items():
        by_fate.setdefault(fate, Counter())[tokens] += count
    trained = by_fate.get("trained")
    if not trained:
        return None
    # A rollout that waits to be trained, or whose process died, is no sign of a preference yet.
    ended = sum((by_fate.get(fate, Counter()) for fate in ("trained", "failed", "dropped")), Counter())
    figure, axes = new_figure()
    top = max(ended)
    edges = [top * i / 30 - 0.5 for i in range(30)] if top >= 30 else [i - 0.5 for i in range(top + 1)]
    bins = [*edges, top + 0.5]
    for name, found, style in (("all that ended", ended, AREA), ("trained", trained, OUTLINE)):
        label = f"{name} ({found.total():,})"
        axes.hist(list(found), weights=list(found.values()), bins=bins, density=True, label=label, **style)
    finish(axes, "action tokens", "share of rollouts")
    axes.set_yticks([])
    means = {fate: _mean_key(count) for fate, count in sorted(by_fate.items())}
    everyone = _mean_key(ended)
    return Panel(
        name="lengths",
        title="Lengths: started against trained",
        note=f"Trained rollouts have {means['trained']:.1f} action tokens on average, all that ended {everyone:.1f}. "
        "An outline to the left of the area means that long rollouts are lost. Running and waiting ones are left out.",
        alt=f"Mean lengths in tokens: {means['trained']:.2f} of trained, {everyone:.2f} of all ended rollouts.",
        figure=figure,
        numbers=table(
            ("fate", "rollouts", "mean action tokens"),
            [(fate, f"{by_fate[fate].total():,}", f"{mean:.2f}") for fate, mean in means.items()],
        ),
    )


def _mean_key(count: Counter[int]) -> float:
    return sum(number * times for number, times in count.items()) / max(1, count.total())


def idle(files: RunFiles) -> Panel | None:
    """Who waits for whom."""
    return _lines(
        files,
        name="idle",
        title="Idle time",
        note="Learner: share of a step in which it waited for rollouts. Engines: share in which they computed nothing. "
        "Both low is good; the one that idles less is the bottleneck.",
        lines={
            "learner": (series(files.metrics, "trainer/idle_ratio"), BLUE),
            "engines": (series(files.metrics, "rollouter/idle_ratio"), ORANGE),
        },
        unit="idle share",
        top=1.0,
    )


def queue(files: RunFiles) -> Panel | None:
    """Scored rollouts that wait to be trained."""
    return _lines(
        files,
        name="queue",
        title="Queue",
        note="Scored rollouts that waited when a step began. A long queue means old rollouts.",
        lines={"rollouts": (series(files.metrics, "queue/size"), BLUE)},
        unit="rollouts",
    )


def delay(files: RunFiles) -> Panel | None:
    """How long the event loop kept its tasks waiting."""
    return _lines(
        files,
        name="delay",
        title="Event-loop delay",
        note="How late the loop that serves players and tools woke up. Beyond about 100 ms the engines starve.",
        lines={
            "largest of the step": (series(files.metrics, "loop/delay_max_ms"), "#b9c7d1"),
            "99th percentile since the start": (series(files.metrics, "loop/delay_p99_ms"), BLUE),
        },
        unit="ms",
    )


PANELS: tuple[Callable[[RunFiles], Panel | None], ...] = (
    reward, critic, masked, staleness, lengths, idle, queue, delay,
)  # fmt: skip


def _lines(
    files: RunFiles,
    *,
    name: str,
    title: str,
    note: str,
    lines: dict[str, tuple[Points, str]],
    unit: str,
    floor: float = 0.0,
    top: float | None = None,
    zero: bool = False,
) -> Panel | None:
    """A panel of lines over steps, drawn from `floor` on. None when no line has a point."""
    present = {label: line for label, line in lines.items() if line[0]}
    if not present:
        return None
    figure, axes = new_figure()
    for label, (points, color) in present.items():
        axes.plot(*_xy([(step, max(floor, value)) for step, value in points]), color=color, linewidth=1.6, label=label)
    lowest = min(value for points, _ in present.values() for _, value in points)
    axes.set_ylim(
        bottom=floor if floor == 0.0 else max(floor, min(0.0, lowest)) - 0.05, top=top or (1.0 if zero else None)
    )
    if zero:
        axes.axhline(0.0, color=QUIET, linewidth=0.8)
    finish(axes, "policy update", unit, legend=len(present) > 1)
    ends = ", ".join(f"{label} {points[0][1]:.3g} → {points[-1][1]:.3g}" for label, (points, _) in present.items())
    return Panel(
        name=name,
        title=title,
        note=note,
        alt=f"{title} by policy update, first and last: {ends}.",
        figure=figure,
        numbers=by_step({label: points for label, (points, _) in present.items()}),
    )


def by_step(lines: dict[str, Points]) -> str:
    """A table of some steps, evenly spread, the first and the last among them."""
    steps = sorted({step for points in lines.values() for step, _ in points})
    if not steps:
        return ""
    last = len(steps) - 1
    rows = min(len(steps), TABLE_ROWS)
    shown = sorted({steps[round(i * last / max(1, rows - 1))] for i in range(rows)})
    columns = {label: dict(points) for label, points in lines.items()}
    return table(("step", *columns), [(s, *(number(c.get(s), 4) for c in columns.values())) for s in shown])


def new_figure(size: tuple[float, float] = SIZE) -> tuple[Figure, Axes]:
    """An empty picture."""
    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots()


def finish(axes: Axes, x: str, y: str, *, legend: bool = True) -> None:
    """Labels, quiet axes, a legend above them where no line can run through it."""
    axes.set_xlabel(x, color=QUIET, fontsize=9)
    axes.set_ylabel(y, color=QUIET, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(QUIET)
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(colors=QUIET, labelsize=9)
    if axes.lines:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if legend and axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, fontsize=9, labelcolor=INK,
                    borderaxespad=0.2, handlelength=1.4, columnspacing=1.2)  # fmt: skip


def _xy(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
