"""The named advantage estimators, one table: what each needs and which settings it reads. Plain data, no torch.

Not covered: how they are computed (`algorithms/`), and by whom (`training/estimators.py`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AdvEstimator:
    """What an advantage estimator needs and reads.

    Example: `ADV_ESTIMATORS["group_relative"].groups` is True: it compares rollouts of one task.
    """

    critic: bool = False
    """Whether it reads a value model."""
    groups: bool = False
    """Whether it compares the rollouts of a group, so that `group_size` must be 2 or more."""
    repeats: bool = False
    """Whether it remembers tasks, so that tasks must come again."""
    whitens: bool = False
    """Whether it whitens in any case, so that the switch `whiten` would change nothing."""
    settings: tuple[str, ...] = ()
    """Keys of the config's section `advantage` that it reads, beside those that all do."""
    source: str
    """Where it comes from."""


_GAE_SETTINGS = ("gamma", "lambda_policy", "length_adaptive_alpha", "bootstrap_truncated", "order")

ADV_ESTIMATORS: dict[str, AdvEstimator] = {
    "skip_observation_gae": AdvEstimator(critic=True, settings=_GAE_SETTINGS, source="SAO, arXiv 2607.07508, eqs 4-5"),
    "step_gae_mean": AdvEstimator(critic=True, settings=_GAE_SETTINGS, source="SAO, ablation of section 4"),
    "step_gae_last": AdvEstimator(critic=True, settings=_GAE_SETTINGS, source="SAO, ablation of section 4"),
    "group_relative": AdvEstimator(groups=True, source="GRPO, arXiv 2402.03300"),
    "group_mean": AdvEstimator(groups=True, source="Dr. GRPO, arXiv 2503.20783"),
    "running_mean": AdvEstimator(settings=("running_mean_over", "running_mean_window"), source="SAO, section 4.5"),
    "spo": AdvEstimator(repeats=True, settings=("spo_offline_samples",), source="SPO, arXiv 2509.13232"),
    "reinforce_pp": AdvEstimator(whitens=True, settings=("gamma",), source="REINFORCE++, arXiv 2501.03262"),
}
"""By the name that `advantage.adv_estimator` takes."""
