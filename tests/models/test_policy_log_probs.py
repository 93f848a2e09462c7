"""Log-probabilities of selected tokens against a plain float64 loop, at several temperatures, whatever the padding."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import PreTrainedModel

from soloist.config import ModelConfig
from soloist.models.policy import action_log_probs
from soloist.models.rows import padded_rows
from soloist.models.tiny import tiny_policy
from soloist.models.tokenizer import build_tokenizer

LENGTHS = (9, 14, 5)
ROWS = torch.tensor([0, 0, 0, 1, 1, 2, 2])
POSITIONS = torch.tensor([1, 4, 8, 2, 13, 1, 4])


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    config = ModelConfig(family=request.param, hidden_size=32, layers=2, heads=2, mlp_size=48, experts=4)
    policy = tiny_policy(config, 0, build_tokenizer())
    # at the usual scale of initial weights the distribution is almost uniform, and a wrong index would hardly show
    for parameter in policy.parameters():
        if parameter.dim() >= 2:
            parameter.data.mul_(8)
    return policy


def batch(padding: int, seed: int = 0) -> torch.Tensor:
    """Three rows of different lengths, padded on the right with random tokens of another seed."""
    tokens = torch.randint(0, 126, (3, 14), generator=torch.Generator().manual_seed(seed))
    filler = torch.randint(0, 126, (3, 14), generator=torch.Generator().manual_seed(padding))
    real = torch.arange(14)[None, :] < torch.tensor(LENGTHS)[:, None]
    return torch.where(real, tokens, filler)


def reference(model: PreTrainedModel, ids: torch.Tensor, temperature: float) -> tuple[list[float], list[float]]:
    """Row by row without padding, position by position, softmax in float64."""
    log_probs, entropies = [], []
    for row, position in zip(ROWS.tolist(), POSITIONS.tolist(), strict=True):
        with torch.no_grad():
            logits = model(input_ids=ids[row : row + 1, :position]).logits[0, -1].double()
        scaled = [z / temperature for z in logits.tolist()]
        top = max(scaled)
        log_total = top + math.log(math.fsum(math.exp(z - top) for z in scaled))
        log_probs.append(scaled[int(ids[row, position])] - log_total)
        entropies.append(-math.fsum(math.exp(z - log_total) * (z - log_total) for z in scaled))
    return log_probs, entropies


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_log_probs_and_entropy_equal_a_float64_loop(model: PreTrainedModel, temperature: float) -> None:
    ids = batch(padding=1)
    expected, expected_entropy = reference(model, ids, temperature)
    with torch.no_grad():
        log_probs, entropy = action_log_probs(model, padded_rows(ids, ROWS, POSITIONS), temperature)
    torch.testing.assert_close(log_probs.double(), torch.tensor(expected).double(), atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(entropy.double(), torch.tensor(expected_entropy).double(), atol=2e-5, rtol=1e-5)
    assert log_probs.std() > 0.3


def test_what_stands_in_the_padding_changes_nothing(model: PreTrainedModel) -> None:
    with torch.no_grad():
        one, _ = action_log_probs(model, padded_rows(batch(padding=1), ROWS, POSITIONS), 1.0)
        two, _ = action_log_probs(model, padded_rows(batch(padding=2), ROWS, POSITIONS), 1.0)
        wider = torch.cat([batch(padding=1), torch.zeros(3, 7, dtype=torch.long)], dim=1)
        three, _ = action_log_probs(model, padded_rows(wider, ROWS, POSITIONS), 1.0)
    assert not torch.equal(batch(padding=1), batch(padding=2))
    torch.testing.assert_close(one, two, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(one, three, atol=5e-6, rtol=1e-6)


def test_later_tokens_of_the_row_do_not_leak_into_earlier_ones(model: PreTrainedModel) -> None:
    ids = batch(padding=1)
    changed = ids.clone()
    changed[1, 10:] = 7
    rows, positions = torch.tensor([1, 1]), torch.tensor([9, 12])
    with torch.no_grad():
        before, _ = action_log_probs(model, padded_rows(ids, rows, positions), 1.0)
        after, _ = action_log_probs(model, padded_rows(changed, rows, positions), 1.0)
    assert before[0].item() == pytest.approx(after[0].item(), abs=1e-6)
    assert before[1].item() != pytest.approx(after[1].item(), abs=1e-3)


def test_results_are_fp32_and_differentiable_in_bfloat16_too() -> None:
    model = tiny_policy(ModelConfig(hidden_size=32, layers=1, heads=2, mlp_size=48), 0, build_tokenizer())
    low, full = model.to(torch.bfloat16), batch(padding=1)
    log_probs, entropy = action_log_probs(low, padded_rows(full, ROWS, POSITIONS), 1.0)
    assert log_probs.dtype == torch.float32
    assert entropy.dtype == torch.float32
    assert not entropy.requires_grad
    log_probs.sum().backward()
    assert all(p.grad is not None and bool(torch.isfinite(p.grad).all()) for p in low.parameters())


def test_the_gradient_of_one_token_is_that_of_plain_cross_entropy(model: PreTrainedModel) -> None:
    ids = batch(padding=1)[1:2]
    log_probs, _ = action_log_probs(
        model, padded_rows(ids, torch.zeros(13, dtype=torch.long), torch.arange(1, 14)), 1.0
    )
    weight = model.model.norm.weight
    (own,) = torch.autograd.grad(-log_probs.mean(), weight)
    logits = model(input_ids=ids).logits[0, :-1]
    (plain,) = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, ids[0, 1:]), weight)
    torch.testing.assert_close(own, plain, atol=1e-6, rtol=1e-4)
    assert own.abs().max() > 1e-4


@pytest.mark.parametrize(
    ("rows", "positions", "temperature", "message"),
    [
        ([0], [0], 1.0, "positions span 0 … 0"),
        ([0, 1], [3, 15], 1.0, "positions span 3 … 15"),
        ([3], [1], 1.0, "rows span 3 … 3"),
        ([-1], [1], 1.0, "rows span -1"),
        ([0, 1], [1], 1.0, r"rows \[2\], positions \[1\]"),
        ([0], [1], 0.0, "temperature is 0.0"),
        ([0], [1], float("nan"), "temperature is nan"),
    ],
)
def test_selections_that_would_wrap_round_are_refused(
    model: PreTrainedModel, rows: list[int], positions: list[int], temperature: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        action_log_probs(model, padded_rows(batch(1), torch.tensor(rows), torch.tensor(positions)), temperature)


def test_an_empty_selection_gives_an_empty_result(model: PreTrainedModel) -> None:
    nothing = torch.zeros(0, dtype=torch.long)
    log_probs, entropy = action_log_probs(model, padded_rows(batch(1), nothing, nothing), 1.0)
    assert log_probs.shape == (0,)
    assert entropy.shape == (0,)
