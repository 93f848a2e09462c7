"""Weights files: written once per tied tensor, verified before anything is copied, atomic under faults."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from soloist.config import ModelConfig
from soloist.models.loading import assign_weights, parameter_table, read_weights, save_weights
from soloist.models.tiny import tiny_policy
from soloist.models.tokenizer import build_tokenizer
from soloist.models.value import ValueModel
from soloist.seams import Storage, installed_faults, sha256_of

EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"


def small_model(family: str = "qwen3", seed: int = 0) -> PreTrainedModel:
    config = ModelConfig(family=family, hidden_size=32, layers=2, heads=2, mlp_size=48, experts=4)
    return tiny_policy(config, seed, build_tokenizer())


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_weights_go_to_another_model_bit_for_bit(family: str, tmp_path: Path) -> None:
    source, target = small_model(family, 1), small_model(family, 2)
    path = tmp_path / "model.safetensors"
    digest = save_weights(source, path)
    pointers = [p.data_ptr() for p in target.parameters()]
    assert not torch.equal(source.lm_head.weight, target.lm_head.weight)
    assign_weights(target, read_weights(path, parameter_table(target), digest))
    assert all(torch.equal(a, b) for a, b in zip(source.parameters(), target.parameters(), strict=True))
    assert [p.data_ptr() for p in target.parameters()] == pointers
    assert torch.equal(source.lm_head.weight, target.lm_head.weight)
    assert digest == sha256_of(path) == save_weights(target, tmp_path / "again.safetensors")


def test_tied_weights_are_stored_once_and_the_table_names_the_file(tmp_path: Path) -> None:
    model = small_model()
    save_weights(model, tmp_path / "w.safetensors")
    with safe_open(tmp_path / "w.safetensors", framework="pt") as file:
        names = set(file.keys())
    assert names == set(parameter_table(model)) == set(dict(model.named_parameters()))
    assert "lm_head.weight" not in names
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]


def test_a_value_model_is_saved_and_read_the_same_way(tmp_path: Path) -> None:
    policy = small_model("qwen3_moe")
    source, target = ValueModel.from_policy(policy), ValueModel.from_policy(small_model("qwen3_moe", 7))
    torch.nn.init.normal_(source.head.weight)
    digest = save_weights(source, tmp_path / "v.safetensors")
    assign_weights(target, read_weights(tmp_path / "v.safetensors", parameter_table(target), digest))
    assert all(torch.equal(a, b) for a, b in zip(source.parameters(), target.parameters(), strict=True))
    assert {"head.weight", "head.bias"} <= parameter_table(target).keys()


def test_weights_are_cast_to_the_engines_type(tmp_path: Path) -> None:
    source, target = small_model(seed=1), small_model(seed=2).to(torch.bfloat16)
    digest = save_weights(source, tmp_path / "w.safetensors", dtype=torch.bfloat16)
    assign_weights(target, read_weights(tmp_path / "w.safetensors", parameter_table(target), digest))
    for a, b in zip(source.parameters(), target.parameters(), strict=True):
        assert b.dtype == torch.bfloat16
        assert torch.equal(a.to(torch.bfloat16), b)


def change(edit: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        tensors = load_file(path)
        edit(tensors)
        save_file(tensors, path)

    return apply


SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (change(lambda t: t.pop(NORM)), f"no tensor {NORM}"),
    "unknown": (change(lambda t: t.update(extra=torch.ones(1))), "unknown tensor extra"),
    "shape": (change(lambda t: t.update({NORM: torch.ones(31)})), rf"{NORM} as \(\(31,\)"),
    "type": (change(lambda t: t.update({NORM: t[NORM].double()})), "float64"),
    "infinite": (change(lambda t: t[NORM].mul_(float("inf"))), f"non-finite numbers in {NORM}"),
    "garbage": (lambda path: path.write_bytes(b"\x00" * 100), "no safetensors file"),
    "empty": (lambda path: path.write_bytes(b""), "no safetensors file"),
}


@pytest.mark.parametrize("case", SPOILED)
def test_a_file_that_does_not_fit_is_refused_though_its_hash_is_right(case: str, tmp_path: Path) -> None:
    spoil, expected = SPOILED[case]
    model, path = small_model(), tmp_path / "w.safetensors"
    save_weights(model, path)
    spoil(path)
    with pytest.raises(ValueError, match=expected) as caught:
        read_weights(path, parameter_table(model), sha256_of(path))
    assert str(path) in str(caught.value)


def test_one_flipped_bit_is_noticed_by_the_hash(tmp_path: Path) -> None:
    model, path = small_model(), tmp_path / "w.safetensors"
    digest = save_weights(model, path)
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=hashlib.sha256(data).hexdigest()) as caught:
        read_weights(path, parameter_table(model), digest)
    assert digest in str(caught.value)


@pytest.mark.parametrize("edit", [lambda t: t.pop(NORM), lambda t: t.update({NORM: torch.ones(3)})])
def test_nothing_is_copied_when_tensors_do_not_fit(edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    model = small_model(seed=1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    tensors = {name: p.detach().clone() for name, p in small_model(seed=2).named_parameters()}
    edit(tensors)
    with pytest.raises(ValueError, match=NORM):
        assign_weights(model, tensors)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


@pytest.mark.parametrize("fail_at", [0, 1, 2])
def test_a_failed_write_leaves_the_old_file(fail_at: int, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    digest = save_weights(small_model(seed=1), path)
    passed: list[str] = []

    def fail(name: str) -> None:
        passed.append(name)
        if len(passed) > fail_at:
            raise OSError(5, "Input/output error")

    with installed_faults(fail), pytest.raises(OSError, match="Input/output"):
        save_weights(small_model(seed=2), path)
    assert sha256_of(path) == digest
    points = ["write:.w.safetensors.tmp", "sync:.w.safetensors.tmp", "rename:w.safetensors"]
    assert passed == points[: fail_at + 1]


def test_another_storage_is_obeyed(tmp_path: Path) -> None:
    written: list[str] = []

    class Recording(Storage):
        def write(self, path: Path, data: bytes) -> None:
            written.append(path.name)
            super().write(path, data)

    save_weights(small_model(), tmp_path / "w.safetensors", storage=Recording())
    assert written == [".w.safetensors.tmp"]
    assert (tmp_path / "w.safetensors").is_file()
