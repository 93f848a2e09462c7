"""A step's update does not depend on how its rollouts are cut into micro-batches, ordered, or spread over workers."""

from itertools import pairwise
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from soloist.algorithms.aggregation import LossAggregation, aggregation_weights
from soloist.algorithms.losses import POLICY_LOSSES
from soloist.algorithms.values import value_loss

MODES: tuple[LossAggregation, ...] = get_args(LossAggregation)
LENGTHS = [3, 5, 8, 16, 1, 0, 7]
VOCABULARY, WIDTH = 11, 6


class Step:
    """Forty tokens of seven rollouts (one of them empty) for a linear policy with a value head, in fp32."""

    def __init__(self, mode: LossAggregation) -> None:
        source = torch.Generator().manual_seed(1)
        self.rollout_T = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
        n = len(self.rollout_T)
        self.features = torch.randn(n, WIDTH, generator=source)
        self.tokens = torch.randint(VOCABULARY, (n,), generator=source)
        self.advantages = torch.randn(n, generator=source)
        self.returns = torch.randn(n, generator=source)
        self.matrix = torch.randn(WIDTH, VOCABULARY + 1, generator=source)
        drift = torch.randn(n, generator=source)
        self.recorded = self._log_probs(self.matrix, torch.arange(n)) + drift
        self.weights = aggregation_weights(mode, self.rollout_T, len(LENGTHS), fixed_length=20)

    def _log_probs(self, matrix: Tensor, part: Tensor) -> Tensor:
        logits = self.features[part] @ matrix[:, :VOCABULARY]
        return logits.log_softmax(-1).gather(-1, self.tokens[part, None])[:, 0]

    def gradient(self, name: str, parts: list[Tensor]) -> Tensor:
        """Gradient of policy plus value loss, accumulated over parts as a learner or its workers would."""
        matrix = self.matrix.clone().requires_grad_()
        for part in parts:
            chosen = self.recorded[part], self.advantages[part], self.weights[part]
            policy, _ = POLICY_LOSSES[name](self._log_probs(matrix, part), *chosen, eps_low=0.3, eps_high=5.0)
            values = self.features[part] @ matrix[:, VOCABULARY]
            (policy + 0.5 * value_loss(values, self.returns[part], self.weights[part])).backward()
        assert matrix.grad is not None
        return matrix.grad

    def parts(self, groups: list[list[int]]) -> list[Tensor]:
        """Tokens of each group of rollouts."""
        return [torch.cat([(self.rollout_T == r).nonzero()[:, 0] for r in group]) for group in groups if group]


def assert_same_update(gradient: Tensor, reference: Tensor) -> None:
    assert float((gradient - reference).norm() / reference.norm()) < 1e-6
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
@settings(max_examples=8, deadline=None)
@given(order=st.permutations(range(len(LENGTHS))), cuts=st.sets(st.integers(1, len(LENGTHS) - 1)))
def test_every_split_and_order_gives_the_same_gradient(
    name: str, mode: LossAggregation, order: list[int], cuts: set[int]
) -> None:
    step = Step(mode)
    edges = [0, *sorted(cuts), len(LENGTHS)]
    groups = [order[a:b] for a, b in pairwise(edges)]
    whole = step.gradient(name, [torch.arange(len(step.rollout_T))])
    assert_same_update(step.gradient(name, step.parts(groups)), whole)


@pytest.mark.parametrize("sizes", [[40], [20, 20], [7, 13, 1, 19]])
def test_forty_tokens_in_one_two_or_four_parts_give_one_update(sizes: list[int]) -> None:
    """RB-022: also when two workers take turns and add their gradients up."""
    step = Step("token-mean")
    assert len(step.rollout_T) == 40
    whole = step.gradient("dis", [torch.arange(40)])
    parts = list(torch.arange(40).split(sizes))
    assert_same_update(step.gradient("dis", parts), whole)
    workers = [step.gradient("dis", share) for share in (parts[::2], parts[1::2]) if share]
    assert_same_update(torch.stack(workers).sum(0), whole)


def test_an_auxiliary_loss_has_the_same_denominator() -> None:
    """RB-023: sequences of 3, 5, 8 and 16 tokens, policy plus value loss, micro-batches of 1 and of 4 sequences."""
    step = Step("token-mean")
    one_by_one = step.gradient("ppo", step.parts([[0], [1], [2], [3]]))
    together = step.gradient("ppo", step.parts([[0, 1, 2, 3]]))
    assert_same_update(one_by_one, together)
    assert float(step.weights.sum()) == pytest.approx(1.0, rel=1e-6)


def test_tokens_outside_the_band_still_count_in_the_denominator() -> None:
    """DIS masks a token's gradient, not its place in the step: the others keep the weight 1 / all tokens."""
    weights = aggregation_weights("token-mean", torch.tensor([0, 0, 1, 1]), 2)
    current = torch.full((4,), -1.0, requires_grad=True)
    recorded = torch.tensor([-1.0, -1.0, -1.0, -50.0])
    loss, sums = POLICY_LOSSES["dis"](current, recorded, torch.ones(4), weights, eps_low=0.3, eps_high=5.0)
    loss.backward()
    assert current.grad is not None
    assert current.grad.tolist() == [-0.25, -0.25, -0.25, 0.0]
    assert float(sums["dis/masked_frac"]) == 1.0
