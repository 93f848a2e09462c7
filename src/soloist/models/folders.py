"""What a model folder must look like before anything in it is parsed by a library. Model folders are not trusted.

Guarantees: a folder that passes holds a JSON config, safetensors with sound headers and no code; everything else is
refused with one sentence that names the file, what was found, what was expected and the way out. Nothing is executed,
unpickled or fetched. Not covered: whether the tensors fit the architecture (`loading.load_policy` compares them).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from soloist.errors import UserError

INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
CONVERT = (
    "convert it in an environment you trust: load the state dict there with torch.load(..., weights_only=True) and "
    "write it with safetensors.torch.save_file"
)


def check_model_folder(folder: Path) -> None:
    """Raise UserError unless `folder` is a model folder of data only: config.json, safetensors, no code, no pickle."""
    check_data_only(folder)
    config, adapter = folder / "config.json", folder / "adapter_config.json"
    if adapter.is_file():
        raise UserError(
            f"{adapter}: found a LoRA adapter, expected a whole model; its base model would come from elsewhere, so "
            "merge the two (merge_and_unload of peft) and save the result"
        )
    if "transformers_weights" in (content := read_json(config)):
        raise UserError(
            f"{config}: found transformers_weights = {content['transformers_weights']!r}, expected none; weights are "
            f"read from model.safetensors or {INDEX} only, so rename the file and remove the entry"
        )
    for path in weight_files(folder):
        check_safetensors(path)


def check_data_only(folder: Path) -> None:
    """Raise UserError when the folder is missing or brings code of its own (`.py` files or an `auto_map`)."""
    if not folder.is_dir():
        found = "a file" if folder.exists() else "nothing"
        raise UserError(
            f"{folder}: found {found}, expected a model folder (config.json, tokenizer, safetensors); "
            "check model.path, or leave it empty to build a tiny model"
        )
    code = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.py"))
    if code:
        raise UserError(
            f"{folder}: found code ({', '.join(code[:3])}), expected data only, as no code of a model folder is run; "
            "use an architecture that transformers has, and delete the file if the model works without it"
        )
    for name in ("config.json", "tokenizer_config.json"):
        path = folder / name
        if path.is_file() and "auto_map" in (content := read_json(path)):
            raise UserError(
                f"{path}: found auto_map = {content['auto_map']}, expected none, as no code of a model folder is run; "
                "use an architecture that transformers has, and remove the entry if the model works without it"
            )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises UserError when the file is missing, no JSON or no object."""
    if not path.is_file():
        raise UserError(f"{path}: found no such file, expected a Hugging Face folder that has one; check model.path")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: found no JSON ({error}), expected an object; copy or save the model anew") from error
    if not isinstance(content, dict):
        raise UserError(
            f"{path}: found a JSON {type(content).__name__}, expected an object; copy or save the model anew"
        )
    return content


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder. Raises UserError for pickled or missing weights and names that lead out."""
    single, index = folder / "model.safetensors", folder / INDEX
    if single.is_file():  # transformers looks for it first, too
        return [single]
    if index.is_file():
        return _shards(index)
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    if pickles:
        raise UserError(
            f"{folder / pickles[0]}: found pickled weights, expected model.safetensors, since a pickle can run code; "
            f"{CONVERT}"
        )
    raise UserError(
        f"{folder}: found no weights, expected model.safetensors or {INDEX}; save the model with "
        "model.save_pretrained(folder)"
    )


def _shards(index: Path) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(
            f"{index}: found weight_map = {weight_map!r}, expected tensor names with their files; save the model anew"
        )
    shards = []
    for name in sorted(set(map(str, weight_map.values()))):
        # a name such as ../other/model.safetensors would read files that the folder does not own
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise UserError(
                f"{index}: found shard '{name}', expected a .safetensors file of this folder; mend the index"
            )
        if not (index.parent / name).is_file():
            raise UserError(
                f"{index.parent / name}: found no such file, expected a shard of {index.name}; copy it there"
            )
        shards.append(index.parent / name)
    return shards


def check_safetensors(path: Path) -> None:
    """Raise UserError unless the header is sound and its offsets end exactly where the file ends."""
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path}: found {path.stat().st_size} bytes that are no complete safetensors file ({error}), expected "
            "weights; copy or save the file anew"
        ) from error
    if not names:
        raise UserError(f"{path}: found no tensors, expected weights; copy or save the file anew")
