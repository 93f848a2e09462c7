"""Published weights of a run: one Hugging Face folder a version, the last few kept."""

from __future__ import annotations

import shutil
from pathlib import Path


class PublishedWeights:
    """`weights/step_N`: config and tokenizer are copied from the base model, the learner writes the weights.

    Example: `PublishedWeights(run / "weights", base).folder_of(3)` is `weights/step_3`, ready for `model.safetensors`.
    """

    def __init__(self, folder: Path, base_model: Path, keep: int = 3) -> None:
        self._folder = folder
        self._base_model = base_model
        self._keep = keep

    def folder_of(self, version: int) -> Path:
        """Folder of a version, with everything but the weights in it."""
        target = self._folder / f"step_{version}"
        target.mkdir(parents=True, exist_ok=True)
        for path in self._base_model.glob("*.json"):
            # An index would name shards that are not here: the learner writes one file.
            if not path.name.endswith(".index.json"):
                shutil.copyfile(path, target / path.name)
        return target

    def forget_old(self, newest: int) -> None:
        """Remove all but the last few versions. Engines have read what they serve."""
        for path in self._folder.glob("step_*"):
            version = path.name.removeprefix("step_")
            if version.isdigit() and int(version) <= newest - self._keep:
                shutil.rmtree(path, ignore_errors=True)

    def newest(self) -> Path | None:
        """Folder of the newest complete version, or None."""
        complete = [path for path in self._folder.glob("step_*") if (path / "model.safetensors").is_file()]
        return max(complete, key=lambda path: int(path.name.removeprefix("step_")), default=None)
