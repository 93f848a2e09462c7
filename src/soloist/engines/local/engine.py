"""The parent's side of the embedded engine: requests go to a child process, completions come back.

Who waits for what:
    caller of `generate`   waits for its answer, at most `request_seconds`, queueing and restarts included
    caller of `load`       waits for the swap, `request_seconds` for each child that it takes; loads go one at a time
    supervisor (one task)  reads replies; when the child is gone it starts another one and hands the work over
    probe (task on demand) asks a child that missed a deadline for a sign of life, and kills it when there is none

Guarantees: a crash of the child is noticed at once (its socket ends) and logged with its last words; a fresh child has
the last good weights before any request goes on; restarted requests begin again at their prompt, so a completion never
mixes two children; after `restarts` crashes the engine is lost and tells everybody. A child that is killed during its
first start is replaced, too; one that gives up then is not, as the next would, too. No child outlives this process.
Not covered: choosing among engines (`pool`), weights files (`runtime/weights.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from soloist.config import EngineConfig
from soloist.engines.base import Capabilities, EngineHealth
from soloist.engines.local.child import Child
from soloist.engines.local.desk import Desk
from soloist.engines.local.messages import (
    Abort,
    Alteration,
    AskHealth,
    Cancel,
    Close,
    FrameError,
    Generate,
    Load,
    Loaded,
    NotLoaded,
    Ready,
    Release,
    Start,
)
from soloist.errors import RolloutError, RunError
from soloist.seams import Clock, SystemClock, fault_point
from soloist.types import Completion, GenerateRequest, WeightsRef

START_SECONDS = 300.0
"""Deadline of a child's start: importing, reading the model folder and loading the last weights."""
CLOSE_SECONDS = 2.0
"""What a child gets to exit by itself when the engine is closed."""
EXIT_SECONDS = 10.0
"""What a child gets to exit after its socket has ended, so that its own exit code is reported and not our kill."""
HEALTH_SECONDS = 5.0
"""How long `health` waits for fresh numbers before it reports the last known ones."""

_log = logging.getLogger("soloist.engines")


class _KilledAtStartError(RunError):
    """Something outside ended a child before it served."""


class LocalEngine:
    """Serves one model folder from a child process. Implements `engines.base.Engine`.

    Example: `engine = LocalEngine("local-0", Path("models/tiny"), EngineConfig()); await engine.start()`.
    `fixed_shapes` makes each completion depend, bit for bit, on its request, its slot and the weights only; prefixes
    are then computed anew each turn. `vocab_size` cuts off ids that the model has but the tokenizer does not. `seed` is
    that of `engine.noise`.
    """

    capabilities = Capabilities(in_flight_load=True, recompute_on_load=True, fixed_shapes=True)

    def __init__(
        self,
        name: str,
        model_folder: Path,
        config: EngineConfig,
        *,
        fixed_shapes: bool = False,
        vocab_size: int | None = None,
        seed: int = 0,
        clock: Clock | None = None,
    ) -> None:
        self.name = name
        self.request_seconds = config.request_seconds
        """Deadline of one generate or load call; may be changed while running."""
        self.restarts = 0
        self.lost = ""
        """Why the engine will never serve again; empty while it does."""
        self._config = config
        self._start = Start(
            model_folder=str(model_folder),
            dtype=config.dtype,
            device=config.device,
            threads=config.threads,
            slots=config.slots,
            max_length=config.max_length,
            recompute=config.on_load == "recompute",
            fixed_shapes=fixed_shapes,
            vocab_size=vocab_size,
            prefill_chunk=config.prefill_chunk,
            cores=config.cores,
            cuda_graphs=config.cuda_graphs,
            alteration=Alteration(noise=config.noise, rounding=config.rounding, seed=seed),
        )
        self._clock = clock or SystemClock()
        self._child: Child | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._probe: asyncio.Task[bool] | None = None
        self._closed = False
        self._desk = Desk(name, vocab_size)
        self._swapping = asyncio.Lock()

    @property
    def version(self) -> int:
        """Version of the last successful load; 0 before any."""
        return self._desk.version

    @property
    def child_pid(self) -> int | None:
        """Process id of the child; None while there is none."""
        return self._child.pid if self._child else None

    async def start(self) -> None:
        """Start the child and wait until it serves. Raises RunError with the child's last words when it can't.

        A child that something kills meanwhile is replaced while the budget of restarts lasts.
        """
        if self._supervisor is not None or self._closed:
            raise RunError(f"engine '{self.name}' was started before; build a new one")
        child = await self._first_child()
        self._child = child
        self._supervisor = asyncio.create_task(self._supervise(child), name=f"supervisor of engine {self.name}")

    async def generate(self, request: GenerateRequest) -> Completion:
        """Continue a prompt. Raises RolloutError("engine", …) when the child can't, is lost, or the deadline passes."""
        self._refuse_when_down(lambda reason: RolloutError("engine", reason))
        answer = self._desk.ask(request)
        began = self._clock.monotonic()
        try:
            # Without a child the request waits on the desk; a fresh child is handed everything there.
            if self._child:
                self._child.send(Generate(request=request))
            async with asyncio.timeout(self.request_seconds):
                return await answer
        except FrameError as error:
            raise RolloutError("engine", f"request {request.request_id}: {error}") from error
        except TimeoutError as error:
            if self._child:
                self._suspect(self._child)
            waited = self._clock.monotonic() - began
            raise RolloutError(
                "engine",
                f"request {request.request_id} had no answer from '{self.name}' after {waited:.1f} s; the limit is "
                f"engine.request_seconds = {self.request_seconds:g}",
            ) from error
        finally:
            # Still listed means unanswered: the deadline passed or the caller was cancelled.
            if self._desk.forget(request.request_id) and self._child:
                self._child.send(Cancel(request_id=request.request_id))

    async def release(self, rollout_id: str) -> None:
        """Forget the prefix kept for a rollout that is over."""
        if self._child:
            self._child.send(Release(rollout_id=rollout_id))

    async def load(self, weights: WeightsRef) -> None:
        """Swap the weights between two decode steps. Raises RunError and keeps the old ones when they don't fit."""
        if weights.version < 0:
            raise RunError(f"engine '{self.name}' can't load version {weights.version}; versions count from 0")
        async with self._swapping:
            self._refuse_when_down(RunError)
            fault_point("engine:load:before")
            answer = self._desk.ask_load(weights)
            if self._child:
                self._child.send(Load(weights=weights))
            try:
                await self._loaded(answer, weights.version)
            finally:
                # Whoever gave up is not waited for: a fresh child is handed only loads that somebody awaits.
                answer.cancel()
            fault_point("engine:load:after")

    async def _loaded(self, answer: asyncio.Future[None], version: int) -> None:
        """Wait for a load. A child that hangs or dies meanwhile is replaced, and the fresh one has the same time."""
        while True:
            child = self._child
            await asyncio.wait([answer], timeout=self.request_seconds)
            if answer.done():
                return answer.result()
            # Restarts are bounded and each has a deadline, so this ends: with the load, or with the engine's loss.
            if child is None or self._child is not child or await self._hangs(child):
                continue
            raise RunError(
                f"engine '{self.name}' did not load version {version} within engine.request_seconds = "
                f"{self.request_seconds:g}; raise it if the weights are that large"
            )

    async def abort(self, rollout_ids: list[str] | None = None) -> None:
        """End the requests of these rollouts (all when None) with finish reason `abort`."""
        self._desk.mark_aborted(rollout_ids)
        if self._child:
            self._child.send(Abort(rollout_ids=rollout_ids))
        else:
            self._desk.answer_aborted()

    async def health(self) -> EngineHealth:
        """State and counters. `alive` means that it serves, or will again by itself after a restart."""
        if self._child:
            await self._ping(self._child, min(HEALTH_SECONDS, self.request_seconds))
        seen = self._desk.counters
        return EngineHealth(
            alive=self._supervisor is not None and not self._closed and not self.lost,
            version=self.version,
            running=seen.running,
            waiting=seen.waiting,
            restarts=self.restarts,
            tokens=self._desk.tokens_before + seen.tokens,
            busy_s=self._desk.busy_before_s + seen.busy_s,
        )

    async def close(self) -> None:
        """Ask the child to exit, then kill it. Who still waits gets an error. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        # The supervisor first stops watching, so that the end of the child does not look like a crash.
        for task in (self._probe, self._supervisor):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        child, self._child = self._child, None
        if child is not None:
            child.send(Close())
            await child.end(CLOSE_SECONDS)
        self._desk.fail_all(f"engine '{self.name}' was closed")

    async def _first_child(self) -> Child:
        while True:
            try:
                return await self._launch()
            except _KilledAtStartError as error:
                if self.restarts >= self._config.restarts:
                    raise
                self.restarts += 1
                _log.warning("%s; restart %d of %d", error, self.restarts, self._config.restarts)

    async def _launch(self) -> Child:
        """A fresh child with the last good weights. Raises RunError when it does not come to serve."""
        child = await Child.spawn(self._config.threads)
        try:
            async with asyncio.timeout(START_SECONDS):
                child.send(self._start)
                ready = await child.receive()
                if not isinstance(ready, Ready):
                    words = await child.end(EXIT_SECONDS)
                    error = _KilledAtStartError if child.was_killed else RunError
                    raise error(f"engine '{self.name}' did not start: {words}")
                self._desk.vocab_size = ready.vocab_size
                await self._restore(child)
        except (TimeoutError, FrameError) as error:
            child.kill()
            words = await child.end(EXIT_SECONDS)
            reason = str(error) or f"no answer within {START_SECONDS:g} s"
            raise RunError(f"engine '{self.name}' did not start ({reason}): {words}") from error
        except BaseException:
            # Cancelled by `close` or Ctrl-C while the child was starting: nobody else knows it yet.
            child.kill()
            await child.end(EXIT_SECONDS)
            raise
        return child

    async def _restore(self, child: Child) -> None:
        """Load the last good weights into a fresh child, so that versions never go back in a crash."""
        weights = self._desk.weights
        if weights is None:
            return
        child.send(Load(weights=weights))
        reply = await child.receive()
        if isinstance(reply, Loaded):
            return
        reason = reply.reason if isinstance(reply, NotLoaded) else await child.end(EXIT_SECONDS)
        raise RunError(f"engine '{self.name}' could not restore version {weights.version}: {reason}")

    async def _supervise(self, child: Child) -> None:
        """Read replies until the child is gone; replace it while the budget of restarts lasts."""
        while True:
            await self._listen(child)
            self._child = None
            # From here on nothing is sent; requests that arrive wait on the desk.
            words = await child.end(EXIT_SECONDS)
            _log.error("engine '%s': %s; %d requests wait", self.name, words, len(self._desk))
            self._desk.child_gone()
            fresh = await self._replace(words)
            if fresh is None:
                return
            child = fresh

    async def _listen(self, child: Child) -> None:
        try:
            while (reply := await child.receive()) is not None:
                self._desk.take(reply)
        except FrameError as error:
            _log.error("engine '%s' sent bytes that are no reply: %s", self.name, error)
            child.kill()

    async def _replace(self, words: str) -> Child | None:
        """A serving child with all waiting work, or None (and everybody told) when the budget is spent."""
        while self.restarts < self._config.restarts:
            self.restarts += 1
            try:
                child = await self._launch()
            except RunError as error:
                # A start that failed uses up the budget too, or a broken machine would be tried for ever.
                words = str(error)
                _log.error("%s", words)
                continue
            # No await between these lines, so no request is sent twice or missed.
            self._child = child
            orders = self._desk.hand_over()
            for order in orders:
                child.send(order)
            _log.warning(
                "engine '%s': child %d took over at version %d, orders handed on: %d; restart %d of %d",
                self.name, child.pid, self.version, len(orders), self.restarts, self._config.restarts,
            )  # fmt: skip
            return child
        self.lost = f"engine '{self.name}' is lost after {self.restarts} restarts: {words}"
        _log.error("%s", self.lost)
        self._desk.fail_all(self.lost)
        return None

    def _refuse_when_down(self, error: Callable[[str], Exception]) -> None:
        if self.lost:
            raise error(self.lost)
        if self._closed or self._supervisor is None:
            raise error(f"engine '{self.name}' is {'closed' if self._closed else 'not started'}")

    async def _ping(self, child: Child, limit_s: float) -> bool:
        """Whether the child answers within the limit. It answers between two decode steps."""
        ping = self._desk.ask_health()
        child.send(AskHealth())
        try:
            async with asyncio.timeout(limit_s):
                await ping
        except TimeoutError:
            return False
        return True

    def _suspect(self, child: Child) -> asyncio.Task[bool]:
        """A deadline passed: find out whether the child hangs, without keeping anybody waiting."""
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._kill_if_hung(child), name=f"probe of engine {self.name}")
        return self._probe

    async def _hangs(self, child: Child) -> bool:
        """Whether the child gave no sign of life, and was killed."""
        probe = self._suspect(child)
        await asyncio.wait([probe])
        # `close` cancels the probe; its caller is not cancelled and must not end as if it were.
        return not probe.cancelled() and probe.result()

    async def _kill_if_hung(self, child: Child) -> bool:
        if await self._ping(child, self.request_seconds):
            return False
        _log.error("engine '%s': child %d gives no sign of life; killing it", self.name, child.pid)
        child.kill()
        return True
