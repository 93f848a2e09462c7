"""Published weights of a run: one Hugging Face folder a version, the last few kept."""

from __future__ import annotations

import shutil
from pathlib import Path

from soloist.config import RunConfig
from soloist.errors import RunError
from soloist.seams import Storage, sha256_of
from soloist.types import WeightsRef

# Config, tokenizer (vocabularies and merges may be text or SentencePiece) and chat template.
COPIED = (".json", ".jinja", ".txt", ".model")


def versions_kept(config: RunConfig) -> int:
    """With a lag, a resumed run samples from weights that are `lag` versions old; one more is being written."""
    return max(3, (config.lag or 0) + 2)


class PublishedWeights:
    """`weights/step_N`: config and tokenizer are copied from the base model, the learner writes the weights.

    Example: `PublishedWeights(run / "weights", base).folder_of(3)` is `weights/step_3`, ready for `model.safetensors`.
    """

    def __init__(self, folder: Path, base_model: Path, keep: int = 3, storage: Storage | None = None) -> None:
        self._folder = folder
        self._storage = storage or Storage()
        self._base_model = base_model
        self._keep = keep

    def folder_of(self, version: int) -> Path:
        """Folder of a version, with everything but the weights in it."""
        target = self._folder / f"step_{version}"
        if not target.is_dir():
            target.mkdir(parents=True, exist_ok=True)
            # Their names must survive a power cut: with a lag a resumed run samples from older versions.
            for folder in (self._folder.parent, self._folder):
                self._storage.sync(folder)
        for path in sorted(self._base_model.iterdir()):
            # An index would name shards that are not here: the learner writes one file.
            if path.suffix in COPIED and not path.name.endswith(".index.json"):
                shutil.copyfile(path, target / path.name)
        return target

    def reference_to(self, version: int) -> WeightsRef:
        """A version that was published before, for engines that must sample from it. Raises RunError if it is gone."""
        path = self._folder / f"step_{version}" / "model.safetensors"
        if not path.is_file():
            raise RunError(
                f"{path} is gone, but with a lag the next rollouts must be sampled from version {version}; restore "
                "the file, or go on without --lag and with max_staleness"
            )
        return WeightsRef(path=str(path), version=version, sha256=sha256_of(path))

    def forget_old(self, newest: int) -> None:
        """Remove all but the last few versions. Engines have read what they serve."""
        for version, path in self._versions().items():
            if version <= newest - self._keep:
                shutil.rmtree(path, ignore_errors=True)

    def forget_newer(self, version: int) -> None:
        """Remove versions that a resumed run has rolled back: they are not of its lineage."""
        for path in self._folder.glob("step_*"):
            number = path.name.removeprefix("step_")
            if number.isdigit() and int(number) > version:
                shutil.rmtree(path, ignore_errors=True)

    def newest(self) -> Path | None:
        """Folder of the newest complete version, or None."""
        versions = self._versions()
        complete = [version for version, path in versions.items() if (path / "model.safetensors").is_file()]
        return versions[max(complete)] if complete else None

    def _versions(self) -> dict[int, Path]:
        names = {path.name.removeprefix("step_"): path for path in self._folder.glob("step_*")}
        return {int(name): path for name, path in names.items() if name.isdecimal()}
