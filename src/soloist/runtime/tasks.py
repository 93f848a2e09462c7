"""Where the next task comes from: indices 0, 1, 2 … in order, with those that must be played again first.

Guarantees: tasks = pending + leased + trained + quarantined + uniform at every moment, counted over indices handed out
so far; after `restore` exactly the indices that were leased or pending come again, none is skipped or comes twice.
Not covered: how often a task is tried (`buffer.py`), and what a task is (`environments/`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from soloist.types import Task


class TaskSource:
    """Hands out (index, task) and remembers which indices are under way.

    Example: `source = TaskSource(environment.train_task); index, task = source.lease(); source.trained(index)`.
    """

    def __init__(self, train_task: Callable[[int], Task]) -> None:
        self._train_task = train_task
        self._next = 0
        self._returned: list[int] = []  # heap: the oldest is played again first
        self._leased: set[int] = set()
        self._quarantined: dict[int, str] = {}
        self._uniform = 0
        self._looked_at: tuple[int, Task] | None = None

    def peek(self) -> tuple[int, Task]:
        """What `lease` would hand out. Raises what `train_task` raises, and then nothing has changed."""
        index = self._returned[0] if self._returned else self._next
        if self._looked_at is None or self._looked_at[0] != index:
            self._looked_at = (index, self._train_task(index))
        return self._looked_at

    def lease(self) -> tuple[int, Task]:
        """Hand out the next index with its task; it counts as leased until told otherwise."""
        index, task = self.peek()
        if self._returned:
            heapq.heappop(self._returned)
        else:
            self._next += 1
        self._leased.add(index)
        self._looked_at = None
        return index, task

    def claim(self, index: int) -> Task:
        """Take an index that waits to be handed out again, as if it had been leased now: its rollouts are at hand.

        Raises ValueError unless it waits.
        """
        if index not in self._returned:
            raise ValueError(f"task {index} doesn't wait to be handed out again; waiting are {sorted(self._returned)}")
        self._returned.remove(index)
        heapq.heapify(self._returned)
        self._leased.add(index)
        self._looked_at = None
        return self._train_task(index)

    def give_back(self, index: int) -> None:
        """The task must be played again; it comes before new ones. Raises ValueError unless it is leased."""
        self._end(index)
        heapq.heappush(self._returned, index)

    def trained(self, index: int) -> None:
        """The task is done. Raises ValueError unless it is leased."""
        self._end(index)

    def quarantine(self, index: int, reason: str) -> None:
        """The task is given up; a new one takes its place. Raises ValueError unless it is leased."""
        self._end(index)
        self._quarantined[index] = reason

    def uniform(self, index: int) -> None:
        """The task is done without being trained: its group taught nothing. Raises ValueError unless it is leased."""
        self._end(index)
        self._uniform += 1

    @property
    def quarantined(self) -> dict[int, str]:
        """Given-up indices with the last reason."""
        return dict(self._quarantined)

    def counts(self) -> dict[str, int]:
        """Indices handed out so far, by what became of them; `tasks` is the sum of the others."""
        others = {
            "pending": len(self._returned),
            "leased": len(self._leased),
            "quarantined": len(self._quarantined),
            "uniform": self._uniform,
        }
        return {"tasks": self._next, "trained": self._next - sum(others.values()), **others}

    def state(self) -> dict[str, Any]:
        """JSON-able: the next new index, the indices that are not trained yet, the quarantine, the uniform ones."""
        return {
            "next": self._next,
            "open": sorted(self._leased | set(self._returned)),
            "quarantined": [[index, reason] for index, reason in sorted(self._quarantined.items())],
            "uniform": self._uniform,
        }

    def restore(
        self, next_index: int, open_indices: Iterable[int], quarantined: Mapping[int, str], uniform: int = 0
    ) -> None:
        """Continue where a ledger says: what was under way is handed out again, oldest first, before new indices."""
        self._next = next_index
        # A sorted list is a heap.
        self._returned = sorted(open_indices)
        self._leased = set()
        self._quarantined = dict(quarantined)
        self._uniform = uniform
        self._looked_at = None

    def _end(self, index: int) -> None:
        if index not in self._leased:
            raise ValueError(f"task {index} isn't leased; leased are {sorted(self._leased)}")
        self._leased.remove(index)
