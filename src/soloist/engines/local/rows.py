"""Which row of the cache each slot has, so that decoding reads few columns and no row for nothing.

A slot is a promise to a request; a row is a place in memory. Attention reads leading rows block of columns by block, so
a short row before a long one would be read for nothing, and a gap would be computed for nobody. Hence running slots
have the leading rows, the longest first.

Invariant: rows and slots are permutations of each other. Pure bookkeeping: no torch; whoever asks for an arrangement
must carry out the swaps that it returns.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Reach:
    """How far attention must read rows 0 … B−1."""

    longest: list[int]
    """Minus the largest length from each row on: ascending, so that it can be searched."""
    grown: int = 0
    """Tokens by which all rows have grown since."""

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Reach:
        """For rows of these lengths."""
        return cls([-length for length in accumulate(reversed(lengths), max)][::-1])

    @property
    def width(self) -> int:
        """Columns of the longest row."""
        return self.grown - self.longest[0] if self.longest else 0

    def rows(self, column: int) -> int:
        """One past the last row that holds something in this column or beyond."""
        return bisect_left(self.longest, self.grown - column)


@dataclass(frozen=True)
class Swap:
    """Two rows that change places, and the slots that had them before."""

    left: int
    right: int
    left_slot: int
    right_slot: int


class RowOrder:
    """The row of each slot, and the slot of each row."""

    def __init__(self, rows: int) -> None:
        self.row_of = list(range(rows))
        self.slot_at = list(range(rows))

    def compact(self, running: Sequence[int]) -> list[Swap]:
        """Give the running slots the leading rows, in any order. Returns the swaps of rows, to be done in order."""
        count = len(running)
        members = set(running)
        late = [self.row_of[slot] for slot in running if self.row_of[slot] >= count]
        gaps = [row for row in range(count) if self.slot_at[row] not in members] if late else []
        return [self._swap(gap, row) for gap, row in zip(gaps, late, strict=True)]

    def sort(self, bands: Mapping[int, int]) -> list[Swap]:
        """Give the running slots the leading rows, the highest band first. Returns the swaps of rows.

        A band is a length in coarse units: rows of one band stand in any order, as each swap costs memory traffic.
        """
        wanted = sorted(bands.values(), reverse=True)
        swaps = []
        for row, band in enumerate(wanted):
            if bands.get(self.slot_at[row], -1) == band:
                continue
            # Rows before this one are settled, so the slot that belongs here stands further down.
            swaps.append(self._swap(row, self._misplaced(row, band, bands, wanted)))
        return swaps

    def _misplaced(self, row: int, band: int, bands: Mapping[int, int], wanted: Sequence[int]) -> int:
        """A row further down whose slot belongs into `band`, best one that the evicted slot can have in exchange."""
        evicted = bands.get(self.slot_at[row], -1)
        choices = [
            other
            for other in range(row + 1, len(self.slot_at))
            if bands.get(self.slot_at[other], -1) == band and (other >= len(wanted) or wanted[other] != band)
        ]
        return next((c for c in choices if (wanted[c] if c < len(wanted) else -1) == evicted), choices[0])

    def _swap(self, left: int, right: int) -> Swap:
        slots = self.slot_at
        swap = Swap(left, right, slots[left], slots[right])
        slots[left], slots[right] = swap.right_slot, swap.left_slot
        self.row_of[swap.right_slot], self.row_of[swap.left_slot] = left, right
        return swap
