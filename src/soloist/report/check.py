"""What works on this machine, and what a config will do, said before anything starts.

Guarantees: nothing is written, downloaded or trained; devices and sandboxes are tried, not guessed from versions.
Figures of a plan are upper limits: rollouts that end early cost less. Not covered: how long it takes.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import shutil
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch
from safetensors import safe_open

from soloist.config import RunConfig
from soloist.environments import sandbox
from soloist.errors import UserError
from soloist.models.folders import check_model_folder, weight_files
from soloist.models.tiny import tiny_policy
from soloist.models.tokenizer import build_tokenizer

LIBRARIES = ("soloist", "torch", "transformers", "renderers", "safetensors", "pydantic", "pydantic-monty", "msgspec")
ALL_STAGES = ("sft", "pretrain-value", "train", "eval")
BYTES_PER_PARAMETER = 4 * (1 + 2) * 2
"""A checkpoint holds weights and two moments of AdamW, in fp32, for policy and value model."""


def describe_machine(folder: Path = Path()) -> list[str]:
    """Versions, cores, memory, disk at `folder`, and which engines and sandboxes work here."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in LIBRARIES)
    memory, disk = psutil.virtual_memory(), shutil.disk_usage(folder)
    # Containers often grant fewer cores than the machine has.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return [
        f"versions     Python {platform.python_version()}, {versions}",
        f"processor    {cores} cores usable, {_devices()}",
        f"memory       {_size(memory.available)} free of {_size(memory.total)}",
        f"disk         {_size(disk.free)} free of {_size(disk.total)} at {folder.resolve()}",
        f"engines      local: works on {', '.join(usable_devices())}",
        f"sandboxes    {_sandboxes()}",
    ]


def usable_devices() -> list[str]:
    """Devices that can hold the learner and the engines, as torch names them."""
    named = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    return [device for device in named if _why_unusable(device) is None]


def refuse_missing_devices(config: RunConfig) -> None:
    """Raise UserError when a device of the config can't hold a tensor here, before any process is started."""
    for field, device in (("model.device", config.model.device), ("engine.device", config.engine.device)):
        reason = _why_unusable(device)
        if reason is not None:
            raise UserError(
                f"{field}: found '{device}', which torch {torch.__version__} can't use on this machine ({reason}); "
                f"expected one of {', '.join(usable_devices())}"
            )


def _why_unusable(device: str) -> str | None:
    # A build with CUDA on a machine without a driver looks able until the first tensor.
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        return str(error).split("\n")[0][:100]
    return None


def describe_plan(config: RunConfig, stages: Sequence[str] = ALL_STAGES) -> list[str]:
    """What each stage will do at most, and the size of models and checkpoints. Raises UserError for the model."""
    size = parameters(config)
    rows = {"sft": _sft, "pretrain-value": _pretraining, "train": _training, "eval": _evaluation}
    checkpoints = math.ceil(config.steps / config.checkpoint_every)
    return [
        f"run folder     {config.folder}{' (exists)' if config.folder.exists() else ''}",
        f"models         {size:,} parameters each, policy and value model",
        *(f"{stage:14} {rows[stage](config)}" for stage in ALL_STAGES if stage in stages),
        f"checkpoints    {checkpoints} of about {_size(size * BYTES_PER_PARAMETER)}",
    ]


def parameters(config: RunConfig) -> int:
    """Number of parameters of the policy; a model folder is read from its headers, a built model is never allocated.

    Raises UserError when the folder is refused.
    """
    if not config.model.path:
        # On the meta device tensors have shapes only, so the count is exact and costs no memory.
        with torch.device("meta"):
            return sum(p.numel() for p in tiny_policy(config.model, 0, build_tokenizer()).parameters())
    folder = Path(config.model.path)
    check_model_folder(folder)
    total = 0
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            total += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return total


def _sft(c: RunConfig) -> str:
    if c.sft.steps == 0:
        return f"no training, since sft.steps = 0, but {_evaluation(c)}"
    return f"{c.sft.steps:,} steps of {c.sft.batch_size} demonstrations, then {_evaluation(c)}"


def _pretraining(c: RunConfig) -> str:
    v, samples = c.value_pretraining, c.advantage.spo_offline_samples
    if samples:
        return f"no value model; {samples} rollouts of each task for the success rates"
    if not c.has_critic:
        return f"nothing: adv_estimator = '{c.advantage.adv_estimator}' has no value model"
    updates = v.epochs * math.ceil(v.rollouts * (1 - v.holdout) / v.batch_size)
    return f"{_rollouts(v.rollouts, c)}; {updates:,} value updates at most"


def _training(c: RunConfig) -> str:
    policy, value = c.steps * c.policy.epochs * c.policy.minibatches, c.steps * c.value_updates
    bound = f"staleness at most {c.max_staleness}" if c.on_stale != "train" else "staleness without a bound"
    return f"{_rollouts(c.steps * c.rollouts_per_step, c)}; {policy:,} policy and {value:,} value updates; {bound}"


def _evaluation(c: RunConfig) -> str:
    return f"{_rollouts(c.eval.problems * c.eval.samples, c)} of {c.eval.problems} held-out tasks"


def _rollouts(count: int, c: RunConfig) -> str:
    return f"{count:,} rollouts, {count * c.rollout.max_tokens:,} tokens at most"


def _sandboxes() -> str:
    problem = sandbox.available()
    return "monty: works, the escape attempts failed" if problem is None else f"monty: does not work ({problem})"


def _devices() -> str:
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return ", ".join(names) or "no GPU that this torch can use"


def _size(size: float) -> str:
    # Powers of 1000, as disks are sold; three digits are all that a plan knows.
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
