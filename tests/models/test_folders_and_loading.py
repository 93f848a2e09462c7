"""Model folders: built, saved and loaded bit for bit, and refused with one sentence when anything is off."""

from __future__ import annotations

import json
import pickle
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from soloist.config import ModelConfig
from soloist.errors import UserError
from soloist.models.loading import load_policy, load_tokenizer, parameter_table, save_folder
from soloist.models.tiny import build_tiny, tiny_policy
from soloist.models.tokenizer import build_tokenizer
from soloist.seams import installed_faults

SMALL = ModelConfig(hidden_size=32, layers=2, heads=2, mlp_size=48, experts=4)
FAMILIES = ("qwen3", "qwen3_moe")
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def small(family: str) -> ModelConfig:
    return SMALL.model_copy(update={"family": family})


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(small(request.param), 3, tmp_path_factory.mktemp("tiny") / "model")


@pytest.mark.parametrize(("family", "low", "high"), [("qwen3", 3e5, 6e5), ("qwen3_moe", 2e6, 3e6)])
def test_default_tiny_models_have_the_intended_size_and_shape(family: str, low: float, high: float) -> None:
    tokenizer = build_tokenizer()
    model = tiny_policy(ModelConfig(family=family), 0, tokenizer)
    assert low < sum(p.numel() for p in model.parameters()) < high
    assert model.config.vocab_size == len(tokenizer)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert (model.config.eos_token_id, model.config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert model.config.rope_parameters["rope_theta"] == 10_000.0
    assert model.config.max_position_embeddings == 2048


@pytest.mark.parametrize("family", FAMILIES)
def test_a_seed_fixes_every_byte_and_leaves_the_random_state_alone(family: str, tmp_path: Path) -> None:
    torch.manual_seed(9)
    before = torch.get_rng_state()
    first, again, other = (build_tiny(small(family), seed, tmp_path / f"{i}") for i, seed in enumerate((5, 5, 6)))
    weights = [(path / "model.safetensors").read_bytes() for path in (first, again, other)]
    assert weights[0] == weights[1]
    assert weights[0] != weights[2]
    assert torch.equal(before, torch.get_rng_state())


def test_a_saved_folder_loads_bit_for_bit_without_network(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a model folder is loaded without network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    family = json.loads((folder / "config.json").read_text())["model_type"]
    built, loaded = tiny_policy(small(family), 3, build_tokenizer()), load_policy(folder)
    assert all(
        torch.equal(a, b) for a, b in zip(built.state_dict().values(), loaded.state_dict().values(), strict=True)
    )
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert not loaded.training
    assert loaded.config._attn_implementation == "sdpa"
    assert len(load_tokenizer(folder)) == loaded.config.vocab_size


def test_the_dtype_is_the_one_asked_for(folder: Path) -> None:
    assert {p.dtype for p in load_policy(folder, dtype="bfloat16").parameters()} == {torch.bfloat16}
    assert {dtype for _, dtype in parameter_table(load_policy(folder)).values()} == {torch.float32}


def test_sharded_weights_load_like_one_file(folder: Path, tmp_path: Path) -> None:
    whole = load_policy(folder)
    whole.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert not (tmp_path / "sharded" / "model.safetensors").exists()
    sharded = load_policy(tmp_path / "sharded")
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), sharded.parameters(), strict=True))


def test_an_existing_folder_is_not_replaced(folder: Path) -> None:
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(FileExistsError, match="exists already"):
        build_tiny(SMALL, 4, folder)
    assert (folder / "model.safetensors").read_bytes() == before


def test_a_crash_at_any_fault_point_leaves_no_folder_and_the_next_try_succeeds(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    model, target = tiny_policy(SMALL, 1, tokenizer), tmp_path / "model"
    reached: list[str] = []
    with installed_faults(reached.append):
        save_folder(model, tokenizer, target)
    assert "rename:model" in reached
    assert "sync:model.safetensors" in reached
    for crash_at in range(reached.index("rename:model") + 1):
        shutil.rmtree(target, ignore_errors=True)
        passed: list[str] = []

        def crash(name: str, passed: list[str] = passed, crash_at: int = crash_at) -> None:
            passed.append(name)
            if len(passed) > crash_at:
                raise OSError(28, "No space left on device")

        with installed_faults(crash), pytest.raises(OSError, match="No space"):
            save_folder(model, tokenizer, target)
        assert not target.exists()
        save_folder(model, tokenizer, target)
        assert [path.name for path in tmp_path.iterdir()] == ["model"]


def edit_json(name: str, **entries: object) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        (path / name).write_text(json.dumps(json.loads((path / name).read_text()) | entries))

    return edit


def edit_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})

    return edit


def write(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda path: (path / name).write_bytes(data) and None


def truncate(share: float) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        data = (path / "model.safetensors").read_bytes()
        (path / "model.safetensors").write_bytes(data[: int(len(data) * share)])

    return edit


def pickled(suffix: str) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        (path / "model.safetensors").unlink()
        (path / f"pytorch_model{suffix}").write_bytes(pickle.dumps({"a": 1}))

    return edit


def indexed(shard: str) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        (path / "model.safetensors").rename(path / "elsewhere.safetensors")
        weight_map = {Q_PROJ: shard} if shard else {}
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return edit


REFUSALS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing folder": (shutil.rmtree, "check model.path"),
    "missing config": (lambda path: (path / "config.json").unlink(), "found no such file"),
    "config is no JSON": (write("config.json", b"{"), "found no JSON"),
    "config is a list": (write("config.json", b"[]"), "found a JSON list"),
    "config nested without end": (write("config.json", b"[" * 200_000), "found no JSON"),
    "unknown architecture": (edit_json("config.json", model_type="nonsuch"), "can't load"),
    "no causal LM": (edit_json("config.json", model_type="vit"), "can't load"),
    "wrong type in config": (edit_json("config.json", num_hidden_layers="two"), "can't load"),
    ".bin": (pickled(".bin"), "weights_only=True"),
    ".pt": (pickled(".pt"), "safetensors.torch.save_file"),
    ".pkl": (pickled(".pkl"), "pickled weights"),
    "no weights": (lambda path: (path / "model.safetensors").unlink(), "found no weights"),
    "auto_map in config": (edit_json("config.json", auto_map={"AutoModel": "m.M"}), "auto_map"),
    "auto_map in tokenizer": (edit_json("tokenizer_config.json", auto_map={"AutoTokenizer": ["t.T"]}), "auto_map"),
    "code": (write("modeling_evil.py", b"raise SystemExit"), "found code"),
    "adapter": (write("adapter_config.json", b'{"base_model_name_or_path": "/x"}'), "merge_and_unload"),
    "weights elsewhere": (edit_json("config.json", transformers_weights="x.bin"), "transformers_weights"),
    "shard outside": (indexed("../elsewhere.safetensors"), "of this folder"),
    "shard of another kind": (indexed("x.bin"), "expected a .safetensors file"),
    "shard missing": (indexed("x.safetensors"), "found no such file"),
    "empty index": (indexed(""), "found weight_map = {}"),
    "truncated data": (truncate(0.7), "no complete safetensors"),
    "truncated header": (truncate(0.001), "no complete safetensors"),
    "empty file": (truncate(0.0), "no complete safetensors"),
    "garbage": (write("model.safetensors", b"\xff" * 4096), "no complete safetensors"),
    "missing tensor": (edit_tensors(lambda tensors: tensors.pop(Q_PROJ)), f"no tensor {Q_PROJ}"),
    "wrong shape": (edit_tensors(lambda t: t.update({Q_PROJ: torch.zeros(8, 8)})), r"of shape \[8, 8\] instead of"),
    "left-over tensor": (edit_tensors(lambda t: t.update(extra=torch.zeros(1))), "unknown tensor extra"),
    "more layers in config": (edit_json("config.json", num_hidden_layers=3, layer_types=None), "no tensor"),
    "fewer layers in config": (edit_json("config.json", num_hidden_layers=1, layer_types=None), "unknown tensor"),
    "NaN": (edit_tensors(lambda t: t[Q_PROJ].fill_(float("nan"))), f"non-finite numbers in {Q_PROJ}"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_folder_is_refused_with_one_sentence(case: str, folder: Path, tmp_path: Path) -> None:
    spoil, expected = REFUSALS[case]
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    spoil(copy)
    with pytest.raises(UserError, match=expected) as caught:
        load_policy(copy)
    message = str(caught.value)
    assert str(copy) in message
    assert "found" in message
    assert "expected" in message
    assert "\n" not in message


def test_a_missing_expert_is_not_initialised_anew(tmp_path: Path) -> None:
    folder = build_tiny(small("qwen3_moe"), 0, tmp_path / "model")
    one = "model.layers.0.mlp.experts.1.up_proj.weight"
    edit_tensors(lambda tensors: tensors.pop(one))(folder)
    with pytest.raises(UserError, match="can't load"):
        load_policy(folder)
    rest = [f"model.layers.0.mlp.experts.3.{part}_proj.weight" for part in ("gate", "up", "down")]
    shutil.rmtree(folder)
    build_tiny(small("qwen3_moe"), 0, folder)
    edit_tensors(lambda tensors: [tensors.pop(name) for name in rest])(folder)
    with pytest.raises(UserError, match=r"experts\.gate_up_proj of shape"):
        load_policy(folder)


def test_pickles_beside_safetensors_are_never_opened(folder: Path, tmp_path: Path) -> None:
    class Marker:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (open, (str(tmp_path / "ran"), "w"))

    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    for name in ("training_args.bin", "pytorch_model.bin", "optimizer.pt"):
        (copy / name).write_bytes(pickle.dumps(Marker()))
    assert load_policy(copy) is not None
    assert load_tokenizer(copy) is not None
    assert not (tmp_path / "ran").exists()


def test_code_in_a_tokenizer_folder_is_refused_and_not_run(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    (copy / "tok.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(UserError, match=r"tok\.py"):
        load_tokenizer(copy)
    assert not (tmp_path / "ran").exists()
