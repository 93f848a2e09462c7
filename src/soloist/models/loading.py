"""From model folder to model, from model to weights file, and back.

Guarantees: only safetensors and JSON are read, no code of a folder runs, no network is touched; a tensor that is
missing, left over or misshapen ends in a UserError (folders) or ValueError (weights files) before any model changes,
and nothing is silently newly initialised. Files and folders appear whole or not at all. Tied weights are stored once.
Not covered: who publishes which version when (`training/weights.py`); LoRA and quantised folders.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from soloist.errors import UserError
from soloist.models.folders import check_data_only, check_model_folder
from soloist.seams import Storage

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

TensorTable = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and type of each tensor, by name."""


def load_policy(folder: Path, dtype: str = "float32", device: str = "cpu") -> PreTrainedModel:
    """The causal LM of a Hugging Face folder, in evaluation mode (no dropout, so that engine and learner agree).

    `dtype` is "float32" or "bfloat16". Raises UserError when the folder is refused (`folders.check_model_folder`), its
    architecture is no causal LM of transformers, or its tensors differ from what config.json describes.
    """
    check_model_folder(folder)
    try:
        with _quiet():
            # with ignore_mismatched_sizes a wrong shape is reported like a missing tensor, rather than as a long trace
            model, report = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=DTYPES[dtype],
                attn_implementation="sdpa",
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError, StrictDataclassError) as error:
        raise UserError(
            f"{folder}: found a folder that transformers can't load ({_first_line(error)}), expected a causal LM with "
            "the tensors that its config.json describes; check that both belong to one model"
        ) from error
    problems = [f"no tensor {name}" for name in sorted(report["missing_keys"])]
    problems += [f"unknown tensor {name}" for name in sorted(report["unexpected_keys"])]
    problems += [
        f"{name} of shape {list(found)} instead of {list(expected)}"
        for name, found, expected in sorted(report["mismatched_keys"])
    ]
    problems += [f"non-finite numbers in {name}" for name in _not_finite(model.state_dict())]
    if problems:
        raise UserError(
            f"{folder}: found {_some(problems)}, expected exactly the finite tensors that config.json describes; "
            "nothing is initialised anew, so check that weights and config.json belong to one model"
        )
    return model.to(device).eval()


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face folder. Raises UserError when it is missing, broken or brings code."""
    check_data_only(folder)
    try:
        with _quiet():
            return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises bare Exception for a broken tokenizer.json
        raise UserError(
            f"{folder}: found no tokenizer that can be loaded ({_first_line(error)}), expected tokenizer.json and "
            "tokenizer_config.json; save it there with tokenizer.save_pretrained(folder)"
        ) from error


def save_folder(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, storage: Storage | None = None
) -> Path:
    """Write model and tokenizer as a Hugging Face folder: staged beside the target, synced, then renamed.

    A folder that exists is whole, so it is never replaced: raises FileExistsError. Leftovers of a crash are removed.
    """
    storage = storage or Storage()
    if folder.exists():
        raise FileExistsError(f"{folder} exists already and is not replaced; choose another folder or remove it")
    staging = folder.with_name(f".{folder.name}.staging")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    with _quiet():
        model.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
    for path in (*sorted(staging.iterdir()), staging):
        storage.sync(path)
    storage.rename(staging, folder)
    return folder


def parameter_table(model: nn.Module) -> TensorTable:
    """Shape and type of every tensor of the model's state. Tied tensors count once, under their first name."""
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in own_tensors(model).items()}


def save_weights(model: nn.Module, path: Path, dtype: torch.dtype | None = None, storage: Storage | None = None) -> str:
    """Write the model's state as one safetensors file and return the file's SHA-256 (hex).

    Names are those of `parameter_table`, not the per-expert names of Hugging Face MoE folders. Floating-point tensors
    are cast to `dtype` if given (the engine's type). The state is held in memory once more while it is written.
    """
    storage = storage or Storage()
    tensors = {}
    for name, tensor in own_tensors(model).items():
        cast = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        tensors[name] = tensor.detach().to("cpu", cast).contiguous()
    data = save(tensors)
    temporary = path.with_name(f".{path.name}.tmp")
    storage.write(temporary, data)
    storage.rename(temporary, path)
    return hashlib.sha256(data).hexdigest()


def read_weights(path: Path, expected: TensorTable, sha256: str) -> dict[str, Tensor]:
    """Read and verify a weights file: hash, names, shapes, types and that all numbers are finite. Changes no model.

    The verified bytes are the ones that are decoded; the file is read once. Raises ValueError naming what differs.
    """
    data = path.read_bytes()
    found_hash = hashlib.sha256(data).hexdigest()
    if found_hash != sha256:
        raise ValueError(f"{path}: SHA-256 is {found_hash}, expected {sha256}; the file was changed or damaged")
    try:
        tensors: dict[str, Tensor] = load(data)
    except SafetensorError as error:
        raise ValueError(f"{path}: {len(data)} bytes are no safetensors file ({error})") from error
    problems = _differences({name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}, expected)
    problems += [f"non-finite numbers in {name}" for name in _not_finite(tensors)]
    if problems:
        raise ValueError(f"{path}: found {_some(problems)}; the weights belong to another model or type")
    return tensors


@torch.no_grad()
def assign_weights(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into the model in place; tied weights follow, optimizers and views keep their tensors.

    Raises ValueError, before anything is copied, unless names and shapes are exactly the model's.
    """
    own = own_tensors(model)
    shapes = {name: (tuple(t.shape), own[name].dtype if name in own else t.dtype) for name, t in tensors.items()}
    problems = _differences(shapes, parameter_table(model))
    if problems:
        raise ValueError(f"weights don't fit the {type(model).__name__}: found {_some(problems)}")
    for name, tensor in own.items():
        tensor.copy_(tensors[name])


def own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of the model's state themselves. Tied ones come once, under their first name."""
    first_names: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if first_names.setdefault(id(tensor), name) == name}


def _differences(found: Mapping[str, object], expected: Mapping[str, object]) -> list[str]:
    problems = [f"no tensor {name}" for name in sorted(expected.keys() - found.keys())]
    problems += [f"unknown tensor {name}" for name in sorted(found.keys() - expected.keys())]
    problems += [
        f"{name} as {found[name]} instead of {expected[name]}"
        for name in sorted(found.keys() & expected.keys())
        if found[name] != expected[name]
    ]
    return problems


def _not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    return [name for name, t in tensors.items() if t.is_floating_point() and not bool(torch.isfinite(t).all())]


def _some(problems: list[str]) -> str:
    more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
    return ", ".join(problems[:3]) + more


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without progress bars and reports on stderr: what matters in them is raised."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
