"""What a stage tells the outside while it runs. The display implements it; training never waits for it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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


class _Notes(logging.Handler):
    """Hands log records to an observer."""

    def __init__(self, observer: Observer) -> None:
        super().__init__(logging.WARNING)
        self._observer = observer

    def emit(self, record: logging.LogRecord) -> None:
        """One record, one note."""
        self._observer.note(record.getMessage())


@contextmanager
def log_as_notes(observer: Observer) -> Iterator[None]:
    """While the context lasts, warnings and errors that the package logs (a crashed engine) are notes too."""
    # Rooms below know no observer; without a handler Python would print their lines across the display.
    handler, logger = _Notes(observer), logging.getLogger("soloist")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
