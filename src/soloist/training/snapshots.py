"""Snapshots: named parts of (tensors, JSON) that become visible together or not at all. Without torch.

Everything with memory after step s - 1: weights, value model, both optimizers with their schedules, random states, and
where the run stands. In this order, and after a crash between any two lines recovery does this (`recovery.py`):

    order                                             what a crash after it leaves     recovery starts from
    1 step s - 1 is committed to the ledger           no trace of the snapshot         the one before; steps retrained
    2 the state is copied at the step boundary        no trace                         the same
    3 parts are written to `.staged_s` and synced     a hidden folder, half written    the same; the next removes it
    4 the manifest with the hashes is written last    a hidden folder, complete        the same
    5 the staged folder is synced                     the same, lasting                the same
    6 rename to `step_s`                              a visible folder; a power cut    the new one, or the one before
                                                      may still forget its name
    7 the parent folder is synced                     a snapshot that lasts            the new one
    8 all but the last two are removed                two snapshots                    the new one (damaged: the other)
    9 the ledger notes it (`sealed`)                  the same, on record              the same
    10 payloads that neither needs are forgotten      the same                         the same

A snapshot counts only when its manifest fits its files and its hash is that of step s - 1 in the ledger; another one is
named, skipped and set aside, and the good one before it is never removed first. Tensors in files of the encoder's
making, JSON; no pickle. Not covered: what the parts mean, who writes them when (`snapshot_writer.py`).
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from soloist.seams import Storage, fault_point, sha256_of

Encode = Callable[[Mapping[str, Any]], bytes]
Decode = Callable[[bytes], dict[str, Any]]
Part = tuple[dict[str, Any], dict[str, Any]]
FORMAT = 1
SKIPPED = "skipped_"
"""Begins the name of a folder that was set aside."""


class SnapshotFolder:
    """The snapshots of one folder, `step_N` each.

    Example: `SnapshotFolder(run / "checkpoints", encode, decode).save(20, {"policy": (tensors, {"version": 20})})`.
    """

    def __init__(
        self, folder: Path, encode: Encode, decode: Decode, *, keep: int = 2, storage: Storage | None = None
    ) -> None:
        """`encode` and `decode` are tensors to bytes and back; this file knows nothing of tensors."""
        self._folder = folder
        self._encode = encode
        self._decode = decode
        self._keep = keep
        self._storage = storage or Storage()

    def save(self, step: int, parts: Mapping[str, Part]) -> Path:
        """Write a checkpoint and remove those before the last `keep`.

        Raises OSError; then nothing new is visible, or, when only the last fsync failed, all of it.
        """
        if not self._folder.is_dir():
            self._folder.mkdir(parents=True)
            # A name lasts only when the folder above is synced; without it a power cut would take all snapshots.
            self._storage.sync(self._folder.parent)
        self._undo_half_replacements()
        for leftover in (*self._folder.glob(".staged_*"), *self._folder.glob(".removed_*")):
            shutil.rmtree(leftover, ignore_errors=True)
        target = self._folder / f"step_{step}"
        staged = self._folder / f".staged_{step}"
        staged.mkdir()
        for name, (tensors, data) in parts.items():
            self._storage.write(staged / f"{name}.safetensors", self._encode(tensors))
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
            self._remove(old)
        return target

    def _remove(self, step: int) -> None:
        hidden = self._folder / f".removed_{step}"
        # Hidden first, since a crash in the middle would leave a visible snapshot that isn't whole.
        self._storage.replace(self._folder / f"step_{step}", hidden)
        shutil.rmtree(hidden, ignore_errors=True)

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

    def load_newest(
        self,
        complain: Callable[[str], None],
        misfit: Callable[[int, dict[str, Part]], str] = lambda step, parts: "",
        *,
        set_aside: bool = False,
    ) -> tuple[int, dict[str, Part]] | None:
        """Newest usable checkpoint as (step, parts), or None. Damaged ones are named through `complain`.

        So are those for which `misfit` gives a reason. `set_aside` gives the skipped ones another name, so that they
        don't count when the next save removes all but the last few.
        """
        self._undo_half_replacements()
        for step in reversed(self.steps()):
            path = self._folder / f"step_{step}"
            damaged = ""
            try:
                parts = self.load(step)
                reason = misfit(step, parts)
            except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
                damaged, reason = "damaged and ", str(error)
            if not (damaged or reason):
                return step, parts
            complain(f"checkpoint {path} is {damaged}skipped: {reason}")
            if set_aside:
                self._set_aside(path)
        return None

    def _set_aside(self, path: Path) -> None:
        # One is enough to look into what happened; more would fill the disk of a run that is damaged often.
        for other in self._folder.glob(f"{SKIPPED}*"):
            shutil.rmtree(other, ignore_errors=True)
        self._storage.rename(path, path.with_name(f"{SKIPPED}{path.name}"))

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
                self._decode((folder / f"{name}.safetensors").read_bytes()),
                json.loads((folder / f"{name}.json").read_text()),
            )
            for name in names
        }
