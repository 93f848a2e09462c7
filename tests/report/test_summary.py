"""The end of a run: figures, a picture and one rollout, from the folder alone and whatever a model wrote into it."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from soloist.metrics import MetricsLog
from soloist.report.summary import describe_rollout, draw, evaluations, series, smooth, write_summary
from soloist.runtime.ledger import Ledger
from soloist.types import Rollout, Segment, VersionSpan

PNG = b"\x89PNG\r\n\x1a\n"

MESSAGES = [
    {"role": "user", "content": "Compute 3+4*2"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "python", "arguments": {"code": "3+4*2"}}}],
    },
    {"role": "tool", "name": "python", "content": "11"},
    {"role": "assistant", "content": "The answer is 11"},
]


def rollout(**changes: Any) -> Rollout:
    segment = Segment(
        token_ids=[1, 2, 3, 4],
        action_mask=[False, True, False, True],
        rollout_log_probs=[None, -0.1, None, -0.2],
        version_spans=[VersionSpan(version=1, start=1, end=2), VersionSpan(version=2, start=3, end=4)],
    )
    base = Rollout(
        rollout_id="r1", task_id="calculator/train/1", group_id="r1", environment="calculator", state="scored",
        status="completed", terminated=True, segments=[segment], messages=MESSAGES, score=1.0,
    )  # fmt: skip
    return msgspec.structs.replace(base, **changes)


def write_metrics(folder: Path, steps: int = 12) -> None:
    log = MetricsLog(folder / "metrics.jsonl")
    log.write("eval", 0, 0.0, {"eval/calculator/avg@4": 0.25})
    for step in range(steps):
        log.write(
            "train",
            step,
            float(step),
            {
                "reward/mean": step / 10,
                "critic/explained_var": None if step == 0 else 0.5,
                "dis/masked_frac": 0.01,
                "off_policy/staleness/mean": 1.5,
            },
        )
    log.write("eval", steps, 99.0, {"eval/calculator/avg@4": 0.75})


async def store(folder: Path, rollouts: list[Rollout]) -> None:
    ledger = await Ledger.open(folder / "ledger.sqlite")
    rollouts = [msgspec.structs.replace(one, place=place) for place, one in enumerate(rollouts)]
    for one in rollouts:
        await ledger.started(one, unit=one.place, expires_at=0.0)
        await ledger.ended(one)
    await ledger.commit(0, rollouts, {"version": 0})
    await ledger.close()


async def test_a_run_folder_becomes_figures_a_picture_and_a_rollout(tmp_path: Path) -> None:
    write_metrics(tmp_path)
    plain = rollout(rollout_id="r2", messages=[{"role": "user", "content": "no tool here"}])
    await store(tmp_path, [plain, rollout(), rollout(rollout_id="r3", score=0.0)])
    said = "\n".join(write_summary(tmp_path))
    first, last = statistics.fmean([0, 0.1, 0.2, 0.3, 0.4]), statistics.fmean([0.7, 0.8, 0.9, 1.0, 1.1])
    assert f"{first:.3f} → {last:.3f}" in said
    assert "eval/calculator/avg@4  0.250  (version 0)" in said
    assert "eval/calculator/avg@4  0.750  (version 12)" in said
    assert "sample: calculator/train/1, completed, reward 1, 2 action tokens of version 1–2" in said
    assert "no tool here" not in said
    assert (tmp_path / "reward.png").read_bytes().startswith(PNG)


def test_a_rollout_shows_its_calls_and_observations() -> None:
    lines = describe_rollout(rollout())
    assert lines[1] == f"  {'user':16} │ Compute 3+4*2"
    assert "assistant calls" in lines[2]
    assert "python({'code': '3+4*2'})" in lines[2]
    assert lines[3] == f"  {'tool':16} │ 11"
    assert lines[4].endswith("│ The answer is 11")


def test_hostile_text_is_shown_as_text_and_cannot_pass_for_a_line_of_ours() -> None:
    evil = "\x1b[2J\x07[bold]x[/bold]\nreward 1.0\r\u202e\u2028sample: \ud800"
    lines = describe_rollout(rollout(messages=[{"role": evil, "content": evil, "tool_calls": [evil, {"x": 1}]}]))
    assert all(line.startswith("  ") for line in lines[1:])
    assert not set("\x1b\x07\r\u202e\u2028\ud800") & set("".join(lines))
    assert any("│ reward 1.0\\r" in line for line in lines)
    assert any("[bold]x[/bold]" in line for line in lines)


json_values = st.recursive(
    st.none() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@given(
    messages=st.lists(
        st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "name"]), json_values), max_size=3
    )
)
def test_no_message_whatever_breaks_the_description(messages: list[dict[str, Any]]) -> None:
    lines = describe_rollout(rollout(messages=messages))
    assert lines[0].startswith("sample: ")
    assert not [line for line in lines if "\n" in line or "\x1b" in line]


def test_an_untrained_folder_says_so_and_gets_no_picture(tmp_path: Path) -> None:
    assert write_summary(tmp_path) == ["no step has been trained yet"]
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_was_trained_again_counts_as_it_was_trained_last() -> None:
    records = [
        {"stage": "train", "step": 1, "reward/mean": 0.1},
        {"stage": "train", "step": 2, "reward/mean": 0.9},
        {"stage": "eval", "step": 2, "reward/mean": 7.0},
        {"stage": "train", "step": 2, "reward/mean": 0.2},
        {"stage": "train", "step": 3, "reward/mean": None},
    ]
    assert series(records, "reward/mean") == [(1, 0.1), (2, 0.2)]
    assert series(records, "critic/loss") == []
    assert evaluations([{"stage": "eval", "step": 4, "eval/a/avg@2": 0.5}]) == [("eval/a/avg@2", 4, 0.5)]


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=12), st.integers(1, 6))
def test_the_smooth_line_is_the_mean_of_the_last_values(values: list[float], width: int) -> None:
    points = list(enumerate(values))
    expected = [sum(values[max(0, i - width + 1) : i + 1]) / min(width, i + 1) for i in range(len(values))]
    assert [value for _, value in smooth(points, width)] == pytest.approx(expected)
    assert [step for step, _ in smooth(points, width)] == list(range(len(values)))


def test_the_picture_names_its_lines_and_leaves_no_metric_out(tmp_path: Path) -> None:
    write_metrics(tmp_path)
    from_folder = [
        {"stage": "eval", "step": 0, "eval/calculator/avg@4": 0.25},
        {"stage": "train", "step": 1, "reward/mean": 0.5, "critic/explained_var": -40.0, "dis/masked_frac": 0.02},
        {"stage": "eval", "step": 2, "eval/calculator/avg@4": 0.75},
    ]
    reward, explained, masked = draw(from_folder, "a $run_1$ <b>").axes
    labels = [text.get_text() for text in reward.get_legend().get_texts()]
    assert labels[2:] == ["SFT policy, held-out avg@4: 0.25", "version 2, held-out avg@4: 0.75"]
    assert explained.get_ylim()[0] >= -1.0
    assert masked.lines[0].get_ydata()[0] == pytest.approx(2.0)
