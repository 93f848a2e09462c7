"""An environment that a tiny model learns in a minute, registered for the tests of this folder.

Two turns with an observation between them: the first says a digit, the second a letter. The digit 2 earns a half at
once (a reward of its turn), the letter b earns a half at the end. Demonstrations choose at random, so what pays can
only be learned from the two rewards, each by the turn that earned it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from soloist.config import EnvironmentConfig
from soloist.environments import registry
from soloist.environments.base import Action, Demonstration, StepResult, keyed_random
from soloist.types import Message, Task

DIGITS, LETTERS = "0123", "abcd"


class TwoTurns:
    """Say a digit, hear "next", say a letter."""

    name = "two-turns"

    def __init__(self, config: EnvironmentConfig, seed: int, **mixture: float) -> None:
        self.seed = seed
        self.distinct_tasks = config.distinct_tasks

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def train_task(self, index: int) -> Task:
        number = index % self.distinct_tasks if self.distinct_tasks else index
        return Task(task_id=f"two-turns/{number}", environment=self.name, data={})

    def heldout_task(self, index: int) -> Task:
        return Task(task_id=f"two-turns/held-out/{index}", environment=self.name, data={})

    def demonstration(self, index: int) -> Demonstration:
        rng = keyed_random(self.seed, "demonstration", index)
        messages: list[Message] = [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": rng.choice(DIGITS)},
            {"role": "user", "content": "next"},
            {"role": "assistant", "content": rng.choice(LETTERS)},
        ]
        return Demonstration(messages=messages, tools=[])

    def episode(self, task: Task) -> TwoTurnsEpisode:
        return TwoTurnsEpisode()


class TwoTurnsEpisode:
    tools: list[dict[str, Any]] = []

    def __init__(self) -> None:
        self.said: list[str] = []

    async def reset(self) -> list[Message]:
        return [{"role": "user", "content": "go"}]

    async def step(self, action: Action) -> StepResult:
        self.said.append(action.text)
        if len(self.said) == 2:
            return StepResult(terminated=True)
        return StepResult(messages=[{"role": "user", "content": "next"}], reward=0.5 * (action.text == "2"))

    async def score(self) -> tuple[float, dict[str, Any]]:
        return 0.5 * (self.said[1:] == ["b"]), {}

    async def close(self) -> None: ...


@pytest.fixture(autouse=True, scope="session")
def two_turns_environment() -> Iterator[None]:
    """Make `environment.name = "two-turns"` known."""
    registry.ENVIRONMENTS["two-turns"] = TwoTurns
    yield
    del registry.ENVIRONMENTS["two-turns"]
