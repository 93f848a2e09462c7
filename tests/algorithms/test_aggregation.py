"""Weights of the four aggregation modes, and that a step's loss does not know how the step was cut up."""

from typing import get_args

import pytest
import torch

from soloist.algorithms.aggregation import LossAggregation, aggregation_weights, rollout_weights

MODES = get_args(LossAggregation)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", [1 / 4] * 4),
        ("seq-mean-token-mean", [1 / 2, 1 / 6, 1 / 6, 1 / 6]),
        ("seq-mean-token-sum", [1 / 2] * 4),
        ("fixed-length", [1 / 20] * 4),
    ],
)
def test_weights_are_those_of_the_formula(mode: LossAggregation, expected: list[float]) -> None:
    """Rollouts of 1, 0 and 3 tokens: the empty one is no sequence, so N = 2."""
    weights = aggregation_weights(mode, torch.tensor([0, 2, 2, 2]), 3, fixed_length=10)
    assert weights.tolist() == pytest.approx(expected)
    assert weights.dtype == torch.float32
    assert rollout_weights(mode, torch.tensor([1, 0, 3]), 10)[1] == 0.0


@pytest.mark.parametrize("mode", MODES)
def test_order_of_tokens_and_rollouts_does_not_matter(mode: LossAggregation) -> None:
    index = torch.tensor([0, 0, 1, 3, 3, 3, 3])
    order = torch.tensor([4, 0, 6, 2, 1, 5, 3])
    weights = aggregation_weights(mode, index, 4, 5, torch.float64)
    assert torch.equal(weights[order], aggregation_weights(mode, index[order], 4, 5, torch.float64))
    renamed = torch.tensor([2, 1, 0, 3])[index]
    assert torch.equal(weights, aggregation_weights(mode, renamed, 4, 5, torch.float64))
    assert weights.dtype == torch.float64


@pytest.mark.parametrize("mode", MODES)
def test_a_step_without_tokens_gives_no_weights_and_no_nan(mode: LossAggregation) -> None:
    empty = torch.zeros(0, dtype=torch.long)
    assert aggregation_weights(mode, empty, 0, 5).shape == (0,)
    assert aggregation_weights(mode, empty, 3, 5).shape == (0,)
    assert rollout_weights(mode, torch.tensor([0, 0, 0]), 5).tolist() == [0.0, 0.0, 0.0]


def test_two_micro_batches_give_the_mean_of_their_tokens() -> None:
    """RB-021: 10 tokens with mean loss 1.0 and 30 with 0.2 give 0.40, not 0.60."""
    index = torch.tensor([0] * 10 + [1] * 30)
    terms = torch.tensor([1.0] * 10 + [0.2] * 30)
    weights = aggregation_weights("token-mean", index, 2)
    parts = [(weights[part] * terms[part]).sum() for part in (slice(0, 10), slice(10, 40))]
    assert float(sum(parts)) == pytest.approx(0.40, rel=1e-6)
    assert float((weights * terms).sum()) == pytest.approx(0.40, rel=1e-6)


def test_truncated_and_removed_rollouts_leave_the_denominator_too() -> None:
    """RB-024, RB-076: completions of 4, 4 and 8 tokens, the third removed by its mask: 8/8, not 8/16."""
    index = torch.tensor([0] * 4 + [1] * 4 + [2] * 8)
    trainable = index != 2
    weights = aggregation_weights("token-mean", index[trainable], 3)
    assert float((weights * torch.ones(8)).sum()) == pytest.approx(1.0)
    nothing = aggregation_weights("token-mean", index[torch.zeros(16, dtype=torch.bool)], 3)
    assert float((nothing * torch.ones(0)).sum()) == 0.0
    assert int(torch.bincount(index[trainable], minlength=3)[2]) == 0


def test_means_over_sequences_count_valid_rollouts_only() -> None:
    """RB-078: of four rollouts two were aborted and have no trainable token; means are over the other two."""
    index = torch.tensor([0, 0, 3, 3, 3])
    terms = torch.tensor([1.0, 1.0, 3.0, 3.0, 3.0])
    assert float((aggregation_weights("seq-mean-token-mean", index, 4) * terms).sum()) == pytest.approx(2.0)
    assert float((aggregation_weights("seq-mean-token-sum", index, 4) * terms).sum()) == pytest.approx(5.5)


def test_impossible_requests_are_refused_with_what_was_found() -> None:
    index = torch.tensor([0, 2])
    with pytest.raises(ValueError, match=r"0 … 1, found 0 … 2"):
        aggregation_weights("token-mean", index, 2)
    with pytest.raises(ValueError, match=r"found -1"):
        aggregation_weights("token-mean", torch.tensor([-1, 0]), 2)
    with pytest.raises(ValueError, match=r"found 0"):
        aggregation_weights("fixed-length", index, 3)
    with pytest.raises(ValueError, match=r"'batch-mean' is none of token-mean"):
        aggregation_weights("batch-mean", index, 3)
