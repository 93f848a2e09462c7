"""The check at the engines' door: every kind of wrong completion is refused with its reason."""

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soloist.engines.door import check_completion
from soloist.engines.local.batch import spans_of
from soloist.errors import RolloutError
from soloist.types import Completion, GenerateRequest, Sampling, VersionSpan

REQUEST = GenerateRequest(request_id="q", rollout_id="r", prompt_ids=[1], sampling=Sampling(max_new_tokens=3))


def span(version: int, start: int, end: int) -> VersionSpan:
    return VersionSpan(version=version, start=start, end=end)


def completion(**changes: Any) -> Completion:
    good: dict[str, Any] = {
        "token_ids": [5, 6],
        "log_probs": [-0.5, 0.0],
        "finish_reason": "length",
        "version_spans": [span(3, 0, 1), span(4, 1, 2)],
    }
    return Completion(**(good | changes))


def test_a_sound_completion_passes_unchanged() -> None:
    sound = completion()
    assert check_completion(sound, REQUEST, vocab_size=10, newest_version=4) is sound
    nothing = completion(token_ids=[], log_probs=[], version_spans=[], finish_reason="abort")
    assert check_completion(nothing, REQUEST, vocab_size=10, newest_version=0) is nothing


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"log_probs": [-0.5]}, "2 tokens came with 1 log-prob"),
        ({"token_ids": [5] * 4, "log_probs": [-1.0] * 4, "version_spans": [span(4, 0, 4)]}, "at most 3"),
        ({"log_probs": [-0.5, math.nan]}, "token 1 has log-probability nan"),
        ({"log_probs": [-math.inf, -0.5]}, "token 0 has log-probability -inf"),
        ({"log_probs": [0.01, -0.5]}, "token 0 has log-probability 0.01"),
        ({"token_ids": [5, 10]}, "token 1 is 10, outside the vocabulary of 10"),
        ({"token_ids": [-1, 5]}, "token 0 is -1"),
        ({"version_spans": []}, "cover 0 of 2"),
        ({"version_spans": [span(4, 0, 1)]}, "cover 1 of 2"),
        ({"version_spans": [span(4, 0, 3)]}, "cover 3 of 2"),
        ({"version_spans": [span(4, 1, 2)]}, "spans must join"),
        ({"version_spans": [span(5, 0, 2)]}, "known are 0…4"),
        ({"version_spans": [span(-1, 0, 2)]}, "known are 0…4"),
        (
            {"token_ids": [], "log_probs": [], "version_spans": [], "finish_reason": "stop"},
            "a stop token is part of the action",
        ),
    ],
)
def test_a_doubtful_completion_is_refused_whole_with_its_reason(changes: dict[str, Any], reason: str) -> None:
    """RB-045, RB-046, RB-047, S17: rejected and named; never stored as any finite number."""
    with pytest.raises(RolloutError, match=reason) as caught:
        check_completion(completion(**changes), REQUEST, vocab_size=10, newest_version=4)
    assert caught.value.boundary == "engine"
    assert "request q" in caught.value.reason


@given(st.lists(st.integers(0, 4), max_size=12))
def test_versions_of_single_tokens_become_spans_that_pass_the_door(versions: list[int]) -> None:
    n = len(versions)
    spans = spans_of(versions)
    sampled = completion(token_ids=[5] * n, log_probs=[-1.0] * n, version_spans=spans)
    patient = GenerateRequest(request_id="q", rollout_id="r", prompt_ids=[1], sampling=Sampling(max_new_tokens=12))
    assert check_completion(sampled, patient, vocab_size=10, newest_version=4) is sampled
    assert [s.version for s in spans for _ in range(s.start, s.end)] == versions
    assert all(left.version != right.version for left, right in itertools.pairwise(spans))
