"""Three sample rollouts as HTML: what was said, called and observed, and every token with what training made of it.

Guarantees: all text of models, tools and tasks passes through `markup.text`, so it is shown, never obeyed, and bounded;
the four views of the tokens switch by radio buttons and style alone; a run without `samples.jsonl` shows the same
rollouts by mask only. Not covered: which rollouts were stored while training (`training/samples.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import Tokenizer

from soloist.report.colors import Scale
from soloist.report.markup import LONG, attribute, number, text
from soloist.report.run_files import RunFiles
from soloist.types import Rollout

MOST_MESSAGES, MOST_CALLS, MOST_TOKENS = 24, 8, 800
TOKEN_CHARS = 40
VIEWS = ("mask", "ratio", "advantage", "value")
LABELS = {"early": "Early", "middle": "Middle", "last": "Last"}

Row = dict[str, Any]


def sample_rollouts(files: RunFiles) -> str:
    """The section's HTML; a sentence when there is no rollout."""
    samples = choose_samples(files)
    if not samples:
        return "<p>No rollout has been trained yet.</p>"
    scales = _scales(samples)
    return "".join(_article(index, sample, scales) for index, sample in enumerate(samples))


def choose_samples(files: RunFiles) -> list[Row]:
    """Up to three rows as in `samples.jsonl`, early, middle and last, each with its `rollout` when it is on record."""
    # After a resume a step may have been sampled by two lives; the file keeps one, rows of no use are left out.
    rows = [row for row in files.samples if row.get("segments")]
    steps = sorted({row["step"] for row in rows})
    if not steps:
        return _from_the_ledger(files)
    chosen: list[Row] = []
    for when, step in zip(LABELS, _three(steps), strict=False):
        mine = [row for row in rows if row["step"] == step]
        best = max(mine, key=lambda row: _interest(row, chosen))
        record = {row.rollout_id: row.rollout for row in files.rollouts_of(step)}.get(best["rollout_id"])
        chosen.append(best | {"when": when, "rollout": record})
    return chosen


def _three(steps: Sequence[int]) -> list[int]:
    return sorted({steps[0], steps[len(steps) // 2], steps[-1]})


def _interest(row: Row, chosen: Sequence[Row]) -> tuple[bool, bool, int]:
    """Tool use first, then an outcome that isn't shown yet, then masked tokens."""
    reward, shown = row.get("reward") or 0.0, {other.get("reward") or 0.0 for other in chosen}
    turns = sum(_runs(segment["action"]) for segment in row["segments"])
    outside = sum(flag is False for segment in row["segments"] for flag in segment["in_band"])
    return turns > 1, (reward not in shown) if chosen else reward <= 0, outside


def _runs(action: Sequence[int]) -> int:
    return sum(now and not before for before, now in zip([0, *action], action, strict=False))


def _from_the_ledger(files: RunFiles) -> list[Row]:
    steps = sorted(files.steps)
    if not steps:
        return []
    decode = _decoder(files)
    chosen: list[Row] = []
    for when, step in zip(LABELS, _three(steps), strict=False):
        rows = [_row_of(step, row.rollout, decode) for row in files.rollouts_of(step) if row.rollout is not None]
        if rows:
            chosen.append(max(rows, key=lambda row: _interest(row, chosen)) | {"when": when})
    return chosen


def _row_of(step: int, rollout: Rollout, decode: Callable[[int], str]) -> Row:
    segments = []
    for segment in rollout.segments:
        nothing = [None] * len(segment.token_ids)
        segments.append(
            {
                "token_ids": segment.token_ids,
                "texts": _Lazy(segment.token_ids, decode),
                "action": [int(flag) for flag in segment.action_mask],
                "versions": segment.versions(),
                **dict.fromkeys(("in_band", "ratio", "advantage", "value"), nothing),
            }
        )
    oldest = rollout.oldest_version
    return {
        "step": step, "rollout_id": rollout.rollout_id, "task_id": rollout.task_id, "reward": rollout.reward,
        "status": rollout.status, "staleness": None if oldest is None else step - oldest, "segments": segments,
        "rollout": rollout, "left_out": 0,
    }  # fmt: skip


class _Lazy(Sequence[str]):
    """Texts of tokens, decoded when looked at: of a step's rollouts one is shown."""

    def __init__(self, token_ids: Sequence[int], decode: Callable[[int], str]) -> None:
        self._token_ids, self._decode = token_ids, decode

    def __len__(self) -> int:
        return len(self._token_ids)

    def __getitem__(self, index: Any) -> Any:
        return self._decode(self._token_ids[index])


def _decoder(files: RunFiles) -> Callable[[int], str]:
    """Token id → text by the tokenizer in the run folder, or the id itself when there is none to read."""
    for path in (files.folder / "sft" / "model" / "tokenizer.json", files.folder / "model" / "tokenizer.json"):
        try:
            tokenizer = Tokenizer.from_file(str(path))
        # The library raises bare Exception for a missing or broken file.
        except Exception:
            continue
        return lambda token: str(tokenizer.decode([token], skip_special_tokens=False))
    files.miss("The run folder holds no tokenizer that can be read, so tokens are shown as numbers.")
    return lambda token: f"{token} "


# --- HTML -------------------------------------------------------------------------------------------------------------


def _article(index: int, sample: Row, scales: dict[str, Scale]) -> str:
    rollout: Rollout | None = sample["rollout"]
    reward = sample.get("reward")
    facts = [
        f"reward {number(reward, 2) if isinstance(reward, float) else text(reward)}",
        text(sample.get("status")),
        f"staleness {text(sample.get('staleness'))}",
        f"{sum(map(sum, (s['action'] for s in sample['segments'])))} action tokens",
        f"task {text(sample.get('task_id'), 60)}",
    ]
    head = f"<h3>{LABELS[sample['when']]}: step {text(sample['step'])}</h3><p class='facts'>{' · '.join(facts)}</p>"
    said = _conversation(rollout) if rollout is not None else "<p>Its messages are not on record any more.</p>"
    return f"<article>{head}{said}{_tokens(index, sample, scales)}</article>"


def _conversation(rollout: Rollout) -> str:
    shown = rollout.messages[:MOST_MESSAGES]
    left_out = len(rollout.messages) - len(shown)
    more = f"<p class='cut'>{left_out} more messages</p>" if left_out else ""
    return f"<div class='talk'>{''.join(map(_message, shown))}{more}</div>"


def _message(message: Any) -> str:
    if not isinstance(message, dict):
        return _said("?", "", str(message))
    role = str(message.get("role", "?"))
    kind = role if role in ("system", "user", "assistant", "tool") else "other"
    parts = []
    if str(message.get("content") or "").strip():
        parts.append(_said(role, kind, str(message["content"])))
    calls = message.get("tool_calls") or []
    calls = calls if isinstance(calls, list) else [calls]
    parts += [_said(f"{role} calls", "call", _call(call)) for call in calls[:MOST_CALLS]]
    if len(calls) > MOST_CALLS:
        parts.append(f"<p class='cut'>{len(calls) - MOST_CALLS} more calls</p>")
    return "".join(parts)


def _call(call: Any) -> str:
    function = call.get("function", call) if isinstance(call, dict) else call
    if isinstance(function, dict) and "name" in function:
        return f"{function['name']}({function.get('arguments', '')})"
    return str(function)


def _said(label: str, kind: str, content: str) -> str:
    body = text(content, LONG, keep_newlines=True)
    return f"<div class='said {kind}'><b>{text(label, 40)}</b><pre>{body}</pre></div>"


def _tokens(index: int, sample: Row, scales: dict[str, Scale]) -> str:
    measured = any(value is not None for segment in sample["segments"] for value in segment["ratio"])
    views = VIEWS if measured else VIEWS[:1]
    switch = "".join(
        f"<input type='radio' name='view{index}' id='view{index}{view}' class='{view}'"
        f"{' checked' if view == 'mask' else ''}><label for='view{index}{view}'>{view}</label>"
        for view in views
    )
    legends = "".join(f"<p class='legend {view}'>{_legend(view, scales, measured)}</p>" for view in views)
    tokens, left = [], MOST_TOKENS
    for number_, segment in enumerate(sample["segments"]):
        if number_ and left > 0:
            tokens.append("<hr>")
        tokens += [_token(segment, place, scales) for place in range(min(left, len(segment["token_ids"])))]
        left -= len(segment["token_ids"])
    left_out = max(0, -left) + int(sample.get("left_out") or 0)
    more = f"<p class='cut'>{left_out:,} more tokens</p>" if left_out else ""
    return f"<div class='views'>{switch}{legends}<div class='tokens'>{''.join(tokens)}</div>{more}</div>"


def _token(segment: Row, place: int, scales: dict[str, Scale]) -> str:
    action, in_band = segment["action"][place], segment["in_band"][place]
    kind = ("a" if in_band is not False else "x") if action else "o"
    says, style = [f"token {segment['token_ids'][place]}", "action" if action else "observation"], ""
    if action:
        says.append(f"version {segment['versions'][place]}")
        says += ["masked"] if in_band is False else []
        for view in VIEWS[1:]:
            value = segment[view][place]
            if value is not None:
                says.append(f"{view} {value:+.4g}" if view == "advantage" else f"{view} {value:.4g}")
                style += f"--{view[0]}:{scales[view].color(value)};"
    styled = f" style='{style}'" if style else ""
    shown = _visible(segment["texts"][place])
    return f"<i class='{kind}'{styled} title='{attribute(' · '.join(says))}'>{shown}</i>"


def _visible(token: str) -> str:
    # A line break in a token is shown and obeyed, as a conversation without line breaks can't be read.
    breaks = "\n" * min(2, token.count("\n"))
    marked = token.replace("\n", "↵")
    cut = "…" if len(marked) > TOKEN_CHARS else ""
    return (text(marked[:TOKEN_CHARS]) or "∅") + cut + breaks


def _legend(view: str, scales: dict[str, Scale], measured: bool) -> str:
    if not measured:
        return "<i class='a'>action</i> <i class='o'>observation: never trained</i> Masked tokens are not on record."
    if view == "mask":
        return (
            "<i class='a'>action</i> <i class='x'>action, masked: outside the trust region</i> "
            "<i class='o'>observation: never trained</i>"
        )
    scale = scales[view]
    low, middle, high = scale.marks()
    stops = ", ".join(scale.color(scale.at(share / 8)) for share in range(9))
    bar = f"<span class='bar' style='background:linear-gradient(to right,{stops})'></span>"
    return f"{low} {bar} {high}{f' (white: {middle})' if middle else ''} <i class='o'>observation: none</i>"


def _scales(samples: Sequence[Row]) -> dict[str, Scale]:
    """One scale a view for all samples, so that their colours can be compared."""

    def values(view: str) -> list[float]:
        found = (value for sample in samples for segment in sample["segments"] for value in segment[view])
        return [value for value in found if value is not None and math.isfinite(value)]

    # At least so wide that noise stays white.
    ratio = max([abs(math.log(max(value, 1e-9))) for value in values("ratio")] + [math.log(1.05)])
    advantage = max([abs(value) for value in values("advantage")] + [0.05])
    value = values("value") or [0.0]
    return {
        "ratio": Scale(-ratio, ratio, centre=0.0, log=True),
        "advantage": Scale(-advantage, advantage, centre=0.0),
        "value": Scale(min(0.0, *value), max(*value, 0.05)),
    }
