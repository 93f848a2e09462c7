"""The monty sandbox: what code may do, what its mistakes look like, and that nothing leaks or survives."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

import soloist.environments.sandbox as sandbox_module
from soloist.config import EnvironmentConfig
from soloist.environments.sandbox import CUT_MARK, LONGEST_CODE, MontySandbox, available, cut
from soloist.errors import RolloutError, RunError

NEVER_RETURNS = "x = 10**4000\nfor i in range(1000): x = x * x"


@pytest.fixture
async def sandbox() -> AsyncIterator[MontySandbox]:
    running = MontySandbox(seconds=0.3, memory_mb=32, output_chars=200)
    await running.start()
    yield running
    await running.close()


def workers() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "monty" in child.name()]


@pytest.mark.parametrize(
    ("code", "observation"),
    [
        ("23+45*2", "113"),
        ("print(1)\nprint(2)", "1\n2"),
        ("x = 3\nprint(x)\nx + 4", "3\n7"),
        ("x = 5", ""),
        ("", ""),
        ("# nothing", ""),
        ("None", ""),
        ("'a'", "'a'"),
        ("3 + 4\n# done", "7"),
        ("[\n    1,\n    2,\n]", "[1, 2]"),
        ("def f(n):\n    return n * 2\n\nf(21)", "42"),
        ("for i in range(2):\n    i", ""),
        ("if True:\n    3\nelse:\n    4", ""),
        ("import math\nmath.gcd(12, 18)", "6"),
    ],
)
async def test_output_and_the_value_of_the_last_line_come_back(
    sandbox: MontySandbox, code: str, observation: str
) -> None:
    assert await sandbox.run(code) == observation
    assert await sandbox.run(code) == observation


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("1/0", "ZeroDivisionError: division by zero"),
        ("(", "SyntaxError: unexpected EOF while parsing"),
        ("05+3", "SyntaxError"),
        ("y", "NameError: name 'y' is not defined"),
        ("print(1)\nraise ValueError('no')", "1\nValueError: no"),
        ("while True: pass", "TimeoutError: more than 0.3 s of computation"),
        ("import time\nwhile True: time.sleep(1)", "TimeoutError: more than 0.3 s of computation"),
        ("[0] * 10**9", "MemoryError: more than 32 MB"),
        ("'a' * 30_000_000", "MemoryError: more than 32 MB"),
        ("def f(n): return f(n + 1)\nf(0)", "RecursionError: maximum recursion depth exceeded"),
        ("2**10_000_000", "ValueError: Exceeds the limit (4300 digits)"),
        ("\ud800", "SyntaxError: the code holds half of a surrogate pair"),
        ("1" * (LONGEST_CODE + 1), f"SyntaxError: the code has {LONGEST_CODE + 1} characters"),
        ("(" * 9000 + "1" + ")" * 9000, "SyntaxError: Source is too deeply nested"),
    ],
)
async def test_an_error_of_the_code_is_a_text_for_the_model(sandbox: MontySandbox, code: str, error: str) -> None:
    """RB-063 in spirit: one bad call costs an observation, nothing else."""
    assert (await sandbox.run(code)).startswith(error)
    assert await sandbox.run("6*7") == "42"


@pytest.mark.parametrize(
    "bomb",
    [
        "9**9**9**9",
        "import math\nmath.factorial(8_000_000)",
        "import math\nmath.comb(10**8, 5 * 10**7)",
        "x = 10**4000\nfor i in range(1000): x = x * x",
        "'%1000000000d' % 1",
        "x = []\nfor i in range(10**6): x = [x]\nx",
        "import re\nre.match('(a|aa)+$', 'a' * 60 + 'b')",
    ],
)
async def test_a_cost_bomb_ends_within_its_limits(sandbox: MontySandbox, bomb: str) -> None:
    """RB-194: short code with an enormous cost; the third limit is the parent, which kills a worker that hangs."""
    observation = await asyncio.wait_for(sandbox.run(bomb), timeout=5)
    assert len(observation) <= 200
    assert await sandbox.run("6*7") == "42"


async def test_a_flood_of_output_is_cut_and_marked(sandbox: MontySandbox) -> None:
    """S14, RB-087: output is bounded, the cut is visible, and an error after the flood is not lost."""
    text = await sandbox.run("print('x' * 5000)")
    assert text == "x" * (200 - len(CUT_MARK)) + CUT_MARK
    flood = await sandbox.run("for i in range(10**6): print('x' * 100)")
    assert len(flood) <= 200
    assert flood.endswith("MemoryError: more than 65536 bytes printed")
    assert CUT_MARK in flood
    assert len(await sandbox.run("'y' * 1_000_000")) == 200


@given(text=st.text(max_size=60), limit=st.integers(len(CUT_MARK), 70))
def test_cutting_keeps_short_texts_and_bounds_long_ones(text: str, limit: int) -> None:
    assert len(cut(text, limit)) <= limit
    assert (cut(text, limit) == text) == (len(text) <= limit)


@pytest.mark.parametrize(
    ("code", "refusal"),
    [
        ("open('/etc/passwd').read()", "PermissionError"),
        ("open('marker', 'w').write('x')", "PermissionError"),
        ("from pathlib import Path\nPath.home()", ""),
        ("from pathlib import Path\nPath('../../etc/passwd').read_text()", "PermissionError"),
        ("import os\nos.listdir('/')", "PermissionError"),
        ("import os\nos.environ", "RuntimeError"),
        ("import os\nos.system('id')", "AttributeError"),
        ("import os\nos.fork()", "AttributeError"),
        ("import subprocess", "ModuleNotFoundError"),
        ("import socket", "ModuleNotFoundError"),
        ("import urllib.request", "ModuleNotFoundError"),
        ("import ctypes", "ModuleNotFoundError"),
        ("import threading", "ModuleNotFoundError"),
        ("import gc", "ModuleNotFoundError"),
        ("__import__('os')", "NameError"),
        ("().__class__.__base__.__subclasses__()", "AttributeError"),
        ("(lambda: 0).__globals__", "AttributeError"),
        ("eval('open(\"/etc/passwd\").read()')", "PermissionError"),
        ("f'{().__class__}'", "AttributeError"),
    ],
)
async def test_there_is_no_way_to_files_network_or_processes(sandbox: MontySandbox, code: str, refusal: str) -> None:
    """RB-195, RB-196, RB-199, RB-208 as far as they concern pure computation: every door is missing."""
    here = set(os.listdir("."))
    observation = await sandbox.run(code)
    assert refusal in observation
    assert "root:" not in observation
    assert set(os.listdir(".")) == here


async def test_no_secret_of_the_parent_reaches_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """RB-197, RB-198 (S12): not by a deny-list of names; the environment of a worker is empty."""
    canary = "canary-5c1d"
    for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "A_NEW_INNOCENT_NAME"):
        monkeypatch.setenv(name, canary)
    sandbox = MontySandbox(output_chars=10_000)
    await sandbox.start()
    codes = ["import os\nos.environ", "import os\nos.getenv('HF_TOKEN')", "import sys\nsys.argv", "globals()"]
    observations = [await sandbox.run(code) for code in codes]
    environments = [Path(f"/proc/{worker.pid}/environ").read_text() for worker in workers()]
    await sandbox.close()
    assert environments
    assert not any(canary in text for text in [*observations, *environments])


async def test_nothing_stays_from_one_call_to_the_next(sandbox: MontySandbox) -> None:
    """S18: rollout A writes a marker wherever it can, B must not see it."""
    await sandbox.run("marker = 1\nimport random\nrandom.seed(7)\nimport sys\nsys.marker = 1")
    seen = await asyncio.gather(*[sandbox.run("marker") for _ in range(8)])
    assert set(seen) == {"NameError: name 'marker' is not defined"}
    assert (await sandbox.run("import sys\nsys.marker")).startswith("AttributeError")


async def test_clock_and_randomness_are_the_same_in_every_call(sandbox: MontySandbox) -> None:
    code = (
        "import random, time, datetime\n(random.random(), time.time(), datetime.datetime.now(), hash('a'), {'b', 'a'})"
    )
    first, second = await sandbox.run(code), await sandbox.run(code)
    other = MontySandbox(seconds=0.3)
    await other.start()
    third = await other.run(code)
    await other.close()
    assert first == second == third
    assert "datetime.datetime(2026, 1, 1, 0, 0)" in first


async def test_the_event_loop_goes_on_while_code_runs(sandbox: MontySandbox) -> None:
    bomb = asyncio.create_task(sandbox.run("while True: pass"))
    for _ in range(50):
        await asyncio.sleep(0)
    assert not bomb.done()
    assert (await bomb).startswith("TimeoutError")


async def test_sixteen_verifications_that_compute_for_long_leave_the_loop_free_and_share_four_workers(
    sandbox: MontySandbox,
) -> None:
    """RB-129: long computations run in a bounded pool of processes; the loop of the rollouts goes on meanwhile."""
    calls = [asyncio.create_task(sandbox.run("while True: pass")) for _ in range(16)]
    turns, most = 0, 0
    while not all(call.done() for call in calls):
        await asyncio.sleep(0.005)
        turns, most = turns + 1, max(most, len(workers()))
    # A call that held up the loop would let it turn once or twice in all.
    assert turns >= 8
    assert 1 <= most <= 4
    assert {await call for call in calls} == {"TimeoutError: more than 0.3 s of computation"}


async def test_hung_verifications_are_killed_and_their_workers_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """RB-131: two workers, three calls that never return (in native code, which sees no clock), then a quick one."""
    monkeypatch.setattr(sandbox_module, "_WORKERS", 2)
    sandbox = MontySandbox(seconds=0.2)
    await sandbox.start()
    before = {worker.pid for worker in workers()}
    hung = [asyncio.create_task(sandbox.run(NEVER_RETURNS)) for _ in range(3)]
    quick = asyncio.create_task(sandbox.run("6*7"))
    assert await asyncio.wait_for(quick, 30) == "42"
    assert [await call for call in hung] == ["TimeoutError: more than 0.2 s of computation"] * 3
    after = {worker.pid for worker in workers()}
    assert not before & after, "the workers that hung are gone"
    assert await asyncio.gather(*[sandbox.run(f"{n}+1") for n in range(6)]) == [str(n + 1) for n in range(6)]
    assert len(workers()) <= 2
    await sandbox.close()


@pytest.mark.parametrize(
    "tower",
    [
        "import math\nmath.log(math.log(math.log(math.log(math.log(10**10**10**10)))))",
        "import math\nx = 9**9**9**9**9\nmath.log(math.log(x))",
        "import math\nx = [math.log(n + 2) for n in range(10**9)]",
        "import math\nx = 7\nwhile True: x = math.log(x ** x) * x ** x",
    ],
)
async def test_nested_logarithms_and_towers_cost_their_worker_and_nobody_else(
    sandbox: MontySandbox, tower: str
) -> None:
    """RB-143: time and memory are the worker's (512 MB by the kernel); the trainer's memory doesn't move."""
    memory = psutil.Process().memory_info().rss
    call = asyncio.create_task(sandbox.run(tower))
    largest = 0
    while not call.done():
        for worker in workers():
            with suppress(psutil.NoSuchProcess):
                largest = max(largest, worker.memory_info().rss)
        await asyncio.sleep(0.01)
    assert "Error: " in await call
    assert largest < 512 << 20
    assert psutil.Process().memory_info().rss - memory < 32 << 20
    assert await sandbox.run("6*7") == "42"


async def test_many_players_share_the_workers_and_each_gets_its_own_answer(sandbox: MontySandbox) -> None:
    answers = await asyncio.gather(*[sandbox.run(f"{n}*{n}") for n in range(64)])
    assert answers == [str(n * n) for n in range(64)]
    assert len(workers()) <= 4


async def test_a_worker_that_something_else_kills_is_replaced(sandbox: MontySandbox) -> None:
    for worker in workers():
        worker.kill()
        worker.wait(5)
    assert await sandbox.run("6*7") == "42"
    assert await sandbox.run("6*8") == "48"


async def test_the_kernel_limits_workers_too(sandbox: MontySandbox) -> None:
    await asyncio.gather(*[sandbox.run("1") for _ in range(8)])
    worker = workers()[0]
    assert worker.rlimit(resource.RLIMIT_NOFILE) == (0, 0)
    assert worker.rlimit(resource.RLIMIT_NPROC) == (0, 0)
    assert worker.rlimit(resource.RLIMIT_CPU)[0] <= sum(worker.cpu_times()[:2]) + 5
    assert worker.rlimit(resource.RLIMIT_AS)[0] == 1 << 29


async def test_machinery_that_cannot_run_code_is_a_failure_not_an_observation() -> None:
    """RB-032, RB-033: without a worker there is no answer, and a rollout must not be judged by its absence."""
    sandbox = MontySandbox()
    with pytest.raises(RolloutError, match="sandbox: it was not started") as caught:
        await sandbox.run("1")
    assert caught.value.boundary == "sandbox"
    await sandbox.start()
    await sandbox.close()
    await sandbox.close()
    assert not workers()
    with pytest.raises(RolloutError, match="closed already"):
        await sandbox.run("1")


async def test_calls_that_wait_when_the_sandbox_closes_fail_and_are_not_cancelled() -> None:
    sandbox = MontySandbox(seconds=0.3)
    await sandbox.start()
    calls = [asyncio.create_task(sandbox.run("while True: pass")) for _ in range(12)]
    await asyncio.sleep(0.05)
    await sandbox.close()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(result, str | RolloutError) for result in results)
    assert sum(isinstance(result, RolloutError) for result in results) >= 1


async def test_a_machine_without_the_interpreter_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """S9: no isolation, no tool."""
    monkeypatch.setenv("MONTY_BIN", "/nonexistent/monty")
    reason = available()
    assert reason is not None
    assert "/nonexistent/monty" in reason
    with pytest.raises(RunError, match="the monty sandbox doesn't work here"):
        await MontySandbox().start()


def test_the_self_test_passes_here_whatever_the_limits() -> None:
    assert available() is None
    small = MontySandbox.from_config(EnvironmentConfig(tool_output_chars=12, tool_seconds=0.5, tool_memory_mb=16))
    assert small._open() is None
    small._close()
    assert not workers()


PARENT = """
import asyncio, psutil
from soloist.environments.sandbox import MontySandbox

async def main():
    sandbox = MontySandbox(seconds=0.5)
    await sandbox.start()
    calls = [asyncio.create_task(sandbox.run(code)) for code in (
        "while True: pass", "x = 10**4000\\nfor i in range(1000): x = x * x")]
    await asyncio.sleep(0.2)
    print(*[child.pid for child in psutil.Process().children()], flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_no_worker_survives_the_kill_of_its_parent() -> None:
    """R12: one worker spins, one hangs in a single operation that no time limit of the interpreter interrupts."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    alive = [psutil.Process(pid) for pid in pids]
    assert alive
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while alive and time.monotonic() < deadline:
        time.sleep(0.1)
        # nobody reaps orphans in some containers; a zombie computes nothing
        alive = [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert not alive


def test_a_program_that_used_the_sandbox_ends_cleanly() -> None:
    """The coroutine pool of the interpreter's package aborts in about one of ten exits; this one never may."""
    program = (
        "import asyncio\nfrom soloist.environments.sandbox import MontySandbox\n"
        "async def main():\n    s = MontySandbox()\n    await s.start()\n    print(await s.run('6*7'))\n"
        "    await s.close()\nasyncio.run(main())"
    )
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, "42\n")
