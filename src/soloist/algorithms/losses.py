"""Policy losses: ratio × region × surrogate × correction, per-token terms times weights, summed (`soloist.methods`).

Guarantees: gradients reach log π_θ only; bf16 and fp16 are computed in fp32; a step's loss is the plain sum of its
micro-batches' losses, since the weights (`aggregation.py`) and the statistics (`step_statistics.py`) were made from the
whole step. A token of weight exactly 0 is absent: whatever stands there, NaN and ±inf included, changes no bit of loss,
gradient or metric. A NaN at a live token does reach the loss, so that it is found and not trained on.
Not covered: KL penalty, entropy bonus (SAO has neither), entropy as a metric.

Metrics are sums over the tokens of one call, plus their count, in fp64: add them up over micro-batches and ranks,
divide once (`MINIMA` are least values instead). `metrics_of` does it all. The loss itself needs no division.
Legend: T packed trainable tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from soloist.algorithms.corrections import masked_correction, proximal_correction, truncated_correction
from soloist.algorithms.ratios import (
    interpolated_correction,
    interpolated_log_ratio,
    k3_divergence,
    log_ratio,
    saturated_ratio,
    saturation,
    with_gradient_of,
)
from soloist.algorithms.step_statistics import StepStatistics, linear_quantile
from soloist.algorithms.surrogates import Terms, detached, linear, pessimistic
from soloist.algorithms.tensors import at_least_float32, check_packed
from soloist.algorithms.trust_regions import (
    TrustRegion,
    band_region,
    clip_region,
    no_region,
    probability_region,
    sat_region,
    second_moment_region,
    truncation_region,
)
from soloist.methods import LossMethod, Setting

Sums = dict[str, Tensor]
MINIMA = {"sat/contraction_min"}
"""Metrics that are the least value of a step instead of a mean."""


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """What a policy loss sees of one micro-batch, all [T].

    Example: `policy_loss(LOSS_METHODS["dis"], {}, inputs)`.
    """

    log_probs_T: Tensor
    """log π_θ, nats; the only one that gets a gradient."""
    rollout_log_probs_T: Tensor
    """log μ as the engine recorded it, nats."""
    old_log_probs_T: Tensor
    """log π_old, nats: the recorded ones again, or recomputed at the start of the step."""
    advantages_T: Tensor
    """A, in units of the reward."""
    weights_T: Tensor
    """w of `aggregation_weights`; exactly 0 where a token is absent."""
    staleness_T: Tensor
    """Version being trained minus the token's version, int."""
    statistics: StepStatistics
    """Of the whole step, for these tokens: `step_statistics(…).at(tokens_t)`."""


def policy_loss(method: LossMethod, settings: Mapping[str, Setting], inputs: LossInputs) -> tuple[Tensor, Sums]:
    """L = −Σ_t w_t · k_t · s(r_t, A_t), with the method's ratio r, surrogate s in its region, and correction k.

    A scalar to minimise and the sums of its metrics. Settings that are not given have their published values. Raises
    ValueError when tensors are not [T], for settings that aren't the method's, and for absent statistics.
    """
    given = method.settings_with(settings)
    tokens = _Tokens.of(inputs, factors=1 if method.correction == "none" else 2)
    step = _TokenLosses.of(method, given, tokens)
    with torch.no_grad():
        sums = tokens.common_sums() | {name: tokens.combined(name, x_T) for name, x_T in step.metrics.items()}
    return -(tokens.weights_T * step.gain_T).sum(), sums


@torch.no_grad()
def teaches(method: LossMethod, settings: Mapping[str, Setting], inputs: LossInputs) -> Tensor:
    """Tokens with a gradient, bool [T]: not masked, clipped or saturated. A token with A = 0 counts like the others."""
    tokens = _Tokens.of(inputs, factors=1 if method.correction == "none" else 2)
    return _TokenLosses.of(method, method.settings_with(settings), tokens).teaches_T & tokens.live_T


def metrics_of(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, float | None]:
    """Step metrics, named as in `soloist.metrics.METRICS`, from the sums of all its micro-batches.

    Each is (Σ over parts) / (Σ tokens), and dis/ess = (Σr)² / (n·Σr²). None, not NaN, for a step without tokens.
    """
    totals: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            known = totals.get(name, float("inf") if name in MINIMA else 0.0)
            totals[name] = min(known, float(value)) if name in MINIMA else known + float(value)
    n = totals.pop("tokens", 0.0)
    ratio, ratio_squared = totals.pop("ratio", None), totals.pop("ratio_squared", 0.0)
    metrics = {name: total / (1.0 if name in MINIMA else n) if n else None for name, total in totals.items()}
    if ratio is not None:
        metrics["dis/ess"] = ratio**2 / (n * ratio_squared) if ratio_squared else None
    return metrics


@dataclass(frozen=True, kw_only=True)
class _Tokens(LossInputs):
    """Checked inputs in fp32 or better, neutral (d = 0, A = 0, w = 0) where a token is absent."""

    live_T: Tensor
    """Tokens that are not absent, bool [T]."""
    limit: float
    """d at which ratios saturate; it depends on the type that the gradient will have."""

    @classmethod
    def of(cls, inputs: LossInputs, factors: int) -> _Tokens:
        """Check and select. Raises ValueError when shapes differ or are not [T]."""
        columns = {field.name: getattr(inputs, field.name) for field in fields(inputs) if field.name != "statistics"}
        per_token = {name: x for name, x in vars(inputs.statistics).items() if name != "quantile" and x is not None}
        check_packed(**columns, **per_token)
        weights_T = at_least_float32(inputs.weights_T.detach())
        # NaN ≠ 0, so a broken weight counts as live and shows in the loss.
        live_T = weights_T != 0

        def selected(x_T: Tensor) -> Tensor:
            return torch.where(live_T, at_least_float32(x_T), 0.0)

        return cls(
            log_probs_T=selected(inputs.log_probs_T),
            rollout_log_probs_T=selected(inputs.rollout_log_probs_T.detach()),
            old_log_probs_T=selected(inputs.old_log_probs_T.detach()),
            advantages_T=selected(inputs.advantages_T.detach()),
            weights_T=weights_T,
            staleness_T=torch.where(live_T, inputs.staleness_T, 0),
            statistics=_neutral(inputs.statistics, live_T),
            live_T=live_T,
            limit=saturation(inputs.log_probs_T.dtype, factors),
        )

    def combined(self, name: str, x_T: Tensor) -> Tensor:
        """The least value over live tokens for `MINIMA`, else Σ, in fp64: fp32 can't count beyond 2²⁴ tokens."""
        x_T = x_T.detach().to(torch.float64)
        if name not in MINIMA:
            return torch.where(self.live_T, x_T, 0.0).sum()
        live_T = torch.where(self.live_T, x_T, torch.inf)
        return torch.cat([live_T, live_T.new_full((1,), torch.inf)]).min()

    def common_sums(self) -> Sums:
        """Sums that every loss reports, always against μ: tokens, Σ(log μ − log π), Σ k3."""
        log_ratio_T = log_ratio(self.log_probs_T.detach(), self.rollout_log_probs_T)
        return {
            "tokens": self.combined("tokens", self.live_T),
            "actor/ppo_kl": -self.combined("actor/ppo_kl", log_ratio_T),
            "mismatch_kl/mean": self.combined("mismatch_kl/mean", k3_divergence(log_ratio_T, self.limit)),
        }


@dataclass(frozen=True, kw_only=True)
class _TokenLosses:
    """The parts of a method put together, [T] each."""

    gain_T: Tensor
    teaches_T: Tensor
    metrics: dict[str, Tensor]

    @classmethod
    def of(cls, method: LossMethod, settings: Mapping[str, Setting], tokens: _Tokens) -> _TokenLosses:
        """Ratio, region, surrogate and correction of every token."""
        log_ratio_T, log_weight_T = _log_ratios(method, settings, tokens)
        ratio_T = saturated_ratio(log_ratio_T, tokens.limit)
        region = _region(method, settings, tokens, log_ratio_T)
        terms = _surrogate(method, tokens, ratio_T, region)
        metrics = dict(region.metrics)
        if terms.clipped_T is not None:
            metrics["ppo/clip_frac"] = terms.clipped_T
        if method.region == "band":
            # The effective sample size is of the ratios before masking: it shows what the mask had to deal with.
            distance_T = log_ratio(tokens.log_probs_T.detach(), tokens.rollout_log_probs_T).to(torch.float64)
            metrics["ratio"] = saturated_ratio(distance_T, tokens.limit)
            metrics["ratio_squared"] = metrics["ratio"].square()
        # A detached coefficient saturates without losing its token's gradient.
        moves_T = (ratio_T != 0) & ~(log_ratio_T > tokens.limit)
        teaches_T = terms.passes_T & (moves_T | (method.surrogate == "detached"))
        gain_T = terms.gain_T
        if method.correction != "none":
            factor_T, cut_T = _correction(method, settings, log_weight_T, tokens.limit)
            gain_T, teaches_T = factor_T * gain_T, teaches_T & (factor_T != 0)
            metrics |= {} if cut_T is None else {"correction/truncated_frac": cut_T}
        return cls(gain_T=gain_T, teaches_T=teaches_T, metrics=metrics)


def _neutral(statistics: StepStatistics, live_T: Tensor) -> StepStatistics:
    """The statistics with nothing to say of absent tokens."""

    def selected(x_T: Tensor | None, neutral: float) -> Tensor | None:
        return None if x_T is None else torch.where(live_T, x_T.detach(), neutral)

    kept_T = statistics.kept_T
    return StepStatistics(
        sequence_log_ratio_T=selected(statistics.sequence_log_ratio_T, 0.0),
        sequence_correction_T=selected(statistics.sequence_correction_T, 0.0),
        quantile=statistics.quantile,
        kept_T=None if kept_T is None else kept_T | ~live_T,
    )


def _log_ratios(method: LossMethod, settings: Mapping[str, Setting], tokens: _Tokens) -> tuple[Tensor, Tensor]:
    """(log r, log of what the correction is made of), [T] in nats."""
    if method.ratio == "interpolated":
        columns = tokens.log_probs_T, tokens.rollout_log_probs_T, tokens.staleness_T
        return interpolated_log_ratio(*columns), interpolated_correction(*columns)
    log_weight_T = log_ratio(tokens.old_log_probs_T, tokens.rollout_log_probs_T)
    if settings.get("correction_over", "token") != "token":
        log_weight_T = _needed(tokens.statistics.sequence_correction_T, "sequence_correction_T")
    if method.ratio == "sequence":
        mean_T = _needed(tokens.statistics.sequence_log_ratio_T, "sequence_log_ratio_T")
        return with_gradient_of(tokens.log_probs_T, mean_T), log_weight_T
    return log_ratio(tokens.log_probs_T, tokens.old_log_probs_T), log_weight_T


def _region(method: LossMethod, settings: Mapping[str, Setting], tokens: _Tokens, log_ratio_T: Tensor) -> TrustRegion:
    log_ratio_T = log_ratio_T.detach()
    if method.region == "none":
        return no_region(log_ratio_T)
    if method.region == "second_moment":
        return second_moment_region(log_ratio_T, _needed(tokens.statistics.kept_T, "kept_T"))
    if method.region == "probability_difference":
        delta, cap = float(settings["tv_delta"]), float(settings["ratio_cap"])
        return probability_region(tokens.log_probs_T, tokens.old_log_probs_T, tokens.advantages_T, delta, cap)
    eps_low, eps_high = float(settings["eps_low"]), float(settings["eps_high"])
    if method.region == "sat_clip":
        if settings["sat_over"] == "step":
            quantile = _needed(tokens.statistics.quantile, "quantile")
        else:
            quantile = linear_quantile(log_ratio_T[tokens.live_T].abs(), float(settings["sat_quantile"]))
        return sat_region(log_ratio_T, quantile, str(settings["sat_kernel"]), eps_low, eps_high)
    simple = {"band": band_region, "clip": clip_region, "truncation": truncation_region}
    return simple[method.region](log_ratio_T, eps_low, eps_high)


def _surrogate(method: LossMethod, tokens: _Tokens, ratio_T: Tensor, region: TrustRegion) -> Terms:
    if method.surrogate == "detached":
        return detached(ratio_T, tokens.log_probs_T, tokens.advantages_T, region)
    if method.surrogate == "linear":
        return linear(ratio_T, tokens.advantages_T, region)
    return pessimistic(ratio_T, tokens.advantages_T, region)


def _correction(
    method: LossMethod, settings: Mapping[str, Setting], log_weight_T: Tensor, limit: float
) -> tuple[Tensor, Tensor | None]:
    """(factor, tokens whose factor was cut or None where nothing is), [T]."""
    if method.correction == "truncated":
        return truncated_correction(log_weight_T, float(settings["truncation_cap"]), limit)
    if method.correction == "masked":
        return masked_correction(log_weight_T, float(settings["icepop_low"]), float(settings["icepop_high"]), limit)
    return proximal_correction(log_weight_T, limit), None


def _needed(statistic: Tensor | None, name: str) -> Tensor:
    if statistic is None:
        raise ValueError(
            f"this policy loss needs {name} of the whole step and found None; make it with step_statistics"
        )
    return statistic
