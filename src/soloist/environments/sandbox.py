"""The `monty` tier: code that a model wrote runs in a pure-computation interpreter, in worker processes with limits.

Guarantees: no files, network, processes, clock or entropy (the clock stands still, random numbers are seeded, sleeping
takes no time); nothing stays from one call to the next; the worker's environment is empty, so it holds no secret. What
the code does wrong (an exception, too much time or memory, killing its worker twice) is text for the model, cut to the
limit; what the machinery does wrong is `RolloutError("sandbox", …)`. The event loop is never blocked, and no worker
outlives its parent: an idle one ends when its pipe closes, a busy one at its limit of seconds, the kernel's at last.
Not covered: real CPython, files and shells (they need isolation by the operating system); an attacker with a native
exploit of the interpreter, who would still find no file handles, no new processes and bounded memory on Linux.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import resource
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from pydantic_monty import CollectString, Monty, MontyCrashedError, MontyError, MontySyntaxError

from soloist.config import EnvironmentConfig
from soloist.errors import RolloutError, RunError

CUT_MARK = "...[cut]"
LONGEST_CODE = 20_000
"""Characters of code that are looked at; the token budget of a turn is smaller than that."""

# a looping snippet holds its worker for all of its seconds, so one worker a core would let two of them stop everybody
_WORKERS = 4
_QUEUE_SECONDS = 60.0
# the interpreter looks at its clock between operations; the parent waits this much longer, then kills
_GRACE_SECONDS = 1.0
# more than any limit of characters needs, and little enough to carry between processes
_PRINTED_BYTES = 1 << 16
# pipes and threads that a worker has stay usable; a worker needs no more than those
_KERNEL_LIMITS = {
    resource.RLIMIT_AS: 1 << 29,
    resource.RLIMIT_NOFILE: 0,
    resource.RLIMIT_NPROC: 0,
    resource.RLIMIT_CORE: 0,
}
# an observation must be the same whenever and wherever the code runs
_POLICY: dict[str, Any] = {
    "datetime": datetime(2026, 1, 1, tzinfo=UTC),
    "timezone": "utc",
    "sleep": "zero",
    "process_time": "zero",
    "random_start": {"seed": 0},
}
_SELF_TEST = (
    ("print(6 * 7)\n6 * 9", "42\n", "54"),
    ("open('/etc/passwd').read()", "", "PermissionError: Permission denied: '/etc/passwd'"),
    ("import socket", "", "ModuleNotFoundError: No module named 'socket'"),
    ("import os\nos.environ", "", "RuntimeError: 'os.environ' is not supported in this environment"),
)
"""Code, what it prints, and its value or error: one calculation and three attempts to break out."""


class MontySandbox:
    """Runs snippets of Python, each in a fresh session of a pooled worker.

    The pool's threads, not its coroutines, are used: those complete futures from threads of their own, and one that is
    late when the program ends makes the whole process abort.
    Example: `await sandbox.run("x = 3\\nprint(x)\\nx + 4")` gives `"3\\n7"`.
    """

    tier = "monty"

    def __init__(self, seconds: float = 2.0, memory_mb: int = 64, output_chars: int = 200) -> None:
        """Set the limits of one call: seconds of computation, MB of memory, characters of the result."""
        self.seconds = seconds
        self.memory_mb = memory_mb
        self.output_chars = output_chars
        self._pool: Monty | None = None
        self._threads: ThreadPoolExecutor | None = None

    @classmethod
    def from_config(cls, config: EnvironmentConfig) -> MontySandbox:
        """A sandbox with the limits of an `[environment]` section."""
        return cls(config.tool_seconds, config.tool_memory_mb, config.tool_output_chars)

    async def start(self) -> None:
        """Start workers and try to break out of one. Raises RunError with the reason if the tier doesn't work here."""
        if self._pool is not None:
            return
        reason = await asyncio.to_thread(self._open)
        if reason is not None:
            await self.close()
            raise RunError(f"the monty sandbox doesn't work here: {reason}; `soloist check` shows what does")

    async def run(self, code: str) -> str:
        """What the code printed and the value of its last line, or its error. Raises RolloutError("sandbox", …)."""
        if self._pool is None or self._threads is None:
            raise RolloutError("sandbox", "it was not started, or is closed already")
        deadline = _QUEUE_SECONDS + 3 * (self.seconds + _GRACE_SECONDS)
        try:
            async with asyncio.timeout(deadline):
                return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, code)
        except TimeoutError:
            raise RolloutError("sandbox", f"no worker answered within {deadline:g} s; all are busy") from None
        except asyncio.CancelledError:
            # `close` cancels what waits for a thread; the caller was not cancelled and must not end as if it were
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise RolloutError("sandbox", "it was closed before a worker was free") from None

    async def close(self) -> None:
        """Stop the workers, after the snippets that are running (within their limits). Safe to call twice."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        # in this order: nothing new gets in, what runs ends, and only then its workers go
        pool, threads, self._threads = self._pool, self._threads, None
        if threads is not None:
            threads.shutdown(cancel_futures=True)
        if pool is not None:
            pool.__exit__(None, None, None)
        self._pool = None

    def _open(self) -> str | None:
        """Start pool and threads; None, or why the self-test failed."""
        try:
            pool = Monty(
                min_processes=1,
                max_processes=_WORKERS,
                checkout_timeout=_QUEUE_SECONDS,
                request_timeout=self.seconds + _GRACE_SECONDS,
                # this deadline alone says that it was one; the others look like a crash
                feed_duration_limit_grace=None,
                turn_duration_limit_grace=None,
            )
            self._pool = pool.__enter__()
        except (MontyError, OSError, RuntimeError) as error:
            return str(error)
        self._threads = ThreadPoolExecutor(_WORKERS, thread_name_prefix="sandbox")
        for code, printed, last in _SELF_TEST:
            try:
                found = self._run(code)
            except RolloutError as error:
                return error.reason
            if found != (expected := self._observation(printed, last)):
                return f"{code!r} gave {found!r} instead of {expected!r}"
        return None

    def _run(self, code: str) -> str:
        """One call, in a thread. A worker that dies is replaced once; the second death is the code's doing."""
        problem = _unreadable(code)
        if problem:
            return cut(problem, self.output_chars)
        for _ in range(2):
            try:
                return self._play(code)
            except MontyCrashedError as error:
                # a second try would only take as long again
                if error.timed_out:
                    return cut(self._too_slow(), self.output_chars)
        return cut("SystemError: the interpreter crashed", self.output_chars)

    def _play(self, code: str) -> str:
        """One call in one worker. Raises MontyCrashedError when the worker dies, RolloutError when there is none."""
        printed = CollectString(max_bytes=_PRINTED_BYTES)
        with ExitStack() as stack:
            session = self._checkout(stack)
            _limit_process(session.worker_pid, self.seconds)
            try:
                program = _returning_text(session, code, self.output_chars + 1)
                value = session.feed_run(program, print_callback=printed)
            except MontyCrashedError:
                raise
            except MontyError as error:
                value = self._describe(error, printed.output)
        return self._observation(printed.output, value or "")

    def _checkout(self, stack: ExitStack) -> Any:
        """A fresh session. Idle workers that something else killed are noticed here, one by one, and replaced."""
        assert self._pool is not None
        limits = {"max_feed_duration_secs": self.seconds, "max_memory": self.memory_mb << 20}
        checkout = partial(self._pool.checkout, limits=limits, os_policy=_POLICY)
        try:
            for _ in range(_WORKERS):
                with suppress(MontyCrashedError):
                    return stack.enter_context(checkout())
            return stack.enter_context(checkout())
        except (MontyError, OSError, RuntimeError) as error:
            raise RolloutError("sandbox", f"no worker could be had: {error}") from error

    def _describe(self, error: Any, printed: str) -> str:
        """`ZeroDivisionError: division by zero`. Limits get words without measured numbers, equal in every run."""
        text: str = error.display("type-msg")
        if text.startswith("TimeoutError: feed time limit exceeded"):
            return self._too_slow()
        if not re.match("MemoryError: (memory limit|the worker) exceeded", text):
            return text
        # the collector of the output reports its own limit in the same words
        if 2 * len(printed) > _PRINTED_BYTES:
            return f"MemoryError: more than {_PRINTED_BYTES} bytes printed"
        return f"MemoryError: more than {self.memory_mb} MB"

    def _too_slow(self) -> str:
        return f"TimeoutError: more than {self.seconds:g} s of computation"

    def _observation(self, printed: str, last: str) -> str:
        """Output, then value or error, together within the limit; a flood of output leaves the error visible."""
        printed = printed.removesuffix("\n")
        if not printed or not last:
            return cut(printed or last, self.output_chars)
        last = cut(last, self.output_chars // 2)
        return cut(printed, self.output_chars - 1 - len(last)) + "\n" + last


def available() -> str | None:
    """None if the monty tier works on this machine (escape attempts included), else the reason."""
    sandbox = MontySandbox(seconds=1.0, memory_mb=32)
    try:
        return sandbox._open()
    finally:
        sandbox._close()


def cut(text: str, limit: int) -> str:
    """The first characters of a text, at most `limit` with the mark that says something is missing."""
    return text if len(text) <= limit else text[: max(0, limit - len(CUT_MARK))] + CUT_MARK


def _unreadable(code: str) -> str:
    """Why code can't be given to a worker at all, as an error text; empty if it can."""
    if len(code) > LONGEST_CODE:
        return f"SyntaxError: the code has {len(code)} characters, at most {LONGEST_CODE} are run"
    try:
        code.encode()
    except UnicodeEncodeError:
        return "SyntaxError: the code holds half of a surrogate pair"
    return ""


def _returning_text(session: Any, code: str, limit: int) -> str:
    """The program to run: `code`, ending in the text of its last line's value instead of the value.

    A value would be built again in this process, whatever its size, and hold up everything else here; its text is made
    and cut in the worker. The last line counts if it starts in column 0 and is an expression, which the interpreter
    itself is asked: as the body of a lambda it is parsed but not executed.
    """
    lines = code.rstrip().split("\n")
    start = len(lines) - 1
    while start > 0 and lines[start][:1] in " \t)]}#":
        start -= 1
    # inside parentheses so that a value over several lines stays one expression
    head, tail = "\n".join(lines[:start]), "\n".join(lines[start:])
    try:
        session.feed_run(f"lambda: (\n{tail}\n,)")  # the comma refuses a tail of comments
    except MontySyntaxError:
        return f"{code}\nNone"
    # an f-string calls no name, so code that redefines `repr` or `str` changes nothing here
    return f"{head}\n_ = (\n{tail}\n)\nNone if _ is None else f'{{_!r}}'[:{limit}]"


def _limit_process(pid: int | None, seconds: float) -> None:
    """Let the kernel limit a worker (Linux): no new files, sockets or processes, 512 MB, CPU time for this call.

    The limit of CPU seconds also ends a worker whose parent was killed. Workers are reused, so it starts from what the
    worker has used already. A worker that is gone shows itself in the call.
    """
    if pid is None or not hasattr(resource, "prlimit"):
        return
    try:
        # the name of the program comes first, in parentheses, and may hold spaces
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        used = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        # only the soft limit, which can be raised again for the next call
        _, most = resource.prlimit(pid, resource.RLIMIT_CPU)
        resource.prlimit(pid, resource.RLIMIT_CPU, (math.ceil(used + seconds) + 1, most))
        for kind, limit in _KERNEL_LIMITS.items():
            resource.prlimit(pid, kind, (limit, limit))
    except (OSError, ValueError):
        return
