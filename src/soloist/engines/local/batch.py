"""Continuous batching: requests join and leave between any two decode steps.

Guarantees: a request that can't be served is refused with a reason and disturbs no other; a load is verified in full
before anything changes; versions, log-probabilities and ids come from one step of the runner, so they belong together.
Not covered: sockets and processes (`worker`), deadlines and retries (`engine`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import Tensor

from soloist.engines.local.loads import EXACT, verify
from soloist.engines.local.messages import Alteration, Counters
from soloist.engines.local.model_runner import PASS_TOKENS, ModelRunner, first_tokens
from soloist.engines.local.own_forward import Stretch
from soloist.engines.local.scheduler import SlotTable
from soloist.engines.local.state import Ended
from soloist.models.loading import parameter_table
from soloist.seams import Clock, SystemClock
from soloist.types import Completion, FinishReason, GenerateRequest, VersionSpan, WeightsRef


@dataclass(frozen=True)
class Answer:
    """What became of a request: a completion, or the reason why there is none."""

    request_id: str
    completion: Completion | None
    reason: str = ""


def spans_of(versions: Sequence[int]) -> list[VersionSpan]:
    """Runs of equal versions: [3, 3, 4] → [3: 0…2, 4: 2…3]."""
    spans: list[VersionSpan] = []
    for version, run in groupby(versions):
        start = spans[-1].end if spans else 0
        spans.append(VersionSpan(version=version, start=start, end=start + len(list(run))))
    return spans


class ContinuousBatch:
    """Serves requests with one model: `submit`, then `step` while `busy`."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        recompute: bool = False,
        prefill_chunk: int = 256,
        alteration: Alteration = EXACT,
        clock: Clock | None = None,
    ) -> None:
        """`alteration` is for weights that are loaded; those that the runner was built with stay as they are."""
        self.runner = runner
        self.alteration = alteration
        self.recompute = recompute
        self.prefill_chunk = prefill_chunk
        # Delta prefill depends on what an earlier turn left behind; in fixed shapes nothing may depend on the past.
        self.table = SlotTable(runner.slots, reuse=not runner.fixed_shapes)
        self.tokens = 0
        self.busy_s = 0.0
        self._clock = clock or SystemClock()
        self._prompts: list[Stretch] = []
        """What is left to compute of the prompts of seated requests, in order of arrival."""

    @property
    def busy(self) -> bool:
        """Something waits or runs."""
        return bool(self.table.waiting or self.table.running)

    @property
    def counters(self) -> Counters:
        """State and totals for the parent."""
        return Counters(
            version=self.runner.version,
            running=len(self.table.running),
            waiting=len(self.table.waiting),
            tokens=self.tokens,
            busy_s=self.busy_s,
        )

    def submit(self, request: GenerateRequest) -> Answer | None:
        """Queue a request; the answer comes from `step`, or at once when nothing can be sampled."""
        problem = self._problem(request)
        if problem:
            return Answer(request.request_id, None, problem)
        # A full context is the end of a budget, which truncates; it is not an error.
        if request.sampling.max_new_tokens < 1 or len(request.prompt_ids) >= self.runner.max_length:
            return Answer(request.request_id, _completion(None, "length"))
        self.table.submit(request)
        return None

    def _problem(self, request: GenerateRequest) -> str:
        """Why a request can't be served, or nothing."""
        vocab_size, slots = self.runner.vocab_size, self.runner.slots
        # Checked before anything reaches a tensor: an id out of range would end the process or the device.
        if not request.prompt_ids:
            return "the prompt has 0 tokens; sampling needs at least one before it"
        for name, tokens in (("prompt", request.prompt_ids), ("stop", request.sampling.stop_token_ids)):
            if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
                bad = next(token for token in tokens if not 0 <= token < vocab_size)
                return f"{name} token {bad} is outside the vocabulary of {vocab_size}"
        temperature = request.sampling.temperature
        if not (temperature >= 0 and math.isfinite(temperature)):
            return f"temperature is {temperature}; it must be finite and at least 0"
        if request.slot is not None and not 0 <= request.slot < slots:
            return f"slot {request.slot} does not exist; the engine has {slots}"
        return ""

    def step(self) -> list[Answer]:
        """Seat who waits, then sample one token for everybody whose prompt is done. Returns the requests that end."""
        started = self._clock.monotonic()
        self._admit()
        stretches, self._prompts = first_tokens(self._prompts, self._allowance())
        unfinished = self._prompts[0].slot if self._prompts else None
        ready = [stretch.slot for stretch in stretches if stretch.slot != unfinished]
        self.tokens += self.runner.running + len(ready)
        answers = self._finish(self.runner.step(stretches, ready)) if self.table.running else []
        self.busy_s += self._clock.monotonic() - started
        return answers

    def _allowance(self) -> int:
        """Prompt tokens of this step: bounded beside running requests, so that a long prompt can't hold them up."""
        if self.runner.fixed_shapes:
            return sum(stretch.end - stretch.start for stretch in self._prompts)
        return self.prefill_chunk if self.runner.running else max(self.prefill_chunk, PASS_TOKENS)

    def _admit(self) -> None:
        seats = self.table.admit(self.runner.version)
        if seats:
            self.runner.seat(seats)
            self._prompts += [Stretch(seat.slot, seat.reused, len(seat.request.prompt_ids)) for seat in seats]

    def _finish(self, ended: Sequence[Ended]) -> list[Answer]:
        answers = []
        for row in ended:
            request = self.table.running[row.slot].request
            if not row.finite:
                # No completion at all: a number in place of NaN would be trained on as if it were true.
                self.table.vacate(row.slot)
                reason = (
                    f"non-finite logits at token {len(row.token_ids)} of the action, weights version {row.versions[-1]}"
                )
                answers.append(Answer(request.request_id, None, reason))
                continue
            stopped = row.token_ids[-1] in request.sampling.stop_token_ids
            answers.append(self._keep(row, "stop" if stopped else "length"))
        return answers

    def _keep(self, row: Ended, finish_reason: FinishReason) -> Answer:
        request = self.table.running[row.slot].request
        self._forget_prompt(row.slot)
        # Of a prompt that was cut short, only what was computed can be continued.
        self.table.finish(row.slot, request.prompt_ids + row.token_ids, cached=self.runner.cached(row.slot))
        return Answer(request.request_id, _completion(row, finish_reason))

    def _forget_prompt(self, slot: int) -> None:
        self._prompts = [stretch for stretch in self._prompts if stretch.slot != slot]

    def abort(self, rollout_ids: Sequence[str] | None) -> list[Answer]:
        """End the requests of these rollouts (all when None); what they sampled so far is returned."""
        wanted = None if rollout_ids is None else set(rollout_ids)
        waiting = [r for r in self.table.waiting if wanted is None or r.rollout_id in wanted]
        for request in waiting:
            self.table.withdraw(request.request_id)
        slots = [s for s, seat in self.table.running.items() if wanted is None or seat.request.rollout_id in wanted]
        answers = [Answer(request.request_id, _completion(None, "abort")) for request in waiting]
        return answers + [self._keep(row, "abort") for row in (self.runner.stop(slots) if slots else [])]

    def cancel(self, request_id: str) -> None:
        """Drop a request without an answer."""
        slot = self.table.withdraw(request_id)
        if slot is not None:
            self._forget_prompt(slot)
            self.runner.stop([slot])
            self.table.vacate(slot)

    def release(self, rollout_id: str) -> None:
        """Forget the prefixes of a rollout."""
        self.table.release(rollout_id)

    def load(self, weights: WeightsRef) -> None:
        """Verify and swap the weights. Raises ValueError, with nothing changed, when they don't fit."""
        # Everything that can fail comes before the first tensor changes.
        verified = verify(weights, parameter_table(self.runner.model), self.alteration)
        if verified.tensors is None:
            raise ValueError(verified.reason)
        self.swap(verified.tensors, weights.version)

    def swap(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Put verified weights in place, and compute the caches anew if that is wanted."""
        self.runner.load(tensors, version)
        if not self.recompute:
            return
        started = self._clock.monotonic()
        # Idle prefixes too: they belong to running rollouts that are just waiting for an observation.
        self.runner.recompute([*self.table.running, *self.table.kept])
        self.table.renewed(version)
        self.busy_s += self._clock.monotonic() - started


def _completion(row: Ended | None, finish_reason: FinishReason) -> Completion:
    """A completion from what a row sampled; None sampled nothing."""
    if row is None:
        return Completion(token_ids=[], log_probs=[], finish_reason=finish_reason, version_spans=[])
    return Completion(
        token_ids=row.token_ids,
        log_probs=row.log_probs,
        finish_reason=finish_reason,
        version_spans=spans_of(row.versions),
    )
