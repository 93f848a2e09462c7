"""Seams for tests and for replay: the clock, named fault points and durable writes are reached through here.

Production uses the defaults. A test installs a `FaultPlan`, or passes its own `Clock` or `Storage`, and every file that
has a memory or touches the disk obeys it. Nothing here knows what the callers do.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

_faults: Callable[[str], None] | None = None


class Clock(Protocol):
    """Source of time. `monotonic` measures intervals, `now` stamps records."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary point; never goes back."""

    def now(self) -> float:
        """Seconds since 1970."""


class SystemClock:
    """The machine's clock."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary point; never goes back."""
        return time.monotonic()

    def now(self) -> float:
        """Seconds since 1970."""
        return time.time()


def fault_point(name: str) -> None:
    """Mark an instant at which a test may kill, delay or fail the process. Does nothing outside tests."""
    if _faults is not None:
        _faults(name)


@contextmanager
def installed_faults(plan: Callable[[str], None]) -> Iterator[None]:
    """Call `plan(name)` at every fault point while the context lasts."""
    global _faults
    before, _faults = _faults, plan
    try:
        yield
    finally:
        _faults = before


class Storage:
    """Durable file operations. A test's subclass fails the n-th of them, or forgets what was not synced.

    `put`, `fsync` and `replace` are what the disk does; the others say in which order, and are what callers use.
    """

    def write(self, path: Path, data: bytes) -> None:
        """Write and fsync a file; it may be visible half-written, so callers rename it into place."""
        fault_point(f"write:{path.name}")
        self.put(path, data)
        self.sync(path)

    def sync(self, path: Path) -> None:
        """Fsync a file, or a folder so that the names in it last."""
        fault_point(f"sync:{path.name}")
        self.fsync(path)

    def rename(self, source: Path, target: Path) -> None:
        """Make `source` visible as `target` in one step and sync the folder that holds it."""
        fault_point(f"rename:{target.name}")
        self.replace(source, target)
        self.sync(target.parent)

    def put(self, path: Path, data: bytes) -> None:
        """Give a file this content; a crash of the machine may forget it until `fsync`."""
        with path.open("wb") as file:
            file.write(data)

    def fsync(self, path: Path) -> None:
        """Wait until a file's content, or a folder's names, are on disk."""
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def replace(self, source: Path, target: Path) -> None:
        """Rename; a crash of the machine may forget it until the folder is synced."""
        os.replace(source, target)


def sha256_of(path: Path) -> str:
    """Hex digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
