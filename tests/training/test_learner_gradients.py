"""One step of the learner on rollouts at lag 8, against a float64 loop written from methods.md, not from the code.

With SGD at learning rate 1 a parameter moves by its gradient, so moves are compared. The reference knows nothing of
packing, micro-batches or masks: it walks over single rollouts, token by token.
"""

from __future__ import annotations

import copy
import gc
import math
import random
import statistics
import weakref
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch

from soloist.config import ModelConfig, RunConfig, build_config
from soloist.methods import LOSS_METHODS
from soloist.models.loading import load_policy
from soloist.models.tiny import build_tiny
from soloist.models.value import ValueModel
from soloist.training import estimators, objective
from soloist.training import learner as learner_module
from soloist.training.learner import Learner
from soloist.types import Rollout, Sampling, Segment, Turn, VersionSpan

TEMPERATURE = 1.3
LAG = 8
VALUE_LR = 0.05


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    build_tiny(ModelConfig(hidden_size=32, layers=2, heads=2, mlp_size=64), 0, folder)
    return load_policy(folder)


def config_for(**changes: Any) -> RunConfig:
    raw: dict[str, Any] = {
        "token_budget": 200,
        "rollout": {"temperature": TEMPERATURE},
        "policy": {"lr": 1.0, "warmup_steps": 0, "max_grad_norm": 1e9},
        "value": {"lr": VALUE_LR, "warmup_steps": 0, "max_grad_norm": 1e9},
        "loss": {"eps_low": 0.3, "eps_high": 1.0},
        "advantage": {"gamma": 0.98},
    }
    return build_config(raw | changes, "test")


@torch.no_grad()
def moved(model: torch.nn.Module, seed: int, scale: float) -> torch.nn.Module:
    """The same model some updates later."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    for parameter in other.parameters():
        parameter += scale * torch.randn(parameter.shape, generator=generator)
    return other


@torch.no_grad()
def log_probs_of(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    """log π(token t | before), float64 or float32 as the model is, [L, V]; row t is for token t (row 0 unused)."""
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0] / TEMPERATURE
    return torch.cat([torch.zeros_like(logits[:1]), torch.log_softmax(logits, -1)[:-1]])


def rollouts_of(model: torch.nn.Module, count: int = 9) -> list[Rollout]:
    """Two turns each, actions sampled by `model`; every third has a rewritten history (a second segment)."""
    rng = random.Random(5)
    rollouts = []
    for index in range(count):
        segments, turns = [], []
        for number in range(2 if index % 3 == 0 else 1):
            ids = [rng.randrange(120) for _ in range(rng.randint(3, 6))]
            mask = [False] * len(ids)
            for _ in range(2):
                start = len(ids)
                for _ in range(rng.randint(1, 5)):
                    row = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0, -1] / TEMPERATURE, -1)
                    ids.append(rng.choices(range(len(row)), weights=row.exp().tolist())[0])
                    mask.append(True)
                turns.append(
                    Turn(segment=number, start=start, end=len(ids), finish_reason="stop", reward=rng.choice([0, 0.25]))
                )
                observed = [rng.randrange(120) for _ in range(rng.randint(1, 4))]
                ids += observed
                mask += [False] * len(observed)
            table = log_probs_of(model, ids)
            segments.append(
                Segment(
                    token_ids=ids,
                    action_mask=mask,
                    rollout_log_probs=[float(table[t, ids[t]]) if mask[t] else None for t in range(len(ids))],
                    version_spans=[VersionSpan(version=0, start=0, end=len(ids))],
                )
            )
        rollouts.append(
            Rollout(
                rollout_id=f"r{index}", task_id=f"t{index}", group_id=f"g{index}", environment="x", state="scored",
                status="truncated" if index == 4 else "completed", truncated=index == 4,
                score=float(rng.random() < 0.5), segments=segments, turns=turns,
                sampling=Sampling(temperature=TEMPERATURE),
            )
        )  # fmt: skip
    return rollouts


class Reference:
    """The same step in float64, one rollout and one token at a time."""

    def __init__(self, policy: torch.nn.Module, value: ValueModel, config: RunConfig, frozen: list[str]) -> None:
        self.policy = copy.deepcopy(policy).double()
        self.value = copy.deepcopy(value).double()
        self.config = config
        self.frozen = set(frozen)

    def v(self, rollout: Rollout, after_end: bool = False) -> torch.Tensor:
        values = []
        for segment in rollout.segments:
            hidden = self.value.backbone(input_ids=torch.tensor([segment.token_ids]), use_cache=False)
            all_values = self.value.head(hidden.last_hidden_state[0])[:, 0]
            values += [all_values[t - 1] for t, action in enumerate(segment.action_mask) if action]
        return all_values[-1] if after_end else torch.stack(values)

    def rewards(self, rollout: Rollout) -> list[float]:
        ends: list[float] = []
        for turn in rollout.turns:
            ends += [0.0] * (turn.end - turn.start - 1) + [turn.reward]
        ends[-1] += rollout.score or 0.0
        return ends

    def update_value(self, rollouts: list[Rollout], bootstraps: list[float]) -> None:
        tokens = sum(r.action_tokens for r in rollouts)
        loss = torch.zeros((), dtype=torch.float64)
        for rollout, bootstrap in zip(rollouts, bootstraps, strict=True):
            target, targets = bootstrap, []
            for reward in reversed(self.rewards(rollout)):
                target = reward + self.config.advantage.gamma * target
                targets.append(target)
            for value, goal in zip(self.v(rollout), reversed(targets), strict=True):
                loss = loss + (value - goal) ** 2 / tokens
        self.value.zero_grad()
        loss.backward()
        with torch.no_grad():
            for name, parameter in self.value.named_parameters():
                if name not in self.frozen and parameter.grad is not None:
                    parameter -= VALUE_LR * parameter.grad

    def advantages(self, rollout: Rollout, bootstrap: float) -> list[float]:
        values = [*self.v(rollout).tolist(), bootstrap]
        gamma, lam = self.config.advantage.gamma, max(0.0, 1 - 1 / (1.5 * rollout.action_tokens))
        running, found = 0.0, []
        for t in reversed(range(rollout.action_tokens)):
            delta = self.rewards(rollout)[t] + gamma * values[t + 1] - values[t]
            running = delta + gamma * lam * running
            found.append(running)
        return found[::-1]

    def policy_gradient(
        self, rollouts: list[Rollout], bootstraps: list[float]
    ) -> tuple[dict[str, torch.Tensor], float]:
        tokens = sum(r.action_tokens for r in rollouts)
        loss, masked = torch.zeros((), dtype=torch.float64), 0
        found = [self.advantages(rollout, bootstrap) for rollout, bootstrap in zip(rollouts, bootstraps, strict=True)]
        flat = [advantage for own in found for advantage in own]
        center, scale = 0.0, 1.0
        if self.config.advantage.whiten:
            center, scale = statistics.fmean(flat), 1 / statistics.pstdev(flat)
        for rollout, own in zip(rollouts, found, strict=True):
            advantages = iter([(advantage - center) * scale for advantage in own])
            for segment in rollout.segments:
                ids = segment.token_ids
                logits = self.policy(input_ids=torch.tensor([ids]), use_cache=False).logits[0] / TEMPERATURE
                for t, action in enumerate(segment.action_mask):
                    if not action:
                        continue
                    log_prob = torch.log_softmax(logits[t - 1], -1)[ids[t]]
                    ratio = math.exp(log_prob.item() - segment.rollout_log_probs[t])
                    advantage = next(advantages)
                    if not 1 - self.config.loss.eps_low < ratio < 1 + self.config.loss.eps_high:
                        masked += 1
                        continue
                    loss = loss - ratio * advantage * log_prob / tokens
        self.policy.zero_grad()
        loss.backward()
        return {n: p.grad for n, p in self.policy.named_parameters() if p.grad is not None}, masked / tokens


def one_step(learner: Learner, rollouts: list[Rollout]) -> tuple[dict[str, torch.Tensor], dict[str, float | None]]:
    """K value updates and a policy update with SGD; how far each policy parameter moved."""
    learner._actor.optimizer = torch.optim.SGD(learner.policy.parameters(), lr=1.0)
    learner._critic.optimizer = torch.optim.SGD([p for p in learner.value.parameters() if p.requires_grad], lr=VALUE_LR)
    before = {name: parameter.detach().clone() for name, parameter in learner.policy.named_parameters()}
    for _ in range(learner.config.value.updates_per_step):
        learner.update_value(rollouts)
    metrics = learner.update_policy(rollouts)
    return {name: before[name] - p.detach() for name, p in learner.policy.named_parameters()}, metrics


def build(base: Any, config: RunConfig) -> tuple[Learner, Reference, list[Rollout]]:
    rollouts = rollouts_of(base)
    policy = moved(base, seed=LAG, scale=0.2)
    value = ValueModel.from_policy(base)
    with torch.no_grad():
        value.head.weight.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
    learner = Learner(policy, value, config)
    learner.version = LAG
    return learner, Reference(policy, value, config, learner.frozen), rollouts


def difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """‖found − expected‖ / ‖expected‖ over all parameters together."""
    error = sum(float((found[name].detach().double() - expected[name].detach()).pow(2).sum()) for name in expected)
    return math.sqrt(error / sum(float(gradient.detach().pow(2).sum()) for gradient in expected.values()))


def reference_step(
    reference: Reference, rollouts: list[Rollout], bootstraps: list[float] | None = None
) -> tuple[dict[str, torch.Tensor], float]:
    bootstraps = bootstraps or [0.0] * len(rollouts)
    for _ in range(reference.config.value.updates_per_step):
        reference.update_value(rollouts, bootstraps)
    return reference.policy_gradient(rollouts, bootstraps)


def test_a_step_at_lag_8_equals_the_float64_loop(base: Any) -> None:
    learner, reference, rollouts = build(base, config_for())
    moves, metrics = one_step(learner, rollouts)
    expected, masked = reference_step(reference, rollouts)
    assert difference(moves, expected) < 2e-5
    assert 0.05 < masked < 0.9, "the fixture must have tokens inside and outside the band"
    assert metrics["dis/masked_frac"] == pytest.approx(masked, abs=1e-9)
    value_moves = {n: p.double() for n, p in reference.value.named_parameters()}
    assert difference(dict(learner.value.named_parameters()), value_moves) < 1e-6
    assert learner.version == LAG + 1


def test_bootstrapping_a_truncated_rollout_takes_the_value_before_the_updates(base: Any) -> None:
    learner, reference, rollouts = build(base, config_for(advantage={"gamma": 0.98, "bootstrap_truncated": True}))
    with torch.no_grad():
        bootstraps = [float(reference.v(r, after_end=True)) if r.truncated else 0.0 for r in rollouts]
    assert any(bootstraps)
    moves, _ = one_step(learner, rollouts)
    expected, _ = reference_step(reference, rollouts, bootstraps)
    assert difference(moves, expected) < 2e-5


def test_whitened_advantages_have_mean_0_and_deviation_1_over_the_step(base: Any) -> None:
    learner, reference, rollouts = build(base, config_for(advantage={"gamma": 0.98, "whiten": True}))
    moves, metrics = one_step(learner, rollouts)
    expected, _ = reference_step(reference, rollouts)
    assert difference(moves, expected) < 2e-5
    assert metrics["advantage/mean"] == pytest.approx(0, abs=1e-6)
    assert metrics["advantage/std"] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("budget", [60, 200, 100_000])
def test_the_update_does_not_depend_on_micro_batches_or_order(base: Any, budget: int) -> None:
    """RB-021, RB-022, RB-023: one denominator for the step, whatever the split."""
    whole, _, rollouts = build(base, config_for(token_budget=100_000))
    expected, _ = one_step(whole, rollouts)
    split, _, _ = build(base, config_for(token_budget=max(budget, 200)))
    split.config = split.config.model_copy(update={"token_budget": budget})
    moves, _ = one_step(split, rollouts[::-1])
    assert difference(moves, {name: move.double() for name, move in expected.items()}) < 2e-6
    assert all(move.isfinite().all() for move in moves.values())


def _break_band(monkeypatch: pytest.MonkeyPatch) -> None:
    real, without = objective.policy_loss, LOSS_METHODS["importance_weighting"]
    monkeypatch.setattr(objective, "policy_loss", lambda method, settings, inputs: real(without, {}, inputs))


def _break_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    real = estimators.gae_over_rollouts
    monkeypatch.setattr(estimators, "gae_over_rollouts", lambda *a, **k: -real(*a, **k))


def _break_lambda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimators, "length_adaptive_lambda", lambda lengths, alpha: torch.ones(len(lengths)))


def _break_target(monkeypatch: pytest.MonkeyPatch) -> None:
    real = learner_module.value_targets
    monkeypatch.setattr(learner_module, "value_targets", lambda *a, **k: real(*a, **k).roll(1))


def _break_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    real = objective.action_log_probs
    monkeypatch.setattr(
        objective, "action_log_probs",
        lambda model, micro, t, **k: real(model, replace(micro, before_t=(micro.before_t - 1).clamp(min=0)), t, **k),
    )  # fmt: skip


def _break_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    real = learner_module.pack

    def without_rewards(*args: Any, **kwargs: Any) -> Any:
        batch = real(*args, **kwargs)
        batch.rewards_T[batch.lengths_R.cumsum(0) - 1] = 0
        return batch

    monkeypatch.setattr(learner_module, "pack", without_rewards)


@pytest.mark.parametrize(
    "breakage", [_break_band, _break_sign, _break_lambda, _break_target, _break_mask, _break_reward]
)
def test_the_comparison_notices_each_breakage(base: Any, monkeypatch: pytest.MonkeyPatch, breakage: Any) -> None:
    """A wrong band, sign, λ, critic target, mask or reward moves the update by far more than the tolerance."""
    learner, reference, rollouts = build(base, config_for())
    expected, _ = reference_step(reference, rollouts)
    breakage(monkeypatch)
    moves, _ = one_step(learner, rollouts)
    assert difference(moves, expected) > 1e-3


def test_rollouts_prepared_ahead_give_the_same_bits_and_are_used_for_themselves_only(
    base: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _, rollouts = build(base, config_for())
    expected, _ = one_step(plain, rollouts)
    ahead, _, _ = build(base, config_for())
    changed = msgspec.structs.replace(rollouts[1], score=7.0, segments=rollouts[0].segments, turns=rollouts[0].turns)
    for rollout in [*rollouts[:1], changed, *rollouts[2:]]:
        ahead.prepare(rollout)
    ahead.prepare(msgspec.structs.replace(rollouts[0], rollout_id="failed", score=None))
    made: list[str] = []
    real = learner_module.rollout_arrays
    monkeypatch.setattr(learner_module, "rollout_arrays", lambda r: made.append(r.rollout_id) or real(r))
    # The buffer hands over copies that are marked as trained.
    taken = [msgspec.structs.replace(rollout, state="trained", trained_step=0) for rollout in rollouts]
    moves, _ = one_step(ahead, taken)
    assert made == ["r1"], "only the one that was replaced is made anew, and once for all updates"
    assert all(torch.equal(moves[name], expected[name]) for name in expected)


def test_prepared_rollouts_that_are_never_trained_do_not_pile_up(base: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner_module, "READY_LIMIT", 8)
    learner, _, rollouts = build(base, config_for())
    for number in range(100):
        learner.prepare(msgspec.structs.replace(rollouts[0], rollout_id=f"x{number}"))
    assert len(learner._ready) <= 8
    assert "x99" in learner._ready


class Notes(dict[str, Any]):
    """A rollout's notes, which can be watched."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def test_what_a_rollout_carries_beside_its_tokens_is_not_kept_by_its_arrays(base: Any) -> None:
    """RB-140: prepared and never trained (too old, say), its messages and notes must not stay in memory."""
    learner, _, rollouts = build(base, config_for())
    alive: weakref.WeakSet[Notes] = weakref.WeakSet()
    for number in range(20):
        notes = Notes(text=f"{number}" * 1000)
        alive.add(notes)
        learner.prepare(msgspec.structs.replace(rollouts[0], rollout_id=f"x{number}", info=notes))
    del notes
    gc.collect()
    assert len(learner._ready) == 20
    assert len(alive) == 0


@pytest.mark.parametrize("packed", [True, False])
def test_packed_and_padded_steps_are_the_same_update(base: Any, packed: bool) -> None:
    learner, reference, rollouts = build(base, config_for(token_budget=200))
    assert learner._packed
    learner._packed = packed
    moves, _ = one_step(learner, rollouts)
    expected, _ = reference_step(reference, rollouts)
    assert difference(moves, expected) < 2e-5


def test_frozen_first_layers_are_shared_between_updates_without_changing_them(base: Any) -> None:
    settings = {"lr": VALUE_LR, "warmup_steps": 0, "max_grad_norm": 1e9, "freeze": [r"embed_tokens", r"layers\.0\."]}
    learner, reference, rollouts = build(base, config_for(value=settings))
    runs: list[int] = []
    learner.value.backbone.layers[0].mlp.register_forward_hook(lambda *_: runs.append(0))
    learner.value.backbone.layers[1].mlp.register_forward_hook(lambda *_: runs.append(1))
    moves, _ = one_step(learner, rollouts)
    expected, _ = reference_step(reference, rollouts)
    assert runs.count(1) == 3 * runs.count(0), "two updates and the values for advantages"
    assert difference(moves, expected) < 2e-5
