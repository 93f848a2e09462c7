"""The value model: values of the state before a token, a copied backbone, and frozen parameters that never move."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from soloist.config import ModelConfig, ValueConfig
from soloist.models.optimizers import build_optimizer, optimizer_state
from soloist.models.rows import padded_rows
from soloist.models.tiny import build_tiny, tiny_policy
from soloist.models.tokenizer import build_tokenizer
from soloist.models.value import ValueModel, freeze_parameters

FAMILIES = ("qwen3", "qwen3_moe")
ROWS = torch.tensor([0, 0, 1, 1])
POSITIONS = torch.tensor([1, 6, 3, 8])


def small_config(family: str) -> ModelConfig:
    return ModelConfig(family=family, hidden_size=32, layers=2, heads=2, mlp_size=48, experts=4)


@pytest.fixture(params=FAMILIES)
def policy(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny_policy(small_config(request.param), 0, build_tokenizer())


def random_ids(rows: int = 2, length: int = 8, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 126, (rows, length), generator=torch.Generator().manual_seed(seed))


def with_random_head(model: ValueModel) -> ValueModel:
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(1))
    torch.nn.init.constant_(model.head.bias, 0.25)
    return model


def train(model: ValueModel, steps: int = 4) -> torch.optim.AdamW:
    """Steps towards targets that no constant fits, with decay, which would move even a weight without gradient."""
    optimizer = build_optimizer(model.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(steps):
        loss = (
            (model.values(padded_rows(random_ids(seed=step), ROWS, POSITIONS)) - torch.tensor([1.0, 0.0, 0.5, -1.0]))
            .square()
            .mean()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return optimizer


def test_a_new_value_model_says_zero_everywhere_and_shares_nothing_with_the_policy(
    policy: PreTrainedModel,
) -> None:
    model = ValueModel.from_policy(policy)
    assert torch.equal(model.values(padded_rows(random_ids(), ROWS, POSITIONS)), torch.zeros(4))
    own, copied = dict(policy.base_model.named_parameters()), dict(model.backbone.named_parameters())
    assert own.keys() == copied.keys()
    assert all(torch.equal(own[name], copied[name]) for name in own)
    assert not {p.data_ptr() for p in policy.parameters()} & {p.data_ptr() for p in model.parameters()}
    assert not [name for name, _ in model.named_parameters() if "lm_head" in name]


def test_a_value_model_from_a_folder_equals_one_from_the_model(tmp_path: Path) -> None:
    folder = build_tiny(small_config("qwen3_moe"), 0, tmp_path / "model")
    read = ValueModel.from_policy(folder)
    copied = ValueModel.from_policy(tiny_policy(small_config("qwen3_moe"), 0, build_tokenizer()))
    assert dict(read.named_parameters()).keys() == dict(copied.named_parameters()).keys()
    assert all(torch.equal(a, b) for a, b in zip(read.parameters(), copied.parameters(), strict=True))
    low = ValueModel.from_policy(folder, dtype="bfloat16")
    assert low.head.weight.dtype == torch.float32
    assert next(low.backbone.parameters()).dtype == torch.bfloat16
    assert low.values(padded_rows(random_ids(), ROWS, POSITIONS)).dtype == torch.float32


def test_a_frozen_policy_gives_a_value_model_that_trains(policy: PreTrainedModel) -> None:
    model = ValueModel.from_policy(policy.requires_grad_(False))
    assert all(p.requires_grad for p in model.parameters())
    assert not any(p.requires_grad for p in policy.parameters())


def test_values_are_read_before_the_token_by_a_slow_reference(policy: PreTrainedModel) -> None:
    model = with_random_head(ValueModel.from_policy(policy))
    ids = random_ids()
    weight, bias = model.head.weight[0].detach().double(), model.head.bias.item()
    expected = []
    with torch.no_grad():
        for row, position in zip(ROWS.tolist(), POSITIONS.tolist(), strict=True):
            hidden = model.backbone(input_ids=ids[row : row + 1, :position]).last_hidden_state[0, -1].double()
            expected.append((hidden @ weight).item() + bias)
        values = model(padded_rows(ids, ROWS, POSITIONS))
    torch.testing.assert_close(values.double(), torch.tensor(expected).double(), atol=1e-5, rtol=1e-5)
    assert values.std() > 0.1


def test_a_value_sees_every_token_before_it_and_none_from_it_on(policy: PreTrainedModel) -> None:
    model = with_random_head(ValueModel.from_policy(policy))
    ids = random_ids()
    changed = ids.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 126
    rows, positions = torch.tensor([0, 0, 0, 1]), torch.tensor([5, 6, 8, 8])
    with torch.no_grad():
        difference = (
            model.values(padded_rows(ids, rows, positions)) - model.values(padded_rows(changed, rows, positions))
        ).abs()
    assert difference[[0, 3]].max() < 1e-6
    assert difference[[1, 2]].min() > 1e-4


def test_padding_does_not_change_the_state_after_the_last_token(policy: PreTrainedModel) -> None:
    model = with_random_head(ValueModel.from_policy(policy))
    ids = random_ids(rows=1, length=6)
    padded = torch.cat([ids, random_ids(rows=1, length=5, seed=3)], dim=1)
    row, last = torch.tensor([0]), torch.tensor([6])
    with torch.no_grad():
        assert model.values(padded_rows(ids, row, last)).item() == pytest.approx(
            model.values(padded_rows(padded, row, last)).item(), abs=2e-6
        )
        assert model.values(padded_rows(ids, row, last)).item() != pytest.approx(
            model.values(padded_rows(ids, row, last - 1)).item(), abs=1e-3
        )


@pytest.mark.parametrize("position", [0, 9, -1])
def test_positions_without_a_state_are_refused(policy: PreTrainedModel, position: int) -> None:
    model = ValueModel.from_policy(policy)
    with pytest.raises(ValueError, match=f"positions span {position} … {position}.* 1 … 8"):
        model.values(padded_rows(random_ids(), torch.tensor([0]), torch.tensor([position])))
    assert model.values(padded_rows(random_ids(), torch.tensor([0]), torch.tensor([8]))).shape == (1,)


def test_default_freezing_holds_attention_and_embeddings_bitwise_while_the_rest_moves(policy: PreTrainedModel) -> None:
    model = ValueModel.from_policy(policy)
    frozen = freeze_parameters(model, ValueConfig().freeze)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = train(model)
    moved = {name for name, p in model.named_parameters() if not torch.equal(before[name], p)}
    assert moved == before.keys() - set(frozen)
    parts = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "q_norm.weight", "k_norm.weight")
    attention = {f"backbone.layers.{i}.self_attn.{part}" for i in range(2) for part in parts}
    assert set(frozen) == attention | {"backbone.embed_tokens.weight"}
    assert all(p.grad is None for name, p in model.named_parameters() if name in frozen)
    tensors, _ = optimizer_state(optimizer, model.named_parameters())
    assert {name.rpartition("/")[0] for name in tensors} == moved


def test_mlp_or_experts_router_norms_and_head_train_by_default(policy: PreTrainedModel) -> None:
    model = ValueModel.from_policy(policy)
    trained = set(dict(model.named_parameters())) - set(freeze_parameters(model, ValueConfig().freeze))
    moe = policy.config.model_type == "qwen3_moe"
    parts = (
        ("experts.gate_up_proj", "experts.down_proj", "gate.weight") if moe else ("gate_proj.weight", "up_proj.weight")
    )
    assert {f"backbone.layers.1.mlp.{part}" for part in parts} <= trained
    norms = {f"backbone.layers.0.{name}_layernorm.weight" for name in ("input", "post_attention")}
    assert norms | {"backbone.norm.weight", "head.weight", "head.bias"} <= trained


def test_each_default_pattern_matches_something(policy: PreTrainedModel) -> None:
    model = ValueModel.from_policy(policy)
    assert len(ValueConfig().freeze) >= 2
    assert all(freeze_parameters(model, [pattern]) for pattern in ValueConfig().freeze)


def test_without_freezing_everything_trains(policy: PreTrainedModel) -> None:
    model = ValueModel.from_policy(policy)
    assert freeze_parameters(model, ()) == []
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model)
    assert {name for name, p in model.named_parameters() if not torch.equal(before[name], p)} == before.keys()


@pytest.mark.parametrize(
    ("pattern", "message"), [(r"\.attention\.", "matches none of"), ("(", "no regular expression")]
)
def test_a_pattern_that_freezes_nothing_is_an_error(policy: PreTrainedModel, pattern: str, message: str) -> None:
    model = ValueModel.from_policy(policy)
    with pytest.raises(ValueError, match=message) as caught:
        freeze_parameters(model, [r"\.self_attn\.", pattern])
    assert repr(pattern) in str(caught.value)
    assert all(p.requires_grad for p in model.parameters())
