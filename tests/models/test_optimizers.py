"""Optimizers: what they hold, the learning rates as numbers, and states that go on bit for bit after a round trip."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from soloist.models.optimizers import WarmupSchedule, build_optimizer, load_optimizer_state, optimizer_state


class Net(nn.Module):
    """A small net with a frozen layer between trainable ones."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 4, dtype=dtype)
        self.middle = nn.Linear(4, 4, dtype=dtype).requires_grad_(False)
        self.last = nn.Linear(4, 1, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def step(net: Net, optimizer: torch.optim.Optimizer, seed: int) -> None:
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed)).to(net.first.weight.dtype)
    optimizer.zero_grad()
    net(x).square().mean().backward()
    optimizer.step()


def stepped(steps: int, dtype: torch.dtype = torch.float32) -> tuple[Net, torch.optim.AdamW]:
    net = Net(dtype)
    optimizer = build_optimizer(net.parameters(), lr=1e-2, weight_decay=0.1)
    for seed in range(steps):
        step(net, optimizer, seed)
    return net, optimizer


def test_only_trainable_parameters_are_held_and_only_matrices_decay() -> None:
    net, optimizer = stepped(1)
    held = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert held == {
        id(net.first.weight): 0.1,
        id(net.last.weight): 0.1,
        id(net.first.bias): 0.0,
        id(net.last.bias): 0.0,
    }
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)
    assert net.middle.weight not in optimizer.state
    with pytest.raises(ValueError, match="none of 2 parameters is trainable"):
        build_optimizer(net.middle.parameters(), lr=1e-2, weight_decay=0.0)


def test_one_update_is_adamw_by_hand() -> None:
    weight = nn.Parameter(torch.tensor([[2.0, -1.0]]))
    optimizer = build_optimizer([weight], lr=0.1, weight_decay=0.5)
    (weight * torch.tensor([[3.0, -4.0]])).sum().backward()
    optimizer.step()
    # after bias correction the first step is lr · sign(g), on top of the decay by lr · 0.5
    torch.testing.assert_close(weight.data, torch.tensor([[2.0 * 0.95 - 0.1, -1.0 * 0.95 + 0.1]]))
    assert set(optimizer.state[weight]) == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_goes_on_bit_for_bit_after_safetensors_and_json(dtype: torch.dtype, tmp_path: Path) -> None:
    straight, straight_optimizer = stepped(3, dtype)
    tensors, meta = optimizer_state(straight_optimizer, straight.named_parameters())
    save_file(tensors, tmp_path / "optimizer.safetensors")
    (tmp_path / "optimizer.json").write_text(json.dumps(meta))

    resumed = Net(dtype)
    resumed.load_state_dict(straight.state_dict())
    optimizer = build_optimizer(resumed.parameters(), lr=5.0, weight_decay=0.1)
    read = load_file(tmp_path / "optimizer.safetensors")
    load_optimizer_state(
        optimizer, resumed.named_parameters(), read, json.loads((tmp_path / "optimizer.json").read_text())
    )
    again, meta_again = optimizer_state(optimizer, resumed.named_parameters())
    assert meta_again == meta
    assert tensors.keys() == again.keys()
    assert all(torch.equal(tensors[name], again[name]) and tensors[name].dtype == again[name].dtype for name in tensors)
    for seed in range(3, 7):
        step(straight, straight_optimizer, seed)
        step(resumed, optimizer, seed)
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters(), strict=True))


def test_saved_tensors_carry_parameter_names_and_are_copies() -> None:
    net, optimizer = stepped(2)
    tensors, meta = optimizer_state(optimizer, net.named_parameters())
    assert set(tensors) == {
        f"{name}/{key}"
        for name in ("first.weight", "first.bias", "last.weight", "last.bias")
        for key in ("step", "exp_avg", "exp_avg_sq")
    }
    assert [group["names"] for group in meta["groups"]] == [
        ["first.weight", "last.weight"],
        ["first.bias", "last.bias"],
    ]
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    step(net, optimizer, 9)
    assert all(torch.equal(before[name], tensors[name]) for name in tensors)
    assert tensors["first.weight/step"].item() == 2


def test_a_state_from_before_the_first_update_is_empty_and_loads() -> None:
    net, optimizer = stepped(0)
    tensors, meta = optimizer_state(optimizer, net.named_parameters())
    assert tensors == {}
    other, other_optimizer = stepped(2)
    load_optimizer_state(other_optimizer, other.named_parameters(), tensors, meta)
    assert not other_optimizer.state_dict()["state"]


def spoil(case: str, tensors: dict[str, torch.Tensor], meta: dict[str, Any]) -> None:
    """Change one thing about a saved state."""
    group = meta["groups"][0]
    if case == "shape":
        tensors["first.weight/exp_avg"] = torch.zeros(2, 2)
    elif case == "dtype":
        tensors["first.weight/exp_avg_sq"] = tensors["first.weight/exp_avg_sq"].double()
    elif case == "key":
        del tensors["last.bias/step"]
    elif case == "unknown":
        tensors["middle.weight/exp_avg"] = torch.zeros(4, 4)
    elif case == "names":
        group["names"] = ["first.weight", "middle.weight"]
    elif case == "order":
        group["names"] = group["names"][::-1]
    elif case == "option":
        group["options"]["weight_decay"] = 0.3
    elif case == "groups":
        meta["groups"] = meta["groups"][:1]
    else:
        meta["optimizer"] = "Muon"


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("shape", r"exp_avg of first.weight is torch.float32 \[2, 2\], expected torch.float32 \[4, 3\]"),
        ("dtype", "exp_avg_sq of first.weight is torch.float64"),
        ("key", r"last.bias has \['exp_avg', 'exp_avg_sq'\]"),
        ("unknown", "middle.weight, which the optimizer does not train"),
        ("names", "differing: last.weight, middle.weight"),
        ("order", "the order"),
        ("option", "weight_decay = 0.3, expected 0.1"),
        ("groups", "1 parameter groups, expected 2"),
        ("optimizer", "Muon, expected AdamW"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(case: str, message: str) -> None:
    net, optimizer = stepped(2)
    tensors, meta = optimizer_state(optimizer, net.named_parameters())
    tensors, meta = dict(tensors), json.loads(json.dumps(meta))
    spoil(case, tensors, meta)
    target, target_optimizer = stepped(5)
    before, _ = optimizer_state(target_optimizer, target.named_parameters())
    with pytest.raises(ValueError, match=message):
        load_optimizer_state(target_optimizer, target.named_parameters(), tensors, meta)
    after, _ = optimizer_state(target_optimizer, target.named_parameters())
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_parameter_without_a_name_is_an_error() -> None:
    net, optimizer = stepped(1)
    with pytest.raises(ValueError, match=r"2 parameters of the optimizer have no name.*\[1, 4\]"):
        optimizer_state(optimizer, net.first.named_parameters())
    with pytest.raises(ValueError, match="have no name"):
        load_optimizer_state(optimizer, net.last.named_parameters(), {}, {})


def test_warm_up_is_linear_and_then_flat() -> None:
    schedule = WarmupSchedule(peak=4e-4, warmup=5)
    assert [schedule.at(n) for n in range(7)] == pytest.approx([8e-5, 1.6e-4, 2.4e-4, 3.2e-4, 4e-4, 4e-4, 4e-4])
    assert WarmupSchedule(peak=4e-4).at(0) == 4e-4
    with pytest.raises(ValueError, match="update number is -1"):
        schedule.at(-1)


def test_cosine_falls_from_the_peak_to_a_tenth() -> None:
    schedule = WarmupSchedule(peak=1.0, warmup=2, total=7)
    early, late = 0.55 + 0.45 * math.cos(math.pi / 4), 0.55 - 0.45 * math.cos(math.pi / 4)
    assert [schedule.at(n) for n in range(8)] == pytest.approx([0.5, 1.0, 1.0, early, 0.55, late, 0.1, 0.1])
    assert schedule.at(10_000) == pytest.approx(0.1)


@given(
    peak=st.floats(1e-8, 1.0), warmup=st.integers(0, 50), total=st.none() | st.integers(1, 200), n=st.integers(0, 300)
)
def test_learning_rates_are_positive_and_never_above_the_peak(
    peak: float, warmup: int, total: int | None, n: int
) -> None:
    schedule = WarmupSchedule(peak=peak, warmup=warmup, total=total)
    assert 0 < schedule.at(n) <= peak * (1 + 1e-12)
    assert schedule.at(n) == schedule.at(n)
    if n + 1 < warmup:
        assert schedule.at(n) < schedule.at(n + 1)


def test_a_schedule_sets_all_groups() -> None:
    _, optimizer = stepped(0)
    lr = WarmupSchedule(peak=1e-3, warmup=4).apply(optimizer, 1)
    assert lr == pytest.approx(5e-4)
    assert [group["lr"] for group in optimizer.param_groups] == [lr, lr]
