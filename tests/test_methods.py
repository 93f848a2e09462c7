"""The table of policy losses: published settings, names that exist, and errors that say what to do."""

from __future__ import annotations

from typing import get_args

import pytest

from soloist.algorithms.aggregation import LossAggregation
from soloist.methods import LOSS_METHODS, SETTING_CHOICES

SETTINGS = {
    "eps_low", "eps_high", "sat_kernel", "sat_quantile", "sat_over", "truncation_cap", "icepop_low", "icepop_high",
    "correction_over", "m2_threshold", "tv_delta", "ratio_cap",
}  # fmt: skip


def test_the_published_settings_are_the_defaults() -> None:
    found = {name: dict(method.settings) for name, method in LOSS_METHODS.items()}
    assert found["dis"] == {"eps_low": 0.3, "eps_high": 5.0}
    assert (
        found["ppo"] == found["dr_grpo"] == found["decoupled_ppo"] == found["a3po"] == {"eps_low": 0.2, "eps_high": 0.2}
    )
    assert found["clip_higher"] == found["dapo"] == {"eps_low": 0.2, "eps_high": 0.28}
    assert found["gspo"] == {"eps_low": 3e-4, "eps_high": 4e-4}
    assert found["cispo"] == {"eps_low": 1.0, "eps_high": 4.0}
    assert (found["tis"]["truncation_cap"], found["icepop"]["icepop_low"], found["icepop"]["icepop_high"]) == (
        2,
        0.5,
        5,
    )
    assert (found["m2po"], found["dppo_tv"]) == ({"m2_threshold": 0.04}, {"tv_delta": 0.2, "ratio_cap": 20.0})
    assert found["sat_ppo"]["sat_quantile"] == 0.9
    assert found["importance_weighting"] == {}


def test_every_method_has_known_settings_a_known_aggregation_and_a_source() -> None:
    for method in LOSS_METHODS.values():
        assert set(method.settings) <= SETTINGS
        assert method.loss_agg_mode in get_args(LossAggregation)
        assert method.old_log_probs
        assert len(method.source) > 5
        assert all(
            method.settings[name] in SETTING_CHOICES[name] for name in set(method.settings) & set(SETTING_CHOICES)
        )
    assert {name for method in LOSS_METHODS.values() for name in method.settings} == SETTINGS


def test_only_importance_weighting_is_without_a_trust_region() -> None:
    assert [name for name, method in LOSS_METHODS.items() if not method.has_trust_region] == ["importance_weighting"]
    assert LOSS_METHODS["dis"].has_trust_region


def test_old_log_probs_are_recomputed_where_the_method_corrects_for_the_difference() -> None:
    recomputed = {name for name, method in LOSS_METHODS.items() if method.old_log_probs[0] == "recompute"}
    assert recomputed == {"tis", "icepop", "decoupled_ppo"}
    assert LOSS_METHODS["dis"].old_log_probs == LOSS_METHODS["a3po"].old_log_probs == ("rollout",)
    assert LOSS_METHODS["gspo"].old_log_probs == ("rollout", "recompute")


def test_given_settings_take_the_place_of_defaults_and_others_are_refused() -> None:
    assert LOSS_METHODS["ppo"].settings_with({"eps_high": 0.3}) == {"eps_low": 0.2, "eps_high": 0.3}
    assert LOSS_METHODS["ppo"].settings["eps_high"] == 0.2
    with pytest.raises(ValueError, match=r"\['sat_kernel'\] are not read by this policy loss, which reads eps_low"):
        LOSS_METHODS["ppo"].settings_with({"sat_kernel": "hill"})
    with pytest.raises(ValueError, match="sat_over 'batch' is none of step, micro_batch"):
        LOSS_METHODS["sat_ppo"].settings_with({"sat_over": "batch"})
    with pytest.raises(ValueError, match="which reads none"):
        LOSS_METHODS["importance_weighting"].settings_with({"eps_low": 0.2})
