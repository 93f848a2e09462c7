"""The folder of a run: where everything lies, which stages are done, and who may write.

Guarantees: one process at a time (a lock that dies with it); a stage counts as done only when its summary is on disk; a
resumed run has the model, environment and seed that it began with.
"""

from __future__ import annotations

import fcntl
import json
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from soloist.config import RunConfig, build_config
from soloist.config_files import dump_config
from soloist.errors import UserError
from soloist.seams import Storage

# Changing these in the middle of a run would mix two runs in one folder.
FIXED = ("seed", "model", "environment", "rollouts_per_step", "group_size")
LOCK_SECONDS = 3.0
"""How long a held lock is tried again: a child that a killed run was just starting has it until its program begins."""


class RunFolder:
    """Paths and stage marks of one run.

    Example: `RunFolder(config).done("sft")` is the summary of the finished SFT stage, or None.
    """

    def __init__(self, config: RunConfig, storage: Storage | None = None) -> None:
        self.path = config.folder
        self._storage = storage or Storage()
        self.base_model = Path(config.model.path) if config.model.path else self.path / "model"
        self.sft_model = self.path / "sft" / "model" if config.sft.steps else self.base_model
        self.sft_checkpoints = self.path / "sft" / "checkpoints"
        self.value_pretraining = self.path / "value_pretraining"
        self.success_rates = self.path / "success_rates.json"
        self.checkpoints = self.path / "checkpoints"
        self.weights = self.path / "weights"
        self.metrics = self.path / "metrics.jsonl"
        self.timeline = self.path / "timeline.jsonl"
        self.ledger = self.path / "ledger.sqlite"
        self._config_file = self.path / "config.resolved.toml"
        self._stages_file = self.path / "stages.json"

    def open(self, config: RunConfig, *, resume: bool, must_exist: bool = False) -> None:
        """Create the folder, or go on in it. Raises UserError when it holds another run, or none to resume."""
        if self._config_file.is_file():
            self._check_same_run(config, resume)
        elif must_exist:
            raise UserError(f"{self.path} holds no run to resume; leave --resume out, or give its --name")
        self.path.mkdir(parents=True, exist_ok=True)
        staged = self.path / ".config.resolved.toml"
        self._storage.write(staged, dump_config(config).encode())
        self._storage.rename(staged, self._config_file)

    def _check_same_run(self, config: RunConfig, resume: bool) -> None:
        if not resume:
            raise UserError(
                f"{self.path} already holds a run; go on with --resume, or choose another with --name, or delete it"
            )
        stored = build_config(tomllib.loads(self._config_file.read_text()), source=str(self._config_file))
        for field in FIXED:
            found, expected = getattr(config, field), getattr(stored, field)
            if found != expected:
                raise UserError(
                    f"{self._config_file}: {field} is {expected!r} there, but {found!r} now; a resumed run keeps it, "
                    "so take the override back or choose another --name"
                )

    def done(self, stage: str) -> dict[str, Any] | None:
        """Summary of a finished stage, or None."""
        summary: dict[str, Any] | None = self._stages().get(stage)
        return summary

    def mark_done(self, stage: str, summary: Mapping[str, Any]) -> None:
        """Record that a stage is finished, with its final figures."""
        stages = self._stages() | {stage: dict(summary)}
        staged = self.path / ".stages.json"
        self._storage.write(staged, json.dumps(stages, indent=1).encode())
        self._storage.rename(staged, self._stages_file)

    def _stages(self) -> dict[str, Any]:
        if not self._stages_file.is_file():
            return {}
        try:
            stages = json.loads(self._stages_file.read_text())
        except ValueError as error:
            raise UserError(f"{self._stages_file} is damaged ({error}); delete it and run the stages again") from error
        if not isinstance(stages, dict):
            raise UserError(f"{self._stages_file} holds a {type(stages).__name__}, expected an object; delete it")
        return stages

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder. Raises UserError when another process does; the lock dies with its holder."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / ".lock").open("w") as file:
            self._lock(file)
            yield

    def _lock(self, file: TextIO) -> None:
        end = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if time.monotonic() >= end:
                    raise UserError(
                        f"{self.path} is in use by another process; wait for it or choose --name"
                    ) from error
            time.sleep(0.02)
