"""Groups as units of asynchronous training: whole, in one step, of one task, each member with randomness of its own."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from soloist.config import build_config
from soloist.runtime.ledger import read_rollouts, read_steps
from soloist.training.observer import SilentObserver
from soloist.training.stages import run_stages
from soloist.types import Rollout

GROUP, STEPS = 8, 3


@pytest.mark.timeout(240)
def test_groups_of_eight_from_several_players_arrive_whole_with_one_task_and_eight_random_streams(
    tmp_path: Path,
) -> None:
    """R1 for groups, with the tiny model: players take members of the same group, and turns overlap with training."""
    raw = {
        "runs_dir": str(tmp_path),
        "name": "groups",
        "steps": STEPS,
        "rollouts_per_step": 2 * GROUP,
        "group_size": GROUP,
        "players": 11,
        "max_staleness": 1,
        "advantage": {"adv_estimator": "group_relative"},
        "environment": {"name": "two-turns"},
        "model": {"hidden_size": 32, "layers": 2, "heads": 2, "mlp_size": 64},
        "engine": {"max_length": 48, "slots": 16},
        "rollout": {"max_new_tokens": 4, "max_tokens": 40, "max_turns": 2},
        "sft": {"steps": 10, "lr": 1e-2, "batch_size": 8},
        "eval": {"problems": 2, "samples": 1},
    }
    config = build_config(raw, "test")
    run_stages(config, ["sft", "train"], resume=False, skip_done=True, observer=SilentObserver())
    ledger = config.folder / "ledger.sqlite"
    groups: dict[str, list[Rollout]] = defaultdict(list)
    for row in read_rollouts(ledger, state="trained"):
        assert row.rollout is not None
        groups[row.rollout.group_id].append(row.rollout)
    assert len(groups) == 2 * STEPS
    for group_id, rollouts in groups.items():
        unit = int(group_id[1:])
        assert sorted(rollout.place for rollout in rollouts) == list(range(unit * GROUP, (unit + 1) * GROUP))
        assert len({rollout.trained_step for rollout in rollouts}) == 1
        assert {rollout.task_id for rollout in rollouts} == {f"two-turns/{unit}"}
        assert len({rollout.segments[0].token_ids[0] for rollout in rollouts}) == 1, "one prompt"
        sampled = {tuple(t for s in r.segments for t in s.token_ids) for r in rollouts}
        assert len(sampled) >= GROUP - 1, "eight streams: that two of them agree is luck"
    assert [len(step.rollout_ids) for step in read_steps(ledger)] == [2 * GROUP] * STEPS
    together = [max(r.started_at for r in group) < min(r.finished_at for r in group) for group in groups.values()]
    assert any(together), "members are played beside each other"
