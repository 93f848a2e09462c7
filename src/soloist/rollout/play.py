"""One episode = environment × engine. Whatever breaks becomes data: a rollout with the boundary that it crossed.

Guarantees: `play_episode` returns a rollout for every lease, whatever happens, except when it is cancelled; a reached
budget (tokens, turns, seconds) truncates and the rollout is still scored; a failure of the machinery is `failed`, never
a reward; the episode is closed and the engine forgets its prefix in every case.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec

from soloist.config import RolloutConfig
from soloist.environments.base import Environment, Episode
from soloist.errors import RolloutError
from soloist.rollout.recorder import TurnRecorder
from soloist.rollout.rendering import Rendering
from soloist.seams import Clock
from soloist.types import Boundary, Completion, Failure, GenerateRequest, Message, Rollout, Sampling, Task

T = TypeVar("T")
# Setting up, acting and scoring are machinery: each has a deadline of its own, above any tool's own limit.
MACHINERY_SECONDS = 60.0
# Its square still fits into fp32, in which the value loss is computed.
LARGEST_REWARD = 1e15
REASON_CHARS = 1000


class Generator(Protocol):
    """The part of an engine (or a set of engines) that an episode needs."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """Continue a prompt."""

    async def release(self, rollout_id: str) -> None:
        """Forget the rollout's prefix."""

    async def abort(self, rollout_ids: list[str] | None = None) -> None:
        """End running requests with finish reason `abort`."""


class EpisodePlayer:
    """Plays episodes of one environment with one renderer and one set of budgets.

    Example: `rollout = await player.play(rollout, task)` where `rollout` is a fresh record with its ids.
    """

    def __init__(
        self,
        *,
        environment: Environment,
        engine: Generator,
        rendering: Rendering,
        budget: RolloutConfig,
        max_length: int,
        clock: Clock,
    ) -> None:
        self._environment = environment
        self._engine = engine
        self._rendering = rendering
        self._budget = budget
        self._max_tokens = min(budget.max_tokens, max_length)
        self._clock = clock

    async def play(
        self,
        rollout: Rollout,
        task: Task,
        slot: int | None = None,
        progress: Callable[[str], None] = lambda waiting_for: None,
    ) -> Rollout:
        """Play `task` once and return the finished record: scored, aborted or failed.

        `progress` hears before each wait what is waited for: a sign of life.
        """
        recorder = TurnRecorder()
        messages: list[Message] = []
        episode: Episode | None = None
        try:
            with _named("environment"):
                episode = self._environment.episode(task)
            ending = await self._turns(rollout, episode, recorder, messages, slot, progress)
            if ending == "aborted":
                return self._finish(rollout, recorder, messages, status="aborted", state="finished")
            with _named("engine"):
                recorder.check()
            progress("its score")
            score, info = await _score(episode)
        except RolloutError as error:
            failure = Failure(boundary=_boundary(error.boundary), reason=_storable_text(error.reason))
            return self._finish(rollout, recorder, messages, status="failed", failure=failure, state="finished")
        finally:
            await self._close(rollout, episode)
        return self._finish(
            rollout,
            recorder,
            messages,
            state="scored",
            status="truncated" if ending == "truncated" else "completed",
            terminated=ending == "terminated",
            truncated=ending == "truncated",
            score=score,
            info=info,
            scored_at=self._clock.now(),
        )

    async def _turns(
        self,
        rollout: Rollout,
        episode: Episode,
        recorder: TurnRecorder,
        messages: list[Message],
        slot: int | None,
        progress: Callable[[str], None],
    ) -> str:
        """Alternate action and observation until the episode ends; says how: terminated, truncated or aborted."""
        deadline = self._clock.monotonic() + self._budget.max_seconds
        progress("the environment's reset")
        first = await _bounded(episode.reset, "environment")
        with _named("environment"):
            _keep(messages, first)
        with _named("renderer"):
            prompt = self._rendering.prompt(messages, episode.tools)
        for turn in range(self._budget.max_turns):
            room = self._max_tokens - len(prompt)
            seconds = deadline - self._clock.monotonic()
            if room <= 0 or seconds <= 0:
                return "truncated"
            with _named("renderer"):
                recorder.prompt(prompt)
            progress(f"turn {turn + 1} at the engine")
            completion, out_of_time = await self._sample(rollout, prompt, room, seconds, slot)
            with _named("engine"):
                recorder.action(completion, self._clock.now())
            if completion.finish_reason == "abort":
                return "truncated" if out_of_time else "aborted"
            with _named("renderer"):
                action = self._rendering.parse(prompt, completion.token_ids, episode.tools)
                _keep(messages, [self._rendering.assistant_message(action)])
            if completion.finish_reason == "length":
                # A cut action was not finished, so it is not executed: its text may mean something else.
                return "truncated"
            progress("the environment's answer")
            result = await _bounded(partial(episode.step, action), "environment")
            with _named("environment"):
                recorder.observed(_checked_reward(result.reward, "step"), self._clock.now())
                if result.terminated or result.truncated:
                    return "terminated" if result.terminated else "truncated"
                _keep(messages, result.messages)
            with _named("renderer"):
                extended = self._rendering.extend(prompt, completion.token_ids, result.messages, episode.tools)
                prompt = extended or self._rendering.prompt(messages, episode.tools)
        return "truncated"

    async def _sample(
        self, rollout: Rollout, prompt: list[int], room: int, seconds: float, slot: int | None
    ) -> tuple[Completion, bool]:
        """One action. The second value says that the episode's seconds ran out while it was sampled."""
        budget = min(room, self._budget.max_new_tokens)
        request = GenerateRequest(
            request_id=f"{rollout.rollout_id}/{rollout.attempt}/{len(prompt)}",
            rollout_id=rollout.rollout_id,
            prompt_ids=prompt,
            sampling=msgspec.structs.replace(rollout.sampling, max_new_tokens=budget),
            key=rollout.place,
            slot=slot,
        )
        out_of_time = asyncio.Event()

        async def stop_when_late() -> None:
            await asyncio.sleep(seconds)
            out_of_time.set()
            await self._engine.abort([rollout.rollout_id])

        timer = asyncio.create_task(stop_when_late(), name=f"budget of {rollout.rollout_id}")
        try:
            # The engine has deadlines of its own; this one is for an engine that doesn't keep them.
            generate = partial(self._engine.generate, request)
            completion = await _bounded(generate, "engine", seconds + MACHINERY_SECONDS)
            return completion, out_of_time.is_set()
        finally:
            timer.cancel()

    async def _close(self, rollout: Rollout, episode: Episode | None) -> None:
        # Cleaning up must not turn a good rollout into a lost one; what it could leave behind dies with its process.
        try:
            with suppress(RolloutError):
                await _bounded(partial(self._engine.release, rollout.rollout_id), "engine")
        finally:
            if episode is not None:
                with suppress(RolloutError):
                    await _bounded(episode.close, "environment")

    def _finish(self, rollout: Rollout, recorder: TurnRecorder, messages: list[Message], **changes: object) -> Rollout:
        finished = msgspec.structs.replace(
            rollout,
            segments=recorder.segments,
            turns=recorder.turns,
            messages=messages,
            finished_at=self._clock.now(),
            **changes,
        )
        if finished.score is not None and finished.action_tokens == 0:
            failure = Failure(boundary="empty", reason="the policy sampled no token")
            return msgspec.structs.replace(finished, status="failed", failure=failure, score=None, state="finished")
        return finished


def new_rollout(
    *,
    rollout_id: str,
    group_id: str,
    place: int,
    attempt: int,
    task: Task,
    sampling: Sampling,
    now: float,
    engine: str = "",
) -> Rollout:
    """An empty record in state `running`; a second attempt starts from one, too."""
    return Rollout(
        rollout_id=rollout_id,
        task_id=task.task_id,
        group_id=group_id,
        attempt=attempt,
        place=place,
        environment=task.environment,
        family=task.family,
        sampling=sampling,
        engine=engine,
        started_at=now,
    )


@contextmanager
def _named(boundary: str) -> Iterator[None]:
    """Whatever is raised inside becomes a RolloutError of this boundary, unless it names one already."""
    try:
        yield
    except RolloutError:
        raise
    except Exception as error:
        raise RolloutError(boundary, f"{type(error).__name__}: {error}") from error


async def _bounded(call: Callable[[], Awaitable[T]], boundary: str, seconds: float | None = None) -> T:
    """Wait for an answer, but not for ever; anything that is raised is named by its boundary."""
    limit = MACHINERY_SECONDS if seconds is None else seconds
    timer = asyncio.timeout(limit)
    try:
        with _named(boundary):
            async with timer:
                return await call()
    except RolloutError as error:
        if timer.expired():
            raise RolloutError(boundary, f"no answer within {limit:g} s") from error
        raise
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # Nobody cancelled us: what was called lost a task of its own. Let through, it would end the player silently.
        raise RolloutError(boundary, "CancelledError: it was cancelled from inside") from error


async def _score(episode: Episode) -> tuple[float, dict[str, Any]]:
    """Score and notes of an episode, checked: what is no number is a failure and never 0."""
    answer = await _bounded(episode.score, "scorer")
    with _named("scorer"):
        score, info = answer
        # What can't be written into the ledger must be found here, where it costs one rollout and not the run.
        msgspec.msgpack.encode(info)
        return _checked_reward(score, "score"), dict(info)


def _keep(messages: list[Message], new: Sequence[Message]) -> None:
    """Append messages that the ledger can store; raises what msgspec raises for others (lone surrogates, objects)."""
    msgspec.msgpack.encode(new)
    messages.extend(new)


def _storable_text(text: str) -> str:
    """Text of a reason: without lone surrogates, and not longer than a person reads."""
    return text.encode("utf-8", "replace").decode()[:REASON_CHARS]


def _checked_reward(value: object, where: str) -> float:
    if isinstance(value, bool | int | float) and abs(value) <= LARGEST_REWARD:
        return float(value)
    raise RolloutError("scorer", f"{where} returned {value!r}; a reward is a number within ±{LARGEST_REWARD:g}")


_BOUNDARIES: dict[str, Boundary] = {
    "engine": "engine",
    "environment": "environment",
    "sandbox": "sandbox",
    "scorer": "scorer",
    "renderer": "renderer",
}


def _boundary(name: str) -> Boundary:
    return _BOUNDARIES.get(name, "environment")
