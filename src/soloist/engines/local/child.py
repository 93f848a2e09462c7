"""The parent's handle on one child process: start, send, receive, end. One object, one process.

Guarantees: the child gets an environment built from an allow-list, so secrets of the parent don't reach it; it dies
with the parent; its end is seen as the end of the stream of replies; memory for its stderr is bounded.
Not covered: what the messages mean, and what to do after a crash (`engine`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Mapping

from soloist.engines.local.messages import FrameBuffer, Order, Reply, pack_frame, unpack_reply

ALLOWED_ENVIRONMENT = (
    "PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "PYTHONPATH", "PYTHONHASHSEED", "VIRTUAL_ENV", "LD_LIBRARY_PATH",
    "CUDA_VISIBLE_DEVICES", "CUDA_HOME", "NVIDIA_VISIBLE_DEVICES",
)  # fmt: skip
"""Variables that the child inherits; everything else stays with the parent."""

MEMORY_SETTINGS = {
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "THP_MEM_ALLOC_ENABLE": "1",
}
"""Steps free and allocate the same sizes again and again: giving memory back in between costs page faults. Large pages
spare the key/value cache address look-ups."""

_STDERR_CHARACTERS = 4000
_READ_BYTES = 1 << 20


def child_environment(threads: int, environment: Mapping[str, str]) -> dict[str, str]:
    """What the child may know: the allow-list, no network for model files, and its number of threads."""
    allowed = {name: environment[name] for name in ALLOWED_ENVIRONMENT if name in environment}
    fixed = {
        **MEMORY_SETTINGS,
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
    return allowed | fixed


class Child:
    """A running worker process."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._frames = FrameBuffer()
        self._replies: deque[Reply] = deque()
        self._stderr = ""
        self._listening = asyncio.create_task(self._listen(), name=f"stderr of engine child {process.pid}")

    @classmethod
    async def spawn(cls, threads: int) -> Child:
        """Start a worker. It imports for seconds before it reads its first order."""
        # Unnamed and inherited: no path, no port, and nobody else can connect.
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "soloist.engines.local.lifeline", str(os.getpid()),
                sys.executable, "-P", "-m", "soloist.engines.local.worker", str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                # Replies go by the socket only, so that a print of some library can't break the protocol.
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                env=child_environment(threads, os.environ),
                # Out of the terminal's foreground group: Ctrl-C is for the parent, which then decides.
                start_new_session=True,
            )  # fmt: skip
        except BaseException:
            ours.close()
            raise
        finally:
            # Our copy of its end would keep the socket open after the child is gone.
            theirs.close()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        return cls(process, reader, writer)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended it, and not a decision of its own."""
        return (self._process.returncode or 0) < 0

    def send(self, order: Order) -> None:
        """Queue an order; it is lost when the child is gone, as `receive` will tell. Raises FrameError if too large."""
        if not self._writer.is_closing():
            self._writer.write(pack_frame(order))

    async def receive(self) -> Reply | None:
        """Next reply, or None when the child is gone. Raises FrameError for bytes that are no reply."""
        while not self._replies:
            try:
                data = await self._reader.read(_READ_BYTES)
            # A killed child may reset the socket instead of ending it.
            except ConnectionError:
                return None
            if not data:
                return None
            self._replies.extend(unpack_reply(payload) for payload in self._frames.feed(data))
        return self._replies.popleft()

    def kill(self) -> None:
        """End the process now, even if it is stopped."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def end(self, grace_s: float) -> str:
        """Wait up to `grace_s` seconds for the exit, then kill. Returns exit code or signal, and the last words."""
        try:
            await asyncio.wait_for(self._process.wait(), grace_s)
        except TimeoutError:
            self.kill()
            await self._process.wait()
        finally:
            self.kill()
            self._writer.close()
        # Bounded, as a grandchild could hold the pipe open.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._listening, 1.0)
        return self._last_words()

    def _last_words(self) -> str:
        code = self._process.returncode
        if code is not None and code < 0:
            how = f"was killed by signal {-code} ({signal.strsignal(-code)})"
        else:
            how = f"exited with code {code}"
        lines = [line for line in self._stderr.splitlines() if line.strip()][-5:]
        return f"child {self.pid} {how}" + (f"; its last words: {' | '.join(lines)}" if lines else "")

    async def _listen(self) -> None:
        stderr = self._process.stderr
        while stderr is not None and (data := await stderr.read(_READ_BYTES)):
            self._stderr = (self._stderr + data.decode(errors="replace"))[-_STDERR_CHARACTERS:]
