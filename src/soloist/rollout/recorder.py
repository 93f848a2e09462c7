"""Records the turns of one rollout as segments of tokens. Environments use it, and so can agents from outside.

Guarantees: ids that the engine sampled are stored as they came, each with its own log-probability and version; what is
appended between two actions has mask False. When the next prompt does not continue what was recorded (the history was
rewritten), the segment is sealed and a new one begins: nothing is ever guessed or tokenized again.
Not covered: rendering of messages (`rendering.py`) and the episode's control flow (`play.py`).
"""

from __future__ import annotations

import msgspec

from soloist.types import Completion, Segment, Turn, VersionSpan


class TurnRecorder:
    """Alternate `prompt` and `action`; read `segments` and `turns` at the end.

    Example::

        recorder.prompt(ids)            # the first prompt, or prompt + action + observation of the turn before
        recorder.action(completion, clock.now())
        recorder.observed(reward=0.0, now=clock.now())
    """

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.turns: list[Turn] = []

    @property
    def token_ids(self) -> list[int]:
        """Tokens of the open segment; empty before the first prompt."""
        return self.segments[-1].token_ids if self.segments else []

    def prompt(self, ids: list[int]) -> None:
        """Take the full prompt of the next action. Raises ValueError for an empty one."""
        if not ids:
            raise ValueError("the prompt holds 0 tokens; an action needs at least one token before it")
        known = self.token_ids
        if not known or ids[: len(known)] != known:
            self.segments.append(Segment(token_ids=[], action_mask=[], rollout_log_probs=[], version_spans=[]))
            known = []
        segment, new = self.segments[-1], ids[len(known) :]
        segment.token_ids.extend(new)
        segment.action_mask.extend([False] * len(new))
        segment.rollout_log_probs.extend([None] * len(new))

    def action(self, completion: Completion, now: float) -> None:
        """Append what the engine sampled. Raises ValueError unless ids, log-probabilities and spans fit together."""
        count = len(completion.token_ids)
        spans = completion.version_spans
        edges = [0, *(span.end for span in spans)]
        gapless = edges[:-1] == [span.start for span in spans] and edges == sorted(edges)
        if len(completion.log_probs) != count or not gapless or edges[-1] != count:
            raise ValueError(
                f"the engine returned {count} ids, {len(completion.log_probs)} log-probabilities and version spans "
                f"{[(span.start, span.end) for span in spans]}; all three must cover the same tokens, without gaps"
            )
        segment = self.segments[-1]
        start = len(segment.token_ids)
        segment.token_ids.extend(completion.token_ids)
        segment.action_mask.extend([True] * count)
        segment.rollout_log_probs.extend(completion.log_probs)
        for span in completion.version_spans:
            _append_span(segment.version_spans, span, start)
        turn = Turn(
            segment=len(self.segments) - 1,
            start=start,
            end=start + count,
            finish_reason=completion.finish_reason,
            sampled_at=now,
        )
        self.turns.append(turn)

    def check(self) -> None:
        """Raise ValueError unless every recorded token can be trained (`Segment.check`)."""
        for segment in self.segments:
            segment.check()

    def observed(self, reward: float, now: float) -> None:
        """Give the last turn its reward and the time of its observation."""
        self.turns[-1] = msgspec.structs.replace(self.turns[-1], reward=reward, observed_at=now)


def _append_span(spans: list[VersionSpan], span: VersionSpan, offset: int) -> None:
    """Shift a completion's span into the segment; join it with the one before when both are adjacent and equal."""
    start, end = span.start + offset, span.end + offset
    if start == end:
        return
    if spans and spans[-1].version == span.version and spans[-1].end == start:
        start = spans.pop().start
    spans.append(VersionSpan(version=span.version, start=start, end=end))
