"""What a run prints while it goes: a live display on a terminal, aligned plain lines everywhere else.

Guarantees: no method raises into training; the first failure is named on stderr, after which this observer is silent.
Text from outside is printed as text. Not covered: anything that must be kept; `metrics.jsonl` holds all figures.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from soloist.report.text import printable
from soloist.seams import Clock, SystemClock

PLAIN_LINES = 60
"""Lines that a stage prints at most when it isn't a terminal; longer stages print every n-th step."""

Formatter = Callable[[float], str]


def _number(value: float) -> str:
    return f"{value:.3f}"


def _share(value: float) -> str:
    return f"{100 * value:.1f}%"


def _count(value: float) -> str:
    return f"{value:.0f}"


FIGURES: dict[str, tuple[str, Formatter, int]] = {
    "reward/mean": ("reward", _number, 6),
    "critic/explained_var": ("explained var", _number, 6),
    "dis/masked_frac": ("masked", _share, 6),
    "off_policy/staleness/mean": ("staleness", _number, 5),
    "perf/tokens_per_s": ("tokens/s", _count, 5),
    "trainer/idle_ratio": ("trainer idle", _share, 6),
    "rollouter/idle_ratio": ("rollouter idle", _share, 6),
    "sft/loss": ("loss", _number, 6),
    "sft/lr": ("lr", lambda value: f"{value:.1e}", 7),
    "value_pretraining/loss": ("loss", _number, 6),
    "value_pretraining/explained_var": ("explained var", _number, 6),
    "value_pretraining/skill": ("skill", _number, 6),
}
"""Metrics that are shown: label, format and width. Evaluations (`eval/…`) are shown under their own names."""


def figures(values: Mapping[str, float | None]) -> str:
    """The shown metrics in one line, in fixed columns; a missing value is a dash."""
    parts = [
        _figure(label, values[name], style, width) for name, (label, style, width) in FIGURES.items() if name in values
    ]
    parts += [_figure(name, value, _number, 6) for name, value in values.items() if name.startswith("eval/")]
    return "  ".join(parts)


def _figure(label: str, value: float | None, style: Formatter, width: int) -> str:
    return f"{label} {'–' if value is None else style(value):>{width}}"


def duration(seconds: float) -> str:
    """`75` → `1m15s`, for people."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02}m"


class _Display(Progress):
    """A bar with a line of figures below it."""

    def __init__(self, console: Console) -> None:
        self.line = ""
        name, left = TextColumn("{task.description}", markup=False), TextColumn("{task.fields[left]}", markup=False)
        super().__init__(name, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), left, console=console)

    def get_renderables(self) -> Iterable[RenderableType]:
        """The bar, then the figures."""
        yield self.make_tasks_table(self.tasks)
        yield Text(self.line)


class ConsoleObserver:
    """Prints the progress of stages. Use it as a context manager, so that the terminal is given back.

    Example line: `train  12/40  reward  0.412  explained var  0.218  masked   0.4%  …  left 1m20s`.
    """

    def __init__(self, console: Console | None = None, clock: Clock | None = None) -> None:
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._clock = clock or SystemClock()
        self._display: _Display | None = None
        self._bar = TaskID(0)
        self._total = 0
        self._started: dict[str, float] = {}
        self._first: tuple[int, float] | None = None
        self._printed_step = 0
        self._silent = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._safely(self._close_display)

    def stage_started(self, stage: str, total: int) -> None:
        """A stage begins; `total` is its number of steps, epochs or rollouts."""
        self._safely(lambda: self._start(stage, total))

    def progress(self, stage: str, step: int, values: Mapping[str, float | None]) -> None:
        """Step `step` of the stage is done, with these metrics."""
        self._safely(lambda: self._step(stage, step, values))

    def stage_finished(self, stage: str, summary: Mapping[str, Any]) -> None:
        """A stage ended; `summary` holds its final figures."""
        self._safely(lambda: self._finish(stage, summary))

    def note(self, text: str) -> None:
        """Something worth a line: a restart, a stall, a damaged checkpoint that was skipped."""
        self._safely(lambda: self._print(f"note: {text}"))

    def _safely(self, action: Callable[[], None]) -> None:
        if self._silent:
            return
        try:
            action()
        # Whatever breaks here, the run is worth more than its display; rich answers a broken pipe with SystemExit.
        except (Exception, SystemExit) as error:
            self._silent = True
            _complain(error)

    def _print(self, text: str) -> None:
        # No markup: a rollout may quote "[bold]", and the model decides what it says.
        self._console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    def _start(self, stage: str, total: int) -> None:
        self._close_display()
        self._total, self._first, self._printed_step = total, None, 0
        self._started[stage] = self._clock.monotonic()
        if not self._console.is_terminal:
            self._print(f"{stage}: started, {total} to do")
            return
        self._display = _Display(self._console)
        self._bar = self._display.add_task(printable(stage), total=total, left="")
        self._display.start()

    def _step(self, stage: str, step: int, values: Mapping[str, float | None]) -> None:
        left = self._time_left(step)
        if self._display is not None:
            self._display.line = figures(values)
            self._display.update(self._bar, completed=step, left=left)
            return
        # A log of a long stage stays short enough to read, and its last line is never left out.
        if step - self._printed_step >= self._total / PLAIN_LINES or step == self._total:
            self._printed_step = step
            width = len(str(self._total))
            self._print(f"{stage}  {step:>{width}}/{self._total}  {figures(values)}  {left}".rstrip())

    def _time_left(self, step: int) -> str:
        # A resumed stage begins in the middle, and some report every n-th step: the pace counts from the first report.
        first_step, first_time = self._first = self._first or (step, self._clock.monotonic())
        if step <= first_step or step >= self._total:
            return ""
        pace = (self._clock.monotonic() - first_time) / (step - first_step)
        return f"left {duration(pace * (self._total - step))}"

    def _finish(self, stage: str, summary: Mapping[str, Any]) -> None:
        # Reports may come every n-th step; a stage that is done fills its bar.
        if self._display is not None:
            self._display.update(self._bar, completed=self._total, left="")
        self._close_display()
        now = self._clock.monotonic()
        took = duration(now - self._started.get(stage, now))
        self._print(f"{stage}: done in {took}  {_end_figures(summary)}".rstrip())

    def _close_display(self) -> None:
        display, self._display = self._display, None
        if display is not None:
            display.stop()


def _end_figures(summary: Mapping[str, Any]) -> str:
    # Of an evaluation inside a summary only the mean is for the screen; stages.json keeps the rest.
    flat = {name: value.get("avg") if isinstance(value, Mapping) else value for name, value in summary.items()}
    shown = {name: value for name, value in flat.items() if value is not None}
    return "  ".join(f"{name} {f'{v:.4g}' if isinstance(v, float) else v}" for name, v in shown.items())


def _complain(error: BaseException) -> None:
    try:
        print(f"the progress display stopped ({type(error).__name__}: {error}); the run goes on", file=sys.stderr)
    except Exception:
        return
