"""Where a run's numbers come from is on record, and never in the way."""

from __future__ import annotations

import subprocess
from importlib.metadata import version
from pathlib import Path

from soloist.metrics import read_metrics
from soloist.training.origin import commit_of, record_origin


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=n@example.org"]
    done = subprocess.run(["git", "-C", folder, *identity, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_each_process_leaves_a_line(tmp_path: Path) -> None:
    record_origin(tmp_path, ["sft", "train"], 12.0)
    record_origin(tmp_path, ["eval"], 13.0)
    first, second = read_metrics(tmp_path / "origin.jsonl")
    assert (first["time"], first["stages"], second["stages"]) == (12.0, ["sft", "train"], ["eval"])
    assert (first["soloist"], first["torch"]) == (version("soloist"), version("torch"))


def test_a_folder_that_cannot_be_written_is_left_alone(tmp_path: Path) -> None:
    record_origin(tmp_path / "missing", ["train"], 0.0)
    assert not (tmp_path / "missing").exists()
    assert list(tmp_path.iterdir()) == []


def test_the_commit_is_that_of_the_package_and_says_when_files_differ(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    assert commit_of(package) is None
    git(tmp_path, "init", "--quiet")
    (tmp_path / "other").write_text("")
    (package / "__init__.py").write_text("")
    git(tmp_path, "add", "other")
    git(tmp_path, "commit", "--quiet", "-m", "x")
    assert commit_of(package) is None, "somebody else's repository"
    git(tmp_path, "add", "package")
    git(tmp_path, "commit", "--quiet", "-m", "y")
    head = git(tmp_path, "rev-parse", "--short", "HEAD")
    assert commit_of(package) == head
    (package / "__init__.py").write_text("changed")
    assert commit_of(package) == f"{head}+"
