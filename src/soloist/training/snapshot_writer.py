"""Writes snapshots beside training: one at a time, then the ledger's note, then what no snapshot needs any more.

Guarantees: the loop never waits for the disk unless the snapshot before is still being written; a disk that fails is
reported and costs no step (the snapshot before stays, a crash then retrains more), except at the end of a run.
Not covered: the order of writes within a snapshot (`snapshots.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from soloist.errors import RunError
from soloist.runtime.ledger import Ledger
from soloist.training.snapshots import Part, SnapshotFolder


class SnapshotWriter:
    """Hands snapshots to a thread.

    Example: `await writer.start(20, "ab…", parts)`, and `await writer.finish()` at the end of the run.
    """

    def __init__(
        self, snapshots: SnapshotFolder, ledger: Ledger, note: Callable[[str], None], keep_rollouts: int | None = None
    ) -> None:
        self._snapshots = snapshots
        self._ledger = ledger
        self._note = note
        self._keep_rollouts = keep_rollouts
        self._task: asyncio.Task[None] | None = None
        self._failure = ""

    async def start(self, step: int, state_hash: str, parts: Mapping[str, Part]) -> None:
        """Begin to write a snapshot of the state after `step` updates; waits only for the one before.

        `parts` must not change any more.
        """
        await self._settle()
        self._task = asyncio.create_task(self._write(step, state_hash, parts), name=f"snapshot of step {step}")

    async def finish(self) -> None:
        """Wait for the one under way. Raises RunError when the last one could not be written."""
        await self._settle()
        if self._failure:
            raise RunError(f"{self._failure}; free the disk and go on with --resume")

    async def close(self) -> None:
        """Wait for the one under way, whatever becomes of it. Safe to call twice."""
        await self._settle()

    async def _settle(self) -> None:
        task, self._task = self._task, None
        if task is None:
            return
        self._failure = ""
        try:
            # Shielded, since a cancelled run must not leave a thread that writes into its folder.
            await asyncio.shield(task)
        except OSError as error:
            self._failure = f"{task.get_name()} could not be written ({error})"
            self._note(f"{self._failure}; training goes on, with the snapshot before")
        except asyncio.CancelledError:
            await asyncio.wait({task})
            raise

    async def _write(self, step: int, state_hash: str, parts: Mapping[str, Part]) -> None:
        folder = await asyncio.to_thread(self._snapshots.save, step, parts)
        await self._ledger.sealed(step, state_hash, folder.name)
        if self._keep_rollouts is not None:
            # The newest may turn out damaged, so the one before it must find the steps after it.
            older = self._snapshots.steps()[:-1]
            await self._ledger.prune(min(older[-1] if older else 0, step - self._keep_rollouts))
