"""Packed rows against plain Hugging Face forwards in float64: log-probabilities, values and gradients."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from soloist.models.packed import packed_attention, packs
from soloist.models.policy import action_log_probs, has_plain_head
from soloist.models.rows import build_layout, build_micro_batches
from soloist.models.value import ValueModel

V = 130
TEMPERATURE = 1.3
SHAPE: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MOE = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
WINDOW = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
SMALL = {"vocab_size": V, "bos_token_id": 1, "eos_token_id": 2}

PACKING = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, attn_implementation="sdpa")),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **MOE, attn_implementation="sdpa")),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, attn_implementation="sdpa")),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, **WINDOW, attn_implementation="sdpa")),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**SMALL, n_embd=32, n_layer=2, n_head=4)),
    "granite": lambda: GraniteForCausalLM(GraniteConfig(**SHAPE, logits_scaling=2.0)),
}
FALLING_BACK = {
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SHAPE, attn_implementation="eager")),
    "mamba": lambda: MambaForCausalLM(MambaConfig(**SMALL, hidden_size=32, num_hidden_layers=2)),
    "bloom": lambda: BloomForCausalLM(BloomConfig(**SMALL, hidden_size=32, n_layer=2, n_head=4)),
}


def build(name: str) -> PreTrainedModel:
    """A model with weights so large that a wrong index shows, in float64."""
    torch.manual_seed(0)
    model: PreTrainedModel = (PACKING | FALLING_BACK)[name]().eval().double()
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.data.mul_(4)
    return model


def selection(prefix: int = 12) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Sequences with a common beginning, some longer than the window; tokens in the beginning, behind it and last."""
    random = np.random.default_rng(0)
    beginning = random.integers(0, V, prefix)
    sequences = [np.concatenate([beginning, random.integers(0, V, n)]) for n in (5, 9, 30, 8, 8, 7, 50)]
    positions = [position for sequence in sequences for position in (3, prefix, prefix + 1, len(sequence) - 1)]
    return sequences, np.repeat(np.arange(len(sequences)), 4), np.array(positions)


def reference(model: PreTrainedModel) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Log-probabilities and gradients of their sum; one forward of a whole prefix for each token, nothing batched."""
    own = copy.deepcopy(model)
    found = []
    for segment, position in zip(*selection()[1:], strict=True):
        sequence = selection()[0][segment]
        logits = own(input_ids=torch.tensor(sequence[None, :position]), use_cache=False).logits[0, -1]
        found.append(torch.log_softmax(logits / TEMPERATURE, -1)[sequence[position]])
    torch.stack(found).sum().backward()
    return torch.stack(found).detach(), [parameter.grad for parameter in own.parameters()]


def own_way(model: PreTrainedModel, packed: bool) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    sequences, segments, positions = selection()
    found = torch.zeros(len(segments), dtype=torch.promote_types(model.dtype, torch.float32))
    model.zero_grad()
    for micro in build_micro_batches(sequences, segments, positions, token_budget=120, packed=packed):
        log_probs, _ = action_log_probs(model, micro, TEMPERATURE)
        found[micro.tokens_t] = log_probs.detach()
        log_probs.sum().backward()
    return found, [parameter.grad for parameter in model.parameters()]


def compare(found: list[torch.Tensor | None], expected: list[torch.Tensor | None]) -> float:
    """‖found − expected‖ / ‖expected‖ over all gradients together."""
    pairs = [(f, e) for f, e in zip(found, expected, strict=True) if f is not None and e is not None]
    assert len(pairs) == sum(e is not None for e in expected)
    error = sum(float((f - e).square().sum()) for f, e in pairs) / sum(float(e.square().sum()) for _, e in pairs)
    return float(error**0.5)


@pytest.mark.parametrize("name", PACKING)
def test_packed_and_padded_rows_equal_one_plain_forward_for_each_token(name: str) -> None:
    """Parity in float64, for a shared beginning, sliding windows, grouped heads, experts and scaled logits.

    Norms of these models compute in fp32 whatever their type, which is what bounds the gradients.
    """
    model = build(name)
    expected, gradients = reference(model)
    assert packs(model)
    assert has_plain_head(model) == (name != "granite")
    for packed in (True, False):
        found, own = own_way(model, packed)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
        assert compare(own, gradients) < 1e-6
    assert expected.std() > 0.1


@pytest.mark.parametrize("name", FALLING_BACK)
def test_models_that_packing_would_change_are_noticed_and_take_padded_rows(name: str) -> None:
    """Capped scores, recurrent layers, attention without the interface."""
    model = build(name)
    before = model.config._attn_implementation
    expected, gradients = reference(model)
    assert not packs(model)
    assert model.config._attn_implementation == before
    found, own = own_way(model, packed=False)
    torch.testing.assert_close(found.double(), expected.double(), atol=2e-6, rtol=2e-6)
    assert compare(own, gradients) < 2e-6


def test_capped_logits_are_noticed_although_they_are_small_at_first() -> None:
    model = build("gemma2").float()
    for parameter in model.parameters():
        parameter.data.div_(100)
    assert not has_plain_head(model)
    assert has_plain_head(build("llama"))


def test_values_are_the_same_packed_and_padded() -> None:
    sequences, segments, _ = selection()
    ends = np.array([len(sequences[segment]) for segment in segments])
    model = ValueModel.from_policy(build("qwen3"))
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(1))
    assert packs(model.backbone)
    found = []
    for packed in (True, False):
        values = torch.zeros(len(segments))
        for micro in build_micro_batches(sequences, segments, ends, token_budget=90, packed=packed):
            values[micro.tokens_t] = model.values(micro).detach()
        found.append(values)
    torch.testing.assert_close(found[0], found[1], atol=1e-6, rtol=1e-5)
    assert found[0].std() > 0.1


def test_bfloat16_models_pack_too() -> None:
    model = build("qwen3").to(torch.bfloat16)
    assert packs(model)
    found, gradients = own_way(model, packed=True)
    assert bool(torch.isfinite(found).all())
    assert any(gradient is not None and bool(gradient.abs().sum() > 0) for gradient in gradients)


class Module(torch.nn.Module):
    """What attention asks of a module."""

    is_causal = True


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"softcap": 30.0}, "softcap"),
        ({"is_causal": False}, "is_causal = False"),
        ({"attention_mask": torch.ones(1, 1, 4, 4)}, "a mask: True"),
        ({"s_aux": torch.ones(2)}, "s_aux"),
    ],
)
def test_attention_that_it_does_not_compute_is_refused(changes: dict[str, Any], message: str) -> None:
    states = torch.randn(3, 1, 2, 4, 8)
    arguments: dict[str, Any] = {"attention_mask": None, "packed_layout": build_layout([4])} | changes
    with pytest.raises(NotImplementedError, match=message):
        packed_attention(Module(), *states, **arguments)
    output, weights = packed_attention(Module(), *states, attention_mask=None, packed_layout=build_layout([4]))
    assert output.shape == (1, 4, 2, 8)
    assert weights is None


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("prefix", [0, 4])
def test_attention_over_buckets_equals_a_full_mask(window: int | None, prefix: int) -> None:
    """Queries, keys and values of 14 tokens, against softmax with the mask that is never built elsewhere."""
    lengths = [4, 4, 3, 1]
    total = prefix + sum(lengths)
    segment = np.repeat([-1, 0, 1, 2, 3], [prefix, *lengths])
    position = np.concatenate([np.arange(prefix), *(prefix + np.arange(length) for length in lengths)])
    visible = ((segment[:, None] == segment[None, :]) | (segment[None, :] == -1)) & (
        position[:, None] >= position[None, :]
    )
    if window is not None:
        visible &= position[:, None] - position[None, :] < window
    states = torch.randn(3, 1, 2, total, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    states.requires_grad_()
    query, key, value = states
    scores = (query @ key.transpose(-1, -2)) * 0.3
    expected = (scores.masked_fill(~torch.from_numpy(visible), float("-inf")).softmax(-1) @ value).transpose(1, 2)
    found, _ = packed_attention(
        Module(),
        query,
        key,
        value,
        None,
        scaling=0.3,
        sliding_window=window,
        packed_layout=build_layout(lengths, prefix, padding=0.4),
    )
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    factor = torch.randn(found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    own, plain = (torch.autograd.grad((output * factor).sum(), states)[0] for output in (found, expected))
    torch.testing.assert_close(own, plain, atol=1e-12, rtol=1e-12)
