"""What happens to run number N: its settings and its faults, drawn from (seed, N) alone, so that N can be repeated.

A run is a row of lives. In each life something goes wrong; the last life has no faults and must reach the last step.
The instants of signals are drawn, too, but what the process is doing then depends on the machine.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, field
from typing import Any

TINY_SHARE = 10
"""Every so many-th run is with the tiny model."""
SLOW_SHARE = 60
"""Every so many-th run has episodes that last longer than a lease."""
POINTS = {
    # name → how often a run of sixteen steps passes it, roughly
    "ledger:open:before": 1,
    "ledger:open:after": 1,
    "ledger:rollouts:before": 96,
    "ledger:rollouts:after": 96,
    "ledger:commit:before": 16,
    "ledger:commit:after": 16,
    "ledger:sealed:before": 6,
    "ledger:sealed:after": 6,
    "ledger:prune:before": 6,
    "ledger:prune:after": 6,
    "wait_for_rollouts:before": 16,
    "wait_for_rollouts:after": 16,
    "update_value:before": 32,
    "update_value:after": 32,
    "update_policy:before": 16,
    "update_policy:after": 16,
    "standin:value:step": 32,
    "standin:policy:step": 64,
    "commit:before": 16,
    "commit:after": 16,
    "weight_sync:before": 16,
    "weight_sync:after": 16,
    "publish:written": 16,
    "publish:loaded": 16,
    "engine:load:before": 16,
    "engine:load:after": 16,
    "checkpoint:before": 6,
    "checkpoint:after": 6,
    "checkpoint:rename:before": 6,
    "checkpoint:rename:after": 6,
    "write:": 80,
    "sync:": 100,
    "rename:": 24,
}
"""Named instants at which a process is killed; a name that ends with a colon stands for all that begin so."""
TINY_POINTS = {"learner:value:step": 12, "learner:policy:step": 6}
STORAGE = {"write": 1400, "fsync": 180, "rename": 24, "any": 1600}
"""Operations below the run folder in a run of sixteen steps, roughly."""
LONGEST_LIFE = {"stand-in": 0.9, "tiny": 6.0}
"""Seconds; signals come before, or the run would be over first."""


@dataclass(kw_only=True)
class Life:
    """What goes wrong between one start of the process and its end."""

    storage: str = ""
    """Faults for `shim.c`."""
    points: list[tuple[str, int, str]] = field(default_factory=list)
    """(name or beginning, n-th time, action) at fault points; actions: kill, engine, sandbox."""
    signals: list[tuple[float, str, float]] = field(default_factory=list)
    """(seconds after the start, kill | stop + who, seconds until it goes on)."""
    power_cut: str = ""
    """strict or partial: what was not synced is forgotten after this life."""
    damage: str = ""
    """Bytes of the newest snapshot that are changed after this life: flip, truncate, delete, clutter."""


@dataclass(kw_only=True)
class Plan:
    """One run."""

    number: int
    kind: str
    config: dict[str, Any]
    rows: int
    """Rows of the task file."""
    lives: list[Life]
    journal: bool
    stopped: bool
    duplicate: float
    """Share of results that are delivered twice, at once or late."""
    reorder: float
    """Share of results that are held back for a while."""
    broken: float
    """Share of episodes that fail at the environment."""
    poison: int
    """Row of the task file that always fails; −1 for none."""
    slow: bool = False
    """Episodes last longer than a lease, and live on its renewals."""
    token_seconds: float = 0.0007
    step_seconds: float = 0.02

    def as_json(self) -> dict[str, Any]:
        """For the log and for the run's process."""
        return asdict(self)


def plan_of(seed: int, number: int, only: str = "") -> Plan:
    """The plan of run `number`."""
    rng = random.Random(f"nemesis/{seed}/{number}")
    tiny = number % TINY_SHARE == TINY_SHARE - 1
    kind = only or ("tiny" if tiny else "stand-in")
    slow = kind == "stand-in" and number % SLOW_SHARE == SLOW_SHARE // 2
    stopped = rng.random() < 0.15 and not slow
    config = _tiny(rng) if kind == "tiny" else _stand_in(rng, number, stopped)
    if slow:
        config |= {"steps": 3, "rollouts_per_step": 4, "players": 8}
        config["rollout"]["max_seconds"] = 2.0
        config["health"] |= {"lease_seconds": 2.0, "stall_limit_seconds": 15.0, "stall_report_seconds": 10.0}
    poison = rng.random() < 0.08 and kind == "stand-in"
    config["rollout"]["attempts"] = 2 if poison else 100
    journal = rng.random() < 0.4
    crashes = rng.choice([1, 2, 2, 3, 3, 4, 6, 10]) if kind == "stand-in" and not slow else rng.choice([1, 2, 3])
    lives = [_life(rng, kind, journal, stopped, share=crashes) for _ in range(crashes)]
    messages = rng.random() < 0.35 and kind == "stand-in"
    rows = rng.choice([7, 12, 25, 40])
    return Plan(
        number=number,
        kind=kind,
        config=config,
        rows=rows,
        lives=[*lives, Life()],
        journal=journal,
        stopped=stopped,
        duplicate=rng.choice([0.1, 0.5]) if messages else 0.0,
        reorder=rng.choice([0.1, 0.5]) if messages else 0.0,
        broken=0.05 if rng.random() < 0.2 and kind == "stand-in" and not poison else 0.0,
        poison=rng.randrange(rows) if poison else -1,
        slow=slow,
    )


def _stand_in(rng: random.Random, number: int, stopped: bool) -> dict[str, Any]:
    deterministic = rng.random() < 0.3
    group = rng.choice([1, 1, 2])
    staleness = 0 if deterministic else rng.choice([0, 1, 2])
    size = rng.choice([4, 6])
    lag = 1 + number % 2 if deterministic and number % 3 == 0 else None
    # By number and not by the generator, so that all other plans stay what they were.
    mode: dict[str, Any] = {} if lag is None else {"lag": lag}
    if group > 1 and number % 2 == 0:
        mode["advantage"] = {"drop_uniform_groups": True}
    return mode | {
        "steps": rng.choice([12, 16, 20]),
        "rollouts_per_step": size,
        "group_size": group,
        "players": rng.choice([2, 4, 7]),
        "max_staleness": staleness if lag is None else lag,
        "on_stale": "wait" if deterministic else rng.choice(["wait", "wait", "drop", "train"]),
        "publish_every": 2 if staleness and rng.random() < 0.3 else 1,
        "checkpoint_every": rng.choice([1, 2, 3, 5]),
        "deterministic": deterministic,
        "keep_rollouts": rng.choice([0, 3]) if rng.random() < 0.2 else None,
        "seed": number,
        "engine": {"slots": 8, "restarts": 100},
        "rollout": {
            "max_new_tokens": 8,
            "max_tokens": 120,
            "max_turns": 3,
            "max_seconds": 0.6 if stopped else 60.0,
            "retry_seconds": 0.01,
        },
        "value": {"updates_per_step": rng.choice([1, 2])},
        "health": {
            "max_failed_ratio": 1.0,
            "stall_limit_seconds": 40.0,
            "stall_report_seconds": 20.0,
            "lease_seconds": 0.6 if stopped else 60.0,
        },
    }


def _tiny(rng: random.Random) -> dict[str, Any]:
    deterministic = rng.random() < 0.5
    return {
        "steps": 6,
        "max_staleness": 0 if deterministic else rng.choice([0, 1]),
        "deterministic": deterministic,
        "checkpoint_every": rng.choice([1, 2, 4]),
        "players": rng.choice([2, 4]),
        "engine": {"restarts": 100},
        "rollout": {"retry_seconds": 0.01},
        "health": {"max_failed_ratio": 1.0, "lease_seconds": 60.0},
    }


def _life(rng: random.Random, kind: str, journal: bool, stopped: bool, share: int) -> Life:
    """One or two faults. `share` says into how many lives the run's work is divided, so that faults come in time."""
    life = Life()
    for _ in range(rng.choice([1, 1, 2])):
        _FAULTS[rng.choices(list(_FAULTS), [3, 6, 5, 5, 2, 2, 1])[0]](rng, life, kind, share)
    if stopped and kind == "stand-in":
        who = rng.choice(["run", "run", "engine", "sandbox"])
        life.signals.append((rng.uniform(0.2, 0.9), f"stop {who}", rng.choice([0.3, 1.0])))
    if journal and rng.random() < 0.7:
        life.power_cut = rng.choice(["strict", "strict", "partial"])
    return life


def _kill_at_random(rng: random.Random, life: Life, kind: str, share: int) -> None:
    life.signals.append((rng.uniform(0.05, LONGEST_LIFE[kind]), "kill run", 0.0))


def _kill_at_point(rng: random.Random, life: Life, kind: str, share: int) -> None:
    points = POINTS | TINY_POINTS if kind == "tiny" else POINTS
    name = rng.choice(sorted(points))
    life.points.append((name, rng.randint(1, max(1, points[name] // share)), "kill"))


def _kill_in_storage(rng: random.Random, life: Life, kind: str, share: int) -> None:
    op = rng.choice(list(STORAGE))
    action = rng.choice(["kill", "killafter", "torn"] if op == "write" else ["kill", "killafter"])
    life.storage = _joined(life.storage, f"{op}:{rng.randint(1, STORAGE[op] // share)}:{action}")


def _fail_storage(rng: random.Random, life: Life, kind: str, share: int) -> None:
    op = rng.choice(list(STORAGE))
    action = rng.choice(["EIO", "ENOSPC", "short"] if op == "write" else ["EIO", "ENOSPC"])
    count = rng.choice([1, 1, 2, 5, 1000])
    life.storage = _joined(life.storage, f"{op}:{rng.randint(1, STORAGE[op] // share)}:{action}:{count}")


def _kill_engine(rng: random.Random, life: Life, kind: str, share: int) -> None:
    life.signals.append((rng.uniform(0.3, LONGEST_LIFE[kind]), "kill engine", 0.0))


def _kill_sandbox(rng: random.Random, life: Life, kind: str, share: int) -> None:
    life.signals.append((rng.uniform(0.2, LONGEST_LIFE[kind]), "kill sandbox", 0.0))


def _damage_snapshot(rng: random.Random, life: Life, kind: str, share: int) -> None:
    life.signals.append((rng.uniform(0.4, LONGEST_LIFE[kind]), "kill run", 0.0))
    life.damage = rng.choice(["flip", "truncate", "delete", "clutter"])


def _joined(*faults: str) -> str:
    return ",".join(filter(None, faults))


_FAULTS = {
    "kill_at_random": _kill_at_random,
    "kill_at_point": _kill_at_point,
    "kill_in_storage": _kill_in_storage,
    "fail_storage": _fail_storage,
    "kill_engine": _kill_engine,
    "kill_sandbox": _kill_sandbox,
    "damage_snapshot": _damage_snapshot,
}
