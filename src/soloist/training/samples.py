"""What a report needs and the ledger doesn't hold: masked tokens by staleness, and a few rollouts token by token.

    staleness.jsonl   {"step": 3, "staleness": [0, 1], "rollouts": [40, 24], "tokens": [512, 300], "masked": [0, 2]}
    samples.jsonl     {"step": 4, "stride": 4, "rollout_id": "r9", …, "segments": [{"token_ids": […], "texts": […],
                       "action": […], "versions": […], "in_band": […], "ratio": […], "advantage": […], "value": […]}]}

Guarantees: numbers are those that the policy update used; samples are of `STEPS` steps and the last one at most, spread
evenly over the run whatever its length, and of `LONGEST` tokens a rollout; nothing that breaks here stops a run, it is
told once.
Not covered: payloads of all other rollouts (`runtime/ledger.py`) and drawing (`report/`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from soloist.metrics import read_metrics
from soloist.seams import Storage
from soloist.training.statistics import staleness_of
from soloist.types import Rollout, Segment

STEPS = 32
"""Steps whose samples are kept; beyond it every second one is forgotten, so a run of any length is covered evenly."""
LONGEST = 2048
"""Tokens of a sample that are kept; a report shows fewer."""
LONGEST_TEXT = 64
"""Characters of one token that are kept."""

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class TokenTable:
    """What a policy update saw of each trainable token, in the order of the packed row. T tokens, R rollouts.

    Example: `learner.tokens.in_band_T` after `learner.update_policy(rollouts)`.
    """

    lengths_R: list[int]
    """Tokens of each rollout."""
    log_ratio_T: Tensor
    """log π − log μ when the step first used the token, nats."""
    advantages_T: Tensor
    """As the loss got them: whitened when that is set."""
    values_T: Tensor | None
    """V of the state before the token; None without a value model."""
    in_band_T: Tensor
    """Whether the token could teach the policy, bool."""

    def rows(self) -> Iterator[tuple[list[Any], ...]]:
        """(ratios, advantages, values, in band or not) of each rollout in turn."""
        values_T = torch.full_like(self.advantages_T, torch.nan) if self.values_T is None else self.values_T
        columns = (self.log_ratio_T.clamp(-20, 20).exp(), self.advantages_T, values_T, self.in_band_T)
        for parts in zip(*(column.cpu().split(self.lengths_R) for column in columns), strict=True):
            yield tuple(part.tolist() for part in parts)


class Samples:
    """Writes both files of a run.

    Example: `Samples(folder, 4, rendering.text_of, observer.note, first_step=0).record(step, rollouts, tokens)`.
    """

    def __init__(
        self,
        folder: Path,
        per_step: int,
        text_of: Callable[[int], str],
        note: Callable[[str], None],
        *,
        first_step: int,
        storage: Storage | None = None,
    ) -> None:
        """`per_step` rollouts are sampled, none when 0; what was written from `first_step` on is forgotten."""
        self._staleness = folder / "staleness.jsonl"
        self._path = folder / "samples.jsonl"
        self._per_step = per_step
        self._text_of = text_of
        self._note = note
        self._storage = storage or Storage()
        self._texts: dict[int, str] = {}
        self._stride = 1
        self._steps: list[int] = []
        self._broken = False
        self._safely(lambda: self._go_on(first_step))

    def record(self, step: int, rollouts: Sequence[Rollout], tokens: TokenTable | None, *, last: bool = False) -> None:
        """Write what is worth keeping of a step; `last` keeps it in any case. Never raises; call it in any one thread.

        `tokens` belongs to `rollouts`, in the same order; without it nothing is written.
        """
        if tokens is not None:
            self._safely(lambda: self._record(step, rollouts, tokens, last))

    def _record(self, step: int, rollouts: Sequence[Rollout], tokens: TokenTable, last: bool) -> None:
        rows = list(tokens.rows())
        masked = [len(in_band) - sum(in_band) for *_, in_band in rows]
        _append(self._staleness, [{"step": step} | _by_staleness(step, rollouts, masked)])
        if not self._per_step or not (last or step % self._stride == 0):
            return
        chosen = choose(rollouts, masked, self._per_step)
        _append(self._path, [self._sample(step, rollouts[index], rows[index]) for index in chosen])
        self._steps.append(step)
        if len(self._steps) > STEPS + last:
            self._thin_out()

    def _sample(self, step: int, rollout: Rollout, columns: tuple[list[Any], ...]) -> Row:
        row: Row = {"step": step, "stride": self._stride, "rollout_id": rollout.rollout_id, "task_id": rollout.task_id}
        row |= {"reward": rollout.reward, "status": rollout.status, "staleness": staleness_of(rollout, step)}
        values = [iter(column) for column in columns]
        segments: list[Row] = []
        left = LONGEST
        for segment in rollout.segments:
            segments.append(self._segment(segment, values, left))
            left -= len(segments[-1]["token_ids"])
        total = sum(len(segment.token_ids) for segment in rollout.segments)
        return row | {"left_out": total - (LONGEST - left), "segments": segments}

    def _segment(self, segment: Segment, values: list[Iterator[Any]], left: int) -> Row:
        joined = [tuple(map(next, values)) if is_action else (None,) * 4 for is_action in segment.action_mask]
        ratio, advantage, value, in_band = zip(*joined[:left], strict=True) if joined[:left] else ((),) * 4
        return {
            "token_ids": segment.token_ids[:left],
            "texts": [self._text(token) for token in segment.token_ids[:left]],
            "action": [int(is_action) for is_action in segment.action_mask[:left]],
            "versions": segment.versions()[:left],
            "in_band": in_band,
            "ratio": [_short(number) for number in ratio],
            "advantage": [_short(number) for number in advantage],
            "value": [_short(number) for number in value],
        }

    def _text(self, token: int) -> str:
        # Decoded while the tokenizer is at hand: a run folder may outlive the folder of its base model.
        if token not in self._texts:
            self._texts[token] = self._text_of(token)[:LONGEST_TEXT]
        return self._texts[token]

    def _go_on(self, first_step: int) -> None:
        if self._staleness.is_file():
            self._rewrite(self._staleness, [row for row in read_metrics(self._staleness) if row["step"] < first_step])
        if self._path.is_file():
            rows = [row for row in read_metrics(self._path) if row["step"] < first_step]
            self._stride = max((row["stride"] for row in rows), default=1)
            self._steps = sorted({row["step"] for row in rows})
            self._rewrite(self._path, rows)

    def _thin_out(self) -> None:
        self._stride *= 2
        rows = [row for row in read_metrics(self._path) if row["step"] % self._stride == 0]
        self._steps = sorted({row["step"] for row in rows})
        self._rewrite(self._path, [row | {"stride": self._stride} for row in rows])

    def _rewrite(self, path: Path, rows: Iterable[Row]) -> None:
        staged = path.with_name(f".{path.name}")
        self._storage.write(staged, "".join(json.dumps(row) + "\n" for row in rows).encode())
        self._storage.rename(staged, path)

    def _safely(self, action: Callable[[], None]) -> None:
        if self._broken:
            return
        try:
            action()
        except Exception as error:  # whatever breaks, the run is worth more than its report
            self._broken = True
            self._note(f"no more samples for the report ({type(error).__name__}: {error}); training goes on")


def choose(rollouts: Sequence[Rollout], masked: Sequence[int], count: int) -> list[int]:
    """Indices of up to `count` rollouts that show most: the best and the worst with tools, the most masked, the oldest.

    `masked` is the number of masked tokens of each. The rest, when more are asked for, in order of arrival.
    """

    def tools(index: int) -> bool:
        return len(rollouts[index].turns) > 1 or bool(rollouts[index].info.get("tool_calls"))

    everyone = range(len(rollouts))
    preferred = [
        max(everyone, key=lambda i: (tools(i), rollouts[i].reward or 0.0)),
        min(everyone, key=lambda i: (rollouts[i].reward or 0.0, not tools(i))),
        max(everyone, key=lambda i: masked[i]),
        min(everyone, key=lambda i: (rollouts[i].oldest_version or 0, -rollouts[i].action_tokens)),
    ]
    return list(dict.fromkeys([*preferred, *everyone]))[:count]


def _by_staleness(step: int, rollouts: Sequence[Rollout], masked: Sequence[int]) -> dict[str, list[int]]:
    counts: dict[str, Counter[int]] = {name: Counter() for name in ("rollouts", "tokens", "masked")}
    for rollout, outside in zip(rollouts, masked, strict=True):
        staleness = staleness_of(rollout, step)
        for name, number in (("rollouts", 1), ("tokens", rollout.action_tokens), ("masked", outside)):
            counts[name][staleness] += number
    ages = sorted(counts["rollouts"])
    return {"staleness": ages} | {name: [counter[age] for age in ages] for name, counter in counts.items()}


def _append(path: Path, rows: Iterable[Row]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def _short(number: float | None) -> float | None:
    # Four digits are more than a colour shows, and a third of the bytes.
    return None if number is None or number != number else float(f"{number:.4g}")
