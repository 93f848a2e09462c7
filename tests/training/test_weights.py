"""Published weights: folders that any Hugging Face reader takes, the newest complete one is found, old ones go."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from soloist.config import ModelConfig
from soloist.models.loading import load_policy, save_weights
from soloist.models.tiny import build_tiny
from soloist.training.weights import PublishedWeights

TINY = ModelConfig(hidden_size=16, layers=1, heads=2, mlp_size=16)


def complete(folder: Path) -> Path:
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A base model's files, without weights worth reading."""
    folder = tmp_path / "base"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "merges.txt"):
        (folder / name).write_text(f"content of {name}")
    (folder / "spiece.model").write_bytes(b"\0")
    return folder


def test_a_published_folder_is_a_whole_model_that_loads_with_the_published_weights(tmp_path: Path) -> None:
    base = build_tiny(TINY, 0, tmp_path / "base")
    weights = PublishedWeights(tmp_path / "weights", base)
    policy = load_policy(base)
    with torch.no_grad():
        next(policy.parameters()).add_(1.0)
    folder = weights.folder_of(3)
    assert weights.newest() is None
    save_weights(policy, folder / "model.safetensors")
    assert weights.newest() == folder == tmp_path / "weights" / "step_3"
    loaded = load_policy(folder)
    assert torch.equal(next(loaded.parameters()), next(policy.parameters()))
    assert not torch.equal(next(loaded.parameters()), next(load_policy(base).parameters()))


def test_config_tokenizer_and_template_are_copied_and_neither_weights_nor_their_index(
    tmp_path: Path, base: Path
) -> None:
    expected = sorted(path.name for path in base.iterdir())
    for name in ("model-00001-of-00002.safetensors", "model.safetensors", "pytorch_model.bin"):
        (base / name).write_bytes(b"old weights")
    (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "model-00001-of-00002"}}))
    (base / "original").mkdir()
    folder = PublishedWeights(tmp_path / "weights", base).folder_of(0)
    assert sorted(path.name for path in folder.iterdir()) == expected
    assert (folder / "chat_template.jinja").read_text() == "content of chat_template.jinja"


def test_the_newest_complete_version_is_found_by_number(tmp_path: Path, base: Path) -> None:
    """RB-101: step_9 and step_100; a folder without weights and strangers don't count."""
    weights = PublishedWeights(tmp_path / "weights", base)
    assert weights.newest() is None
    for version in (0, 9, 100):
        assert weights.newest() == (None if version == 0 else tmp_path / "weights" / f"step_{0 if version == 9 else 9}")
        complete(weights.folder_of(version))
    weights.folder_of(101)
    for name in ("step_x", "step_200.tmp", "step_"):
        (tmp_path / "weights" / name).mkdir()
        complete(tmp_path / "weights" / name)
    assert weights.newest() == tmp_path / "weights" / "step_100"


def test_the_last_few_versions_are_kept_and_foreign_folders_left_alone(tmp_path: Path, base: Path) -> None:
    """R13: disk does not grow with the steps."""
    weights = PublishedWeights(tmp_path / "weights", base, keep=3)
    (tmp_path / "weights" / "step_x").mkdir(parents=True)
    for version in range(8):
        complete(weights.folder_of(version))
        weights.forget_old(version)
    left = sorted(path.name for path in (tmp_path / "weights").iterdir())
    assert left == ["step_5", "step_6", "step_7", "step_x"]
    assert weights.newest() == tmp_path / "weights" / "step_7"


def test_a_version_published_again_replaces_the_copies(tmp_path: Path, base: Path) -> None:
    weights = PublishedWeights(tmp_path / "weights", base)
    folder = complete(weights.folder_of(4))
    (folder / "config.json").write_text("torn")
    assert weights.folder_of(4) == folder
    assert (folder / "config.json").read_text() == "content of config.json"
    assert (folder / "model.safetensors").read_bytes() == b"weights"
