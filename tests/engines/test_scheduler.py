"""Slots and prefixes: who sits where, whose prefix stays, and who must give way."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soloist.engines.local.scheduler import SlotTable, common_prefix
from soloist.types import GenerateRequest, Sampling


def request(name: str, prompt: list[int], *, rollout: str = "", slot: int | None = None) -> GenerateRequest:
    return GenerateRequest(
        request_id=name, rollout_id=rollout or name, prompt_ids=prompt, sampling=Sampling(), slot=slot
    )


def played(table: SlotTable, name: str, prompt: list[int], sampled: list[int], *, rollout: str = "") -> int:
    """Seat a request at version 0 and finish it; returns its slot."""
    table.submit(request(name, prompt, rollout=rollout))
    (seat,) = table.admit(0)
    ids = prompt + sampled
    table.finish(seat.slot, ids, cached=len(ids) - 1)
    return seat.slot


def test_the_lowest_free_slot_is_taken_first() -> None:
    table = SlotTable(3)
    for name in "abc":
        table.submit(request(name, [1]))
    assert [seat.slot for seat in table.admit(0)] == [0, 1, 2]
    table.vacate(2)
    table.vacate(0)
    table.submit(request("d", [1]))
    assert [seat.slot for seat in table.admit(0)] == [0]
    assert table.highest == 2


def test_the_next_turn_of_a_rollout_reuses_its_prefix() -> None:
    table = SlotTable(2)
    slot = played(table, "turn 1", [1, 2, 3], [4, 5], rollout="r")
    table.submit(request("turn 2", [1, 2, 3, 4, 5, 6, 7], rollout="r"))
    (seat,) = table.admit(9)
    assert (seat.slot, seat.reused) == (slot, 4), "the last sampled token was never an input"
    assert seat.version == 0, "its cache is as old as its first turn, also after a load"


def test_prefixes_are_not_shared_between_rollouts() -> None:
    """RB-111, trap 10: a prompt that another rollout computed with old weights starts from nothing."""
    table = SlotTable(2)
    slot = played(table, "a", [1, 2, 3], [4])
    table.submit(request("b", [1, 2, 3]))
    (seat,) = table.admit(1)
    assert seat.slot != slot
    assert (seat.reused, seat.version) == (0, 1)


@pytest.mark.parametrize(("version", "reused"), [(0, 2), (1, 0)])
def test_a_rewritten_history_keeps_the_common_prefix_only_under_the_same_weights(version: int, reused: int) -> None:
    """RB-111: a restarted or rewritten rollout must not continue on keys of old weights."""
    table = SlotTable(1)
    played(table, "turn 1", [1, 2, 3], [4, 5], rollout="r")
    table.submit(request("turn 2", [1, 2, 9, 9], rollout="r"))
    (seat,) = table.admit(version)
    assert (seat.slot, seat.reused) == (0, reused)
    assert seat.version == version


def test_the_last_prompt_token_is_always_computed() -> None:
    table = SlotTable(1)
    played(table, "a", [1, 2, 3], [4, 5], rollout="r")
    table.submit(request("b", [1, 2, 3], rollout="r"))
    (seat,) = table.admit(0)
    assert seat.reused == 2
    assert table.kept == {}


def test_the_least_recently_used_prefix_gives_way() -> None:
    table = SlotTable(2)
    assert [played(table, "a", [1], [2]), played(table, "b", [1], [2])] == [0, 1]
    table.submit(request("a again", [1, 2, 3], rollout="a"))
    (seat,) = table.admit(0)
    table.finish(seat.slot, [1, 2, 3, 4], cached=3)
    table.submit(request("c", [7]))
    (newcomer,) = table.admit(0)
    assert newcomer.slot == 1, "b was idle longest"
    assert [kept.rollout_id for kept in table.kept.values()] == ["a"]


def test_release_frees_the_slot_also_when_it_comes_before_the_end() -> None:
    table = SlotTable(2)
    played(table, "a", [1], [2])
    table.release("a")
    assert table.kept == {}
    table.submit(request("b", [1]))
    (seat,) = table.admit(0)
    assert seat.slot == 0
    table.release("b")
    table.finish(seat.slot, [1, 2], cached=1)
    assert table.kept == {}


def test_a_request_that_waits_for_its_own_slot_lets_others_pass() -> None:
    table = SlotTable(2)
    for name in ("first", "second"):
        table.submit(request(name, [1], slot=1))
    table.submit(request("free", [1]))
    assert [(seat.request.request_id, seat.slot) for seat in table.admit(0)] == [("first", 1), ("free", 0)]
    table.vacate(1)
    assert [(seat.request.request_id, seat.slot) for seat in table.admit(0)] == [("second", 1)]


def test_without_reuse_nothing_is_kept() -> None:
    table = SlotTable(1, reuse=False)
    played(table, "a", [1, 2], [3], rollout="r")
    assert table.kept == {}
    table.submit(request("b", [1, 2, 3, 4], rollout="r"))
    assert table.admit(0)[0].reused == 0


events = st.lists(
    st.tuples(st.sampled_from(["submit", "admit", "finish", "vacate", "release", "withdraw"]), st.integers(0, 5)),
    max_size=80,
)


@given(events, st.integers(1, 4))
def test_every_slot_is_free_running_or_kept_and_no_request_vanishes(steps: list[tuple[str, int]], slots: int) -> None:
    table, submitted, ended = SlotTable(slots), 0, 0
    for what, n in steps:
        running = sorted(table.running)
        if what == "submit":
            table.submit(request(f"q{submitted}", list(range(n + 1)), rollout=f"r{n}", slot=n if n < slots else None))
            submitted += 1
        elif what == "admit":
            table.admit(n)
        elif what == "release":
            table.release(f"r{n}")
        elif what == "withdraw" and table.waiting:
            assert table.withdraw(table.waiting[0].request_id) is None
            ended += 1
        elif running and what in ("finish", "vacate"):
            slot = running[n % len(running)]
            ids = [*table.running[slot].request.prompt_ids, 9]
            table.finish(slot, ids, len(ids) - 1) if what == "finish" else table.vacate(slot)
            ended += 1
        states = sorted([*table._free, *table.running, *table.kept])
        assert states == list(range(slots))
        assert len(table.waiting) + len(table.running) + ended == submitted


@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), max_size=6))
def test_common_prefix_equals_counting_one_by_one(left: list[int], right: list[int]) -> None:
    n = 0
    while n < min(len(left), len(right)) and left[n] == right[n]:
        n += 1
    assert common_prefix(left, right) == n
    assert left[:n] == right[:n]
