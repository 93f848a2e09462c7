"""The named policy losses, one table: ratio × region × surrogate × correction × aggregation. Plain data, no torch.

Guarantees: a method reads exactly the settings that its row names, and every row composes out of the same parts
(`algorithms/losses.py: policy_loss`), so a new method is a new row unless it brings a new part.
Not covered: advantages. GRPO and Dr. GRPO differ from PPO here in their aggregation alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Ratio = Literal["token", "sequence", "interpolated"]
Region = Literal["none", "band", "clip", "sat_clip", "truncation", "second_moment", "probability_difference"]
Surrogate = Literal["detached", "linear", "pessimistic"]
Correction = Literal["none", "truncated", "masked", "proximal"]
OldLogProbs = Literal["rollout", "recompute"]
Setting = float | str

SETTING_CHOICES: dict[str, tuple[str, ...]] = {
    "sat_kernel": ("hill", "hill_half", "hill_excess"),
    "sat_over": ("step", "micro_batch"),
    "correction_over": ("token", "sequence", "sequence_mean"),
}
"""Settings that are words, each with all its values; the other settings are numbers.

`correction_over = "sequence"` multiplies the ratios of a sequence, as TRL and verl do under that name;
`sequence_mean` takes their geometric mean, which does not grow with the length.
"""


@dataclass(frozen=True, kw_only=True)
class LossMethod:
    """One policy loss as a choice of parts.

    Example: `LOSS_METHODS["dapo"].settings["eps_high"]` is 0.28.
    """

    ratio: Ratio
    """exp(log π − log π_old) of the token, its sequence's geometric mean, or against A-3PO's interpolated policy."""
    region: Region
    """Which tokens may teach, or how far."""
    surrogate: Surrogate
    """−sg(f(r))·A·log π, −r·A, or −min(r·A, clip(r)·A)."""
    correction: Correction = "none"
    """Factor made of π_old/μ: cut at a cap, 0 outside an interval, or whole."""
    loss_agg_mode: str
    """How terms become one number unless set otherwise (`algorithms/aggregation.py`)."""
    old_log_probs: tuple[OldLogProbs, ...]
    """Where log π_old may come from: recorded by the engine, or recomputed by the trainer. The first is the default."""
    settings: Mapping[str, Setting]
    """Exactly the settings that the method reads, with their published values."""
    source: str
    """Paper and equation."""

    @property
    def has_trust_region(self) -> bool:
        """Whether anything keeps the policy near the old one, so that several epochs make sense."""
        return self.region != "none"

    def settings_with(self, given: Mapping[str, Setting]) -> dict[str, Setting]:
        """All settings of the method, `given` ones in place of the defaults. Raises ValueError for any other name."""
        unknown = sorted(set(given) - set(self.settings))
        if unknown:
            reads = ", ".join(self.settings) or "none"
            raise ValueError(f"settings {unknown} are not read by this policy loss, which reads {reads}; remove them")
        for name, choices in SETTING_CHOICES.items():
            if name in given and given[name] not in choices:
                raise ValueError(f"{name} '{given[name]}' is none of {', '.join(choices)}")
        return {**self.settings, **given}


_EITHER: tuple[OldLogProbs, ...] = ("rollout", "recompute")
_RECORDED: tuple[OldLogProbs, ...] = ("rollout",)
_RECOMPUTED: tuple[OldLogProbs, ...] = ("recompute",)
_PPO_CLIP: dict[str, Setting] = {"eps_low": 0.2, "eps_high": 0.2}
_CLIP_HIGHER: dict[str, Setting] = {"eps_low": 0.2, "eps_high": 0.28}
_SAT: dict[str, Setting] = {**_PPO_CLIP, "sat_kernel": "hill", "sat_quantile": 0.9, "sat_over": "step"}

LOSS_METHODS: dict[str, LossMethod] = {
    "dis": LossMethod(
        ratio="token", region="band", surrogate="detached", loss_agg_mode="token-mean", old_log_probs=_RECORDED,
        settings={"eps_low": 0.3, "eps_high": 5.0}, source="SAO, arXiv 2607.07508, eqs 1–3",
    ),
    "ppo": LossMethod(
        ratio="token", region="clip", surrogate="pessimistic", loss_agg_mode="token-mean", old_log_probs=_EITHER,
        settings=_PPO_CLIP, source="PPO, arXiv 1707.06347, eq 7",
    ),
    "clip_higher": LossMethod(
        ratio="token", region="clip", surrogate="pessimistic", loss_agg_mode="seq-mean-token-mean",
        old_log_probs=_EITHER, settings=_CLIP_HIGHER,
        source="GRPO, arXiv 2402.03300, eq 3, with the two epsilons of DAPO, arXiv 2503.14476, eq 10",
    ),
    "dr_grpo": LossMethod(
        ratio="token", region="clip", surrogate="pessimistic", loss_agg_mode="fixed-length", old_log_probs=_EITHER,
        settings=_PPO_CLIP, source="Dr. GRPO, arXiv 2503.20783, section 3.2",
    ),
    "dapo": LossMethod(
        ratio="token", region="clip", surrogate="pessimistic", loss_agg_mode="token-mean", old_log_probs=_EITHER,
        settings=_CLIP_HIGHER, source="DAPO, arXiv 2503.14476, eq 8",
    ),
    "gspo": LossMethod(
        ratio="sequence", region="clip", surrogate="pessimistic", loss_agg_mode="seq-mean-token-mean",
        old_log_probs=_EITHER, settings={"eps_low": 3e-4, "eps_high": 4e-4},
        source="GSPO, arXiv 2507.18071, eqs 5–7; the form per token of eqs 13–14",
    ),
    "cispo": LossMethod(
        ratio="token", region="truncation", surrogate="detached", loss_agg_mode="token-mean", old_log_probs=_EITHER,
        settings={"eps_low": 1.0, "eps_high": 4.0}, source="CISPO, arXiv 2506.13585, eqs 4–5",
    ),
    "tis": LossMethod(
        ratio="token", region="clip", surrogate="pessimistic", correction="truncated", loss_agg_mode="token-mean",
        old_log_probs=_RECOMPUTED, settings={**_PPO_CLIP, "truncation_cap": 2.0, "correction_over": "token"},
        source="Yao et al. (2025), “Your efficient RL framework secretly brings you off-policy RL training”",
    ),
    "icepop": LossMethod(
        ratio="token", region="clip", surrogate="pessimistic", correction="masked", loss_agg_mode="token-mean",
        old_log_probs=_RECOMPUTED,
        settings={**_PPO_CLIP, "icepop_low": 0.5, "icepop_high": 5.0, "correction_over": "token"},
        source="IcePop, arXiv 2510.18855",
    ),
    "m2po": LossMethod(
        ratio="token", region="second_moment", surrogate="linear", loss_agg_mode="token-mean",
        old_log_probs=_RECORDED, settings={"m2_threshold": 0.04}, source="M2PO, arXiv 2510.01161",
    ),
    "dppo_tv": LossMethod(
        ratio="token", region="probability_difference", surrogate="linear", loss_agg_mode="token-mean",
        old_log_probs=_RECORDED, settings={"tv_delta": 0.2, "ratio_cap": 20.0},
        source="DPPO, arXiv 2602.04879, its binary total-variation form",
    ),
    "decoupled_ppo": LossMethod(
        ratio="token", region="clip", surrogate="pessimistic", correction="proximal", loss_agg_mode="token-mean",
        old_log_probs=_RECOMPUTED, settings=_PPO_CLIP, source="AReaL, arXiv 2505.24298",
    ),
    "a3po": LossMethod(
        ratio="interpolated", region="clip", surrogate="pessimistic", correction="proximal",
        loss_agg_mode="token-mean", old_log_probs=_RECORDED, settings=_PPO_CLIP, source="A-3PO, arXiv 2512.06547",
    ),
    "sat_ppo": LossMethod(
        ratio="token", region="sat_clip", surrogate="pessimistic", loss_agg_mode="token-mean",
        old_log_probs=_RECORDED, settings=_SAT, source="SAT, arXiv 2607.18722",
    ),
    "sat_grpo": LossMethod(
        ratio="token", region="sat_clip", surrogate="pessimistic", loss_agg_mode="seq-mean-token-mean",
        old_log_probs=_RECORDED, settings=_SAT, source="SAT, arXiv 2607.18722",
    ),
    "sat_gspo": LossMethod(
        ratio="sequence", region="sat_clip", surrogate="pessimistic", loss_agg_mode="seq-mean-token-mean",
        old_log_probs=_RECORDED, settings=_SAT, source="SAT, arXiv 2607.18722, on GSPO's ratio",
    ),
    "importance_weighting": LossMethod(
        ratio="token", region="none", surrogate="linear", loss_agg_mode="token-mean", old_log_probs=_RECORDED,
        settings={}, source="importance sampling without a trust region: the baseline that shows what one is for",
    ),
}  # fmt: skip
