"""Log-probabilities from hidden states against plain float64 formulas, their gradients, chunks of every size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from soloist.models.vocabulary import chosen_log_probs

T, D, V = 7, 5, 11


def parts(dtype: torch.dtype = torch.float64, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = scale * torch.randn(T, D, generator=generator, dtype=torch.float64)
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64)
    bias = torch.randn(V, generator=generator, dtype=torch.float64)
    tokens = torch.randint(0, V, (T,), generator=generator)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), bias.to(dtype).requires_grad_(), tokens


def plain(hidden: Tensor, weight: Tensor, bias: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The textbook way: all logits at once."""
    log_probs = torch.log_softmax((hidden @ weight.T + bias) / temperature, -1)
    return log_probs[torch.arange(len(tokens)), tokens], -(log_probs.exp() * log_probs).sum(-1)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
@pytest.mark.parametrize("chunk", [1, 2 * V, 3 * V + 1, 100 * V])
@pytest.mark.parametrize("kept", [0, 100 * V])
def test_values_and_gradients_equal_the_textbook_for_every_chunk(temperature: float, chunk: int, kept: int) -> None:
    hidden, weight, bias, tokens = parts()
    found = chosen_log_probs(hidden, weight, bias, tokens, temperature, chunk=chunk, kept=kept)
    expected = plain(hidden, weight, bias, tokens, temperature)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    factors = torch.randn(T, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    own = torch.autograd.grad((found[0] * factors).sum(), (hidden, weight, bias))
    textbook = torch.autograd.grad((expected[0] * factors).sum(), (hidden, weight, bias))
    torch.testing.assert_close(own, textbook, atol=1e-12, rtol=1e-10)
    assert not found[1].requires_grad


@pytest.mark.parametrize("chunk", [2 * V, 100 * V])
def test_finite_differences_agree_with_both_gradients(chunk: int) -> None:
    hidden, weight, bias, tokens = parts()

    def both(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return chosen_log_probs(*tensors, tokens, 1.3, entropy_gradient=True, chunk=chunk)

    def first(*tensors: Tensor) -> Tensor:
        return chosen_log_probs(*tensors, tokens, 0.7, chunk=chunk)[0]

    assert torch.autograd.gradcheck(both, (hidden, weight, bias))
    assert torch.autograd.gradcheck(first, (hidden, weight, bias))


def test_extreme_logits_give_finite_numbers_and_gradients() -> None:
    hidden, weight, bias, tokens = parts(torch.float32, scale=1e4)
    log_probs, entropy = chosen_log_probs(hidden, weight, bias, tokens, 1.0, entropy_gradient=True)
    assert log_probs.min() < -1000
    assert bool(torch.isfinite(log_probs).all() and torch.isfinite(entropy).all())
    (log_probs.sum() + entropy.sum()).backward()
    assert all(bool(torch.isfinite(p.grad).all()) for p in (hidden, weight, bias) if p.grad is not None)
    assert weight.grad is not None


def test_a_head_that_shares_the_embeddings_weights_gets_both_gradients() -> None:
    _, weight, bias, tokens = parts()
    log_probs, _ = chosen_log_probs(weight[tokens].tanh(), weight, bias, tokens, 1.0, chunk=2 * V)
    (own,) = torch.autograd.grad(log_probs.sum(), weight)
    (textbook,) = torch.autograd.grad(plain(weight[tokens].tanh(), weight, bias, tokens, 1.0)[0].sum(), weight)
    torch.testing.assert_close(own, textbook, atol=1e-12, rtol=1e-10)
    assert own.abs().sum() > 0


def test_bfloat16_states_give_fp32_log_probabilities_and_bfloat16_gradients() -> None:
    hidden, weight, bias, tokens = parts(torch.bfloat16)
    log_probs, entropy = chosen_log_probs(hidden, weight, bias, tokens, 1.0, chunk=2 * V)
    assert log_probs.dtype == entropy.dtype == torch.float32
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    expected = torch.log_softmax(logits, -1)[torch.arange(T), tokens]
    torch.testing.assert_close(log_probs, expected, atol=1e-6, rtol=1e-6)
    log_probs.sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.bfloat16


def test_frozen_parts_get_no_gradient_and_no_work() -> None:
    hidden, weight, _, tokens = parts()
    log_probs, _ = chosen_log_probs(hidden.detach(), weight, None, tokens, 1.0)
    log_probs.sum().backward()
    assert hidden.grad is None
    assert weight.grad is not None
    log_probs, _ = chosen_log_probs(hidden, weight.detach(), None, tokens, 1.0)
    assert log_probs.requires_grad
