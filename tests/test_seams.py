"""Seams: a fault can be placed at every durable operation, and writes are what they say."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from soloist.seams import Storage, SystemClock, fault_point, installed_faults, sha256_of


def test_fault_points_reach_the_installed_plan_only_while_it_is_installed() -> None:
    outer: list[str] = []
    inner: list[str] = []
    fault_point("nobody listens")
    with installed_faults(outer.append):
        fault_point("a")
        with installed_faults(inner.append):
            fault_point("b")
        fault_point("c")
    fault_point("d")
    assert outer == ["a", "c"]
    assert inner == ["b"]


def test_a_plan_that_raises_is_taken_out_again() -> None:
    def fail(name: str) -> None:
        raise OSError(f"disk gone at {name}")

    with pytest.raises(OSError, match="disk gone at x"), installed_faults(fail):
        fault_point("x")
    seen: list[str] = []
    with installed_faults(seen.append):
        fault_point("y")
    assert seen == ["y"]
    fault_point("z")


def test_every_durable_operation_passes_a_fault_point_before_it_happens(tmp_path: Path) -> None:
    storage = Storage()
    names: list[str] = []
    with installed_faults(names.append):
        storage.write(tmp_path / "staged", b"content")
        storage.rename(tmp_path / "staged", tmp_path / "final")
    assert names == ["write:staged", "sync:staged", "rename:final", f"sync:{tmp_path.name}"]
    assert (tmp_path / "final").read_bytes() == b"content"

    def fail(name: str) -> None:
        raise OSError(name)

    with installed_faults(fail), pytest.raises(OSError, match="write:other"):
        storage.write(tmp_path / "other", b"never")
    with installed_faults(fail), pytest.raises(OSError, match="rename:elsewhere"):
        storage.rename(tmp_path / "final", tmp_path / "elsewhere")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["final"]


def test_a_rename_replaces_its_target_in_one_step(tmp_path: Path) -> None:
    storage = Storage()
    storage.write(tmp_path / "target", b"old")
    storage.write(tmp_path / "staged", b"new")
    storage.rename(tmp_path / "staged", tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == b"new"
    assert not (tmp_path / "staged").exists()
    with pytest.raises(FileNotFoundError):
        storage.sync(tmp_path / "absent")


def test_the_digest_is_sha256_of_the_content(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100_000)
    assert sha256_of(path) == hashlib.sha256(b"x" * 100_000).hexdigest()
    path.write_bytes(b"")
    assert sha256_of(path) == hashlib.sha256().hexdigest()


def test_the_system_clock_measures_forward_and_stamps_with_the_date() -> None:
    clock = SystemClock()
    first, second = clock.monotonic(), clock.monotonic()
    assert second >= first
    assert clock.now() > 1_600_000_000
