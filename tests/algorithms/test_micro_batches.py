"""A step's update does not depend on how its tokens are cut into micro-batches, ordered, or spread over workers."""

from itertools import pairwise
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from soloist.algorithms.aggregation import LossAggregation, aggregation_weights
from soloist.algorithms.losses import LossInputs, metrics_of, policy_loss
from soloist.algorithms.step_statistics import step_statistics
from soloist.algorithms.values import value_loss
from soloist.methods import LOSS_METHODS

MODES: tuple[LossAggregation, ...] = get_args(LossAggregation)
LENGTHS = [3, 5, 8, 16, 1, 0, 7]
VOCABULARY, WIDTH = 11, 6
Metrics = dict[str, float | None]


class Step:
    """Forty tokens of seven rollouts (one of them empty) for a linear policy with a value head, in fp32."""

    def __init__(self, name: str, mode: LossAggregation | None = None) -> None:
        self.method = LOSS_METHODS[name]
        aggregation: Any = mode or self.method.loss_agg_mode
        source = torch.Generator().manual_seed(1)
        self.rollout_T = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
        n = len(self.rollout_T)
        self.features = torch.randn(n, WIDTH, generator=source)
        self.tokens = torch.randint(VOCABULARY, (n,), generator=source)
        self.advantages = torch.randn(n, generator=source)
        self.returns = torch.randn(n, generator=source)
        self.matrix = torch.randn(WIDTH, VOCABULARY + 1, generator=source)
        drift, mismatch = torch.randn(n, generator=source), torch.randn(n, generator=source)
        scale = 1e-3 if name == "gspo" else 0.5
        self.old = self._log_probs(self.matrix, torch.arange(n)) + scale * drift
        self.recorded = self.old + 0.3 * mismatch * ("recompute" in self.method.old_log_probs)
        self.staleness = torch.arange(n) % 4
        self.weights = aggregation_weights(aggregation, self.rollout_T, len(LENGTHS), fixed_length=20)
        self.statistics = step_statistics(
            self.method, {}, log_probs_T=self._log_probs(self.matrix, torch.arange(n)), old_log_probs_T=self.old,
            rollout_log_probs_T=self.recorded, weights_T=self.weights, rollout_T=self.rollout_T,
            n_rollouts=len(LENGTHS),
        )  # fmt: skip

    def _log_probs(self, matrix: Tensor, part: Tensor) -> Tensor:
        logits = self.features[part] @ matrix[:, :VOCABULARY]
        return logits.log_softmax(-1).gather(-1, self.tokens[part, None])[:, 0]

    def update(self, parts: list[Tensor]) -> tuple[float, Tensor, Metrics]:
        """(policy loss, gradient of policy plus value loss, metrics), added up over parts as a learner would."""
        matrix, total, sums = self.matrix.clone().requires_grad_(), 0.0, []
        for part in parts:
            inputs = LossInputs(
                log_probs_T=self._log_probs(matrix, part), rollout_log_probs_T=self.recorded[part],
                old_log_probs_T=self.old[part], advantages_T=self.advantages[part], weights_T=self.weights[part],
                staleness_T=self.staleness[part], statistics=self.statistics.at(part),
            )  # fmt: skip
            policy, found = policy_loss(self.method, {}, inputs)
            values = self.features[part] @ matrix[:, VOCABULARY]
            (policy + 0.5 * value_loss(values, self.returns[part], self.weights[part])).backward()
            total += policy.item()
            sums.append(found)
        assert matrix.grad is not None
        return total, matrix.grad, metrics_of(sums)

    def gradient(self, parts: list[Tensor]) -> Tensor:
        """Gradient of policy plus value loss."""
        return self.update(parts)[1]

    def parts(self, groups: list[list[int]]) -> list[Tensor]:
        """Tokens of each group of rollouts."""
        return [torch.cat([(self.rollout_T == r).nonzero()[:, 0] for r in group]) for group in groups if group]


def assert_same_update(gradient: Tensor, reference: Tensor) -> None:
    assert float((gradient - reference).norm() / reference.norm()) < 1e-6
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize(("name", "mode"), [("dis", mode) for mode in MODES] + [(name, None) for name in LOSS_METHODS])
@settings(max_examples=8, deadline=None)
@given(order=st.permutations(range(len(LENGTHS))), cuts=st.sets(st.integers(1, len(LENGTHS) - 1)))
def test_every_split_and_order_of_rollouts_gives_the_same_gradient(
    name: str, mode: LossAggregation | None, order: list[int], cuts: set[int]
) -> None:
    step = Step(name, mode)
    edges = [0, *sorted(cuts), len(LENGTHS)]
    groups = [order[a:b] for a, b in pairwise(edges)]
    whole = step.gradient([torch.arange(len(step.rollout_T))])
    assert_same_update(step.gradient(step.parts(groups)), whole)


@pytest.mark.parametrize("name", sorted(LOSS_METHODS))
@settings(max_examples=12, deadline=None)
@given(order=st.permutations(range(sum(LENGTHS))), cuts=st.sets(st.integers(1, sum(LENGTHS) - 1), max_size=6))
def test_sequences_may_be_split_over_micro_batches(name: str, order: list[int], cuts: set[int]) -> None:
    """Tokens in any order and any parts, as no learner would pack them: loss, gradient and metrics are the step's."""
    step = Step(name)
    edges = [0, *sorted(cuts), len(order)]
    parts = [torch.tensor(order[a:b]) for a, b in pairwise(edges)]
    loss, gradient, metrics = step.update(parts)
    whole_loss, whole_gradient, whole_metrics = step.update([torch.arange(len(order))])
    assert loss == pytest.approx(whole_loss, rel=1e-5, abs=1e-6)
    assert_same_update(gradient, whole_gradient)
    assert metrics == pytest.approx(whole_metrics, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("sizes", [[40], [20, 20], [7, 13, 1, 19]])
def test_forty_tokens_in_one_two_or_four_parts_give_one_update(sizes: list[int]) -> None:
    """RB-022: also when two workers take turns and add their gradients up."""
    step = Step("dis")
    assert len(step.rollout_T) == 40
    whole = step.gradient([torch.arange(40)])
    parts = list(torch.arange(40).split(sizes))
    assert_same_update(step.gradient(parts), whole)
    workers = [step.gradient(share) for share in (parts[::2], parts[1::2]) if share]
    assert_same_update(torch.stack(workers).sum(0), whole)


def test_an_auxiliary_loss_has_the_same_denominator() -> None:
    """RB-023: sequences of 3, 5, 8 and 16 tokens, policy plus value loss, micro-batches of 1 and of 4 sequences."""
    step = Step("ppo")
    one_by_one = step.gradient(step.parts([[0], [1], [2], [3]]))
    together = step.gradient(step.parts([[0, 1, 2, 3]]))
    assert_same_update(one_by_one, together)
    assert float(step.weights.sum()) == pytest.approx(1.0, rel=1e-6)


def test_tokens_outside_the_band_still_count_in_the_denominator() -> None:
    """DIS masks a token's gradient, not its place in the step: the others keep the weight 1 / all tokens."""
    step = Step("dis")
    weights = aggregation_weights("token-mean", torch.tensor([0, 0, 1, 1]), 2)
    now = torch.full((4,), -1.0, requires_grad=True)
    recorded = torch.tensor([-1.0, -1.0, -1.0, -50.0])
    loss, sums = policy_loss(step.method, {}, LossInputs(
        log_probs_T=now, rollout_log_probs_T=recorded, old_log_probs_T=recorded, advantages_T=torch.ones(4),
        weights_T=weights, staleness_T=torch.zeros(4, dtype=torch.int64), statistics=step.statistics,
    ))  # fmt: skip
    loss.backward()
    assert now.grad is not None
    assert now.grad.tolist() == [-0.25, -0.25, -0.25, 0.0]
    assert float(sums["dis/masked_frac"]) == 1.0
