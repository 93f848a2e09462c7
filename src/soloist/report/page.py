"""The page of a report: headline, panels, sample rollouts. One HTML file that needs nothing but itself.

Guarantees: no script, no address outside the page; whatever came from a run was escaped by `markup.text`; a panel that
breaks is replaced by a sentence and the others stay. Not covered: where the page is written (`report.py`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

from soloist.report.figures import PANELS, Panel
from soloist.report.markup import POLICY, details, number, percent, picture, table, text
from soloist.report.rollouts import sample_rollouts
from soloist.report.run_files import RunFiles
from soloist.report.style import STYLE
from soloist.report.summary import SMOOTH, held_out, series
from soloist.report.timeline import timeline

T = TypeVar("T")
STAGES = ("sft", "pretrain-value", "train", "eval")


def build_page(files: RunFiles, panels: Sequence[Panel], now: float) -> str:
    """The whole page. `panels` are in the order of reading; `now` is when it was made, seconds since 1970."""
    figures = "".join(_figure(panel) for panel in panels) or "<p>There is nothing to draw yet.</p>"
    samples = guarded(files, "sample rollouts", lambda: sample_rollouts(files)) or ""
    setup = guarded(files, "setup", lambda: _setup(files)) or ""
    body = "".join(
        (
            _headline(files, now),
            guarded(files, "final figures", lambda: tiles(files)) or "",
            # Last of what is computed: the parts above may find that something is missing.
            _missing(files),
            f'<h2>The run</h2><div class="panels">{figures}</div>',
            f"<h2>Sample rollouts</h2>{samples}",
            f"<h2>Setup</h2>{setup}",
        )
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{text(files.name)} – Soloist report</title><style>{STYLE}</style></head><body>{body}</body></html>\n"
    )


def build_panels(files: RunFiles) -> list[Panel]:
    """All panels that have data."""
    made = [guarded(files, f"panel '{make.__name__}'", partial(make, files)) for make in (*PANELS, timeline)]
    return [panel for panel in made if panel is not None]


def guarded(files: RunFiles, what: str, make: Callable[[], T]) -> T | None:
    """What `make` returns, or None after noting that it broke: half a report is better than none."""
    try:
        return make()
    except Exception as error:
        files.miss(f"The {what} could not be made ({type(error).__name__}: {error}).")
        return None


def tiles(files: RunFiles) -> str:
    """The final figures: means over the last steps, as `SMOOTH` says, and evaluations with their versions."""
    rewards = series(files.metrics, "reward/mean")
    found: list[tuple[str, str]] = []
    if rewards:
        first, last = (statistics.fmean(value for _, value in part) for part in (rewards[:SMOOTH], rewards[-SMOOTH:]))
        found.append(("reward, first and last 5 steps", f"{first:.3f} → {last:.3f}"))
    found += [
        (f"held-out {name.rpartition('/')[2]}, version {version}", f"{value:.3f}")
        for name, version, value in _ends(files)
    ]
    found += [
        (label, show(_last(files, name)))
        for label, name, show in (
            ("critic: explained variance", "critic/explained_var", number),
            ("critic: skill per rollout", "critic/skill", number),
            ("masked tokens", "dis/masked_frac", lambda value: percent(value, 2)),
            ("staleness, mean", "off_policy/staleness/mean", lambda value: number(value, 2)),
            ("learner idle", "trainer/idle_ratio", lambda value: percent(value, 0)),
            ("engines idle", "rollouter/idle_ratio", lambda value: percent(value, 0)),
            ("tokens sampled a second", "perf/tokens_per_s", lambda value: number(value, 0)),
            ("seconds a step", "time/step", lambda value: number(value, 2)),
        )
        if _last(files, name) is not None
    ]
    return f"<div class='tiles'>{''.join(f'<div><b>{text(v)}</b><span>{text(k)}</span></div>' for k, v in found)}</div>"


def _last(files: RunFiles, name: str) -> float | None:
    points = series(files.metrics, name)[-SMOOTH:]
    return statistics.fmean(value for _, value in points) if points else None


def _ends(files: RunFiles) -> list[tuple[str, int, float]]:
    rows = held_out(files.metrics, files.stages)
    return rows if len(rows) < 2 else [rows[0], rows[-1]]


def _headline(files: RunFiles, now: float) -> str:
    config, model = files.config, files.config.get("model", {})
    environment = config.get("environment", {})
    trained = len({point[0] for point in series(files.metrics, "reward/mean")})
    built = f"{model.get('family')}, {model.get('layers')} layers of {model.get('hidden_size')}, built from scratch"
    facts = [
        f"model {model['path']}" if model.get("path") else built if model else "model unknown",
        f"environment {environment.get('name', 'unknown')} ({environment.get('preset', '–')})",
        f"seed {config.get('seed', '–')}",
        f"{trained} of {config.get('steps', '–')} policy updates",
        *(["CONTROL RUN: rewards are shuffled, so nothing can be learned"] if config.get("shuffle_rewards") else []),
    ]
    done = [stage for stage in STAGES if stage in files.stages]
    state = f"stages done: {', '.join(done) or 'none'}" + ("" if "eval" in done else "; not finished")
    origin = files.origins[-1] if files.origins else {}
    names = ("soloist", "commit", "torch", "transformers", "python", "machine", "gpu")
    made_by = " · ".join(f"{name} {origin[name]}" for name in names if origin.get(name))
    if not origin:
        files.miss("origin.jsonl is missing, so versions and commit of the run are not known.")
    last = max((r["time"] for r in files.metrics if isinstance(r.get("time"), int | float)), default=None)
    state += f" · last record {_moment(last)}" if last is not None else ""
    return (
        f"<header><h1>{text(files.name)}</h1><p class='facts'>{text(' · '.join(facts), 600)}</p>"
        f"<p class='facts'>{text(made_by, 400)}</p>"
        f"<p class='facts'>{text(state)} · report of {_moment(now)}</p></header>"
    )


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _missing(files: RunFiles) -> str:
    if not files.missing:
        return ""
    sentences = "".join(f"<li>{text(sentence, 400)}</li>" for sentence in files.missing)
    return f"<div class='missing'>Not in this report:<ul>{sentences}</ul></div>"


def _figure(panel: Panel) -> str:
    shown = picture(panel.png, panel.alt)
    shown = f"<div class='scroll'>{shown}</div>" if panel.wide else shown
    numbers = details("Numbers", panel.numbers) if panel.numbers else ""
    kind = " class='wide'" if panel.wide else ""
    return (
        f"<figure{kind} id='{panel.name}'><h3>{text(panel.title)}</h3>{shown}"
        f"<figcaption>{text(panel.note, 600)}</figcaption>{numbers}</figure>"
    )


def _setup(files: RunFiles) -> str:
    rows = [(name, value) for name, value in flat(files.config)]
    stages = [(stage, name, value) for stage, found in files.stages.items() for name, value in flat(found)]
    lives = [(_moment(float(o.get("time", 0))), *(o.get(n) for n in ("commit", "torch"))) for o in files.origins]
    return (
        details("Results of the stages", table(("stage", "figure", "value"), stages))
        + details("Config", table(("key", "value"), rows))
        + (details("Processes that worked on the run", table(("start", "commit", "torch"), lives)) if lives else "")
    )


def flat(section: dict[str, Any], above: str = "") -> list[tuple[str, object]]:
    """Nested keys as dotted names, in order."""
    rows: list[tuple[str, object]] = []
    for name, value in section.items():
        rows += flat(value, f"{above}{name}.") if isinstance(value, dict) else [(f"{above}{name}", value)]
    return rows
