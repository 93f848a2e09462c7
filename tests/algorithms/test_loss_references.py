"""Every policy loss against plain Python loops that share no code with it, and against finite differences of those.

A reference is what one token adds to the objective, as a function of its log π with all that is detached held fixed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from soloist.algorithms.losses import LossInputs, policy_loss, teaches
from soloist.algorithms.step_statistics import step_statistics
from soloist.methods import LOSS_METHODS

EVERY_METHOD = pytest.mark.parametrize("name", sorted(LOSS_METHODS))
LIMIT = 20.0
"""The log-ratio at which ratios saturate, nats."""


@dataclass(frozen=True)
class Token:
    """One trainable token: log π, log π_old, log μ, A, versions behind, its sequence."""

    now: float
    old: float
    recorded: float
    advantage: float
    behind: int = 0
    sequence: int = 0

    @property
    def moved(self) -> float:
        return self.now - self.old


Objective = Callable[[float], float]


def exp(x: float) -> float:
    return math.exp(min(x, LIMIT))


def clip(u: float, advantage: float, low: float, high: float) -> float:
    """min(r·A, clip(r)·A) for r = exp(u)."""
    ratio = exp(u)
    return min(ratio * advantage, min(max(ratio, low), high) * advantage)


def quantile(values: list[float], share: float) -> float:
    """Linear interpolation between the neighbours in order."""
    ordered, place = sorted(values), share * (len(values) - 1)
    below = math.floor(place)
    return ordered[below] + (place - below) * (ordered[math.ceil(place)] - ordered[below])


def sequence_mean(token: Token, step: list[Token]) -> float:
    """Of log π − log π_old."""
    own = [t.moved for t in step if t.sequence == token.sequence]
    return sum(own) / len(own)


def clipped(low: float, high: float) -> Callable[[Token, list[Token]], Objective]:
    return lambda t, step: lambda x: clip(x - t.old, t.advantage, low, high)


def dis(t: Token, step: list[Token]) -> Objective:
    kept = exp(t.moved) if 0.7 < exp(t.moved) < 6.0 else 0.0
    return lambda x: kept * t.advantage * x


def gspo(t: Token, step: list[Token]) -> Objective:
    return lambda x: clip(sequence_mean(t, step) + x - t.now, t.advantage, 1 - 3e-4, 1 + 4e-4)


def cispo(t: Token, step: list[Token]) -> Objective:
    return lambda x: min(exp(t.moved), 5.0) * t.advantage * x


def tis(t: Token, step: list[Token]) -> Objective:
    return lambda x: min(exp(t.old - t.recorded), 2.0) * clip(x - t.old, t.advantage, 0.8, 1.2)


def icepop(t: Token, step: list[Token]) -> Objective:
    k = exp(t.old - t.recorded)
    return lambda x: k * clip(x - t.old, t.advantage, 0.8, 1.2) if 0.5 <= k <= 5 else 0.0


def decoupled(t: Token, step: list[Token]) -> Objective:
    return lambda x: exp(t.old - t.recorded) * clip(x - t.old, t.advantage, 0.8, 1.2)


def a3po(t: Token, step: list[Token]) -> Objective:
    alpha = 1 / t.behind if t.behind > 0 else 1.0
    proximal = alpha * t.recorded + (1 - alpha) * t.now
    return lambda x: exp(proximal - t.recorded) * clip(x - proximal, t.advantage, 0.8, 1.2)


def m2po(t: Token, step: list[Token]) -> Objective:
    squares = sorted(s.moved**2 for s in step)
    while squares and sum(squares) / len(squares) >= 0.04:
        squares.pop()
    kept = bool(squares) and t.moved**2 <= squares[-1]
    return lambda x: exp(x - t.old) * t.advantage if kept else 0.0


def dppo_tv(t: Token, step: list[Token]) -> Objective:
    change = math.exp(t.now) - math.exp(t.recorded)
    masked = (t.advantage > 0 and change > 0.2) or (t.advantage < 0 and change < -0.2)
    return lambda x: 0.0 if masked else min(exp(x - t.recorded), 20.0) * t.advantage


def sat(t: Token, step: list[Token], distance: Callable[[Token], float]) -> Objective:
    d, q = distance(t), quantile([abs(distance(s)) for s in step], 0.9)
    c = 2 / (1 + (abs(d) / q) ** 2) if abs(d) > q > 0 else 1.0
    low, high = (1 - 0.2 * c, 1.2) if d < 0 else (0.8, 1 + 0.2 * c)
    return lambda x: clip(d + x - t.now, t.advantage, low, high)


REFERENCES: dict[str, Callable[[Token, list[Token]], Objective]] = {
    "dis": dis,
    "ppo": clipped(0.8, 1.2),
    "clip_higher": clipped(0.8, 1.28),
    "dr_grpo": clipped(0.8, 1.2),
    "dapo": clipped(0.8, 1.28),
    "gspo": gspo,
    "cispo": cispo,
    "tis": tis,
    "icepop": icepop,
    "m2po": m2po,
    "dppo_tv": dppo_tv,
    "decoupled_ppo": decoupled,
    "a3po": a3po,
    "sat_ppo": lambda t, step: sat(t, step, lambda s: s.moved),
    "sat_grpo": lambda t, step: sat(t, step, lambda s: s.moved),
    "sat_gspo": lambda t, step: sat(t, step, lambda s: sequence_mean(s, step)),
    "importance_weighting": lambda t, step: lambda x: exp(x - t.old) * t.advantage,
}


def value_and_slope(name: str, token: Token, step: list[Token], width: float = 1e-6) -> tuple[float, float]:
    """What a token adds to the objective, and the central difference of that."""
    objective = REFERENCES[name](token, step)
    slope = (objective(token.now + width) - objective(token.now - width)) / (2 * width)
    return objective(token.now), slope


def recomputes(name: str) -> bool:
    return "recompute" in LOSS_METHODS[name].old_log_probs


def random_step(name: str, seed: int, n: int = 60) -> list[Token]:
    """Tokens of four sequences, a few of them far away; log π_old is log μ where the method allows nothing else."""
    source = torch.Generator().manual_seed(seed)
    scale = 3e-3 if name == "gspo" else 0.4
    tokens = []
    for place in range(n):
        near, far, mismatch, advantage = torch.randn(4, generator=source, dtype=torch.float64).tolist()
        recorded = -0.05 - 1.5 * abs(far)
        old = recorded + 0.5 * mismatch if recomputes(name) else recorded
        now = old + scale * near * (6 if place % 7 == 0 else 1)
        tokens.append(Token(now, old, recorded, advantage, behind=place % 5, sequence=place % 4))
    return tokens


def inputs_of(name: str, step: list[Token], dtype: torch.dtype = torch.float64) -> LossInputs:
    """The step as one micro-batch with weights of 1."""

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=dtype)

    now, old = column([t.now for t in step]), column([t.old for t in step])
    recorded, sequence = column([t.recorded for t in step]), torch.tensor([t.sequence for t in step])
    statistics = step_statistics(
        LOSS_METHODS[name], {}, log_probs_T=now, old_log_probs_T=old, rollout_log_probs_T=recorded,
        weights_T=torch.ones(len(step)), rollout_T=sequence, n_rollouts=int(sequence.max()) + 1,
    )  # fmt: skip
    return LossInputs(
        log_probs_T=now.requires_grad_(), rollout_log_probs_T=recorded, old_log_probs_T=old,
        advantages_T=column([t.advantage for t in step]), weights_T=torch.ones(len(step), dtype=torch.float64),
        staleness_T=torch.tensor([t.behind for t in step]), statistics=statistics,
    )  # fmt: skip


def loss_and_gradient(name: str, inputs: LossInputs) -> tuple[float, list[float]]:
    loss, _ = policy_loss(LOSS_METHODS[name], {}, inputs)
    (slopes,) = torch.autograd.grad(loss, inputs.log_probs_T)
    return loss.item(), slopes.tolist()


@EVERY_METHOD
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_loss_and_gradient_equal_the_formula_and_its_differences(name: str, seed: int) -> None:
    step = random_step(name, seed)
    loss, slopes = loss_and_gradient(name, inputs_of(name, step))
    expected = [value_and_slope(name, token, step) for token in step]
    assert loss == pytest.approx(-sum(value for value, _ in expected), rel=1e-10)
    assert slopes == pytest.approx([-slope for _, slope in expected], rel=1e-6, abs=1e-8)
    silent = sum(slope == 0 for slope in slopes)
    assert (silent > 0) == (name not in ("importance_weighting", "cispo"))
    assert silent < len(step) or name == "gspo"


@EVERY_METHOD
@pytest.mark.parametrize("distance", [93.5, 750.0, 19.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_extreme_log_ratios_have_the_formula_s_gradient_and_are_finite(
    name: str, distance: float, advantage: float
) -> None:
    """RB-017, with differences of the reference: one ordinary token, one far above μ, one far below."""
    ordinary = Token(-1.0, -1.0, -1.0, advantage, 0, 0)
    above = Token(-1.5, -1.5 - distance, -1.5 - distance, advantage, 2, 1)
    below = Token(-1.5 - distance, -1.5, -1.5, advantage, 3, 2)
    step = [ordinary, above, below]
    loss, slopes = loss_and_gradient(name, inputs_of(name, step))
    expected = [value_and_slope(name, token, step) for token in step]
    assert math.isfinite(loss)
    assert loss == pytest.approx(-sum(value for value, _ in expected), rel=1e-10, abs=1e-12)
    assert slopes == pytest.approx([-slope for _, slope in expected], rel=1e-6, abs=1e-6)


@EVERY_METHOD
@pytest.mark.parametrize("seed", [0, 1])
def test_a_token_teaches_exactly_when_it_has_a_gradient(name: str, seed: int) -> None:
    step = random_step(name, seed)
    far = [replace(step[0], now=step[0].now - 800), replace(step[1], now=step[1].now + 800)]
    step = [*step[:-2], *far] if name not in ("gspo", "sat_gspo") else step
    inputs = inputs_of(name, step)
    _, slopes = loss_and_gradient(name, inputs)
    found = teaches(LOSS_METHODS[name], {}, inputs)
    assert found.tolist() == [slope != 0 for slope in slopes]
    without = replace(inputs, advantages_T=torch.zeros_like(inputs.advantages_T))
    assert (teaches(LOSS_METHODS[name], {}, without) | ~found).all(), "A = 0 silences no token by itself"


# Two sequences: unchanged; up by half with A > 0; down to 0.6 with A < 0; up by half with A < 0.
FOUR = [
    Token(-1.0, -1.0, -1.0, 1.0, 0, 0),
    Token(-0.7 + math.log(1.5), -0.7, -0.7 - math.log(1.1), 1.0, 2, 0),
    Token(-2.0 + math.log(0.6), -2.0, -2.0 + math.log(0.9), -1.0, 2, 1),
    Token(-1.2 + math.log(1.5), -1.2, -1.2 - math.log(6.0), -1.0, 4, 1),
]
LITERALS = {
    "ppo": [1.0, 1.2, -0.8, -1.5],
    "clip_higher": [1.0, 1.28, -0.8, -1.5],
    "tis": [1.0, 1.2 * 1.1, -0.8 / 0.9, -1.5 * 2.0],
    "icepop": [1.0, 1.2 * 1.1, -0.8 / 0.9, 0.0],
    "decoupled_ppo": [1.0, 1.2 * 1.1, -0.8 / 0.9, -1.5 * 6.0],
    "importance_weighting": [1.0, 1.5, -0.6, -1.5],
    "dppo_tv": [1.0, 0.0, -0.6, -1.5],
    "dis": [-1.0, 1.5 * -0.294534892, 0.0, 1.5 * 0.794534892],
    "cispo": [-1.0, 1.5 * -0.294534892, 0.6 * 2.510825624, 1.5 * 0.794534892],
    # √1.5 and √0.6 of two versions, the fourth root of four: clipped at 1.2 and 0.8, times the rest of the way.
    "a3po": [1.0, 1.2 * 1.5**0.5, -0.8 * 0.6**0.5, -(1.5**0.25) * 1.5**0.75],
    # Sequence ratios √1.5 and √0.9.
    "gspo": [1.0004, 1.0004, -0.9997, -0.9997],
    # |d| = 0, ln 1.5, ln 0.6, ln 1.5: q = 0.479217, the third is beyond it: c⁻ = 0.936213.
    "sat_ppo": [1.0, 1.2, -0.8127574, -1.5],
    # Proxies 0.2027 twice and −0.0527 twice; q is the larger, so nothing contracts.
    "sat_gspo": [1.2, 1.2, -(0.9**0.5), -(0.9**0.5)],
    # Squares 0, .1644, .2609, .1644: with the first two their mean is .082, so only the unchanged one stays.
    "m2po": [1.0, 0.0, 0.0, 0.0],
}


@pytest.mark.parametrize("name", sorted(LITERALS))
def test_four_tokens_have_the_gains_worked_out_by_hand(name: str) -> None:
    step = FOUR if recomputes(name) else [replace(token, recorded=token.old) for token in FOUR]
    loss, _ = loss_and_gradient(name, inputs_of(name, step))
    assert loss == pytest.approx(-sum(LITERALS[name]), abs=1e-6)
    gains = [REFERENCES[name](token, step)(token.now) for token in step]
    assert gains == pytest.approx(LITERALS[name], abs=1e-6)


def test_methods_that_differ_in_aggregation_alone_have_one_reference() -> None:
    assert set(LOSS_METHODS) - set(LITERALS) == {"dr_grpo", "dapo", "sat_grpo"}
    assert set(REFERENCES) == set(LOSS_METHODS)
