"""A few steps of a run as they happened: learner, engines and players above each other, on one clock.

Times of the learner come from `timeline.jsonl`, those of players and engines from the rollouts in the ledger.
Guarantees: at most `MOST_STEPS` steps and `MOST_PLAYERS` rows are drawn, whatever the run's size; rollouts that were
never trained are drawn, too. Not covered: rollouts that are still running, whose turns are not on disk yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from soloist.report.figures import BLUE, GREEN, INK, ORANGE, QUIET, Panel
from soloist.report.markup import table
from soloist.report.run_files import RunFiles
from soloist.types import Rollout

MOST_STEPS, MOST_PLAYERS = 6, 16
BARS_IN_A_ROW = 80
"""Rollouts of one player that can still be told apart in a picture."""
MARGIN_STEPS = 8
"""Steps after the window whose rollouts may have been played in it."""

WAIT, TOOL, LOAD = "#dadada", "#e3a33b", "#8a5a99"
WORK = {
    "wait_for_rollouts": ("waits for rollouts", WAIT),
    "update_value": ("value update", GREEN),
    "update_policy": ("policy update", BLUE),
    "weight_sync": ("loads weights", LOAD),
    "checkpoint": ("checkpoint, ledger", ORANGE),
    "commit": ("checkpoint, ledger", ORANGE),
}
Span = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Window:
    """Some steps and when they happened.

    Example: `Window(steps=range(20, 24), start=12.0, end=31.5)`.
    """

    steps: range
    start: float
    end: float


def timeline(files: RunFiles) -> Panel | None:
    """The panel, of steps in the middle of the run. None when there is no step with times."""
    laps = steps_of(files.timeline)
    if not laps:
        return None
    window = choose_window(laps, int(files.config.get("rollouts_per_step", 64)), int(files.config.get("players", 64)))
    rollouts = list(played_in(files, window))
    lanes = lanes_of(rollouts)
    figure = Figure(figsize=(10.6, 2.6 + 0.13 * min(len(lanes), MOST_PLAYERS)), layout="constrained")
    heights = (1, 1.5, max(1.0, 0.3 * min(len(lanes), MOST_PLAYERS)))
    learner, engines, players = figure.subplots(3, 1, sharex=True, height_ratios=heights)
    inside = [event for step in window.steps for event in laps[step]]
    _draw_learner(learner, inside, window)
    peak = _draw_engines(engines, rollouts, window)
    _draw_players(players, lanes[:MOST_PLAYERS], window)
    for axes in (learner, engines, players):
        _tidy(axes, inside, window, labelled=axes is learner)
    players.set_xlim(0, window.end - window.start)
    players.set_xlabel("seconds", color=QUIET, fontsize=9)
    first, last = window.steps[0], window.steps[-1]
    left_out = f" {len(lanes) - MOST_PLAYERS} more players are not drawn." if len(lanes) > MOST_PLAYERS else ""
    return Panel(
        name="timeline",
        title=f"Timeline of steps {first}–{last}" if first < last else f"Timeline of step {first}",
        note="Above: what the learner did. Middle: requests that the engines worked on. Below: one row a player; its "
        f"pauses are waits for a place in a step. Purple lines are loads of new weights, with the version.{left_out}",
        alt=f"Learner, engines, {len(lanes)} players during steps {first} to {last}, {window.end - window.start:.1f} "
        f"s; at most {peak} requests at once.",
        figure=figure,
        numbers=table(("learner", "seconds", "share"), _seconds_by_work(inside, window)),
        wide=True,
    )


def steps_of(events: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Events of the learner, one list a step that was trained in full; a step begins with its wait."""
    laps: list[list[dict[str, Any]]] = []
    for event in events:
        if event.get("what") == "wait_for_rollouts" or not laps:
            laps.append([])
        laps[-1].append(event)
    return [lap for lap in laps if any(event.get("what") == "update_policy" for event in lap)]


def choose_window(laps: Sequence[Sequence[dict[str, Any]]], rollouts_per_step: int, players: int) -> Window:
    """As many steps in the middle as leave a player's rollouts apart; at least one."""
    fit = BARS_IN_A_ROW * max(1, players) // max(1, rollouts_per_step)
    count = max(1, min(MOST_STEPS, fit, len(laps)))
    first = (len(laps) - count) // 2
    steps = range(first, first + count)
    times = [time for step in steps for event in laps[step] for time in (event["start"], event["end"])]
    return Window(steps=steps, start=min(times), end=max(times))


def played_in(files: RunFiles, window: Window) -> Iterator[Rollout]:
    """Rollouts that were played, at least in part, in the window."""
    trained = [row for s in range(window.steps[0], window.steps[-1] + MARGIN_STEPS) for row in files.rollouts_of(s)]
    for row in [*trained, *files.untrained()]:
        rollout = row.rollout
        if rollout is not None and rollout.started_at < window.end and rollout.finished_at > window.start:
            yield rollout


def lanes_of(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """Rollouts in as few rows as possible without overlap: each row is a player, as a player plays one at a time."""
    lanes: list[list[Rollout]] = []
    for rollout in sorted(rollouts, key=lambda rollout: rollout.started_at):
        free = next((lane for lane in lanes if lane[-1].finished_at <= rollout.started_at), None)
        if free is None:
            lanes.append([rollout])
        else:
            free.append(rollout)
    return lanes


def parts_of(rollout: Rollout) -> tuple[list[Span], list[Span]]:
    """(spans in which an engine sampled, spans in which environment and tools worked), in seconds of the clock."""
    sampled, observed = [], []
    begin = rollout.started_at
    for turn in rollout.turns:
        sampled.append((begin, turn.sampled_at))
        begin = max(turn.sampled_at, turn.observed_at)
        observed.append((turn.sampled_at, begin))
    return sampled, [*observed, (begin, max(begin, rollout.finished_at))]


def load_curve(spans: Sequence[Span]) -> tuple[list[float], list[int]]:
    """(times, number of spans open from then on)."""
    changes = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    times, counts, now = [], [], 0
    for time, change in changes:
        now += change
        times.append(time)
        counts.append(now)
    return times, counts


def _draw_learner(axes: Axes, events: Sequence[dict[str, Any]], window: Window) -> None:
    for what, (_, color) in WORK.items():
        spans = [(e["start"] - window.start, e["end"] - e["start"]) for e in events if e.get("what") == what]
        # A white edge keeps two updates in a row apart.
        axes.broken_barh(spans, (0, 1), facecolors=color, edgecolors="white", linewidth=0.5)
    axes.set_ylabel("learner", color=INK, fontsize=9, rotation=0, ha="right", va="center")
    axes.set_yticks([])
    shown = dict(WORK.values()) | {"engine samples": "#7fb2d6", "tool, environment": TOOL}
    handles = [Patch(color=color, label=label) for label, color in shown.items()]
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1.25), ncols=8, frameon=False, fontsize=8.5,
                labelcolor=INK, handlelength=1, columnspacing=1.1, borderaxespad=0.2)  # fmt: skip


def _draw_engines(axes: Axes, rollouts: Sequence[Rollout], window: Window) -> int:
    times, counts = load_curve([span for rollout in rollouts for span in parts_of(rollout)[0]])
    axes.fill_between([time - window.start for time in times], counts, step="post", color="#7fb2d6", linewidth=0)
    inside = [count for time, count in zip(times, counts, strict=True) if window.start <= time <= window.end]
    axes.set_ylim(0, max([*inside, 1]) * 1.1)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=3))
    axes.set_ylabel("engines,\nrequests", color=INK, fontsize=9, rotation=0, ha="right", va="center")
    return max(inside, default=0)


def _draw_players(axes: Axes, lanes: Sequence[Sequence[Rollout]], window: Window) -> None:
    for number, lane in enumerate(lanes):
        parts = [parts_of(rollout) for rollout in lane]
        for index, color in enumerate(("#7fb2d6", TOOL)):
            spans = [(start - window.start, end - start) for part in parts for start, end in part[index]]
            axes.broken_barh(spans, (number + 0.12, 0.76), facecolors=color, linewidth=0)
    axes.set_ylim(max(1, len(lanes)), 0)
    axes.set_yticks([])
    axes.set_ylabel("players", color=INK, fontsize=9, rotation=0, ha="right", va="center")


def _tidy(axes: Axes, events: Sequence[dict[str, Any]], window: Window, *, labelled: bool) -> None:
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#c8c8c8")
    axes.tick_params(colors=QUIET, labelsize=9)
    loads = [event["end"] - window.start for event in events if event.get("what") == "weight_sync"]
    for index, time in enumerate(loads):
        axes.axvline(time, color=LOAD, linewidth=0.9, alpha=0.8)
        if labelled:
            axes.annotate(f"v{window.steps[index] + 1}", (time, 1.05), color=LOAD, fontsize=8.5, ha="center")


def _seconds_by_work(events: Sequence[dict[str, Any]], window: Window) -> list[tuple[str, str, str]]:
    totals: dict[str, float] = {}
    for event in events:
        totals[str(event.get("what"))] = totals.get(str(event.get("what")), 0.0) + event["end"] - event["start"]
    whole = max(1e-9, window.end - window.start)
    return [(name, f"{seconds:.2f}", f"{100 * seconds / whole:.0f} %") for name, seconds in totals.items()]
