"""Ties a program's life to its parent's, then becomes that program: `lifeline PARENT_PID PROGRAM ARGUMENTS…`.

Guarantees (Linux): from before the program's first import the kernel kills it when its parent dies, and Ctrl-C at the
terminal does not reach it; both survive `exec`. Elsewhere only the second holds, and the end of the socket has to do.
The kernel watches the thread that started the program, so that thread must live as long as the program should.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def tie_to_parent(parent_pid: int) -> None:
    """Die by SIGKILL with the parent, and leave SIGINT to it. Exits at once when the parent is dead already."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        # It died between fork and prctl, when nobody was watching yet.
        raise SystemExit(f"parent {parent_pid} is gone; now under {os.getppid()}")


def main() -> None:
    """Entry point of the process."""
    tie_to_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
