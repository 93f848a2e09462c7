"""What became of the attempts: counts by fate, lengths of everything that ended, and the reasons of failures.

Guarantees: each ended attempt is counted under exactly one fate; memory is bounded between two steps by what ended.
Not covered: attempts that are still under way, which the buffer counts itself.
"""

from __future__ import annotations

from collections import Counter, deque

from soloist.metrics import mean
from soloist.types import Failure

SMALLEST_WINDOW = 20


class Tally:
    """Counters of a buffer.

    Example: `tally.failed(Failure(boundary="engine", reason="lost"), length=3)`; `tally.dominant_failure()`.
    """

    def __init__(self, window: int) -> None:
        self.attempts = 0
        self.ended: Counter[str] = Counter()
        """Attempts by fate: trained, dropped, failed."""
        self.reasons: Counter[str] = Counter()
        """Dropped and failed attempts by `boundary` or reason of the drop."""
        self.late = 0
        """Results of attempts that were no longer awaited; ignored."""
        self.dropped_before = 0
        """Drops of earlier lives of the run."""
        self._recent: deque[Failure | None] = deque(maxlen=max(SMALLEST_WINDOW, window))
        self._since_step()

    def scored(self, length: int) -> None:
        """An attempt was scored; its fate is still open."""
        self._recent.append(None)
        self._lengths.append(length)

    def trained(self, count: int) -> None:
        """So many scored attempts were handed to the learner."""
        self.ended["trained"] += count

    def failed(self, failure: Failure, length: int) -> None:
        """An attempt broke at a boundary."""
        self.ended["failed"] += 1
        self.reasons[f"failed:{failure.boundary}"] += 1
        self._recent.append(failure)
        self._lengths.append(length)
        self._failures_of_step += 1

    def dropped(self, reason: str, length: int, scored_before: bool = False) -> None:
        """An attempt was given up (its age, its group); `scored_before` when `scored` has counted its length."""
        self.ended["dropped"] += 1
        self.reasons[f"dropped:{reason}"] += 1
        self._dropped_lengths.append(length)
        # A scored attempt that is dropped later has already been counted as ended.
        if not scored_before:
            self._recent.append(None)
            self._lengths.append(length)

    def failed_share(self) -> float | None:
        """Share of failures among the last ended attempts; None while fewer than 20 have ended."""
        if len(self._recent) < SMALLEST_WINDOW:
            return None
        return sum(failure is not None for failure in self._recent) / len(self._recent)

    def dominant_failure(self) -> str:
        """The most frequent boundary among the last failures, with its most frequent reason."""
        failures = [failure for failure in self._recent if failure is not None]
        if not failures:
            return "no failure"
        boundary, count = Counter(failure.boundary for failure in failures).most_common(1)[0]
        reasons = Counter(failure.reason for failure in failures if failure.boundary == boundary)
        return f"{boundary} ({count} of {len(failures)} failures), most often: {reasons.most_common(1)[0][0]}"

    def step_metrics(self) -> dict[str, float | None]:
        """Metrics of what ended since the last call; starts counting anew."""
        ended = len(self._lengths)
        values: dict[str, float | None] = {
            "rollout/length_started": mean(self._lengths),
            "rollout/failed_ratio": self._failures_of_step / ended if ended else None,
            "queue/dropped": float(self.dropped_before + self.ended["dropped"]),
            "queue/dropped_length": mean(self._dropped_lengths),
            "group/dropped": float(self.uniform_groups),
        }
        self._since_step()
        return values

    def _since_step(self) -> None:
        self.uniform_groups = 0
        """Groups since the last step that were dropped for their equal rewards."""
        self._lengths: list[int] = []
        self._dropped_lengths: list[int] = []
        self._failures_of_step = 0
