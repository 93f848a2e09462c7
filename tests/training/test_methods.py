"""Every loss and estimator through the learner: the right tensors reach the right formula, whatever the packing.

The reference is slow and obvious: a float64 copy of the policy, one forward per sequence, and one call of the loss over
the whole step. That the loss itself is right is shown in `tests/algorithms/test_loss_references.py`.
"""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import msgspec
import pytest
import torch

from soloist.algorithms.aggregation import aggregation_weights
from soloist.algorithms.losses import LossInputs, policy_loss
from soloist.algorithms.step_statistics import step_statistics
from soloist.config import ModelConfig, RunConfig, build_config
from soloist.errors import RunError
from soloist.estimators import ADV_ESTIMATORS
from soloist.methods import LOSS_METHODS
from soloist.models.loading import load_policy
from soloist.models.tiny import build_tiny
from soloist.models.value import ValueModel
from soloist.training.learner import Learner
from soloist.types import Rollout, Segment, Turn, VersionSpan

TEMPERATURE = 1.2
VERSION = 5


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    build_tiny(ModelConfig(hidden_size=32, layers=1, heads=2, mlp_size=64), 0, folder)
    return load_policy(folder)


def config_for(**changes: Any) -> RunConfig:
    raw: dict[str, Any] = {
        "token_budget": 200,
        "rollout": {"temperature": TEMPERATURE},
        "policy": {"lr": 1.0, "warmup_steps": 0, "max_grad_norm": 1e9},
    }
    for key, value in changes.items():
        raw[key] = {**raw.get(key, {}), **value} if isinstance(value, dict) else value
    return build_config(raw, "test")


def learner_for(base: Any, config: RunConfig, reference: Any = None) -> Learner:
    """A learner at VERSION whose policy steps plainly, without momentum."""
    policy = copy.deepcopy(base)
    learner = Learner(policy, ValueModel.from_policy(policy) if config.has_critic else None, config, reference)
    learner.version = VERSION
    learner._actor.optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    return learner


def log_probs_of(model: Any, rollout: Rollout) -> tuple[torch.Tensor, torch.Tensor]:
    """log π and entropy of a rollout's action tokens in time order, by one plain forward per segment."""
    found, entropies = [], []
    for segment in rollout.segments:
        table = model(input_ids=torch.tensor([segment.token_ids]), use_cache=False).logits[0].double() / TEMPERATURE
        table = torch.log_softmax(table, -1)
        for position, is_action in enumerate(segment.action_mask):
            if is_action:
                found.append(table[position - 1, segment.token_ids[position]])
                entropies.append(-(table[position - 1].exp() * table[position - 1]).sum())
    return torch.stack(found), torch.stack(entropies)


def rollouts_of(model: Any, count: int = 8, seed: int = 3) -> list[Rollout]:
    """Groups of four, two turns each, every third with two segments; recorded log-probabilities are noisy."""
    rng = random.Random(seed)
    rollouts = []
    for index in range(count):
        segments, turns = [], []
        for number in range(2 if index % 3 == 0 else 1):
            ids, mask = [rng.randrange(100) for _ in range(4)], [False] * 4
            for _ in range(2):
                start = len(ids)
                ids += [rng.randrange(100) for _ in range(rng.randint(1, 4))]
                turns.append(Turn(segment=number, start=start, end=len(ids), finish_reason="stop"))
                mask += [True] * (len(ids) - start) + [False, False]
                ids += [rng.randrange(100) for _ in range(2)]
            spans = [VersionSpan(version=VERSION - 1 - index % 4, start=0, end=len(ids))]
            segments.append(
                Segment(token_ids=ids, action_mask=mask, rollout_log_probs=[None] * len(ids), version_spans=spans)
            )
        rollouts.append(
            Rollout(
                rollout_id=f"r{index}", task_id=f"t{index // 4}", group_id=f"g{index // 4}", environment="x",
                state="scored", status="completed", segments=segments, turns=turns,
                score=[0.0, 1.0, 1.0, 0.25][index % 4],
            )
        )  # fmt: skip
    return [recorded(model, rollout, rng) for rollout in rollouts]


@torch.no_grad()
def recorded(model: Any, rollout: Rollout, rng: random.Random) -> Rollout:
    """The rollout as an engine of some updates ago would have recorded it."""
    log_probs = iter((log_probs_of(model, rollout)[0]).tolist())
    segments = []
    for segment in rollout.segments:
        own = [min(-1e-3, next(log_probs) + rng.gauss(0, 0.4)) if action else None for action in segment.action_mask]
        segments.append(msgspec.structs.replace(segment, rollout_log_probs=own))
    return msgspec.structs.replace(rollout, segments=segments)


def flat(rollouts: list[Rollout], of: Any) -> torch.Tensor:
    return torch.tensor([x for rollout in rollouts for segment in rollout.segments for x in of(segment)])


def actions(segment: Segment, values: list[Any]) -> list[Any]:
    return [value for value, is_action in zip(values, segment.action_mask, strict=True) if is_action]


class Plain:
    """One policy update by the definition, in float64."""

    def __init__(self, base: Any, config: RunConfig, rollouts: list[Rollout], advantages: torch.Tensor) -> None:
        self.policy, self.config, self.rollouts = copy.deepcopy(base).double(), config, rollouts
        self.rollout_T = torch.tensor([i for i, rollout in enumerate(rollouts) for _ in range(rollout.action_tokens)])
        self.recorded_T = flat(rollouts, lambda s: actions(s, s.rollout_log_probs)).double()
        self.staleness_T = VERSION - flat(rollouts, lambda s: actions(s, s.versions()))
        self.advantages_T = advantages.double()

    def update(self, reference: Any = None) -> None:
        loss, policy = self.config.loss, self.config.policy
        with torch.no_grad():
            old_T = self.recorded_T if loss.old_log_probs == "rollout" else self.log_probs()[0]
        for _ in range(policy.epochs):
            for part in range(policy.minibatches):
                self.step(set(range(part, len(self.rollouts), policy.minibatches)), old_T, reference)

    def log_probs(self, model: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        pairs = [log_probs_of(model or self.policy, rollout) for rollout in self.rollouts]
        return torch.cat([pair[0] for pair in pairs]), torch.cat([pair[1] for pair in pairs])

    def step(self, members: set[int], old_T: torch.Tensor, reference: Any) -> None:
        loss, method = self.config.loss, LOSS_METHODS[self.config.loss.policy_loss]
        settings = {name: getattr(loss, name) for name in method.settings}
        inside_T = torch.tensor([int(index) in members for index in self.rollout_T])
        length = loss.fixed_length or self.config.rollout.max_tokens
        weights_T = torch.zeros(len(inside_T), dtype=torch.float64)
        weights_T[inside_T] = aggregation_weights(
            loss.loss_agg_mode, self.rollout_T[inside_T], len(self.rollouts), length, torch.float64
        )
        log_probs_T, entropy_T = self.log_probs()
        tensors = {"log_probs_T": log_probs_T, "rollout_log_probs_T": self.recorded_T, "old_log_probs_T": old_T}
        statistics = step_statistics(
            method, settings, **{name: x.detach() for name, x in tensors.items()}, weights_T=weights_T,
            rollout_T=self.rollout_T, n_rollouts=len(self.rollouts),
        )  # fmt: skip
        inputs = LossInputs(
            **tensors, advantages_T=self.advantages_T, weights_T=weights_T, staleness_T=self.staleness_T,
            statistics=statistics,
        )  # fmt: skip
        total, _ = policy_loss(method, settings, inputs)
        total = total - loss.entropy_coef * (weights_T * entropy_T).sum()
        if reference is not None:
            with torch.no_grad():
                reference_T = self.log_probs(reference)[0]
            difference_T = reference_T - log_probs_T
            total = total + loss.kl_coef * (weights_T * (difference_T.exp() - 1 - difference_T)).sum()
        self.policy.zero_grad()
        total.backward()
        with torch.no_grad():
            for parameter in self.policy.parameters():
                parameter -= parameter.grad


def largest_difference(first: Any, second: Any, base: Any) -> float:
    """Of two policies, relative to how far the second moved from the base."""
    error = moved = 0.0
    for one, other, start in zip(first.parameters(), second.parameters(), base.parameters(), strict=True):
        error = max(error, float((one.double() - other).detach().abs().max()))
        moved = max(moved, float((other - start.double()).detach().abs().max()))
    assert moved > 1e-5, "nothing was learned, so nothing was compared"
    return error / moved


def estimator_for(name: str) -> dict[str, Any]:
    changes: dict[str, Any] = {"advantage": {"adv_estimator": name}}
    if ADV_ESTIMATORS[name].groups:
        changes |= {"group_size": 4}
    if ADV_ESTIMATORS[name].repeats:
        changes |= {"environment": {"distinct_tasks": 2}}
    return changes


def loss_changes(name: str) -> dict[str, Any]:
    """A config with the loss, over two minibatches where it recomputes old log-probabilities."""
    changes = estimator_for("group_mean") | {"loss": {"policy_loss": name}}
    if LOSS_METHODS[name].old_log_probs[0] == "recompute":
        changes |= {"policy": {"minibatches": 2}}
    return changes


@pytest.mark.parametrize("name", sorted(LOSS_METHODS))
def test_an_update_under_each_loss_equals_the_float64_definition(base: Any, name: str) -> None:
    rollouts = rollouts_of(base)
    config = config_for(**loss_changes(name))
    learner = learner_for(base, config)
    metrics = learner.update_policy(rollouts)
    assert learner.tokens is not None
    plain = Plain(base, config, rollouts, learner.tokens.advantages_T)
    plain.update()
    assert largest_difference(learner.policy, plain.policy, base) < 2e-4
    assert metrics["actor/pg_loss"] is not None
    assert learner.tokens.values_T is None


@pytest.mark.parametrize(
    ("loss", "policy"),
    [
        ({"policy_loss": "ppo", "old_log_probs": "recompute"}, {"minibatches": 2, "epochs": 2}),
        ({"policy_loss": "gspo", "old_log_probs": "recompute", "eps_low": 0.2, "eps_high": 0.2}, {"epochs": 3}),
        ({"policy_loss": "sat_gspo"}, {"minibatches": 3}),
        ({"policy_loss": "m2po"}, {"epochs": 2}),
        ({"policy_loss": "cispo"}, {"minibatches": 2, "epochs": 2}),
        ({"policy_loss": "tis", "correction_over": "sequence_mean"}, {"minibatches": 2}),
        ({"policy_loss": "dis", "entropy_coef": 0.3}, {}),
    ],
)
def test_several_updates_a_step_keep_the_old_policy_and_renew_the_statistics(
    base: Any, loss: dict[str, Any], policy: dict[str, Any]
) -> None:
    rollouts = rollouts_of(base)
    config = config_for(**estimator_for("group_relative"), loss=loss, policy=policy)
    learner = learner_for(base, config)
    learner.update_policy(rollouts)
    plain = Plain(base, config, rollouts, learner.tokens.advantages_T)
    plain.update()
    assert largest_difference(learner.policy, plain.policy, base) < 1e-3
    assert learner.version == VERSION + 1, "a version is a step, however many updates it takes"


def test_a_divergence_from_the_reference_pulls_towards_it(base: Any) -> None:
    reference = copy.deepcopy(base)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    rollouts = rollouts_of(base)
    config = config_for(**estimator_for("group_mean"), loss={"kl_coef": 0.7})
    learner = learner_for(base, config, reference)
    metrics = learner.update_policy(rollouts)
    plain = Plain(base, config, rollouts, learner.tokens.advantages_T)
    plain.update(copy.deepcopy(reference).double())
    assert largest_difference(learner.policy, plain.policy, base) < 2e-4
    assert metrics["actor/kl_to_reference"] > 0


@pytest.mark.parametrize("name", ["gspo", "sat_grpo", "m2po", "tis", "dr_grpo"])
def test_micro_batches_and_order_change_no_update(base: Any, name: str) -> None:
    """Segments of one rollout may lie in different micro-batches; its ratio is still that of the whole."""
    rollouts = rollouts_of(base)
    changes = loss_changes(name) | {"policy": {}}
    if LOSS_METHODS[name].old_log_probs[0] == "recompute":
        changes |= {"policy": {"epochs": 2}}
    policies = []
    for budget, order in ((100_000, 1), (24, -1)):
        config = config_for(**changes)
        learner = learner_for(base, config)
        learner.config = learner.config.model_copy(update={"token_budget": budget})
        learner.update_policy(rollouts[::order])
        policies.append(learner.policy)
    assert largest_difference(policies[0], policies[1].double(), base) < 2e-4
    assert any(bool((one != two).any()) for one, two in zip(base.parameters(), policies[0].parameters(), strict=True))


def test_group_advantages_compare_rollouts_of_one_group_in_any_order(base: Any) -> None:
    rollouts = rollouts_of(base)
    scores = [0.0, 1.0, 1.0, 0.25]
    mean = sum(scores) / 4
    deviation = math.sqrt(sum((score - mean) ** 2 for score in scores) / 3)
    for name, scale in (("group_mean", 1.0), ("group_relative", deviation)):
        found = []
        for order in (rollouts, rollouts[::2] + rollouts[1::2]):
            learner = learner_for(base, config_for(**estimator_for(name)))
            learner.update_policy(order)
            firsts = [row[1][0] for row in learner.tokens.rows()]
            found.append(dict(zip([rollout.rollout_id for rollout in order], firsts, strict=True)))
        assert found[0] == found[1]
        assert learner._estimators.metrics(learner._begin(rollouts).batch) == {"group/uniform_frac": 0.0}
        assert [found[0][f"r{i}"] for i in range(4)] == pytest.approx([(score - mean) / scale for score in scores])


def test_a_group_of_one_is_refused_while_training(base: Any) -> None:
    """The config refuses it before; a group that arrives alone would be a bug, and is not trained as 0."""
    learner = learner_for(base, config_for(**estimator_for("group_relative")))
    with pytest.raises(RunError, match="group_relative"):
        learner.update_policy(rollouts_of(base)[:5])
    assert learner.version == VERSION


@pytest.mark.parametrize("name", sorted(ADV_ESTIMATORS))
def test_every_estimator_gives_finite_advantages_and_survives_a_snapshot(base: Any, name: str) -> None:
    first, second = rollouts_of(base), rollouts_of(base, seed=4)
    config = config_for(**estimator_for(name), policy={"lr": 1e-3})
    one, other = (Learner(copy.deepcopy(base), value_of(base, config), config) for _ in range(2))
    for learner in (one, other):
        learner.version = VERSION
    train(one, first)
    other.load_state(copy.deepcopy(one.state()))
    assert other.fingerprint() == one.fingerprint()
    for learner in (one, other):
        train(learner, second)
    assert other.fingerprint() == one.fingerprint()
    assert bool(one.tokens.advantages_T.isfinite().all())
    assert float(one.tokens.advantages_T.abs().max()) > 0


def value_of(base: Any, config: RunConfig) -> ValueModel | None:
    return ValueModel.from_policy(base) if config.has_critic else None


def train(learner: Learner, rollouts: list[Rollout]) -> None:
    for _ in range(learner.config.value_updates):
        learner.update_value(rollouts)
    learner.update_policy(rollouts)


def turns_of(rollout: Rollout) -> list[int]:
    """Turn of each action token in time order, by the record of the turns."""
    found = []
    for index, segment in enumerate(rollout.segments):
        for position, is_action in enumerate(segment.action_mask):
            if is_action:
                (turn,) = [
                    number
                    for number, turn in enumerate(rollout.turns)
                    if turn.segment == index and turn.start <= position < turn.end
                ]
                found.append(turn)
    return found


def plain_step_gae(rollout: Rollout, values: list[float], gamma: float, alpha: float, value_of: str) -> list[float]:
    """Advantages of turns, one loop over turns from the last to the first; each token has its turn's."""
    turns = turns_of(rollout)
    count = max(turns) + 1
    tokens = [[v for v, turn in zip(values, turns, strict=True) if turn == number] for number in range(count)]
    value = [sum(own) / len(own) if value_of == "mean" else own[-1] for own in tokens]
    lam = max(0.0, 1 - 1 / (alpha * count))
    advantages, after, following = [0.0] * count, 0.0, 0.0
    for number in reversed(range(count)):
        reward = rollout.turns[number].reward + (rollout.score if number == count - 1 else 0.0)
        after = reward + gamma * following - value[number] + gamma * lam * after
        advantages[number], following = after, value[number]
    return [advantages[turn] for turn in turns]


@pytest.mark.parametrize("value_of", ["mean", "last"])
def test_advantages_of_turns_are_those_of_a_plain_loop_over_them(base: Any, value_of: str) -> None:
    rollouts = [
        msgspec.structs.replace(
            rollout, turns=[msgspec.structs.replace(turn, reward=0.3 * n) for n, turn in enumerate(rollout.turns)]
        )
        for rollout in rollouts_of(base)
    ]
    advantage = {"adv_estimator": f"step_gae_{value_of}", "gamma": 0.9, "length_adaptive_alpha": 1.2}
    learner = learner_for(base, config_for(advantage=advantage))
    train(learner, rollouts)
    for rollout, (_, advantages, values, _) in zip(rollouts, learner.tokens.rows(), strict=True):
        assert advantages == pytest.approx(plain_step_gae(rollout, values, 0.9, 1.2, value_of), abs=1e-5)
    assert len({len(rollout.turns) for rollout in rollouts}) > 1


def test_returns_of_reinforce_are_discounted_from_the_end_and_whitened(base: Any) -> None:
    rollouts = rollouts_of(base)
    learner = learner_for(base, config_for(advantage={"adv_estimator": "reinforce_pp", "gamma": 0.9}))
    learner.update_policy(rollouts)
    returns = [
        rollout.score * 0.9 ** (n - 1 - t) for rollout in rollouts for n in [rollout.action_tokens] for t in range(n)
    ]
    mean = sum(returns) / len(returns)
    deviation = math.sqrt(sum((one - mean) ** 2 for one in returns) / len(returns))
    expected = [(one - mean) / deviation for one in returns]
    assert learner.tokens.advantages_T.tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("over", ["global", "task"])
def test_a_running_mean_is_over_the_rewards_of_earlier_steps_of_all_or_of_the_task(base: Any, over: str) -> None:
    advantage = {"adv_estimator": "running_mean", "running_mean_over": over, "running_mean_window": 4}
    changes = {"advantage": advantage, "environment": {"distinct_tasks": 2}, "policy": {"lr": 1e-3}}
    learner = learner_for(base, config_for(**changes))
    first = [msgspec.structs.replace(one, score=float(one.task_id == "t1")) for one in rollouts_of(base)]
    learner.update_policy(first)
    assert [row[1][0] for row in learner.tokens.rows()] == pytest.approx([-0.5] * 4 + [0.5] * 4), "of itself"
    second = rollouts_of(base, seed=4)
    learner.update_policy(second)
    # The last four of all rewards are half of the first step's eight, on average over their orders.
    baselines = [0.5] * 8 if over == "global" else [0.0] * 4 + [1.0] * 4
    expected = [rollout.score - baseline for rollout, baseline in zip(second, baselines, strict=True)]
    assert [row[1][0] for row in learner.tokens.rows()] == pytest.approx(expected)


def test_spo_forgets_by_how_far_the_policy_moved_on_the_previous_answer(base: Any) -> None:
    config = config_for(**estimator_for("spo"), policy={"lr": 1e-3})
    learner = learner_for(base, config)
    first = [rollouts_of(base)[0], rollouts_of(base)[4]]
    second = [rollouts_of(base, seed=9)[1], rollouts_of(base, seed=9)[5]]
    learner.update_policy(first)
    with torch.no_grad():
        moved = log_probs_of(copy.deepcopy(learner.policy).double(), first[0])[0]
    recorded_T = flat(first[:1], lambda s: actions(s, s.rollout_log_probs)).double()
    drift = float((moved - recorded_T).abs().mean())
    rho = min(max(2 ** (-drift / 0.06), 0.875), 0.96)
    learner.update_policy(second)
    # First reward 0 at ρ = 0.96 from a = b = 4, then reward 1 at the measured ρ.
    a, b = 0.96 * 4, 0.96 * 4 + 1
    a, b = rho * a + 1, rho * b
    assert learner.state()["estimators"][1]["memory"]["counts"]["t0"] == pytest.approx([a, b], rel=1e-5)
    assert learner.task_weight("t0") == pytest.approx(math.sqrt(a * b) / (a + b) + 0.05, rel=1e-5)
    assert learner.task_weight("never seen") == pytest.approx(0.55)


def test_rewards_that_spo_can_not_count_end_the_run_with_a_reason(base: Any) -> None:
    learner = learner_for(base, config_for(**estimator_for("spo")))
    rollouts = [msgspec.structs.replace(rollout, score=2.0) for rollout in rollouts_of(base)]
    with pytest.raises(RunError, match=r"'spo'.*2\.0"):
        learner.update_policy(rollouts)


def test_long_rollouts_pay_as_they_near_the_limit(base: Any) -> None:
    rollouts = [msgspec.structs.replace(rollout, score=0.0) for rollout in rollouts_of(base)]
    lengths = [sum(len(segment.token_ids) for segment in rollout.segments) for rollout in rollouts]
    limit = max(lengths) - 2
    changes = estimator_for("reinforce_pp") | {"rollout": {"max_tokens": limit}}
    config = config_for(**(changes | {"advantage": {"adv_estimator": "reinforce_pp", "overlong_buffer": 8}}))
    learner = learner_for(base, config)
    found = learner._begin(rollouts).batch
    per_rollout = torch.zeros(len(rollouts)).index_add(0, found.rollout_T, found.rewards_T)
    expected = [-min(1.0, max(0.0, (length - (limit - 8)) / 8)) for length in lengths]
    assert per_rollout.tolist() == pytest.approx(expected)
    assert min(expected) == -1.0
    assert max(expected) == 0.0


def test_moments_are_forgotten_when_engines_get_new_weights(base: Any) -> None:
    def steps_after(publish_every: int, updates: int) -> set[float]:
        config = config_for(
            **estimator_for("reinforce_pp"), policy={"reset_optimizer_at_publish": True, "lr": 1e-3},
            publish_every=publish_every, max_staleness=4,
        )  # fmt: skip
        learner = Learner(copy.deepcopy(base), None, config)
        for _ in range(updates):
            rollouts = [_as_new(rollout, learner.version) for rollout in rollouts_of(base)]
            learner.update_policy(rollouts)
        return {float(state["step"]) for state in learner._actor.optimizer.state.values()}

    assert steps_after(1, 3) == {1.0}
    assert steps_after(2, 4) == {2.0}
    assert steps_after(2, 3) == {1.0}


def _as_new(rollout: Rollout, version: int) -> Rollout:
    segments = [
        msgspec.structs.replace(s, version_spans=[VersionSpan(version=version, start=0, end=len(s.token_ids))])
        for s in rollout.segments
    ]
    return msgspec.structs.replace(rollout, segments=segments)
