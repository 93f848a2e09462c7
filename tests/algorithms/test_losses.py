"""What holds for every policy loss: extremes, absent tokens, NaN, sums of metrics; and how the methods are related."""

import math
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from soloist.algorithms.losses import LossInputs, metrics_of, policy_loss
from soloist.algorithms.step_statistics import StepStatistics, step_statistics
from soloist.methods import LOSS_METHODS, Setting
from soloist.metrics import METRICS

GARBAGE = [math.nan, math.inf, -math.inf, 1e9]
EVERY_METHOD = pytest.mark.parametrize("name", sorted(LOSS_METHODS))
Sums = dict[str, Tensor]


def recomputes(name: str) -> bool:
    return "recompute" in LOSS_METHODS[name].old_log_probs


def inputs_of(
    now: Tensor, recorded: Tensor, advantages: Tensor | float = 1.0, weights: Tensor | float = 1.0, **rest: Tensor
) -> LossInputs:
    """Inputs without statistics; numbers are spread over all tokens, π_old is μ and tokens are fresh unless given."""

    def column(x: Tensor | float) -> Tensor:
        return x if isinstance(x, Tensor) else torch.full(now.shape, x)

    return LossInputs(
        log_probs_T=now.detach().clone().requires_grad_(), rollout_log_probs_T=recorded,
        old_log_probs_T=rest.get("old", recorded), advantages_T=column(advantages), weights_T=column(weights),
        staleness_T=rest.get("behind", torch.zeros(now.shape, dtype=torch.int64)), statistics=StepStatistics(),
    )  # fmt: skip


def batch(name: str, n: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> LossInputs:
    """Log-probabilities of three policies (some tokens far away), advantages, ages, token-mean weights."""
    source = torch.Generator().manual_seed(seed)
    recorded = -torch.rand(n, generator=source, dtype=torch.float64) * 3 - 0.1
    old = recorded + 0.5 * torch.randn(n, generator=source, dtype=torch.float64) * recomputes(name)
    now = old + torch.randn(n, generator=source, dtype=torch.float64) * 0.8
    advantages = torch.randn(n, generator=source, dtype=torch.float64)
    return inputs_of(
        now.to(dtype), recorded.to(dtype), advantages.to(dtype), torch.full((n,), 1 / n, dtype=torch.float64),
        old=old.to(dtype), behind=torch.arange(n) % 4,
    )  # fmt: skip


def part_of(inputs: LossInputs, places: Tensor) -> LossInputs:
    columns = {field.name: getattr(inputs, field.name) for field in fields(inputs) if field.name != "statistics"}
    return LossInputs(**{name: x[places] for name, x in columns.items()}, statistics=inputs.statistics.at(places))


def with_statistics(name: str, inputs: LossInputs, **given: Setting) -> LossInputs:
    """The inputs as a whole step, every third token of another rollout."""
    n = len(inputs.weights_T)
    statistics = step_statistics(
        LOSS_METHODS[name], given, log_probs_T=inputs.log_probs_T, old_log_probs_T=inputs.old_log_probs_T,
        rollout_log_probs_T=inputs.rollout_log_probs_T, weights_T=inputs.weights_T,
        rollout_T=torch.arange(n) % 3, n_rollouts=3,
    )  # fmt: skip
    return replace(inputs, statistics=statistics)


def outcome(name: str, inputs: LossInputs, **given: Setting) -> tuple[Tensor, Tensor, Sums]:
    """(loss, gradient in log π, metric sums) of the inputs as one step of one micro-batch."""
    loss, sums = policy_loss(LOSS_METHODS[name], given, with_statistics(name, inputs, **given))
    (slopes,) = torch.autograd.grad(loss, inputs.log_probs_T)
    return loss, slopes, sums


@EVERY_METHOD
def test_only_the_current_policy_gets_a_gradient(name: str) -> None:
    inputs = batch(name, 6)
    leaves = {
        column: getattr(inputs, column).detach().clone().requires_grad_()
        for column in ("log_probs_T", "rollout_log_probs_T", "old_log_probs_T", "advantages_T", "weights_T")
    }
    loss, sums = policy_loss(LOSS_METHODS[name], {}, replace(with_statistics(name, inputs), **leaves))
    loss.backward()
    assert [column for column, leaf in leaves.items() if leaf.grad is not None] == ["log_probs_T"]
    assert not any(value.requires_grad for value in sums.values())


def test_one_overflowing_stale_token_is_masked_and_counted() -> None:
    """RB-016: log-ratio 93.5 beside a token with ratio 1."""
    inputs = inputs_of(torch.tensor([-1.5, -0.7]), torch.tensor([-95.0, -0.7]), weights=0.5)
    loss, slopes, sums = outcome("dis", inputs)
    metrics = metrics_of([sums])
    assert loss.item() == pytest.approx(0.35)
    assert slopes.tolist() == [0.0, -0.5]
    assert metrics["dis/masked_frac"] == metrics["dis/masked_frac_high"] == 0.5
    assert metrics["dis/masked_frac_low"] == 0.0


@EVERY_METHOD
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_extreme_log_ratios_stay_finite_in_every_float_type(name: str, dtype: torch.dtype, advantage: float) -> None:
    """RB-017: nothing is NaN or infinite; the first token is ordinary, the rest are 93.5, 750 and −750 away."""
    now = torch.tensor([-1.0, -1.5, -1.0, -751.0], dtype=dtype)
    recorded = torch.tensor([-1.0, -95.0, -751.0, -1.0], dtype=dtype)
    for old in [recorded, now, -torch.ones_like(now)] if recomputes(name) else [recorded]:
        inputs = inputs_of(now, recorded, advantage, 0.25, old=old, behind=torch.tensor([0, 1, 2, 3]))
        loss, slopes, sums = outcome(name, inputs)
        assert torch.isfinite(loss)
        assert torch.isfinite(slopes).all()
        assert all(torch.isfinite(value) for value in sums.values())
        assert loss.dtype == torch.float32
    if name in ("dis", "ppo", "importance_weighting"):
        assert outcome(name, inputs_of(now, recorded, advantage, 0.25))[1].tolist() == [
            -0.25 * advantage,
            0.0,
            0.0,
            0.0,
        ]


@pytest.mark.parametrize("name", ["ppo", "importance_weighting", "decoupled_ppo", "a3po", "tis"])
@pytest.mark.parametrize("distance", [4.0, 9.0, 15.0, 18.0])
def test_large_ratios_do_not_overflow_the_gradient_of_fp16(name: str, distance: float) -> None:
    """exp(15) is fine in fp32, where the loss is computed, but not in the fp16 tensor that receives the gradient."""
    now = torch.tensor([-1.0, -1.0], dtype=torch.float16)
    recorded = torch.tensor([-1.0 - distance, -1.0], dtype=torch.float16)
    old = (now + recorded) / 2 if recomputes(name) else recorded
    loss, slopes, _ = outcome(name, inputs_of(now, recorded, -1.0, old=old, behind=torch.tensor([2, 2])))
    assert torch.isfinite(loss)
    assert torch.isfinite(slopes).all()
    assert slopes[1] == 1.0


@EVERY_METHOD
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_an_impossible_token_breaks_nothing(name: str, advantage: float) -> None:
    """log π = −inf: the product 0 · inf must not appear, forward or backward."""
    now, recorded = torch.tensor([-math.inf, -1.0]), torch.tensor([-1.0, -1.0])
    loss, slopes, _ = outcome(name, inputs_of(now, recorded, advantage, behind=torch.tensor([2, 1])))
    assert torch.isfinite(loss)
    assert slopes.tolist() == [0.0, -advantage]


def test_the_loss_depends_on_the_recorded_log_probability() -> None:
    """RB-026: with recorded −1.0 and current −0.7 the gradient is exp(0.3); a self-made ratio would give 1."""
    for name in ("dis", "importance_weighting", "dppo_tv", "cispo"):
        _, stale, _ = outcome(name, inputs_of(torch.tensor([-0.7]), torch.tensor([-1.0])))
        _, fresh, _ = outcome(name, inputs_of(torch.tensor([-0.7]), torch.tensor([-0.7])))
        assert float(stale) == pytest.approx(-1.34986, abs=1e-5)
        assert float(fresh) == pytest.approx(-1.0)


@EVERY_METHOD
@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_absent_tokens_change_no_bit_of_loss_gradient_or_metric(name: str, garbage: float, dtype: torch.dtype) -> None:
    """A token of weight 0 is absent, whatever is stored there."""
    inputs = batch(name, 9, dtype)
    absent = torch.tensor([0, 1, 0, 0, 1, 0, 0, 0, 1]).bool()
    weights = torch.where(absent, 0.0, inputs.weights_T)

    def filled(filler: float) -> tuple[Tensor, Tensor, Sums]:
        columns = {
            column: torch.where(absent, filler, getattr(inputs, column).detach())
            for column in ("log_probs_T", "rollout_log_probs_T", "old_log_probs_T", "advantages_T")
        }
        columns["log_probs_T"].requires_grad_()
        return outcome(name, replace(inputs, weights_T=weights, **columns))

    clean_loss, clean_gradient, clean_sums = filled(0.0)
    loss, slopes, sums = filled(garbage)
    assert torch.equal(loss, clean_loss)
    assert torch.equal(slopes, clean_gradient)
    assert (slopes[absent] == 0).all()
    assert sums.keys() == clean_sums.keys()
    assert all(torch.equal(sums[key], clean_sums[key]) for key in sums)
    assert sums["tokens"] == 6
    # Without the tokens themselves, and with the statistics of the step that had them, it is the same step.
    whole = with_statistics(name, replace(inputs, weights_T=weights))
    shorter, short_sums = policy_loss(LOSS_METHODS[name], {}, part_of(whole, ~absent))
    assert shorter.item() == pytest.approx(loss.item(), rel=1e-5, abs=1e-7)
    assert metrics_of([sums]) == pytest.approx(metrics_of([short_sums]), rel=1e-12)


@pytest.mark.parametrize("name", ["dis", "ppo", "gspo", "cispo", "a3po", "importance_weighting"])
@pytest.mark.parametrize("filler", [1.0, 0.0, math.nan])
def test_fillers_of_observation_tokens_are_in_no_ratio_kl_or_count(name: str, filler: float) -> None:
    """RB-044: two action tokens around three observation tokens for which the engine has no log-probability."""
    mask = torch.tensor([True, False, False, False, True])
    now = torch.tensor([-0.5, -9.0, -9.0, -9.0, -0.7])
    recorded = torch.where(mask, torch.tensor([-0.5, 0, 0, 0, -0.7]), filler)
    inputs = inputs_of(now, recorded, weights=mask / 2)
    for given_inputs, slope in ((inputs, [-0.5, 0.0, 0.0, 0.0, -0.5]), (part_of(inputs, mask), [-0.5, -0.5])):
        leaf = replace(given_inputs, log_probs_T=given_inputs.log_probs_T.detach().requires_grad_())
        _, slopes, sums = outcome(name, leaf)
        metrics = metrics_of([sums])
        assert slopes.tolist() == slope
        assert (metrics["mismatch_kl/mean"], metrics["actor/ppo_kl"], float(sums["tokens"])) == (0.0, 0.0, 2.0)


def test_reported_kl_is_per_action_token_and_against_the_recorded_policy() -> None:
    """RB-058: 10 action tokens with KL 0.01 each, 200 observation tokens with a difference of −3."""
    mask = torch.tensor([True] * 10 + [False] * 200)
    recorded = torch.full((210,), -1.0)
    now = recorded - torch.where(mask, 0.01, 3.0)
    for name in ("dis", "tis"):
        metrics = metrics_of([outcome(name, inputs_of(now, recorded, weights=mask / 10, old=now))[2]])
        assert metrics["actor/ppo_kl"] == pytest.approx(0.01, rel=1e-4)
        assert metrics["mismatch_kl/mean"] == pytest.approx(math.exp(-0.01) - 1 + 0.01, abs=1e-6)


@EVERY_METHOD
@pytest.mark.parametrize("broken", ["log_probs_T", "rollout_log_probs_T", "advantages_T"])
def test_nan_at_a_live_token_shows_in_loss_and_gradient(name: str, broken: str) -> None:
    """RB-046: hiding NaN is harmful. It must reach the finiteness check, not be counted as a masked token."""
    inputs = batch(name, 6, torch.float32)
    column = getattr(inputs, broken).detach().clone()
    column[0] = math.nan
    inputs = replace(inputs, **{broken: column.requires_grad_(broken == "log_probs_T")})
    if broken == "rollout_log_probs_T":
        inputs = replace(inputs, old_log_probs_T=column)
    loss, slopes, _ = outcome(name, inputs)
    assert loss.isnan()
    assert slopes[0].isnan()


@EVERY_METHOD
def test_nothing_and_all_absent_give_zero_not_nan(name: str) -> None:
    """RB-024, last sentence."""
    empty = inputs_of(torch.zeros(0), torch.zeros(0))
    loss, _, sums = outcome(name, empty)
    assert loss.item() == 0.0
    assert set(metrics_of([sums]).values()) == {None}
    inputs = batch(name, 4)
    loss, slopes, sums = outcome(name, replace(inputs, weights_T=torch.zeros(4)))
    assert loss.item() == 0.0
    assert slopes.tolist() == [0.0] * 4
    assert set(metrics_of([sums]).values()) == {None}
    assert float(sums["tokens"]) == 0.0


def at_ratios(ratios: list[float], advantages: list[float] | float = 1.0, **rest: Tensor) -> LossInputs:
    d = torch.tensor(ratios, dtype=torch.float64).log()
    signs = torch.tensor(advantages) if isinstance(advantages, list) else advantages
    return inputs_of(d - 3.0, torch.full_like(d, -3.0), signs, **rest)


def test_band_and_clip_metrics_have_the_values_of_their_definitions() -> None:
    ratios = [0.5, 1.0, 1.1, 7.0]
    metrics = metrics_of([outcome("dis", at_ratios(ratios))[2]])
    assert [metrics[f"dis/masked_frac{side}"] for side in ("", "_low", "_high")] == [0.5, 0.25, 0.25]
    assert metrics["dis/ess"] == pytest.approx(sum(ratios) ** 2 / (4 * sum(r * r for r in ratios)))
    assert metrics["actor/ppo_kl"] == pytest.approx(-sum(math.log(r) for r in ratios) / 4)
    assert metrics["mismatch_kl/mean"] == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / 4)
    # Outside the interval a token is clipped only where that lowers the objective.
    for first_sign, share in ((-1.0, 0.5), (1.0, 0.25)):
        clipped = metrics_of([outcome("ppo", at_ratios(ratios, [first_sign, 1.0, 1.0, 1.0]))[2]])
        assert clipped["ppo/clip_frac"] == share
    assert metrics_of([outcome("cispo", at_ratios([0.01, 1.0, 5.1, 6.0]))[2]])["cispo/clip_frac"] == 0.5


def test_metrics_of_the_other_regions_have_the_values_of_their_definitions() -> None:
    """Distances 0, 0, 0.1, −0.2: q = 0.17, so the last one has c = 2 / (1 + (0.2/0.17)²) = 0.838897."""
    inputs = at_ratios([1.0, 1.0, math.exp(0.1), math.exp(-0.2)])
    metrics = metrics_of([outcome("sat_ppo", inputs)[2]])
    assert metrics["sat/gate_rate"] == 0.25
    assert metrics["sat/proxy"] == pytest.approx(0.075)
    assert metrics["sat/contraction_min"] == pytest.approx(0.838897, abs=1e-6)
    assert metrics["sat/radius_low"] == pytest.approx(0.2 * (3 + 0.838897) / 4, abs=1e-6)
    assert metrics["sat/radius_high"] == pytest.approx(0.2)
    assert metrics_of([outcome("m2po", inputs, m2_threshold=0.0125)[2]])["m2po/masked_frac"] == 0.25
    assert metrics_of([outcome("dppo_tv", inputs, tv_delta=0.004)[2]])["tv/masked_frac"] == 0.25
    old = torch.tensor([-3.0, -2.0, -1.0, -4.0], dtype=torch.float64)
    corrected = inputs_of(old, torch.full_like(old, -3.0), old=old)
    assert metrics_of([outcome("tis", corrected)[2]])["correction/truncated_frac"] == 0.5
    assert metrics_of([outcome("icepop", corrected)[2]])["correction/truncated_frac"] == 0.5


@EVERY_METHOD
def test_metric_names_are_registered_and_add_up_over_parts(name: str) -> None:
    inputs = with_statistics(name, batch(name, 30, seed=5))
    whole = metrics_of([policy_loss(LOSS_METHODS[name], {}, inputs)[1]])
    parts = [
        policy_loss(LOSS_METHODS[name], {}, part_of(inputs, places))[1]
        for places in torch.arange(30).split([1, 12, 0, 17])
    ]
    assert set(whole) <= set(METRICS)
    assert metrics_of(parts) == pytest.approx(whole, rel=1e-12)
    assert metrics_of([]) == {}


@EVERY_METHOD
def test_tensors_that_would_broadcast_are_refused(name: str) -> None:
    inputs = with_statistics(name, batch(name, 4))
    with pytest.raises(ValueError, match=r"rollout_log_probs_T \(4, 1\)"):
        policy_loss(LOSS_METHODS[name], {}, replace(inputs, rollout_log_probs_T=inputs.rollout_log_probs_T[:, None]))
    with pytest.raises(ValueError, match=r"advantages_T \(1,\)"):
        policy_loss(LOSS_METHODS[name], {}, replace(inputs, advantages_T=inputs.advantages_T[:1]))
    if inputs.statistics.kept_T is not None:
        with pytest.raises(ValueError, match=r"kept_T \(2,\)"):
            policy_loss(LOSS_METHODS[name], {}, replace(inputs, statistics=inputs.statistics.at(torch.arange(2))))


def test_a_setting_that_the_method_does_not_read_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\['eps_low'\] are not read"):
        policy_loss(LOSS_METHODS["m2po"], {"eps_low": 0.2}, batch("m2po", 3))
    with pytest.raises(ValueError, match="sat_kernel 'gauss' is none of"):
        step_statistics(
            LOSS_METHODS["sat_ppo"], {"sat_kernel": "gauss"}, log_probs_T=torch.zeros(1), weights_T=torch.ones(1),
            old_log_probs_T=torch.zeros(1), rollout_log_probs_T=torch.zeros(1), rollout_T=torch.zeros(1).int(),
            n_rollouts=1,
        )  # fmt: skip


# --- how the methods are related --------------------------------------------------------------------------------------

changes = st.lists(st.floats(-3.0, 3.0), min_size=1, max_size=12)


def assert_same_bits(one: tuple[Tensor, Tensor, Sums], other: tuple[Tensor, Tensor, Sums]) -> None:
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])


@pytest.mark.parametrize(("sat", "base"), [("sat_ppo", "ppo"), ("sat_grpo", "clip_higher"), ("sat_gspo", "gspo")])
@settings(max_examples=40, deadline=None)
@given(d=changes, seed=st.integers(0, 9))
def test_sat_without_contraction_is_its_base_to_the_bit(sat: str, base: str, d: list[float], seed: int) -> None:
    """At the 1.0-quantile no |d| is above q, so c = 1 everywhere."""
    source = torch.Generator().manual_seed(seed)
    advantages = torch.randn(len(d), generator=source)
    inputs = inputs_of(torch.tensor(d) - 4.0, torch.full((len(d),), -4.0), advantages, 1 / len(d))
    epsilons: dict[str, Setting] = {"eps_low": 0.1, "eps_high": 0.3}
    assert_same_bits(outcome(sat, inputs, sat_quantile=1.0, **epsilons), outcome(base, inputs, **epsilons))
    contracted = outcome(sat, inputs, sat_quantile=0.5, **epsilons)
    assert contracted[0] >= outcome(base, inputs, **epsilons)[0], "a smaller objective is a larger loss"


@settings(max_examples=40, deadline=None)
@given(d=changes, behind=st.integers(0, 6))
def test_a3po_is_decoupled_ppo_with_the_interpolated_policy(d: list[float], behind: int) -> None:
    recorded = torch.full((len(d),), -4.0, dtype=torch.float64)
    now = torch.tensor(d, dtype=torch.float64) - 4.0
    advantages = torch.where(torch.arange(len(d)) % 2 == 0, 1.0, -0.7).double()
    ages = torch.full((len(d),), behind)
    alpha = 1 / max(behind, 1)
    ours = outcome("a3po", inputs_of(now, recorded, advantages, behind=ages))
    theirs = outcome("decoupled_ppo", inputs_of(now, recorded, advantages, old=alpha * recorded + (1 - alpha) * now))
    assert ours[0].item() == pytest.approx(theirs[0].item(), rel=1e-9)
    assert ours[1].tolist() == pytest.approx(theirs[1].tolist(), rel=1e-9, abs=1e-12)
    ppo = outcome("ppo", inputs_of(now, recorded, advantages))
    if behind <= 1:
        assert_same_bits(ours, ppo)
    elif (now - recorded).abs().max() > 0.5:
        assert ours[0] != ppo[0]


def test_gspo_per_token_has_the_gradient_of_the_sequence_s_own_ratio() -> None:
    """With one advantage a sequence: differentiate exp(mean(log π − log π_old)) itself, clipped, times its length."""
    inputs = batch("sat_gspo", 12, seed=4)
    sequence = torch.arange(12) % 3
    inputs = replace(inputs, advantages_T=torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)[sequence])
    loss, slopes, _ = outcome("gspo", inputs, eps_low=0.2, eps_high=0.2)
    leaf = inputs.log_probs_T.detach().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for number, advantage in enumerate([1.0, -2.0, 0.5]):
        own = sequence == number
        ratio = (leaf[own] - inputs.old_log_probs_T[own]).mean().exp()
        total = total - 4 / 12 * torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    (expected,) = torch.autograd.grad(total, leaf)
    assert loss.item() == pytest.approx(total.item(), rel=1e-12)
    assert slopes.tolist() == pytest.approx(expected.tolist(), rel=1e-12, abs=1e-15)
    assert slopes.any()


@pytest.mark.parametrize("name", ["tis", "icepop", "decoupled_ppo"])
@pytest.mark.parametrize("over", ["token", "sequence", "sequence_mean"])
def test_a_correction_without_mismatch_is_ppo_to_the_bit(name: str, over: str) -> None:
    inputs = batch("dis", 20)
    chosen: dict[str, Setting] = {} if name == "decoupled_ppo" else {"correction_over": over}
    assert_same_bits(outcome(name, inputs, **chosen), outcome("ppo", inputs))
    moved = replace(inputs, old_log_probs_T=inputs.rollout_log_probs_T - 0.3)
    assert outcome(name, moved, **chosen)[0] != outcome("ppo", moved)[0]


@pytest.mark.parametrize("name", ["sat_ppo", "sat_gspo"])
def test_a_quantile_of_the_only_micro_batch_is_that_of_the_step(name: str) -> None:
    inputs = batch(name, 21, seed=2)
    whole, alone = outcome(name, inputs), outcome(name, inputs, sat_over="micro_batch")
    assert_same_bits(whole, alone)
    assert metrics_of([whole[2]]) == metrics_of([alone[2]])
