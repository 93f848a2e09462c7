"""The metrics log: registered names only, nulls instead of NaN, own steps for each stage, and never in the way."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soloist.metrics import METRICS, MetricsLog, is_registered, mean, percentile, read_metrics

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"


def rows_of_the_page() -> dict[str, tuple[str, str]]:
    """`| `name` | unit | meaning |` rows of docs/metrics.md."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines()]
    return {row[0].strip("`"): (row[1], row[2]) for row in rows if len(row) == 3 and row[0].startswith("`")}


def test_the_page_lists_every_metric_with_the_unit_and_meaning_of_the_code() -> None:
    rows = rows_of_the_page()
    assert rows == METRICS
    assert list(rows) == list(METRICS)


def test_an_unregistered_name_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match=r"reward/maen.*METRICS"):
        log.write("train", 1, 0.0, {"reward/mean": 1.0, "reward/maen": 1.0})
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_evaluations_are_registered_for_any_environment_and_nothing_else_is() -> None:
    assert is_registered("eval/calculator/avg@4")
    assert is_registered("eval/my-env/avg@16")
    assert not is_registered("eval/calculator/pass@4")
    assert not is_registered("eval/a/b/avg@4")


def test_one_nan_in_a_window_does_not_erase_the_mean() -> None:
    """RB-157: [0.2, NaN, 0.6] has the mean 0.4."""
    assert mean([0.2, math.nan, 0.6]) == pytest.approx(0.4)
    assert mean([0.2, None, math.inf, 0.6]) == pytest.approx(0.4)
    assert percentile([math.nan, 3.0, 1.0, 2.0], 0.5) == 2.0
    assert mean([math.nan]) is None
    assert mean([]) is None
    assert percentile([], 0.5) is None


def test_a_missing_value_is_null_and_an_absent_metric_has_no_point(tmp_path: Path) -> None:
    """RB-158: what is absent in a step writes no point; it is never NaN and never 0."""
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.write("train", 1, 1.0, {"reward/mean": 0.5, "critic/explained_var": math.nan, "critic/skill": -math.inf})
    log.write("train", 2, 2.0, {"critic/explained_var": None})
    text = path.read_text(encoding="utf-8")
    assert "NaN" not in text
    assert "Infinity" not in text
    first, second = read_metrics(path)
    assert (first["critic/explained_var"], first["critic/skill"]) == (None, None)
    assert "reward/mean" not in second


def test_each_stage_has_its_own_steps_and_no_record_is_lost(tmp_path: Path) -> None:
    """RB-159: a fast stream beside a slow one neither advances its steps nor drops its records."""
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for second in range(90):
        log.write("sft", second, float(second), {"sft/loss": 1.0})
        if second % 30 == 0:
            log.write("train", second // 30, float(second), {"reward/mean": 0.1})
    assert [record["step"] for record in read_metrics(path, stage="train")] == [0, 1, 2]
    assert len(read_metrics(path, stage="sft")) == 90
    assert len(read_metrics(path)) == 93


def test_steps_may_go_backwards_after_an_evaluation_or_a_resume(tmp_path: Path) -> None:
    """RB-160: evaluate at 10 and go on with 11; resume from 8 after 10 was logged."""
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for stage, step in [("train", 10), ("eval", 10), ("train", 11)]:
        log.write(stage, step, 0.0, {"reward/mean": 0.1})
    MetricsLog(path).write("train", 8, 0.0, {"reward/mean": 0.2})
    assert [(r["stage"], r["step"]) for r in read_metrics(path)] == [
        ("train", 10), ("eval", 10), ("train", 11), ("train", 8),
    ]  # fmt: skip
    assert read_metrics(path, stage="eval")[0]["reward/mean"] == 0.1


def test_several_writes_in_one_step_carry_that_step(tmp_path: Path) -> None:
    """RB-161: five writes in training step 7 all carry step 7."""
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for name in ("reward/mean", "actor/pg_loss", "critic/loss", "queue/size", "time/step"):
        log.write("train", 7, 0.0, {name: 1.0})
    assert [record["step"] for record in read_metrics(path)] == [7] * 5
    assert len({name for record in read_metrics(path) for name in record if "/" in name}) == 5


def test_a_disk_that_fails_is_reported_once_and_never_stops_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """RB-160: a logger's error never stops training."""
    log = MetricsLog(tmp_path / "no such folder" / "metrics.jsonl")
    for step in range(3):
        log.write("train", step, 0.0, {"reward/mean": 1.0})
    said = capsys.readouterr().err
    assert said.count("training goes on") == 1
    assert "no such folder" in said


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsLog(path).write("train", 1, 0.0, {"reward/mean": 1.0})
    with path.open("a", encoding="utf-8") as file:
        file.write('7\n{"stage": "train", "step": 2, "rew')
    assert [record["step"] for record in read_metrics(path)] == [1]
    assert read_metrics(tmp_path / "absent.jsonl") == []


@given(value=st.none() | st.floats())
def test_every_value_survives_the_disk_or_becomes_null(tmp_path_factory: pytest.TempPathFactory, value: float) -> None:
    path = tmp_path_factory.mktemp("log") / "metrics.jsonl"
    MetricsLog(path).write("train", 1, 0.0, {"reward/mean": value})
    kept = json.loads(path.read_text(encoding="utf-8"))["reward/mean"]
    assert kept == (value if value is not None and math.isfinite(value) else None)
    assert read_metrics(path)[0]["reward/mean"] == kept
