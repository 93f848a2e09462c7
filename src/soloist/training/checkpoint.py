"""Checkpoints: named parts of (tensors, JSON) that become visible together or not at all.

A checkpoint is staged in a hidden folder, every file is synced, the manifest with the files' hashes is written last,
and one rename makes it visible as `step_N`. The newest valid one is found; a damaged one is named and skipped; the
previous one is removed only after the new one is visible. Safetensors and JSON only, no pickle.
Not covered: what the parts mean.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from soloist.seams import Storage, fault_point, sha256_of

Part = tuple[dict[str, Tensor], dict[str, Any]]
FORMAT = 1


class Checkpoints:
    """The checkpoints of one folder, `step_N` each.

    Example: `Checkpoints(run / "checkpoints").save(20, {"policy": (tensors, {"version": 20})})`.
    """

    def __init__(self, folder: Path, *, keep: int = 2, storage: Storage | None = None) -> None:
        self._folder = folder
        self._keep = keep
        self._storage = storage or Storage()

    def save(self, step: int, parts: Mapping[str, Part]) -> Path:
        """Write a checkpoint and remove those before the last `keep`.

        Raises OSError; then nothing new is visible, or, when only the last fsync failed, all of it.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        self._undo_half_replacements()
        for leftover in self._folder.glob(".staged_*"):
            shutil.rmtree(leftover, ignore_errors=True)
        target = self._folder / f"step_{step}"
        staged = self._folder / f".staged_{step}"
        staged.mkdir()
        for name, (tensors, data) in parts.items():
            self._storage.write(staged / f"{name}.safetensors", save({k: v.contiguous() for k, v in tensors.items()}))
            self._storage.write(staged / f"{name}.json", json.dumps(data).encode())
        hashes = {path.name: sha256_of(path) for path in sorted(staged.iterdir())}
        manifest = {"format": FORMAT, "step": step, "files": hashes}
        self._storage.write(staged / "manifest.json", json.dumps(manifest, indent=1).encode())
        self._storage.sync(staged)
        fault_point("checkpoint:rename:before")
        replaced = self._folder / f".replaced_{step}"
        if target.exists():
            self._storage.rename(target, replaced)
        self._storage.rename(staged, target)
        shutil.rmtree(replaced, ignore_errors=True)
        fault_point("checkpoint:rename:after")
        for old in self.steps()[: -self._keep]:
            shutil.rmtree(self._folder / f"step_{old}", ignore_errors=True)
        return target

    def _undo_half_replacements(self) -> None:
        """Bring back a checkpoint that a crash caught between the two renames of its replacement."""
        for replaced in self._folder.glob(".replaced_*"):
            target = self._folder / replaced.name.replace(".replaced_", "step_")
            if target.exists():
                shutil.rmtree(replaced, ignore_errors=True)
            else:
                self._storage.rename(replaced, target)

    def steps(self) -> list[int]:
        """Steps of all visible checkpoints, ascending, damaged ones included."""
        if not self._folder.is_dir():
            return []
        found = (re.fullmatch(r"step_(\d+)", path.name) for path in self._folder.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def load_newest(self, complain: Callable[[str], None]) -> tuple[int, dict[str, Part]] | None:
        """Newest valid checkpoint as (step, parts), or None. Damaged ones are named through `complain`."""
        self._undo_half_replacements()
        for step in reversed(self.steps()):
            try:
                return step, self.load(step)
            except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
                complain(f"checkpoint {self._folder / f'step_{step}'} is damaged and skipped: {error}")
        return None

    def load(self, step: int) -> dict[str, Part]:
        """All parts of one checkpoint. Raises ValueError naming the file that differs from the manifest."""
        folder = self._folder / f"step_{step}"
        manifest = json.loads((folder / "manifest.json").read_text())
        if manifest["format"] != FORMAT:
            raise ValueError(f"format {manifest['format']}, but this version reads format {FORMAT}")
        if manifest["step"] != step:
            raise ValueError(f"manifest.json is of step {manifest['step']}, the folder is of step {step}")
        for name, expected in manifest["files"].items():
            found = sha256_of(folder / name)
            if found != expected:
                raise ValueError(f"{name} has sha256 {found[:12]}…, the manifest says {expected[:12]}…")
        names = sorted(name.removesuffix(".json") for name in manifest["files"] if name.endswith(".json"))
        return {
            name: (
                load((folder / f"{name}.safetensors").read_bytes()),
                json.loads((folder / f"{name}.json").read_text()),
            )
            for name in names
        }
