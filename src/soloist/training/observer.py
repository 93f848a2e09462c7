"""What a stage tells the outside while it runs. The display implements it; training never waits for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Observer(Protocol):
    """Listener of a run. Its failures must stay its own: they never stop training."""

    def stage_started(self, stage: str, total: int) -> None:
        """A stage begins; `total` steps (or epochs, or rollouts) are to be done."""

    def progress(self, stage: str, step: int, values: Mapping[str, float | None]) -> None:
        """Step number `step` (from 1) is done, with its metrics."""

    def stage_finished(self, stage: str, summary: Mapping[str, Any]) -> None:
        """A stage is done; `summary` holds its final figures."""

    def note(self, text: str) -> None:
        """One line for people: a stall, a restart, a skipped stage."""


class SilentObserver:
    """Tells nobody."""

    def stage_started(self, stage: str, total: int) -> None:
        """Ignored."""

    def progress(self, stage: str, step: int, values: Mapping[str, float | None]) -> None:
        """Ignored."""

    def stage_finished(self, stage: str, summary: Mapping[str, Any]) -> None:
        """Ignored."""

    def note(self, text: str) -> None:
        """Ignored."""
