"""Where the numbers of a run come from: one line in `origin.jsonl` for each process that worked on it.

    {"time": 1790000000.0, "stages": ["train"], "soloist": "0.1.0", "commit": "ab12cd3+", "torch": "2.13.0", …}

Guarantees: a failure here never stops a run. Not covered: the config, which `config.resolved.toml` holds.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import torch

PACKAGE = Path(__file__).parents[1]


def record_origin(folder: Path, stages: Sequence[str], now: float) -> None:
    """Append what runs here to `origin.jsonl`; a folder that can't be written is left for others to complain of."""
    origin = {
        "time": round(now, 3),
        "stages": list(stages),
        "soloist": version("soloist"),
        "commit": commit_of(PACKAGE),
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
    try:
        with (folder / "origin.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(origin) + "\n")
    except OSError:
        return


def commit_of(folder: Path) -> str | None:
    """Short commit of the checkout that holds `folder`, `+` behind it when files differ; None when none does."""
    # An installed package may lie below somebody else's repository, which doesn't know its files.
    if not _git(folder, "ls-files", "__init__.py"):
        return None
    head = _git(folder, "rev-parse", "--short", "HEAD")
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ".")
    return head + "+" if head and changed else head or None


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
