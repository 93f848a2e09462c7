"""The task source: order, retries first, and a resume that neither skips nor repeats."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from soloist.runtime.tasks import TaskSource
from soloist.types import Task


def numbered(index: int) -> Task:
    return Task(task_id=f"t{index}", environment="numbers", data={"index": index})


def test_tasks_come_in_order_and_returned_ones_come_first() -> None:
    source = TaskSource(numbered)
    assert [source.lease()[0] for _ in range(4)] == [0, 1, 2, 3]
    source.give_back(3)
    source.give_back(1)
    index, task = source.lease()
    assert (index, task.task_id) == (1, "t1")
    assert [source.lease()[0] for _ in range(2)] == [3, 4]


def test_looking_at_the_next_task_makes_it_once_and_changes_nothing() -> None:
    made: list[int] = []

    def make(index: int) -> Task:
        made.append(index)
        return numbered(index)

    source = TaskSource(make)
    assert source.peek() == source.peek()
    assert source.counts()["leased"] == 0
    assert source.lease()[0] == 0
    assert made == [0]


def test_a_task_that_can_not_be_made_is_not_lost() -> None:
    broken = {1}

    def make(index: int) -> Task:
        if index in broken:
            raise OSError("disk")
        return numbered(index)

    source = TaskSource(make)
    source.lease()
    with pytest.raises(OSError, match="disk"):
        source.lease()
    assert source.counts() == {"tasks": 1, "pending": 0, "leased": 1, "trained": 0, "quarantined": 0, "uniform": 0}
    broken.clear()
    assert source.lease()[0] == 1


def restore(source: TaskSource, state: dict[str, Any]) -> None:
    """As a ledger would say it, from what `state` told."""
    state = json.loads(json.dumps(state))
    source.restore(state["next"], state["open"], dict(state["quarantined"]))


def test_a_task_whose_rollouts_are_at_hand_is_claimed_and_not_handed_out_again() -> None:
    """RB-090: what comes back from the ledger counts as leased, the rest is played again."""
    source = TaskSource(numbered)
    source.restore(5, [1, 3, 4], {2: "engine: rejected"})
    assert source.claim(3).task_id == numbered(3).task_id
    assert source.counts() == {"tasks": 5, "pending": 2, "leased": 1, "trained": 1, "quarantined": 1, "uniform": 0}
    with pytest.raises(ValueError, match="task 3 doesn't wait"):
        source.claim(3)
    assert [source.lease()[0] for _ in range(3)] == [1, 4, 5]
    source.trained(3)
    assert source.counts()["trained"] == 2


def test_groups_that_finish_out_of_order_are_neither_skipped_nor_trained_twice_after_a_resume() -> None:
    source = TaskSource(numbered)
    for _ in range(5):
        source.lease()
    for index in (0, 1, 3):
        source.trained(index)
    source.quarantine(4, "engine: always rejected")
    resumed = TaskSource(numbered)
    restore(resumed, source.state())
    assert [resumed.lease()[0] for _ in range(3)] == [2, 5, 6]
    assert resumed.quarantined == {4: "engine: always rejected"}
    with pytest.raises(ValueError, match="task 3 isn't leased"):
        resumed.trained(3)


@pytest.mark.parametrize("seed", range(20))
def test_ten_crashes_at_random_points_train_every_task_exactly_once(seed: int) -> None:
    rng = random.Random(seed)
    source = TaskSource(numbered)
    trained: list[int] = []
    checkpoint, kept = source.state(), 0
    crashes = 0
    while len(trained) < 100:
        leased = sorted(source._leased)
        if leased and rng.random() < 0.5:
            index = rng.choice(leased)
            source.trained(index)
            trained.append(index)
        elif leased and rng.random() < 0.1:
            source.give_back(rng.choice(leased))
        else:
            source.lease()
        counts = source.counts()
        assert counts["tasks"] == sum(counts.values()) - counts["tasks"]
        if rng.random() < 0.1:
            checkpoint, kept = json.loads(json.dumps(source.state())), len(trained)
        if crashes < 10 and rng.random() < 0.05:
            crashes += 1
            source = TaskSource(numbered)
            restore(source, checkpoint)
            del trained[kept:]  # steps after the checkpoint are rolled back
    assert len(set(trained)) == len(trained)
    assert set(trained) | set(source.state()["open"]) == set(range(source.state()["next"]))


def test_a_uniform_task_is_done_and_comes_neither_again_nor_as_trained() -> None:
    source = TaskSource(numbered)
    indices = [source.lease()[0] for _ in range(3)]
    source.uniform(1)
    source.trained(0)
    counts = source.counts()
    assert counts == {"tasks": 3, "pending": 0, "leased": 1, "trained": 1, "quarantined": 0, "uniform": 1}
    assert indices == [0, 1, 2]
    with pytest.raises(ValueError, match="task 1 isn't leased"):
        source.uniform(1)
    resumed = TaskSource(numbered)
    resumed.restore(3, source.state()["open"], {}, uniform=source.state()["uniform"])
    assert [resumed.lease()[0] for _ in range(2)] == [2, 3]
    assert resumed.counts()["trained"] == 1
