"""The run's folder: one run, one writer, and stages that are done only when their summary is on disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from soloist.config import RunConfig, build_config
from soloist.errors import UserError
from soloist.seams import Storage
from soloist.training.run_folder import RunFolder


def config_of(tmp_path: Path, **changes: Any) -> RunConfig:
    return build_config({"name": "a", "runs_dir": str(tmp_path)} | changes, source="test")


def test_a_new_run_writes_its_resolved_config_and_nothing_else(tmp_path: Path) -> None:
    config = config_of(tmp_path, seed=3)
    RunFolder(config).open(config, resume=False)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["config.resolved.toml"]
    assert "seed = 3" in (tmp_path / "a" / "config.resolved.toml").read_text()


def test_a_folder_that_holds_a_run_is_refused_unless_resumed_and_stays_as_it_was(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    RunFolder(config).open(config, resume=False)
    before = (tmp_path / "a" / "config.resolved.toml").read_bytes()
    changed = config_of(tmp_path, steps=99)
    with pytest.raises(UserError, match=r"already holds a run; go on with --resume, or .*--name, or delete it"):
        RunFolder(changed).open(changed, resume=False)
    assert (tmp_path / "a" / "config.resolved.toml").read_bytes() == before
    RunFolder(changed).open(changed, resume=True)
    assert "steps = 99" in (tmp_path / "a" / "config.resolved.toml").read_text()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"seed": 1}, "seed is 0 there, but 1 now"),
        ({"rollouts_per_step": 32}, "rollouts_per_step is 64 there, but 32 now"),
        ({"group_size": 2}, "group_size is 1 there, but 2 now"),
        ({"model": {"layers": 2}}, "model is .*layers=4.* there, but .*layers=2.* now"),
        ({"environment": {"preset": "hard"}}, "environment is .* there, but .*hard.* now"),
    ],
)
def test_a_resumed_run_keeps_what_must_not_change(tmp_path: Path, changes: dict[str, Any], field: str) -> None:
    config = config_of(tmp_path)
    RunFolder(config).open(config, resume=False)
    other = config_of(tmp_path, **changes)
    with pytest.raises(UserError, match=field):
        RunFolder(other).open(other, resume=True)
    before = config_of(tmp_path)
    RunFolder(before).open(before, resume=True)
    assert "seed = 0" in (tmp_path / "a" / "config.resolved.toml").read_text()


def test_a_stage_is_done_when_its_summary_is_on_disk(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    folder = RunFolder(config)
    folder.open(config, resume=False)
    assert folder.done("sft") is None
    folder.mark_done("sft", {"steps": 600, "eval": {"avg": 0.42, "by_family": {}}})
    folder.mark_done("train", {"reward": None})
    again = RunFolder(config)
    assert again.done("sft") == {"steps": 600, "eval": {"avg": 0.42, "by_family": {}}}
    assert again.done("train") == {"reward": None}
    assert again.done("eval") is None


class FailingStorage(Storage):
    def write(self, path: Path, data: bytes) -> None:
        path.write_bytes(data[: len(data) // 2])
        raise OSError("disk full")


def test_a_mark_that_can_t_be_written_leaves_the_marks_as_they_were(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    folder = RunFolder(config)
    folder.open(config, resume=False)
    folder.mark_done("sft", {"steps": 1})
    with pytest.raises(OSError, match="disk full"):
        RunFolder(config, FailingStorage()).mark_done("train", {"steps": 2})
    assert folder.done("sft") == {"steps": 1}
    assert folder.done("train") is None


def test_a_config_that_can_t_be_written_leaves_the_stored_one(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    RunFolder(config).open(config, resume=False)
    changed = config_of(tmp_path, steps=99)
    with pytest.raises(OSError, match="disk full"):
        RunFolder(changed, FailingStorage()).open(changed, resume=True)
    RunFolder(config).open(config, resume=True)
    assert "steps = 40" in (tmp_path / "a" / "config.resolved.toml").read_text()


def test_one_process_at_a_time_and_the_lock_goes_with_its_holder(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    with RunFolder(config).locked():
        with pytest.raises(UserError, match="in use by another process; wait for it or choose --name"):
            RunFolder(config).locked().__enter__()
        other = config_of(tmp_path, name="b")
        with RunFolder(other).locked():
            assert (tmp_path / "b").is_dir()
    with pytest.raises(RuntimeError, match="inside"), RunFolder(config).locked():
        raise RuntimeError("inside")
    with RunFolder(config).locked():
        assert (tmp_path / "a" / ".lock").exists()


HOLD = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_killed_holder_leaves_no_lock_behind(tmp_path: Path) -> None:
    """R12: nothing has to be cleaned up by hand after a kill -9."""
    config = config_of(tmp_path)
    (tmp_path / "a").mkdir()
    command = [sys.executable, "-c", HOLD, str(tmp_path / "a" / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match="in use"):
            RunFolder(config).locked().__enter__()
        holder.kill()
        holder.wait()
    with RunFolder(config).locked():
        assert holder.returncode != 0


def test_the_model_of_rl_is_the_sft_model_or_the_base_model_when_there_is_no_sft(tmp_path: Path) -> None:
    with_sft, without = RunFolder(config_of(tmp_path)), RunFolder(config_of(tmp_path, sft={"steps": 0}))
    assert (with_sft.base_model, with_sft.sft_model) == (tmp_path / "a" / "model", tmp_path / "a" / "sft" / "model")
    assert without.sft_model == without.base_model == tmp_path / "a" / "model"
    given = RunFolder(config_of(tmp_path, model={"path": "/models/q"}, sft={"steps": 0}))
    assert given.sft_model == Path("/models/q")
