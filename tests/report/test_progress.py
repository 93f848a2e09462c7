"""The progress display: readable lines, honest estimates, and no exception ever reaches the training."""

from __future__ import annotations

import io
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from soloist.report.progress import PLAIN_LINES, ConsoleObserver, duration, figures


class HandClock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.time = 0.0

    def monotonic(self) -> float:
        return self.time

    def now(self) -> float:
        return self.time


class FullDisk(io.StringIO):
    """A log file on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(28, f"No space left for {len(text)} characters")


def plain(clock: HandClock | None = None) -> tuple[ConsoleObserver, io.StringIO]:
    stream = io.StringIO()
    return ConsoleObserver(Console(file=stream, width=200, highlight=False), clock or HandClock()), stream


VALUES = {
    "reward/mean": 0.41234,
    "critic/explained_var": None,
    "dis/masked_frac": 0.0042,
    "off_policy/staleness/mean": 1.25,
    "perf/tokens_per_s": 1234.4,
    "trainer/idle_ratio": 0.5,
    "rollouter/idle_ratio": 0.031,
    "time/step": 3.0,
}


def test_a_step_is_one_line_with_the_figures_that_matter() -> None:
    line = figures(VALUES)
    assert "reward  0.412" in line
    assert "explained var      –" in line
    assert "masked   0.4%" in line
    assert "tokens/s  1234" in line
    assert "time/step" not in line
    assert figures({"eval/calculator/avg@4": 0.75}) == "eval/calculator/avg@4  0.750"


def test_lines_of_one_stage_are_aligned() -> None:
    observer, stream = plain()
    observer.stage_started("train", 120)
    for step in (9, 10, 120):
        observer.progress("train", step, {"reward/mean": -0.5 if step == 9 else 0.25})
    lines = [line for line in stream.getvalue().splitlines() if "/120" in line]
    assert {line.index("reward") for line in lines} == {lines[0].index("reward")}
    assert lines[-1].startswith("train  120/120  reward  0.250")


def test_the_time_left_counts_the_pace_since_the_resume() -> None:
    clock = HandClock()
    observer, stream = plain(clock)
    observer.stage_started("train", 40)
    clock.time = 10.0
    observer.progress("train", 31, {"reward/mean": 0.1})
    clock.time = 20.0
    observer.progress("train", 32, {"reward/mean": 0.1})
    last = stream.getvalue().splitlines()[-1]
    assert last.endswith("left 1m20s")
    assert "32/40" in last


def test_the_time_left_is_unknown_until_two_reports_are_there() -> None:
    clock = HandClock()
    observer, stream = plain(clock)
    observer.stage_started("eval", 1024)
    for clock.time, done in ((60.0, 256), (90.0, 512), (150.0, 1024)):
        observer.progress("eval", done, {"reward/mean": 0.1})
    first, second, third = stream.getvalue().splitlines()[1:]
    assert "left" not in first + third
    assert second.endswith("left 1m00s")


def test_a_long_stage_prints_few_lines_and_always_its_last() -> None:
    observer, stream = plain()
    observer.stage_started("sft", 601)
    for step in range(1, 602):
        observer.progress("sft", step, {"sft/loss": 1.0 / step})
    lines = [line for line in stream.getvalue().splitlines() if "/601" in line]
    assert 10 < len(lines) <= PLAIN_LINES + 1
    assert "601/601" in lines[-1]


def test_a_stage_that_reports_every_25th_step_has_all_its_lines() -> None:
    observer, stream = plain()
    observer.stage_started("sft", 1000)
    for step in range(25, 1001, 25):
        observer.progress("sft", step, {"sft/loss": 1.0})
    lines = [line for line in stream.getvalue().splitlines() if "/1000" in line]
    assert len(lines) == 40
    assert lines[0].startswith("sft    25/1000")


def test_the_end_of_a_stage_names_its_figures_and_how_long_it_took() -> None:
    clock = HandClock()
    observer, stream = plain(clock)
    observer.stage_started("sft", 2)
    clock.time = 70.0
    observer.stage_started("eval", 2)  # a stage may hold another one; its time counts for both
    clock.time = 75.0
    observer.stage_finished("sft", {"loss": 0.123456, "steps": 2, "skill": None, "eval": {"avg": 0.25, "failed": 0}})
    assert stream.getvalue().splitlines()[-1] == "sft: done in 1m15s  loss 0.1235  steps 2  eval 0.25"
    assert duration(3725) == "1h02m"


def test_notes_are_text_and_neither_markup_nor_escapes() -> None:
    observer, stream = plain()
    observer.note("rollout said [bold red]hi[/] [/nonsense] \x1b[2J \ud800")
    assert stream.getvalue() == "note: rollout said [bold red]hi[/] [/nonsense] \\x1b[2J \\ud800\n"
    assert "\x1b" not in stream.getvalue()


def test_a_terminal_gets_a_bar_with_the_figures_below_it() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, color_system=None)
    with ConsoleObserver(console, HandClock()) as observer:
        observer.stage_started("train", 4)
        observer.progress("train", 1, VALUES)
        observer.note("engine 0 was restarted [1]")
        observer.progress("train", 4, VALUES)
    shown = stream.getvalue()
    assert "4/4" in shown
    assert "reward  0.412" in shown
    assert "note: engine 0 was restarted [1]" in shown
    assert shown.rstrip().endswith("\x1b[?25h")  # the cursor is given back


def test_a_broken_stream_never_reaches_the_training(capsys: pytest.CaptureFixture[str]) -> None:
    """R16, RB-160: the first failure is named, then the display is silent and the run goes on."""
    with ConsoleObserver(Console(file=FullDisk()), HandClock()) as observer:
        observer.stage_started("train", 3)
        for step in range(1, 4):
            observer.progress("train", step, VALUES)
        observer.note("x")
        observer.stage_finished("train", {})
    said = capsys.readouterr().err
    assert said.count("the run goes on") == 1
    assert "No space left" in said


def test_a_reader_that_goes_away_does_not_end_the_process() -> None:
    """R16: `soloist train … | head` trains on after head has left."""
    code = """
import os, sys
from soloist.report.progress import ConsoleObserver
reader, writer = os.pipe()
os.dup2(writer, 1)
os.close(writer)
os.close(reader)
with ConsoleObserver() as observer:
    observer.stage_started("train", 2)
    observer.progress("train", 1, {"reward/mean": 0.5})
print("trained on", file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "trained on" in done.stderr
    assert done.stderr.count("the run goes on") == 1
    assert done.returncode == 0


ANY_VALUE = st.none() | st.floats() | st.text(max_size=5) | st.integers()


@given(
    stage=st.text(max_size=10),
    total=st.integers(-2, 10**9),
    step=st.integers(-5, 10**9),
    values=st.dictionaries(st.sampled_from([*VALUES, "eval/x/avg@1", "other"]), ANY_VALUE),
)
def test_no_values_whatever_raise_into_the_training(stage: str, total: int, step: int, values: dict[str, Any]) -> None:
    observer, stream = plain()
    assert observer.progress(stage, step, values) is None
    observer.stage_started(stage, total)
    observer.progress(stage, step, values)
    observer.stage_finished(stage, values)
    assert stream.getvalue().encode("utf-8") is not None
