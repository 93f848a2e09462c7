"""What is kept of the tokens of a step: the numbers that the update used, few of them, and never at the run's cost."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from soloist.config import ModelConfig, build_config
from soloist.metrics import read_metrics
from soloist.models.loading import load_policy
from soloist.models.tiny import build_tiny
from soloist.models.value import ValueModel
from soloist.training.learner import Learner
from soloist.training.samples import LONGEST, STEPS, Samples, TokenTable, choose
from soloist.types import Rollout, Segment, Turn, VersionSpan


def rollout(number: int = 0, *, actions: int = 2, version: int = 0, **changes: Any) -> Rollout:
    """A prompt of two tokens, `actions` sampled ones and one observation."""
    segment = Segment(
        token_ids=[7, 8, *range(10, 10 + actions), 9],
        action_mask=[False, False, *[True] * actions, False],
        rollout_log_probs=[None, None, *[-0.5] * actions, None],
        version_spans=[VersionSpan(version=version, start=2, end=2 + actions)],
    )
    base = Rollout(
        rollout_id=f"r{number}", task_id=f"t{number}", group_id=f"g{number}", environment="x", state="scored",
        status="completed", segments=[segment], score=1.0,
        turns=[Turn(segment=0, start=2, end=2 + actions, finish_reason="stop")],
    )  # fmt: skip
    return msgspec.structs.replace(base, **changes)


def table(*lengths: int, outside: int = 0) -> TokenTable:
    """Ratio 1.5, advantage 0.25, value 0.125; the first `outside` tokens are masked."""
    total = sum(lengths)
    in_band = torch.arange(total) >= outside
    return TokenTable(
        lengths_R=list(lengths),
        log_ratio_T=torch.full((total,), 1.5).log(),
        advantages_T=torch.full((total,), 0.25),
        values_T=torch.full((total,), 0.125),
        in_band_T=in_band,
    )


def samples_in(folder: Path, notes: list[str] | None = None, first_step: int = 0, per_step: int = 1) -> Samples:
    say = [].append if notes is None else notes.append
    return Samples(folder, per_step, lambda token: f"<{token}>", say, first_step=first_step)


def steps_in(folder: Path) -> list[int]:
    return [row["step"] for row in read_metrics(folder / "samples.jsonl")]


def test_a_sample_holds_every_token_with_what_training_made_of_it(tmp_path: Path) -> None:
    samples_in(tmp_path).record(3, [rollout(version=1)], table(2, outside=1))
    (row,) = read_metrics(tmp_path / "samples.jsonl")
    (segment,) = row["segments"]
    assert (row["step"], row["reward"], row["staleness"], row["left_out"]) == (3, 1.0, 2, 0)
    assert segment["texts"] == ["<7>", "<8>", "<10>", "<11>", "<9>"]
    assert segment["action"] == [0, 0, 1, 1, 0]
    assert segment["in_band"] == [None, None, False, True, None]
    assert segment["ratio"] == [None, None, 1.5, 1.5, None]
    assert segment["advantage"][2:4] == [0.25, 0.25]
    assert segment["value"][2:4] == [0.125, 0.125]
    assert segment["versions"] == [None, None, 1, 1, None]


def test_masked_tokens_are_counted_by_the_staleness_of_their_rollout(tmp_path: Path) -> None:
    rollouts = [rollout(0, actions=3, version=4), rollout(1, version=2), rollout(2, actions=1, version=4)]
    samples_in(tmp_path, per_step=0).record(4, rollouts, table(3, 2, 1, outside=4))
    (row,) = read_metrics(tmp_path / "staleness.jsonl")
    assert row == {"step": 4, "staleness": [0, 2], "rollouts": [2, 1], "tokens": [4, 2], "masked": [3, 1]}
    assert not (tmp_path / "samples.jsonl").exists(), "0 samples a step is the off switch"


@pytest.mark.parametrize("steps", [1, 20, 33, 34, 500])
def test_samples_stay_few_and_even_however_long_the_run_is(tmp_path: Path, steps: int) -> None:
    samples = samples_in(tmp_path)
    for step in range(steps):
        samples.record(step, [rollout()], table(2), last=step == steps - 1)
    found = steps_in(tmp_path)
    assert (found[0], found[-1]) == (0, steps - 1)
    assert min(steps, STEPS // 2) <= len(found) <= STEPS + 1
    gaps = {after - before for before, after in pairwise(found[:-1])}
    assert len(gaps) <= 1


def test_a_resumed_run_forgets_the_steps_that_it_trains_again_and_keeps_its_spacing(tmp_path: Path) -> None:
    samples = samples_in(tmp_path)
    for step in range(70):
        samples.record(step, [rollout()], table(2))
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write('{"step": 69, "torn')
    stride = steps_in(tmp_path)[1]
    resumed = samples_in(tmp_path, first_step=40)
    assert max(steps_in(tmp_path)) < 40
    for step in range(40, 60):
        resumed.record(step, [rollout()], table(2))
    assert steps_in(tmp_path) == list(range(0, 60, stride))
    assert [row["step"] for row in read_metrics(tmp_path / "staleness.jsonl")] == list(range(60))


def test_what_breaks_is_told_once_and_never_raised(tmp_path: Path) -> None:
    notes: list[str] = []
    samples = samples_in(tmp_path / "missing", notes)
    for step in range(3):
        samples.record(step, [rollout()], table(2))
    assert len(notes) == 1
    assert "training goes on" in notes[0]
    (tmp_path / "samples.jsonl").write_text(json.dumps({"no": "step"}) + "\n")
    samples_in(tmp_path, notes).record(0, [rollout()], table(2))
    assert len(notes) == 2


def test_a_long_rollout_is_cut_and_says_by_how_much(tmp_path: Path) -> None:
    long = LONGEST + 50
    samples_in(tmp_path).record(0, [rollout(actions=long)], table(long))
    (row,) = read_metrics(tmp_path / "samples.jsonl")
    assert len(row["segments"][0]["ratio"]) == LONGEST
    assert row["left_out"] == long + 3 - LONGEST


def test_the_best_and_the_worst_with_tools_and_the_most_masked_are_chosen() -> None:
    tools = {"tool_calls": 1}
    rollouts = [rollout(0), rollout(1, info=tools, score=0.0), rollout(2, info=tools), rollout(3, score=0.0)]
    assert choose(rollouts, [0, 0, 0, 2], 4) == [2, 1, 3, 0]
    assert choose(rollouts, [5, 0, 0, 2], 3) == [2, 1, 0]
    assert choose(rollouts[:1], [0], 4) == [0]


def test_the_learner_hands_over_what_its_metrics_sum_up(tmp_path: Path) -> None:
    folder = build_tiny(ModelConfig(hidden_size=32, layers=1, heads=2, mlp_size=64), 0, tmp_path / "model")
    policy = load_policy(folder)
    raw = {"policy": {"lr": 1e-3, "epochs": 2}, "loss": {"eps_low": 0.99, "eps_high": 1.0}}
    learner = Learner(policy, ValueModel.from_policy(policy), build_config(raw, "test"))
    rollouts = [rollout(number, actions=2 + number, score=float(number % 2)) for number in range(4)]
    # Some tokens were likelier when they were sampled, others less likely; the band's upper end lies between.
    for index, one in enumerate(rollouts):
        log_probs = [None, None, *[-4.5 - 0.3 * i for i in range(one.action_tokens)], None]
        segment = msgspec.structs.replace(one.segments[0], rollout_log_probs=log_probs)
        rollouts[index] = msgspec.structs.replace(one, segments=[segment])
    assert learner.tokens is None
    before = torch.tensor(learner.log_prob_errors(rollouts))
    learner.update_value(rollouts)
    metrics = learner.update_policy(rollouts)
    tokens = learner.tokens
    assert tokens is not None
    assert tokens.lengths_R == [2, 3, 4, 5]
    assert torch.allclose((tokens.log_ratio_T.exp() - 1).abs(), before, rtol=1e-4), "of the weights before the update"
    assert float(tokens.advantages_T.mean()) == pytest.approx(metrics["advantage/mean"], abs=1e-6)
    assert torch.equal(tokens.in_band_T, tokens.log_ratio_T < torch.tensor(2.0).log())
    assert 0 < int(tokens.in_band_T.sum()) < 14
    assert [len(columns[0]) for columns in tokens.rows()] == [2, 3, 4, 5]
