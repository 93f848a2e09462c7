"""No orphan: whatever happens to the parent, its child does not outlive it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from soloist.config import ModelConfig
from soloist.models.tiny import build_tiny

PARENT = """
import asyncio, sys
from pathlib import Path
from soloist.config import EngineConfig
from soloist.engines.local.engine import LocalEngine
from soloist.types import GenerateRequest, Sampling

async def main():
    engine = LocalEngine("local-0", Path(sys.argv[1]), EngineConfig(slots=2, max_length=2000))
    await engine.start()
    print(engine.child_pid, flush=True)
    await engine.generate(GenerateRequest(request_id="q", rollout_id="q", prompt_ids=[3],
                                          sampling=Sampling(max_new_tokens=1999)))
    await asyncio.sleep(1000)

asyncio.run(main())
"""

LIFELINE = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-m", "soloist.engines.local.lifeline", str(os.getpid()),
                          sys.executable, "-c", "print('up', flush=True); import time; time.sleep(1000)"],
                         stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
print(child.pid, flush=True)
import time
time.sleep(1000)
"""


def gone_within(pid: int, seconds: float) -> bool:
    """Whether the process ends in time (a zombie has ended)."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


def parent_with_child(*command: str) -> tuple[subprocess.Popen[str], int]:
    parent = subprocess.Popen([sys.executable, "-c", *command], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    return parent, int(parent.stdout.readline())


@pytest.mark.parametrize("what", ["lifeline", "engine"])
def test_kill_9_of_the_parent_ends_the_child(what: str, tmp_path: Path) -> None:
    """R12, RB-134, RB-135: a real process tree; the engine's child is busy decoding at that moment."""
    if what == "lifeline":
        parent, child = parent_with_child(LIFELINE)
    else:
        tiny = ModelConfig(hidden_size=32, layers=2, heads=2, mlp_size=48)
        parent, child = parent_with_child(PARENT, str(build_tiny(tiny, 0, tmp_path / "model")))
    try:
        assert psutil.Process(child).is_running()
        os.kill(child, signal.SIGINT)
        assert not gone_within(child, 0.2), "Ctrl-C is for the parent to decide on"
        parent.kill()
        parent.wait()
        assert gone_within(child, 5)
    finally:
        parent.kill()
        parent.wait()
        if parent.stdout:
            parent.stdout.close()


def test_a_child_whose_parent_is_gone_already_does_not_start() -> None:
    command = [sys.executable, "-m", "soloist.engines.local.lifeline", "1", "/bin/echo", "started"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "parent 1 is gone" in done.stderr
    assert done.stdout == ""
