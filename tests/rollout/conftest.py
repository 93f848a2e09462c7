"""Small real parts for episodes: an engine with a script, an environment with a tool, a rendering by characters.

Ids are code points, the engine changes its weights in mid-turn, time stands still unless a test moves it, and every
part can break at a named point. `bench("?1+2$", "3$", faults={"step": OSError("gone")})` puts them together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest

from soloist.config import RolloutConfig
from soloist.environments.base import Action, StepResult, ToolCall
from soloist.rollout.play import EpisodePlayer, new_rollout
from soloist.types import Completion, GenerateRequest, Message, Rollout, Sampling, Task, VersionSpan

STOP = "$"
TASK = Task(task_id="sum/1", environment="sums", data={"answer": "3"})


class ManualClock:
    """Time that moves only when a test moves it."""

    def __init__(self) -> None:
        self.time = 1000.0

    def monotonic(self) -> float:
        return self.time

    def now(self) -> float:
        return self.time


class Faults:
    """What a named point does: raise an exception, "hang", ask a function or iterator, or answer with a value."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        self.called: list[str] = []

    async def at(self, point: str, answer: Any = None) -> Any:
        self.called.append(point)
        planned = self.plan.get(point, answer)
        if isinstance(planned, BaseException):
            raise planned
        if planned == "hang":
            await asyncio.Event().wait()
        if isinstance(planned, Iterator):
            return next(planned)
        return planned() if callable(planned) else planned


class ScriptedEngine:
    """Samples the scripted texts, one a turn; its version grows by one after `switch_after` tokens of every turn."""

    def __init__(self, *script: str, switch_after: int, faults: Faults) -> None:
        self.script = list(script)
        self.switch_after = switch_after
        self.faults = faults
        self.version = 5
        self.requests: list[GenerateRequest] = []
        self.completions: list[Completion] = []
        self.released: list[str] = []
        self.aborted = asyncio.Event()

    async def generate(self, request: GenerateRequest) -> Completion:
        self.requests.append(request)
        text = self.script.pop(0)
        if text.endswith("…"):  # sampled so far; the rest never comes
            await self.aborted.wait()
            return self._completion(text.removesuffix("…"), "abort")
        cut = len(text) > request.sampling.max_new_tokens
        completion = self._completion(text[: request.sampling.max_new_tokens], "length" if cut else "stop")
        return await self.faults.at("generate", completion)

    def _completion(self, text: str, finish_reason: Any) -> Completion:
        first = sum(len(completion.token_ids) for completion in self.completions)
        spans = [VersionSpan(version=self.version, start=0, end=min(self.switch_after, len(text)))]
        if len(text) > self.switch_after:
            self.version += 1
            spans.append(VersionSpan(version=self.version, start=self.switch_after, end=len(text)))
        log_probs = [-(first + position + 1) / 64 for position in range(len(text))]
        self.completions.append(
            Completion(
                token_ids=[ord(c) for c in text], log_probs=log_probs, finish_reason=finish_reason, version_spans=spans
            )
        )
        return self.completions[-1]

    async def release(self, rollout_id: str) -> None:
        self.released.append(rollout_id)
        await self.faults.at("release")

    async def abort(self, rollout_ids: list[str] | None = None) -> None:
        self.aborted.set()


class SumEpisode:
    """`?expression` calls the tool, anything else is the answer."""

    tools: list[dict[str, Any]] = [{"name": "sum"}]

    def __init__(self, task: Task, faults: Faults) -> None:
        self.task = task
        self.faults = faults
        self.answer = ""
        self.steps: list[Action] = []
        self.closed = 0

    async def reset(self) -> list[Message]:
        return await self.faults.at("reset", [{"role": "user", "content": "1+2?"}])

    async def step(self, action: Action) -> StepResult:
        self.steps.append(action)
        if action.tool_calls:
            observation = {"role": "tool", "content": str(sum(map(int, action.tool_calls[0].name.split("+"))))}
            return await self.faults.at("step", StepResult(messages=[observation], reward=0.125))
        self.answer = action.text
        return await self.faults.at("step", StepResult(terminated=True, reward=0.25))

    async def score(self) -> tuple[float, dict[str, Any]]:
        return await self.faults.at("score", (float(self.answer == self.task.data["answer"]), {"tool_calls": 1}))

    async def close(self) -> None:
        self.closed += 1
        await self.faults.at("close")


class SumEnvironment:
    name = "sums"

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.episodes: list[SumEpisode] = []

    def episode(self, task: Task) -> SumEpisode:
        if "episode" in self.faults.plan:
            raise self.faults.plan["episode"]
        self.episodes.append(SumEpisode(task, self.faults))
        return self.episodes[-1]


class CharacterRendering:
    """`[role]content` for each message; ids are code points. With `forgets`, past actions come out in upper case."""

    stop_token_ids = (ord(STOP),)

    def __init__(self, faults: Faults, forgets: bool) -> None:
        self.faults = faults
        self.forgets = forgets

    def prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        self._at("prompt")
        if self.faults.plan.get("prompt") == "empty":
            return []
        return self._ids(messages) + [ord(c) for c in "[a]"]

    def parse(self, prompt_ids: list[int], completion_ids: list[int], tools: Sequence[dict[str, Any]]) -> Action:
        self._at("parse")
        text = "".join(map(chr, completion_ids)).removesuffix(STOP)
        return Action(text=text, tool_calls=[ToolCall(name=text[1:])] if text.startswith("?") else [])

    def extend(
        self, prompt_ids: list[int], completion_ids: list[int], new: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> list[int] | None:
        self._at("extend")
        if self.forgets:
            return None
        return prompt_ids + completion_ids + self._ids(new) + [ord(c) for c in "[a]"]

    def assistant_message(self, action: Action) -> Message:
        self._at("assistant_message")
        return {"role": "assistant", "content": action.text}

    def _ids(self, messages: Sequence[Message]) -> list[int]:
        shown = [(m["role"], m["content"].upper() if m["role"] == "assistant" else m["content"]) for m in messages]
        return [ord(c) for role, content in shown for c in f"[{role[0]}]{content}\n"]

    def _at(self, point: str) -> None:
        if isinstance(self.faults.plan.get(point), Exception):
            raise self.faults.plan[point]


class Bench:
    """A player with its parts. `budget` are fields of RolloutConfig."""

    def __init__(
        self,
        *script: str,
        faults: dict[str, Any] | None = None,
        switch_after: int = 100,
        forgets: bool = False,
        **budget: Any,
    ) -> None:
        self.faults = Faults(faults or {})
        self.clock = ManualClock()
        self.engine = ScriptedEngine(*script, switch_after=switch_after, faults=self.faults)
        self.environment = SumEnvironment(self.faults)
        self.rendering = CharacterRendering(self.faults, forgets)
        self.player = EpisodePlayer(
            environment=self.environment,  # type: ignore[arg-type]
            engine=self.engine,
            rendering=self.rendering,  # type: ignore[arg-type]
            budget=RolloutConfig(**({"max_turns": 4, "max_tokens": 200} | budget)),
            max_length=256,
            clock=self.clock,
        )

    async def play(self, attempt: int = 0, slot: int | None = None) -> Rollout:
        """Play once; whatever happens, all is closed and released once, and the ledger can store the record."""
        fresh = new_rollout(
            rollout_id=f"r+{attempt}" if attempt else "r",
            group_id="r",
            place=17,
            attempt=attempt,
            task=TASK,
            sampling=Sampling(temperature=0.7, max_new_tokens=64, stop_token_ids=(ord(STOP),), seed=3),
            now=self.clock.now(),
        )
        rollout = await self.player.play(fresh, TASK, slot)
        assert all(episode.closed == 1 for episode in self.environment.episodes)
        assert self.engine.released.count(rollout.rollout_id) == 1
        stored = msgspec.msgpack.encode(rollout)
        assert msgspec.msgpack.encode(msgspec.msgpack.decode(stored, type=Rollout)) == stored
        return rollout


@pytest.fixture
def bench() -> type[Bench]:
    """Builds a player with its parts."""
    return Bench
