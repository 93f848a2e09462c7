"""Which row each slot has: permutations, order, and what attention reads."""

from hypothesis import given
from hypothesis import strategies as st

from soloist.engines.local.rows import Reach, RowOrder, Swap

ROWS = 9
subsets = st.lists(st.integers(0, ROWS - 1), unique=True)
arrangements = st.lists(st.dictionaries(st.integers(0, ROWS - 1), st.integers(1, 4)), max_size=6)


def carried_out(contents: list[int], swaps: list[Swap]) -> list[int]:
    """What lies in each row after the swaps, each checked against what it says about its slots."""
    for swap in swaps:
        assert (contents[swap.left], contents[swap.right]) == (swap.left_slot, swap.right_slot)
        contents[swap.left], contents[swap.right] = contents[swap.right], contents[swap.left]
    return contents


@given(st.lists(subsets, max_size=8))
def test_running_slots_have_the_leading_rows_and_no_slot_is_lost(steps: list[list[int]]) -> None:
    order, contents = RowOrder(ROWS), list(range(ROWS))
    for running in steps:
        swaps = order.compact(running)
        contents = carried_out(contents, swaps)
        assert contents == order.slot_at
        assert set(order.slot_at[: len(running)]) == set(running)
        assert [order.row_of[slot] for slot in order.slot_at] == list(range(ROWS))
        assert len(swaps) <= len(running), "no row moves twice"


@given(arrangements)
def test_sorting_puts_the_highest_band_first_with_few_swaps(steps: list[dict[int, int]]) -> None:
    order, contents = RowOrder(ROWS), list(range(ROWS))
    for bands in steps:
        swaps = order.sort(bands)
        contents = carried_out(contents, swaps)
        assert contents == order.slot_at
        assert [bands[slot] for slot in order.slot_at[: len(bands)]] == sorted(bands.values(), reverse=True)
        assert len(swaps) <= len(bands)
        assert order.sort(bands) == [], "nothing is left to do"


@given(st.lists(st.integers(1, 50), max_size=8), st.integers(0, 20), st.integers(0, 80))
def test_reach_counts_the_rows_that_hold_a_column(lengths: list[int], grown: int, column: int) -> None:
    reach = Reach(Reach.of(lengths).longest, grown)
    reached = [row for row, length in enumerate(lengths) if length + grown > column]
    assert reach.rows(column) == max(reached, default=-1) + 1
    assert reach.width == (max(lengths) + grown if lengths else 0) or not lengths


def test_rows_in_order_cost_what_they_hold() -> None:
    reach = Reach.of([9, 7, 7, 2])
    assert [reach.rows(column) for column in (0, 2, 7, 9)] == [4, 3, 1, 0]
    assert Reach.of([2, 7, 7, 9]).rows(7) == 4, "a long row at the end makes all others pay"
