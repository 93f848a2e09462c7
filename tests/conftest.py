"""What all tests share: one thread per process, no network for model hubs, reproducible property tests, a tiny run."""

from __future__ import annotations

import os
import signal

# Before torch is imported anywhere: tests share few cores, and one thread keeps sums in one order.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from soloist.config import ModelConfig, SftConfig
from soloist.config_files import load_config
from soloist.environments.registry import build_environment
from soloist.models.loading import load_policy, load_tokenizer, save_folder
from soloist.models.tiny import build_tiny
from soloist.rollout.rendering import build_renderer

# A shell starts background jobs with Ctrl-C ignored, and children inherit that: tests of Ctrl-C would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "soloist",
    deadline=None,
    max_examples=40,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("soloist")

# A run that costs next to nothing, for tests that must go through the stages.
TINY = """
steps = 2
rollouts_per_step = 4
players = 4
[model]
hidden_size = 16
layers = 1
heads = 2
mlp_size = 32
[engine]
slots = 4
[rollout]
max_new_tokens = 8
max_tokens = 120
max_turns = 1
[sft]
steps = 2
batch_size = 2
threads = 1
[value_pretraining]
rollouts = 8
epochs = 1
gate = -1e9
[eval]
problems = 2
samples = 1
"""


def write_recipe(folder: Path) -> Path:
    """A tiny recipe whose run folders lie beside it."""
    path = folder / "tiny.toml"
    path.write_text(f'runs_dir = "{folder / "runs"}"\n{TINY}', encoding="utf-8")
    return path


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A tiny recipe whose run folder lies in the test's folder."""
    return write_recipe(tmp_path)


@pytest.fixture(scope="module")
def shared_recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny recipe whose run folder the tests of one file share."""
    return write_recipe(tmp_path_factory.mktemp("shared"))


@pytest.fixture(scope="session")
def coin(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options for a model that answers 1+1 with 2 or 3, each half of the time: enough for a critic to be judged."""
    home = tmp_path_factory.mktemp("coin")
    config = load_config(str(write_recipe(home)))
    folder = build_tiny(config.model, 0, home / "untrained")
    model, tokenizer = load_policy(folder), load_tokenizer(folder)
    rendering, environment = build_renderer(tokenizer, "auto"), build_environment(config.environment, 0)
    tools = environment.demonstration(0).tools
    said = [[{"role": "user", "content": "1+1"}, {"role": "assistant", "content": answer}] for answer in "23"]
    ids, sampled = zip(*(rendering.training_tokens(messages, tools) for messages in said), strict=True)
    labels = torch.where(torch.tensor(sampled), torch.tensor(ids), -100)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        model(input_ids=torch.tensor(ids), labels=labels).loss.backward()
        optimizer.step()
    save_folder(model, tokenizer, home / "model")
    tasks = home / "tasks.jsonl"
    tasks.write_text('{"problem": "1+1", "answer": 2}\n', encoding="utf-8")
    rollouts = ["--value_pretraining.rollouts=64", "--value_pretraining.holdout=0.5"]
    # Back to their defaults: sizes of a built model and settings of SFT, which nothing reads here.
    model_defaults, sft = ModelConfig(), SftConfig()
    unread = [f"--model.{key}={getattr(model_defaults, key)}" for key in ("hidden_size", "layers", "heads", "mlp_size")]
    unread += [f"--sft.batch_size={sft.batch_size}"]
    return [f"--model.path={home / 'model'}", f"--environment.tasks={tasks}", "--sft.steps=0", *rollouts, *unread]
