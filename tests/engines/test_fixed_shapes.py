"""Deterministic mode: with fixed shapes a completion depends, bit for bit, on its request, slot and weights only."""

from collections.abc import Iterable

import pytest
import torch
from transformers import PreTrainedModel

from soloist.config import ModelConfig
from soloist.engines.local.batch import ContinuousBatch
from soloist.engines.local.model_runner import ModelRunner
from soloist.engines.local.own_forward import CHUNK
from soloist.models.loading import load_policy
from soloist.models.tiny import build_tiny
from soloist.types import Completion, GenerateRequest, Sampling

SLOTS = 4


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    config = ModelConfig(family=request.param, hidden_size=32, layers=2, heads=2, mlp_size=48, experts=4)
    model = load_policy(build_tiny(config, 1, tmp_path_factory.mktemp("model") / "tiny"))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
    return model


def fresh(model: PreTrainedModel) -> ContinuousBatch:
    return ContinuousBatch(ModelRunner(model, slots=SLOTS, max_length=96, fixed_shapes=True))


def ask(name: str, prompt: Iterable[int], *, slot: int, tokens: int, rollout: str = "") -> GenerateRequest:
    sampling = Sampling(max_new_tokens=tokens)
    return GenerateRequest(
        request_id=name, rollout_id=rollout or name, prompt_ids=list(prompt), sampling=sampling, key=slot, slot=slot
    )


def run(batch: ContinuousBatch, requests: Iterable[GenerateRequest], steps_between: int) -> dict[str, Completion]:
    """Submit one by one with so many decode steps in between, then finish."""
    answers = []
    for request in requests:
        assert batch.submit(request) is None
        for _ in range(steps_between):
            answers += batch.step()
    while batch.busy:
        answers += batch.step()
    return {answer.request_id: answer.completion for answer in answers if answer.completion}


@pytest.fixture(scope="module")
def requests() -> list[GenerateRequest]:
    """Prompts shorter and longer than a chunk, and of exactly one."""
    lengths = (5, CHUNK, CHUNK + 7, 2 * CHUNK - 1)
    return [
        ask(f"q{i}", [3 + n % 50 for n in range(length)], slot=i, tokens=4 + 3 * i) for i, length in enumerate(lengths)
    ]


def test_order_and_interleaving_change_not_one_bit(model: PreTrainedModel, requests: list[GenerateRequest]) -> None:
    together = run(fresh(model), requests, 0)
    assert len(together) == len(requests)
    for order, steps in (([3, 1, 0, 2], 1), ([2], 0), ([0, 2], 3), ([1, 3, 2, 0], 6)):
        done = run(fresh(model), [requests[i] for i in order], steps)
        assert done == {f"q{i}": together[f"q{i}"] for i in order}


def test_what_a_slot_served_before_leaves_no_trace(model: PreTrainedModel, requests: list[GenerateRequest]) -> None:
    """Another rollout before, and an earlier turn of the same rollout, which would otherwise be reused."""
    used = fresh(model)
    first = run(used, [ask("turn 1", range(3, 9), slot=2, tokens=3, rollout="r")], 0)["turn 1"]
    turn_2 = ask("turn 2", [*range(3, 9), *first.token_ids, 5], slot=2, tokens=9, rollout="r")
    assert run(used, [turn_2], 0) == run(fresh(model), [turn_2], 0)
    assert run(used, requests, 1) == run(fresh(model), requests, 0)


def test_log_probs_are_those_of_a_plain_forward_pass(model: PreTrainedModel, requests: list[GenerateRequest]) -> None:
    for request in requests:
        done = run(fresh(model), [request], 0)[request.request_id]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([request.prompt_ids + done.token_ids])).logits[0]
        rows = torch.log_softmax(logits[len(request.prompt_ids) - 1 : -1].float(), -1)
        wanted = rows.gather(-1, torch.tensor(done.token_ids)[:, None])[:, 0]
        assert len(done.token_ids) == request.sampling.max_new_tokens
        assert float((torch.tensor(done.log_probs) - wanted).abs().max()) < 1e-5
