"""Prompts beside decoding: bounded pieces, whole groups, and what becomes of a prompt that is cut short."""

from typing import Any

import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

from soloist.engines.local.batch import ContinuousBatch
from soloist.engines.local.model_runner import ModelRunner, first_tokens
from soloist.engines.local.own_forward import Stretch
from soloist.types import GenerateRequest, Sampling

CHUNK = 16


@pytest.fixture(params=[True, False], ids=["fused", "own"])
def batch(request: pytest.FixtureRequest) -> ContinuousBatch:
    config = Qwen3Config(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512, attn_implementation="sdpa",
    )  # fmt: skip
    runner = ModelRunner(Qwen3ForCausalLM(config).eval(), slots=4, max_length=400, fused=request.param)
    return ContinuousBatch(runner, prefill_chunk=CHUNK)


def ask(name: str, prompt: list[int], tokens: int = 4) -> GenerateRequest:
    return GenerateRequest(
        request_id=name, rollout_id=name, prompt_ids=prompt, sampling=Sampling(max_new_tokens=tokens), key=1
    )


def passes(batch: ContinuousBatch, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Prompt tokens of each step, as they come to pass."""
    seen, step = [], batch.runner.step

    def watched(stretches: Any, ready: Any) -> Any:
        seen.append(sum(stretch.end - stretch.start for stretch in stretches))
        return step(stretches, ready)

    monkeypatch.setattr(batch.runner, "step", watched)
    return seen


def test_running_requests_sample_a_token_in_every_step_of_a_long_prompt(
    batch: ContinuousBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch.submit(ask("short", [3, 4], 30))
    batch.step()
    tokens = passes(batch, monkeypatch)
    batch.submit(ask("long", [5] * 250))
    answers = [answer for _ in range(16) for answer in batch.step()]
    assert tokens == [CHUNK] * 15 + [10]
    assert batch.tokens == 1 + 16 + 1, "one a step for the short one, and the long one's first in the last step"
    while batch.busy:
        answers += batch.step()
    assert {answer.request_id: len(answer.completion.token_ids) for answer in answers if answer.completion} == {
        "short": 30,
        "long": 4,
    }


def test_a_long_prompt_is_computed_at_once_when_nobody_waits(
    batch: ContinuousBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = passes(batch, monkeypatch)
    batch.submit(ask("long", [5] * 250))
    batch.step()
    assert tokens == [250]
    assert batch.tokens == 1


def test_short_prompts_behind_a_long_one_share_what_is_left_of_a_step(
    batch: ContinuousBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch.submit(ask("running", [3, 4], 30))
    batch.step()
    tokens = passes(batch, monkeypatch)
    batch.submit(ask("long", [5] * 20, 1))
    batch.submit(ask("next", [6] * 5, 1))
    batch.submit(ask("last", [7] * 9, 1))
    first, second, third = (batch.step() for _ in range(3))
    assert tokens == [16, 16, 2]
    assert [[answer.request_id for answer in answers] for answers in (first, second, third)] == [
        [],
        ["long", "next"],
        ["last"],
    ]


def test_an_aborted_prompt_keeps_only_what_was_computed(batch: ContinuousBatch) -> None:
    """The next turn must not reuse keys that nobody has computed."""
    batch.submit(ask("running", [3, 4], 60))
    batch.step()
    prompt = [n % 50 for n in range(100)]
    batch.submit(ask("long", prompt))
    batch.step()
    (aborted,) = batch.abort(["long"])
    assert aborted.completion is not None
    assert (aborted.completion.token_ids, aborted.completion.finish_reason) == ([], "abort")
    (kept,) = batch.table.kept.values()
    assert kept.cached == CHUNK
    batch.submit(ask("long", prompt))
    batch.submit(
        GenerateRequest(
            request_id="cold", rollout_id="cold", prompt_ids=prompt, sampling=Sampling(max_new_tokens=4), key=1
        )
    )
    done = {}
    while batch.busy:
        done |= {answer.request_id: answer.completion for answer in batch.step()}
    assert done["long"].token_ids == done["cold"].token_ids
    assert done["long"].log_probs == pytest.approx(done["cold"].log_probs, abs=1e-5)


def test_an_aborted_prompt_that_had_not_begun_keeps_nothing(batch: ContinuousBatch) -> None:
    """Its slot held more of an earlier rollout, which says nothing about this one."""
    for n in range(4):
        batch.submit(ask(f"old {n}", [n + 1] * 40, 30))
    while batch.busy:
        batch.step()
    batch.submit(ask("running", [3, 4], 60))
    batch.step()
    batch.submit(ask("long", [5] * 100))
    batch.submit(ask("behind", [6] * 60))
    batch.step()
    assert {seat.request.request_id for seat in batch.table.running.values()} == {"running", "long", "behind"}
    batch.abort(["behind"])
    kept = {prefix.rollout_id: prefix.cached for prefix in batch.table.kept.values()}
    assert "behind" not in kept
    assert set(kept.values()) == {69}


def test_a_cancelled_prompt_leaves_nothing_to_compute(batch: ContinuousBatch) -> None:
    batch.submit(ask("running", [3, 4], 60))
    batch.step()
    batch.submit(ask("long", [5] * 100))
    batch.step()
    batch.cancel("long")
    assert sorted(batch.table.running) == [0]
    assert batch._prompts == []


def test_first_tokens_cuts_in_the_middle_of_a_stretch() -> None:
    stretches = [Stretch(0, 5, 9), Stretch(1, 0, 10), Stretch(2, 0, 3)]
    assert first_tokens(stretches, 6) == ([Stretch(0, 5, 9), Stretch(1, 0, 2)], [Stretch(1, 2, 10), Stretch(2, 0, 3)])
    assert first_tokens(stretches, 4) == ([Stretch(0, 5, 9)], stretches[1:])
    assert first_tokens(stretches, 99) == (stretches, [])
    assert first_tokens([], 4) == ([], [])
