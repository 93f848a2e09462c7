"""Runs that are killed, starved of disk, stopped and cut from power, judged by their history alone (tests/nemesis).

The everyday part is a few runs with the stand-in learner, and the checker's own test: a history that was tampered with
is found. `-m slow` plays for three minutes, tiny model included; `tests/nemesis/run.py` plays 500.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

NEMESIS = Path(__file__).parent / "nemesis"


def play(folder: Path, *options: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, figures and what was said of some runs."""
    out = folder / "figures.json"
    command = [sys.executable, str(NEMESIS / "run.py"), "--out", str(out), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert out.exists(), done.stdout + done.stderr
    return done.returncode, json.loads(out.read_text()), done.stdout + done.stderr


@pytest.mark.timeout(170)
def test_no_fault_loses_or_repeats_a_rollout(tmp_path: Path) -> None:
    """R1 to R5 on a few seeded runs; a number repeats with `tests/nemesis/run.py --run N`."""
    code, figures, said = play(tmp_path, "--runs", "14", "--first", "40", "--only", "stand-in", "--jobs", "2")
    assert (figures["lost"], figures["duplicated"], figures["unexplained"]) == (0, 0, 0), said
    assert code == 0
    assert figures["crashes"] >= 15
    assert len(figures["faults"]) >= 8, "the faults of these runs are of many kinds"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_fault_loses_or_repeats_a_rollout_in_three_minutes(tmp_path: Path) -> None:
    """The part of the 500 runs that CI plays: 60 with the stand-in, 2 with the tiny model."""
    code, figures, said = play(tmp_path, "--runs", "66", "--only", "stand-in", "--jobs", "2")
    tiny_code, tiny, tiny_said = play(tmp_path, "--runs", "20", "--only", "tiny")
    assert (figures["lost"], figures["duplicated"], figures["unexplained"]) == (0, 0, 0), said
    assert (tiny["lost"], tiny["duplicated"], tiny["unexplained"]) == (0, 0, 0), tiny_said
    assert code == tiny_code == 0
    assert tiny["runs"] == 2


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of a run with asynchronous rollouts that was crashed and ended well."""
    home = tmp_path_factory.mktemp("history")
    code, figures, said = play(home, "--run", str(RUN), "--keep", str(home / "kept"))
    assert code == 0, said
    assert figures["crashes"] >= 1
    return home / "kept" / str(RUN)


RUN = 51


def drop_trained(db: sqlite3.Connection) -> None:
    db.execute("DELETE FROM rollouts WHERE step = 3 AND position = 1")


def train_twice(db: sqlite3.Connection) -> None:
    db.execute("DROP INDEX one_holder_of_a_place")
    db.execute(
        "UPDATE rollouts SET place = (SELECT place FROM rollouts WHERE step = 2 AND position = 0) "
        "WHERE step = 3 AND position = 0"
    )


def change_reward(db: sqlite3.Connection) -> None:
    lease, payload = db.execute("SELECT lease, payload FROM rollouts WHERE step = 2 AND position = 0").fetchone()
    rollout = msgspec.msgpack.decode(zlib.decompress(payload))
    rollout["score"] = 1.0 - rollout["score"]
    db.execute(
        "UPDATE rollouts SET payload = ? WHERE lease = ?", (zlib.compress(msgspec.msgpack.encode(rollout)), lease)
    )


def skip_prompt(db: sqlite3.Connection) -> None:
    db.execute("DELETE FROM rollouts WHERE unit = 5 AND fate IS NOT 'trained'")
    db.execute("UPDATE tasks SET unit = 100000 WHERE unit = 5")


def forget_step(db: sqlite3.Connection) -> None:
    db.execute("DELETE FROM steps WHERE step = (SELECT max(step) FROM steps)")


def forget_reason(db: sqlite3.Connection) -> None:
    db.execute("UPDATE rollouts SET fate = 'dropped', reason = '', state = 'scored' WHERE step = 4 AND position = 0")


TAMPERING = [
    (drop_trained, "lost"),
    (train_twice, "duplicated"),
    (change_reward, "unexplained"),
    (skip_prompt, "lost"),
    (forget_step, "lost"),
    (forget_reason, "lost"),
]


@pytest.mark.parametrize(("tamper", "kind"), TAMPERING, ids=lambda value: getattr(value, "__name__", value))
def test_the_checker_finds_what_was_tampered_with(
    history: Path, tmp_path: Path, tamper: Callable[[sqlite3.Connection], None], kind: str
) -> None:
    """A checker that finds nothing is no proof, so it is shown what it must find."""
    sys.path.insert(0, str(NEMESIS))
    import checker
    import plans
    import trial

    home = tmp_path / "home"
    shutil.copytree(history, home)
    judged = trial.Trial.__new__(trial.Trial)
    judged.plan, judged._damaged = plans.plan_of(0, RUN), []
    folder, witness = home / "runs" / "run", home / "witness.jsonl"
    assert checker.Checker(folder, judged._facts(), witness).check(complete=True) == []
    db = sqlite3.connect(folder / "ledger.sqlite")
    tamper(db)
    db.commit()
    db.close()
    found = checker.Checker(folder, judged._facts(), witness).check(complete=True)
    assert kind in {one for one, _ in found}, found
