"""The records that every room shares: tasks, rollouts and what an engine returns. Plain data, no torch.

Guarantees: all records are immutable and are checked by msgspec when they come from a wire or a disk; `Rollout` carries
`schema`, so that old ledgers can be told from new ones; per-token lists of a segment have one length (`Segment.check`).
Not covered: how a rollout is made (`rollout/`), stored (`runtime/ledger.py`) or trained (`training/`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

SCHEMA_VERSION = 1

Status = Literal["completed", "truncated", "aborted", "failed"]
State = Literal["running", "finished", "scored", "trained"]
FinishReason = Literal["stop", "length", "abort"]
Boundary = Literal["engine", "environment", "sandbox", "scorer", "renderer", "empty", "deadline"]
Message = dict[str, Any]


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all records: immutable, keyword-only, and refusing unknown fields when decoded."""


class VersionSpan(Record, frozen=True, kw_only=True):
    """Tokens `start … end` (end excluded) were sampled by the weights of one version, as vLLM and SGLang report it.

    Example: `VersionSpan(version=7, start=0, end=57)`.
    """

    version: int
    """Number of policy updates contained in the weights that produced the logits."""
    start: int
    """First token, counted in the sequence that holds the span (a completion or a segment)."""
    end: int
    """One past the last token."""


class Sampling(Record, frozen=True, kw_only=True):
    """How action tokens are drawn. Training samples from the full distribution at a temperature, so no top-p or top-k.

    Example: `Sampling(temperature=1.0, max_new_tokens=64, stop_token_ids=(5,), seed=0)`.
    """

    temperature: float = 1.0
    """Logits are divided by it before the softmax; 0 takes the most likely token (evaluation only)."""
    max_new_tokens: int = 64
    """Tokens sampled at most in one turn."""
    stop_token_ids: tuple[int, ...] = ()
    """Sampling one of these ends the turn; the stop token is part of the action."""
    seed: int = 0
    """Key of the random numbers, together with the rollout id and the position."""


class Task(Record, frozen=True, kw_only=True):
    """A prompt with what is needed to score it.

    Example: `Task(task_id="calculator/train/17", environment="calculator", data={"problem": "3+4*2", "answer": 11})`.
    """

    task_id: str
    environment: str
    data: dict[str, Any]
    """Problem and gold answer, as the environment wants them."""
    family: str = ""
    """Kind of task, for statistics by difficulty."""


class Failure(Record, frozen=True, kw_only=True):
    """The boundary that a broken rollout crossed, and why. A failure is data; it is never a reward of 0."""

    boundary: Boundary
    reason: str


class Turn(Record, frozen=True, kw_only=True):
    """One action with the observation after it.

    Example: `Turn(segment=0, start=20, end=33, finish_reason="stop", reward=0.0, sampled_at=12.1, observed_at=12.3)`.
    """

    segment: int
    """Index of the segment that holds the action."""
    start: int
    """First action token in that segment."""
    end: int
    """One past the last action token."""
    finish_reason: FinishReason
    reward: float = 0.0
    """Reward of this turn; it belongs to the last action token, whatever observation follows."""
    sampled_at: float = 0.0
    """Clock seconds when the action was complete."""
    observed_at: float = 0.0
    """Clock seconds when the observation was complete."""


class Segment(Record, frozen=True, kw_only=True):
    """One token sequence of a rollout, with everything that is known for each token.

    Observation tokens (prompt, tool results) have `action_mask` False and no log-probability (None, never 0).
    Example: `Segment(token_ids=[3, 9, 5], action_mask=[False, True, True], rollout_log_probs=[None, -.1, -.7],
    version_spans=[VersionSpan(version=0, start=1, end=3)])`.
    """

    token_ids: list[int]
    action_mask: list[bool]
    rollout_log_probs: list[float | None]
    """log μ of each action token, recorded by the engine from the distribution that it sampled (after temperature)."""
    version_spans: list[VersionSpan]
    """Cover the action tokens; positions count in `token_ids`."""

    def versions(self) -> list[int | None]:
        """Version of each token; None for observation tokens."""
        versions: list[int | None] = [None] * len(self.token_ids)
        for span in self.version_spans:
            versions[span.start : span.end] = [span.version] * (span.end - span.start)
        return [v if is_action else None for v, is_action in zip(versions, self.action_mask, strict=True)]

    @property
    def action_tokens(self) -> int:
        """Number of tokens that the policy sampled."""
        return sum(self.action_mask)

    def check(self, vocab_size: int | None = None) -> None:
        """Raise ValueError unless all per-token data fit together and every action token is trainable."""
        n = len(self.token_ids)
        if not len(self.action_mask) == len(self.rollout_log_probs) == n:
            raise ValueError(
                f"segment lists differ in length: {n} token_ids, {len(self.action_mask)} action_mask, "
                f"{len(self.rollout_log_probs)} rollout_log_probs"
            )
        # Checked before `versions` is built, as slices with such ends would move the labels of other tokens.
        if any(not 0 <= span.start <= span.end <= n for span in self.version_spans):
            raise ValueError(f"version spans reach beyond the {n} tokens: {self.version_spans}")
        rows = zip(self.token_ids, self.action_mask, self.rollout_log_probs, self.versions(), strict=True)
        for position, (token, is_action, log_prob, version) in enumerate(rows):
            if token < 0 or (vocab_size is not None and token >= vocab_size):
                raise ValueError(f"token {position} is {token}, outside the vocabulary of {vocab_size}")
            if not is_action:
                continue
            if position == 0:
                raise ValueError("token 0 is an action, but nothing precedes it that could predict it")
            if log_prob is None or not math.isfinite(log_prob) or log_prob > 1e-6:
                raise ValueError(f"action token {position} has log-probability {log_prob}; it must be finite and ≤ 0")
            if version is None or version < 0:
                raise ValueError(f"action token {position} has version {version}; the engine must stamp every token")


class Rollout(Record, frozen=True, kw_only=True):
    """One play of a task, from the first prompt to its score and its step.

    `status` says how the episode ended, `state` how far the rollout has come. `reward` is the sum of the turns' rewards
    and the final `score`; it is None until scored.
    """

    schema: int = SCHEMA_VERSION
    rollout_id: str
    task_id: str
    group_id: str
    """Rollouts of one group share the task and are trained in one step; a group of one is the default."""
    attempt: int = 0
    """How many times this place was tried before."""
    place: int = 0
    """Order of the rollout among all that were started; batches are sorted by it in deterministic mode."""
    environment: str
    family: str = ""
    state: State = "running"
    status: Status | None = None
    terminated: bool = False
    """The episode ended by itself."""
    truncated: bool = False
    """A configured budget (tokens, turns or seconds) cut it."""
    failure: Failure | None = None
    segments: list[Segment] = []
    turns: list[Turn] = []
    messages: list[Message] = []
    """The conversation, for people; training reads tokens only."""
    score: float | None = None
    """Reward of the end of the episode; None while (or when never) scored."""
    sampling: Sampling = Sampling()
    engine: str = ""
    """Name of the engine that sampled it."""
    info: dict[str, Any] = {}
    """Environment's notes: sandbox tier, success, tool calls."""
    started_at: float = 0.0
    finished_at: float = 0.0
    scored_at: float = 0.0
    trained_step: int | None = None

    @property
    def reward(self) -> float | None:
        """Sum of all rewards of the episode, or None when it was not scored."""
        if self.score is None:
            return None
        return self.score + sum(turn.reward for turn in self.turns)

    @property
    def action_tokens(self) -> int:
        """Number of trainable tokens over all segments."""
        return sum(segment.action_tokens for segment in self.segments)

    def spans(self) -> Iterator[VersionSpan]:
        """All version spans in time order."""
        for segment in self.segments:
            yield from segment.version_spans

    @property
    def oldest_version(self) -> int | None:
        """Version of the oldest action token, which decides the staleness; None without action tokens."""
        return min((span.version for span in self.spans() if span.end > span.start), default=None)

    @property
    def trainable(self) -> bool:
        """Scored, not failed and with at least one action token."""
        return self.score is not None and self.status in ("completed", "truncated") and self.action_tokens > 0


class WeightsRef(Record, frozen=True, kw_only=True):
    """Where published weights lie. A file is complete when it is named here.

    Example: `WeightsRef(path="runs/x/weights/step_3/model.safetensors", version=3, sha256="ab…")`.
    """

    path: str
    version: int
    sha256: str


class GenerateRequest(Record, frozen=True, kw_only=True):
    """Token ids in: continue `prompt_ids` until a stop token or the budget.

    Requests of one rollout share `rollout_id`, so that the engine can reuse the prefix between turns.
    """

    request_id: str
    rollout_id: str
    prompt_ids: list[int]
    sampling: Sampling
    key: int = 0
    """Number of the rollout in the random stream: equal (seed, key, position) give equal random numbers."""
    slot: int | None = None
    """Fixed cache slot, for deterministic mode; None lets the engine choose."""


class Completion(Record, frozen=True, kw_only=True):
    """Token ids out. `log_probs[i]` is log μ of `token_ids[i]`; spans count within `token_ids`."""

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    version_spans: list[VersionSpan]
