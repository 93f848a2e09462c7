"""R3: a checkpoint is complete or invisible; the newest valid one is found, a damaged one is named and skipped."""

from __future__ import annotations

import errno
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from soloist.seams import Storage, installed_faults
from soloist.training.checkpoint import Checkpoints


def parts_of(step: int) -> dict[str, Any]:
    """Two parts whose content says which step they are of."""
    generator = torch.Generator().manual_seed(step)
    weights = {"w": torch.randn(3, 4, generator=generator), "transposed": torch.randn(2, 3, generator=generator).T}
    return {"policy": (weights, {"version": step, "lr": 0.1}), "progress": ({}, {"step": step, "rng": [1, None]})}


def assert_same(found: Any, step: int) -> None:
    expected = parts_of(step)
    assert found.keys() == expected.keys()
    for name, (tensors, data) in expected.items():
        assert found[name][1] == data
        assert found[name][0].keys() == tensors.keys()
        assert all(torch.equal(found[name][0][key], tensor) for key, tensor in tensors.items())


def newest(folder: Path) -> tuple[int | None, list[str]]:
    """Step of the newest valid checkpoint, after a check of its content, and the complaints."""
    complaints: list[str] = []
    found = Checkpoints(folder).load_newest(complaints.append)
    if found is None:
        return None, complaints
    assert_same(found[1], found[0])
    return found[0], complaints


class FailingStorage(Storage):
    """Fails the n-th durable operation (from 1), before or after it took effect, and counts them."""

    def __init__(self, fail_at: int, code: int = errno.EIO, after: bool = False) -> None:
        self.count = 0
        self._fail_at = fail_at
        self._code = code
        self._after = after

    def put(self, path: Path, data: bytes) -> None:
        self._operate(lambda: super(FailingStorage, self).put(path, data), lambda: path.write_bytes(data[:7]))

    def fsync(self, path: Path) -> None:
        self._operate(lambda: super(FailingStorage, self).fsync(path))

    def replace(self, source: Path, target: Path) -> None:
        self._operate(lambda: super(FailingStorage, self).replace(source, target))

    def _operate(self, work: Callable[[], Any], short: Callable[[], Any] = lambda: None) -> None:
        self.count += 1
        fails = self.count == self._fail_at
        if fails and not self._after:
            short()  # a failing write leaves a torn file
            raise OSError(self._code, "injected")
        work()
        if fails:
            raise OSError(self._code, "injected")


def operations_of(folder: Path, step: int) -> int:
    counting = FailingStorage(0)
    Checkpoints(folder, storage=counting).save(step, parts_of(step))
    return counting.count


def test_what_is_saved_is_loaded_bit_for_bit(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    assert checkpoints.load_newest(print) is None
    assert checkpoints.steps() == []
    path = checkpoints.save(20, parts_of(20))
    assert path == tmp_path / "checkpoints" / "step_20"
    assert_same(checkpoints.load(20), 20)
    assert not list(path.parent.glob(".*"))


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("after", [False, True])
def test_whichever_operation_fails_the_previous_checkpoint_still_loads(tmp_path: Path, code: int, after: bool) -> None:
    """R3, RB-103: the n-th write, fsync or rename fails, for every n; nothing half-written is ever accepted."""
    Checkpoints(tmp_path / "counted").save(10, parts_of(10))
    total = operations_of(tmp_path / "counted", 20)
    assert total == 13, "five files written and synced, the folder synced, renamed, its parent synced"
    for failing in range(1, total + 1):
        folder = tmp_path / f"{failing}"
        Checkpoints(folder).save(10, parts_of(10))
        with pytest.raises(OSError, match="injected"):
            Checkpoints(folder, storage=FailingStorage(failing, code, after)).save(20, parts_of(20))
        step, complaints = newest(folder)
        # Only a failure after the rename finds the new one in place, and then it is complete.
        renamed = failing == total or (after and failing == total - 1)
        assert step == (20 if renamed else 10)
        assert complaints == []
        Checkpoints(folder).save(30, parts_of(30))
        assert newest(folder) == (30, [])
        assert not list(folder.glob(".*"))


class Recording(Storage):
    """Notes what is synced, and what is renamed to what."""

    def __init__(self) -> None:
        self.synced: list[Path] = []
        self.renamed: list[tuple[str, str]] = []

    def fsync(self, path: Path) -> None:
        self.synced.append(path)
        super().fsync(path)

    def replace(self, source: Path, target: Path) -> None:
        self.renamed.append((source.name, target.name))
        super().replace(source, target)


def test_a_power_cut_takes_neither_the_new_folder_nor_half_of_an_old_snapshot(tmp_path: Path) -> None:
    """R3: the name of `checkpoints` lasts before anything counts on it; what is removed is hidden before."""
    storage = Recording()
    checkpoints = Checkpoints(tmp_path / "checkpoints", storage=storage)
    checkpoints.save(10, parts_of(10))
    assert storage.synced[0] == tmp_path
    for step in (20, 30):
        checkpoints.save(step, parts_of(step))
    assert ("step_10", ".removed_10") in storage.renamed
    assert checkpoints.steps() == [20, 30]
    assert storage.synced.count(tmp_path) == 1, "an existing folder is not synced again"


@pytest.mark.parametrize("after", [False, True])
def test_replacing_a_checkpoint_never_loses_it(tmp_path: Path, after: bool) -> None:
    """The same step saved again, with every operation failing in turn: one of the two is there, whole."""
    Checkpoints(tmp_path / "counted").save(10, parts_of(10))
    total = operations_of(tmp_path / "counted", 10)
    for failing in range(1, total + 1):
        folder = tmp_path / f"{failing}"
        Checkpoints(folder).save(10, parts_of(10))
        with pytest.raises(OSError, match="injected"):
            Checkpoints(folder, storage=FailingStorage(failing, after=after)).save(10, parts_of(10))
        assert newest(folder) == (10, [])
        Checkpoints(folder).save(10, parts_of(10))
        assert newest(folder) == (10, [])
        assert not list(folder.glob(".*"))


class Killed(BaseException):
    """Ends the work at a fault point, as a kill does: no handler of OSError runs."""


def test_a_process_killed_at_any_fault_point_resumes_from_a_whole_checkpoint(tmp_path: Path) -> None:
    """RB-098, RB-103: every named point in turn, on a first save, a next one and a replacement."""
    for steps in ([20], [10, 20], [20, 20]):
        names: list[str] = []
        for step in steps[:-1]:
            Checkpoints(tmp_path / f"counted{steps}").save(step, parts_of(step))
        with installed_faults(names.append):
            Checkpoints(tmp_path / f"counted{steps}").save(steps[-1], parts_of(steps[-1]))
        assert {"checkpoint:rename:before", "checkpoint:rename:after", "write:manifest.json"} <= set(names)
        for kill_at in range(len(names)):
            folder = tmp_path / f"{steps}-{kill_at}"
            for step in steps[:-1]:
                Checkpoints(folder).save(step, parts_of(step))
            seen: list[str] = []

            def kill(name: str, seen: list[str] = seen, kill_at: int = kill_at) -> None:
                seen.append(name)
                if len(seen) == kill_at + 1:
                    raise Killed(name)

            with installed_faults(kill), pytest.raises(Killed):
                Checkpoints(folder).save(steps[-1], parts_of(steps[-1]))
            step, complaints = newest(folder)
            renamed = "rename:step_20" in seen[:-1]
            before = steps[0] if steps[1:] else None
            assert step == (20 if renamed else before)
            assert complaints == []


def damages() -> dict[str, Callable[[Path], None]]:
    """Ways to damage one file."""

    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 0x10
        path.write_bytes(bytes(content))

    return {
        "bit flip": flip,
        "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
        "empty": lambda path: path.write_bytes(b""),
        "missing": lambda path: path.unlink(),
        "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    }


FILES = ("manifest.json", "policy.json", "policy.safetensors", "progress.json", "progress.safetensors")


@pytest.mark.parametrize("damage", list(damages()))
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(tmp_path: Path, damage: str, file: str) -> None:
    """R3, RB-099, RB-104: any file of any part, and the manifest."""
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(10, parts_of(10))
    checkpoints.save(20, parts_of(20))
    damages()[damage](tmp_path / "step_20" / file)
    step, complaints = newest(tmp_path)
    assert step == 10
    assert len(complaints) == 1
    assert str(tmp_path / "step_20") in complaints[0]
    if file != "manifest.json":
        assert file in complaints[0]


def test_no_bit_flip_anywhere_gives_other_content(tmp_path: Path) -> None:
    """300 random flips: the content loads unchanged (white space of the manifest) or the checkpoint is skipped."""
    Checkpoints(tmp_path).save(20, parts_of(20))
    chance = random.Random(0)
    skipped = 0
    for _ in range(300):
        path = tmp_path / "step_20" / chance.choice(FILES)
        content = path.read_bytes()
        position = chance.randrange(len(content))
        path.write_bytes(
            content[:position] + bytes([content[position] ^ 1 << chance.randrange(8)]) + content[position + 1 :]
        )
        step, complaints = newest(tmp_path)
        assert (step, len(complaints)) in {(20, 0), (None, 1)}
        skipped += step is None
        path.write_bytes(content)
    assert skipped > 250
    assert newest(tmp_path) == (20, [])


@pytest.mark.parametrize(
    "content",
    [b"[]", b"null", b'"x"', b"{}", b'{"format": 1}', b'{"format": 1, "step": 20, "files": null}', b"\xff\xfe"],
)
def test_a_manifest_of_another_shape_is_damage_and_no_crash(tmp_path: Path, content: bytes) -> None:
    Checkpoints(tmp_path).save(10, parts_of(10))
    Checkpoints(tmp_path).save(20, parts_of(20))
    (tmp_path / "step_20" / "manifest.json").write_bytes(content)
    step, complaints = newest(tmp_path)
    assert step == 10
    assert "step_20 is damaged and skipped" in complaints[0]


def test_another_format_or_a_folder_of_another_step_is_refused_with_what_was_found(tmp_path: Path) -> None:
    """R18: an explicit refusal rather than a guess."""
    checkpoints = Checkpoints(tmp_path, keep=9)
    checkpoints.save(20, parts_of(20))
    shutil.copytree(tmp_path / "step_20", tmp_path / "step_30")
    with pytest.raises(ValueError, match=r"manifest\.json is of step 20, the folder is of step 30"):
        checkpoints.load(30)
    manifest = json.loads((tmp_path / "step_20" / "manifest.json").read_text())
    (tmp_path / "step_20" / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(ValueError, match="format 99, but this version reads format 1"):
        checkpoints.load(20)


def test_steps_are_ordered_as_numbers_and_other_names_are_no_checkpoints(tmp_path: Path) -> None:
    """RB-101: step_9, step_10, step_100, a temporary folder and strangers."""
    checkpoints = Checkpoints(tmp_path, keep=9)
    for step in (9, 100, 10):
        checkpoints.save(step, parts_of(step))
    for name in ("step_x", "step_200.old", "step_", "best", "xstep_300"):
        (tmp_path / name).mkdir()
    (tmp_path / "notes.txt").write_text("step_400")
    assert checkpoints.steps() == [9, 10, 100]
    assert newest(tmp_path) == (100, [])


def test_an_incomplete_folder_and_a_file_in_its_place_are_named_and_skipped(tmp_path: Path) -> None:
    """RB-098: step 20 has no completion marker; step 30 is no folder at all."""
    Checkpoints(tmp_path).save(10, parts_of(10))
    (tmp_path / "step_20").mkdir()
    (tmp_path / "step_30").write_text("")
    step, complaints = newest(tmp_path)
    assert step == 10
    assert ["step_30" in complaints[0], "step_20" in complaints[1]] == [True, True]


def test_when_all_are_damaged_all_are_named_and_nothing_is_loaded(tmp_path: Path) -> None:
    for step in (10, 20):
        Checkpoints(tmp_path).save(step, parts_of(step))
        (tmp_path / f"step_{step}" / "policy.safetensors").write_bytes(b"")
    step, complaints = newest(tmp_path)
    assert step is None
    assert len(complaints) == 2


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_last_ones_are_kept_and_older_ones_removed(tmp_path: Path, keep: int) -> None:
    checkpoints = Checkpoints(tmp_path, keep=keep)
    for step in range(5, 30, 5):
        checkpoints.save(step, parts_of(step))
        assert step in checkpoints.steps()
    assert checkpoints.steps() == [5, 10, 15, 20, 25][-keep:]
    assert len(list(tmp_path.iterdir())) == keep


def test_leftovers_of_crashes_do_not_pile_up(tmp_path: Path) -> None:
    """R13: what earlier attempts staged is removed by the next save, whatever step it was for."""
    for name in (".staged_3", ".staged_20", ".replaced_10"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "policy.safetensors").write_bytes(b"torn")
    Checkpoints(tmp_path).save(10, parts_of(10))
    Checkpoints(tmp_path).save(20, parts_of(20))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_10", "step_20"]
    assert newest(tmp_path) == (20, [])
