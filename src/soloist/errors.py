"""Errors with a promise attached. Floor 0: every room may raise them.

`UserError` ends the command with exit code 2 and one sentence (what the user can mend), `RunError` with exit code 1
(the run itself went wrong). Everything else is a bug of ours and keeps its traceback.
"""

from __future__ import annotations


class UserError(Exception):
    """Bad input: one sentence that names the file or field, the value found, what was expected and the fix."""


class RunError(Exception):
    """The run cannot go on: a stall, too many failures, a critic that learned nothing. The message says who and why."""


class RolloutError(Exception):
    """A rollout broke at a boundary of the machinery. Becomes a `Failure` record; never a reward."""

    def __init__(self, boundary: str, reason: str) -> None:
        super().__init__(f"{boundary}: {reason}")
        self.boundary = boundary
        self.reason = reason
