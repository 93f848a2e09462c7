"""What an environment is: a task becomes messages, an action becomes an observation, an episode becomes a score.

Environments see messages and tool calls, never tokens, and know no engine. `terminated` (the episode ended) and
`truncated` (a limit of the environment cut it) are two flags, as in Gymnasium. Anything that breaks is raised as
`RolloutError` with its boundary (environment, sandbox, scorer); it never becomes a reward.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from soloist.config import EnvironmentConfig
from soloist.types import Message, Record, Task


class ToolCall(Record, frozen=True, kw_only=True):
    """One tool call of an action. `error` says why it could not be parsed; such a call is answered, not executed."""

    name: str
    arguments: dict[str, Any] = {}
    error: str = ""


class Action(Record, frozen=True, kw_only=True):
    """What the policy said, parsed: text and tool calls.

    Example: `Action(text="", tool_calls=[ToolCall(name="python", arguments={"code": "3+4"})])`.
    """

    text: str
    tool_calls: list[ToolCall] = []


class StepResult(Record, frozen=True, kw_only=True):
    """The environment's answer to an action.

    Example: `StepResult(messages=[{"role": "tool", "name": "python", "content": "7"}])`.
    """

    messages: list[Message] = []
    """The observation, as messages to append; empty when the episode is over."""
    reward: float = 0.0
    """Reward of this turn."""
    terminated: bool = False
    truncated: bool = False
    info: dict[str, Any] = {}


class Episode(Protocol):
    """One play of one task. `close` frees what it holds (its sandbox) and is always called."""

    tools: list[dict[str, Any]]
    """Tool specifications (JSON schema, OpenAI function format) that the prompt shows."""

    async def reset(self) -> list[Message]:
        """First messages."""

    async def step(self, action: Action) -> StepResult:
        """Act, and observe."""

    async def score(self) -> tuple[float, dict[str, Any]]:
        """Final reward and notes. Called once, also for truncated episodes; must raise rather than invent a 0.

        It runs on the event loop of all rollouts: what computes for long belongs into the sandbox or a thread.
        """

    async def close(self) -> None:
        """Free everything."""


class Demonstration(Record, frozen=True, kw_only=True):
    """A conversation to imitate: messages (assistant turns are trained) and the tools of its prompt."""

    messages: list[Message]
    tools: list[dict[str, Any]]


class Environment(Protocol):
    """A source of tasks and of episodes. Tasks are numbered; the same seed and index give the same task, always."""

    name: str
    distinct_tasks: int
    """Training tasks before they come again, in epochs; 0 when they never do."""

    async def start(self) -> None:
        """Start what all episodes share (a pool of sandboxes). Raises RunError."""

    def train_task(self, index: int) -> Task:
        """Training task number `index` (0, 1, …; repeats in epochs of `distinct_tasks` when the set is finite)."""

    def heldout_task(self, index: int) -> Task:
        """Held-out task number `index`, never equal to a training task."""

    def demonstration(self, index: int) -> Demonstration:
        """SFT example number `index`, drawn from training tasks."""

    def episode(self, task: Task) -> Episode:
        """A fresh episode."""

    async def close(self) -> None:
        """Stop what episodes share."""


EnvironmentFactory = Callable[[EnvironmentConfig, int], Environment]
"""Builds an environment from its config section and the run's seed."""

ScoreFunction = Callable[[Task, Sequence[Message]], Awaitable[float]]


def keyed_random(*key: object) -> random.Random:
    """A generator that depends on nothing but `key`: `keyed_random(seed, "train", 17)`."""
    return random.Random("/".join(map(str, key)))
