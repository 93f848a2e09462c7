"""Leases and groups under way, and the journal that hears what became of them. Plain records of `places.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from soloist.types import Record, Rollout, Task


class Journal(Protocol):
    """Who must know what became of an attempt or a task: the ledger. Nothing here waits for it."""

    def expired(self, rollout_id: str, attempt: int, reason: str) -> None:
        """The attempt's lease ran out; its result is refused from here on."""

    def dropped(self, rollout: Rollout, fate: str, reason: str, boundary: str | None = None) -> None:
        """A scored rollout won't be trained after all."""

    def quarantined(self, unit: int, reason: str) -> None:
        """The task is given up."""

    def uniform(self, unit: int, rollouts: Sequence[Rollout]) -> None:
        """The task is done without being trained, as the rewards of its group are equal."""


class NoJournal:
    """Tells nobody."""

    def expired(self, rollout_id: str, attempt: int, reason: str) -> None:
        """Ignored."""

    def dropped(self, rollout: Rollout, fate: str, reason: str, boundary: str | None = None) -> None:
        """Ignored."""

    def quarantined(self, unit: int, reason: str) -> None:
        """Ignored."""

    def uniform(self, unit: int, rollouts: Sequence[Rollout]) -> None:
        """Ignored."""


class Lease(Record, frozen=True, kw_only=True):
    """The right to play one rollout, and the names that it must carry.

    Example: `Lease(unit=3, group_id="g3", rollout_id="r3", place=3, attempt=0, task=task, step=1, version=0)`.
    """

    unit: int
    """Index of the task; the unit of admission."""
    group_id: str
    rollout_id: str
    place: int
    """Number of the rollout among all: unit · group_size + member. Also its key in the random stream."""
    attempt: int
    """How many attempts at this place came before."""
    task: Task
    step: int
    """The step that the place was reserved in; the rollout may be trained in another one within its bound."""
    version: int
    """Version of the engine when the rollout was leased."""


@dataclass(kw_only=True)
class Running:
    """A lease under way, with what a stall report says about it.

    Example: `Running(lease=lease, since=clock.monotonic(), expires=clock.monotonic() + 180)`.
    """

    lease: Lease
    since: float
    expires: float
    waiting_for: str = "its first turn"
    finished: bool = False


@dataclass(kw_only=True)
class Unit:
    """A group under way: each member is pending, running or scored.

    Example: `Unit(index=3, task=task, step=1, attempts=[0], tries=[0], pending=[0])`.
    """

    index: int
    task: Task
    step: int
    attempts: list[int]
    """Attempts of each member so far, in all lives: the number of the next one."""
    tries: list[int]
    """Those of them that failed or were dropped."""
    pending: list[int]
    running: dict[int, Running] = field(default_factory=dict)
    scored: dict[int, tuple[Rollout, float]] = field(default_factory=dict)
    doomed: str = ""
    """Fate of its rollouts once the group lost its place; it then waits for its running members to come home."""
    reason: str = ""
    """Why it lost it, for the quarantine."""
