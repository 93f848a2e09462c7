"""States of frozen first layers are computed once and reused: the same numbers, fewer layers run."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from soloist.config import ModelConfig, ValueConfig
from soloist.models.frozen import FrozenStates, frozen_layers
from soloist.models.rows import padded_rows
from soloist.models.tiny import tiny_policy
from soloist.models.tokenizer import build_tokenizer
from soloist.models.value import ValueModel, freeze_parameters

FIRST_TWO = (r"\.embed_tokens\.", r"\.layers\.[01]\.")
MICRO = padded_rows(torch.arange(24).view(2, 12), torch.tensor([0, 0, 1]), torch.tensor([3, 12, 7]))


def value_model(freeze: Sequence[str]) -> ValueModel:
    policy = tiny_policy(ModelConfig(hidden_size=32, layers=4, heads=2, mlp_size=48), 0, build_tokenizer())
    model = ValueModel.from_policy(policy)
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(1))
    freeze_parameters(model, freeze)
    return model


def runs_of(model: ValueModel) -> list[int]:
    """How often the MLP of each layer ran; it grows as the model is used."""
    counts = [0] * len(model.backbone.layers)

    def count(number: int) -> None:
        counts[number] += 1

    for number, layer in enumerate(model.backbone.layers):
        layer.mlp.register_forward_hook(lambda *_, number=number: count(number))
    return counts


@pytest.mark.parametrize(
    ("freeze", "shared"),
    [
        (FIRST_TWO, 2),
        (ValueConfig().freeze, 0),  # the first layer's norms train
        ((r"\.layers\.[01]\.",), 0),  # the embeddings before them train
        ((r"\.embed_tokens\.", r"\.layers\.[12]\."), 0),
        ((r"backbone\.",), 4),
    ],
)
def test_only_layers_before_the_first_trainable_parameter_are_shared(freeze: Sequence[str], shared: int) -> None:
    model = value_model(freeze)
    counts, recall = runs_of(model), FrozenStates(model.backbone)
    for _ in range(3):
        model.values(MICRO, recall)
    assert len(frozen_layers(model.backbone)) == shared
    assert counts == [1] * shared + [3] * (4 - shared)


def test_values_and_gradients_are_the_same_bits_with_and_without_sharing() -> None:
    model = value_model(FIRST_TWO)
    recall = FrozenStates(model.backbone)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    plain = model.values(MICRO)
    expected = torch.autograd.grad(plain.square().sum(), trained)
    for _ in range(2):
        values = model.values(MICRO, recall)
        assert torch.equal(values, plain)
        assert all(map(torch.equal, torch.autograd.grad(values.square().sum(), trained), expected))


def test_an_update_of_what_trains_shows_and_another_micro_batch_is_not_mixed_up() -> None:
    model = value_model(FIRST_TWO)
    recall = FrozenStates(model.backbone)
    other = padded_rows(torch.arange(24, 48).view(2, 12), torch.tensor([1]), torch.tensor([5]))
    before, apart = model.values(MICRO, recall), model.values(other, recall)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.5)
    assert not torch.equal(model.values(MICRO, recall), before)
    assert torch.equal(model.values(MICRO, recall), model.values(MICRO))
    assert torch.equal(model.values(other, recall), model.values(other))
    assert not torch.equal(model.values(other, recall), apart)
    assert "forward" not in vars(model.backbone.layers[0])
