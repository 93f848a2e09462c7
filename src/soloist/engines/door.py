"""The check at the engines' door: what a completion must satisfy before anybody trains on it.

Guarantees: a completion that passes has an id, a finite log-probability ≤ 0 and exactly one known version for each
token, and is no longer than asked. Single-rollout training trusts these log-probabilities completely, so a doubtful
completion is refused whole with a reason; nothing is filled in.
Not covered: whether the numbers are true (parity tests say so).
"""

from __future__ import annotations

import math

from soloist.errors import RolloutError
from soloist.types import Completion, GenerateRequest

ROUNDING = 1e-6
"""A log-probability may exceed 0 by this much: log softmax of a certain token in fp32."""


def check_completion(
    completion: Completion, request: GenerateRequest, *, vocab_size: int | None, newest_version: int
) -> Completion:
    """Return the completion unchanged, or raise RolloutError("engine", …) naming the first thing that is wrong."""
    problem = (
        _wrong_size(completion, request)
        or _wrong_token(completion, vocab_size)
        or _wrong_version(completion, newest_version)
    )
    if problem:
        raise RolloutError("engine", f"request {request.request_id}: {problem}; the completion is refused")
    return completion


def _wrong_size(completion: Completion, request: GenerateRequest) -> str:
    n = len(completion.token_ids)
    if len(completion.log_probs) != n:
        return f"{n} tokens came with {len(completion.log_probs)} log-probabilities"
    if n > max(request.sampling.max_new_tokens, 0):
        return f"{n} tokens came, at most {request.sampling.max_new_tokens} were asked for"
    if n == 0 and completion.finish_reason == "stop":
        return "0 tokens came with finish reason 'stop', but a stop token is part of the action"
    return ""


def _wrong_token(completion: Completion, vocab_size: int | None) -> str:
    for position, (token, log_prob) in enumerate(zip(completion.token_ids, completion.log_probs, strict=True)):
        if token < 0 or (vocab_size is not None and token >= vocab_size):
            return f"token {position} is {token}, outside the vocabulary of {vocab_size}"
        if not math.isfinite(log_prob) or log_prob > ROUNDING:
            return f"token {position} has log-probability {log_prob}; it must be finite and ≤ 0"
    return ""


def _wrong_version(completion: Completion, newest_version: int) -> str:
    covered = 0
    for span in completion.version_spans:
        if span.start != covered or span.end <= span.start:
            return f"version span {span.start}…{span.end} follows token {covered}; spans must join without gaps"
        if not 0 <= span.version <= newest_version:
            return f"tokens {span.start}…{span.end} have version {span.version}; known are 0…{newest_version}"
        covered = span.end
    if covered != len(completion.token_ids):
        return f"version spans cover {covered} of {len(completion.token_ids)} tokens"
    return ""
