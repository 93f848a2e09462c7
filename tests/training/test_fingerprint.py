"""The hash of a state differs for a change of any bit, and for nothing else; random states go on where they were."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from soloist.training import fingerprint as module
from soloist.training.fingerprint import fingerprint
from soloist.training.random_state import load_random_state, random_state

State = dict[str, tuple[dict[str, Tensor], dict[str, Any]]]


def state_of(tensor: Tensor, **data: Any) -> State:
    return {"policy": ({"w": tensor}, data)}


@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.float64]),
    st.integers(1, 50),
    st.data(),
)
def test_any_single_bit_changes_the_hash(dtype: torch.dtype, size: int, data: st.DataObject) -> None:
    tensor = torch.arange(size).to(dtype)
    before = fingerprint(state_of(tensor))
    other = tensor.clone()
    raw = other.view(torch.uint8)
    place, bit = data.draw(st.integers(0, raw.numel() - 1)), data.draw(st.integers(0, 7))
    raw[place] = int(raw[place]) ^ (1 << bit)
    assert fingerprint(state_of(other)) != before
    raw[place] = int(raw[place]) ^ (1 << bit)
    assert fingerprint(state_of(other)) == before


def test_names_shapes_types_counters_and_the_order_of_values_count_but_not_the_order_of_names() -> None:
    tensor = torch.tensor([1.0, 2.0, 3.0, 4.0])
    base = fingerprint(state_of(tensor, version=3))
    different = [
        state_of(tensor.flip(0), version=3),
        state_of(tensor.view(2, 2), version=3),
        state_of(tensor.view(torch.int32), version=3),
        state_of(tensor, version=4),
        {"value": state_of(tensor, version=3)["policy"]},
        {"policy": ({"v": tensor}, {"version": 3})},
        state_of(torch.tensor([1.0, 2.0, 3.0, 4.0, 0.0]), version=3),
        state_of(torch.tensor([-0.0, 2.0, 3.0, 4.0]), version=3),
    ]
    assert len({base, *map(fingerprint, different)}) == len(different) + 1
    assert fingerprint(state_of(tensor.clone(), version=3)) == base
    both = ({"a": tensor, "b": tensor * 2}, {"x": 1, "y": 2})
    turned = (dict(reversed(list(both[0].items()))), dict(reversed(list(both[1].items()))))
    assert fingerprint({"p": both}) == fingerprint({"p": turned})


def test_the_hash_is_the_formula_whatever_the_chunks_and_the_memory_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    words = tensor.view(torch.int32).tolist()
    expected = sum((2 * i + 1) * word for i, word in enumerate(words)) % 2**64
    assert module._sum(tensor) % 2**64 == expected
    whole = fingerprint(state_of(tensor))
    monkeypatch.setattr(module, "_CHUNK", 7)
    assert fingerprint(state_of(tensor)) == whole
    square = tensor[:961].view(31, 31)
    assert fingerprint(state_of(square.t().contiguous().t())) == fingerprint(state_of(square))


def test_random_numbers_go_on_where_they_were_through_json() -> None:
    """R2: RNG of every kind is a part of the snapshot; Python's state survives being written as JSON."""
    tensors, data = random_state()
    stored = ({name: tensor.clone() for name, tensor in tensors.items()}, json.loads(json.dumps(data)))
    expected = (torch.rand(3).tolist(), random.random(), random.gauss(0, 1))
    torch.rand(17), random.random(), random.gauss(0, 1)
    load_random_state(stored)
    assert (torch.rand(3).tolist(), random.random(), random.gauss(0, 1)) == expected
    assert "cpu" in tensors
