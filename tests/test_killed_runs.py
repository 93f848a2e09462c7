"""Runs that die and go on: `kill -9` of the engine's child and of everything, Ctrl-C once and twice, a stalled engine.

Every run is a process of its own with real children. They are forked from one process that has done the imports, which
take most of the time of a start, and call `main` as `python -m soloist` does. What a run did is judged from its folder
alone.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from soloist.cli import main
from soloist.metrics import read_metrics
from soloist.runtime.ledger import read_rollouts, read_steps
from soloist.training.checkpoint import Checkpoints

STEPS, SIZE, EVERY = 40, 4, 4
"""Steps of a run, rollouts of a step, steps between two checkpoints."""
PATIENCE_S = 60.0
"""After which a test stops waiting for something that a run should do."""
DETERMINISTIC = ["--deterministic=true", "--max_staleness=0"]
PARTS = ("policy", "value", "policy_optimizer", "value_optimizer")

NURSERY = """
import json, os, sys
import soloist.report.progress, soloist.report.summary, soloist.training.stages
from soloist.cli import main
for line in sys.stdin:
    arguments, out, err = json.loads(line)
    pid = os.fork()
    if not pid:
        os.setsid()  # a group of its own, like that of a command in a terminal
        for path, number in ((os.devnull, 0), (out, 1), (err, 2)):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
        sys.exit(main(arguments))
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def _command_of(process: psutil.Process) -> list[str]:
    """Its command line; empty when it has just ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:  # a zombie counts as one
        return []


class RunProcess:
    """A run under way: what it says, whom it started, and how it ended."""

    def __init__(self, nursery: subprocess.Popen[str], folder: Path, arguments: list[str], log: Path) -> None:
        self.folder = folder
        self._nursery = nursery
        self._out, self._err = log.with_suffix(".out"), log.with_suffix(".err")
        self._tell(json.dumps([arguments, str(self._out), str(self._err)]))
        self._process = psutil.Process(int(self._heard()))
        self._seen: set[psutil.Process] = set()
        self._code: int | None = None

    @property
    def out(self) -> str:
        return self._out.read_text() if self._out.exists() else ""

    @property
    def err(self) -> str:
        return self._err.read_text() if self._err.exists() else ""

    def until(self, condition: Callable[[], object]) -> None:
        """Wait until something holds. Fails, with what the run said, when the run ends first or time is up."""
        end = time.monotonic() + PATIENCE_S
        while not condition():
            assert lives(self._process) or condition(), f"the run ended\n{self.out}\n{self.err}"
            assert time.monotonic() < end, f"waited {PATIENCE_S} s\n{self.out}\n{self.err}"
            time.sleep(0.01)

    def until_trained(self, more: int) -> None:
        """Wait until so many more steps are on record."""
        before = len(trained_steps(self.folder))
        self.until(lambda: len(trained_steps(self.folder)) >= before + more)

    def engines(self) -> list[psutil.Process]:
        """The engine's child, or none while there is none."""
        return [one for one in self._process.children() if "soloist.engines" in " ".join(_command_of(one))]

    @property
    def engine(self) -> psutil.Process:
        """The engine's child."""
        (child,) = self.engines()
        return child

    def signal(self, number: int) -> None:
        """Signal the run alone, as `kill` does; remembers its whole tree."""
        self._seen |= {self._process, *self._process.children(recursive=True)}
        self._process.send_signal(number)

    def press_ctrl_c(self) -> None:
        """Signal the whole group, as a terminal does; remembers the whole tree."""
        self._seen |= {self._process, *self._process.children(recursive=True)}
        os.killpg(self._process.pid, signal.SIGINT)

    def wait(self) -> int:
        """Exit code; negative for a signal."""
        if self._code is None:
            self._code = int(self._heard())
        return self._code

    def orphans(self) -> list[psutil.Process]:
        """Who of its tree still lives 10 seconds after the signal (a zombie has ended)."""
        assert len(self._seen) > 1
        end = time.monotonic() + 10
        while (alive := [one for one in self._seen if lives(one)]) and time.monotonic() < end:
            time.sleep(0.01)
        return alive

    def kill(self) -> None:
        """End it, whatever happened; the nursery is free for the next run then."""
        for one in filter(lives, {self._process, *self._seen}):
            one.kill()
        self.wait()

    def _tell(self, line: str) -> None:
        assert self._nursery.stdin is not None
        print(line, file=self._nursery.stdin, flush=True)

    def _heard(self) -> str:
        assert self._nursery.stdout is not None
        return self._nursery.stdout.readline()


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def trained_steps(folder: Path) -> list[int]:
    """Steps in the metrics, in the order in which they were trained; after a resume some come again."""
    return [record["step"] for record in read_metrics(folder / "metrics.jsonl", stage="train")]


def checkpoints(folder: Path) -> list[int]:
    return Checkpoints(folder / "checkpoints").steps()


def check_lineage(folder: Path) -> list[int]:
    """Steps 0 … N-1 once each, from different rollouts, as the ledger's rows say too; returns the trained places."""
    steps = read_steps(folder / "ledger.sqlite")
    assert [step.step for step in steps] == list(range(STEPS))
    assert {len(step.rollout_ids) for step in steps} == {SIZE}
    rows = [row for row in read_rollouts(folder / "ledger.sqlite", payloads=False) if row.state == "trained"]
    assert Counter(row.rollout_id for row in rows) == Counter(name for step in steps for name in step.rollout_ids)
    assert len({row.rollout_id for row in rows}) == STEPS * SIZE, "no rollout is trained twice"
    assert all(row.rollout_id in steps[row.step or 0].rollout_ids for row in rows)
    assert set(trained_steps(folder)) == set(range(STEPS))
    return sorted(row.place for row in rows)


def final_state(folder: Path) -> dict[str, torch.Tensor]:
    parts = Checkpoints(folder / "checkpoints").load(STEPS)
    return {f"{part}/{name}": tensor for part in PARTS for name, tensor in parts[part][0].items()}


def different_tensors(one: Path, other: Path) -> list[str]:
    """Tensors of policy, critic and optimizers that aren't equal bit for bit after the last step."""
    found, expected = final_state(one), final_state(other)
    assert found.keys() == expected.keys()
    return [name for name in expected if not torch.equal(expected[name], found[name])]


@pytest.fixture(scope="module")
def nursery() -> Iterator[subprocess.Popen[str]]:
    """The process that the runs are forked from."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, "-c", NURSERY], env=environment, **pipes) as process:
        yield process
        process.kill()


@pytest.fixture(scope="module")
def pretrained(shared_recipe: Path, coin: list[str]) -> Path:
    """The run folder from which every run here starts: value pretraining is done."""
    assert main(["pretrain-value", str(shared_recipe), *coin]) == 0
    folder = shared_recipe.parent / "runs" / "tiny"
    (folder / "config.resolved.toml").unlink()
    return folder


@pytest.fixture(scope="module")
def command(pretrained: Path, shared_recipe: Path, coin: list[str]) -> Callable[..., list[str]]:
    """`command(name, options)`: the arguments of a training run whose folder is made here."""

    def arguments(name: str, *options: str) -> list[str]:
        shutil.copytree(pretrained, pretrained.with_name(name))
        sizes = [f"--steps={STEPS}", f"--checkpoint_every={EVERY}"]
        return ["train", str(shared_recipe), "--name", name, *coin, *sizes, *options]

    return arguments


@pytest.fixture
def start(nursery: subprocess.Popen[str], pretrained: Path, tmp_path: Path) -> Iterator[Callable[..., RunProcess]]:
    """`start(arguments)` starts a run as a process; what the test leaves running is killed."""
    started: list[RunProcess] = []

    def run(arguments: list[str]) -> RunProcess:
        folder = pretrained.with_name(arguments[arguments.index("--name") + 1])
        started.append(RunProcess(nursery, folder, arguments, tmp_path / f"{len(started)}"))
        return started[-1]

    yield run
    for one in started:
        one.kill()


@pytest.fixture(scope="module")
def uninterrupted(command: Callable[..., list[str]], pretrained: Path) -> Path:
    """The folder of a deterministic run that nothing happened to."""
    assert main(command("uninterrupted", *DETERMINISTIC)) == 0
    return pretrained.with_name("uninterrupted")


def advice(run: RunProcess) -> list[str]:
    """The arguments with which a stopped run says that it goes on; its last line."""
    said, _, command = run.err.splitlines()[-1].partition("go on with: soloist ")
    assert said == "soloist: stopped; "
    return shlex.split(command)


@pytest.mark.slow
def test_a_killed_engine_costs_no_step_and_changes_no_weight(
    start: Callable[..., RunProcess], command: Callable[..., list[str]], uninterrupted: Path
) -> None:
    """A crash of the child is noticed within a second and named; a fresh child gets its requests."""
    run = start(command("engine-killed", *DETERMINISTIC))
    run.until_trained(5)
    child = run.engine
    child.kill()
    killed = time.monotonic()
    run.until(lambda: "signal 9" in run.out)
    assert time.monotonic() - killed < 1
    assert run.wait() == 0, run.err
    notes = [line for line in run.out.splitlines() if line.startswith("note: engine 'local-0'")]
    assert f"child {child.pid} was killed by signal 9 (Killed)" in notes[0]
    assert notes[1].endswith("restart 1 of 3")
    assert (len(notes), run.err) == (2, "")
    assert trained_steps(run.folder) == list(range(STEPS))
    assert check_lineage(run.folder) == list(range(STEPS * SIZE))
    assert different_tensors(run.folder, uninterrupted) == []


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_to_the_same_weights(
    start: Callable[..., RunProcess], command: Callable[..., list[str]], uninterrupted: Path
) -> None:
    """R1, R2, R12: `kill -9` of the run at any instant; the resumed one equals one that nothing happened to."""
    arguments = command("killed", *DETERMINISTIC)
    run = start(arguments)
    run.until(lambda: checkpoints(run.folder))
    run.until_trained(random.randint(0, 2 * EVERY))
    time.sleep(random.uniform(0, 0.05))
    run.signal(signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL
    assert run.orphans() == []
    newest, done = checkpoints(run.folder)[-1], len(read_steps(run.folder / "ledger.sqlite"))
    assert newest <= done < STEPS, "the run was killed in its middle"
    resumed = start([*arguments, "--resume"])
    assert resumed.wait() == 0, resumed.err
    said = (
        f"note: train goes on at step {done}: snapshot of step {newest}, {done - newest} recorded steps trained again"
    )
    assert said in resumed.out
    assert [step.lineage for step in read_steps(run.folder / "ledger.sqlite")] == [1] * STEPS
    assert check_lineage(run.folder) == list(range(STEPS * SIZE)) == check_lineage(uninterrupted)
    assert different_tensors(run.folder, uninterrupted) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_deaths_and_other_numbers_of_players_change_no_bit(
    start: Callable[..., RunProcess], command: Callable[..., list[str]], uninterrupted: Path
) -> None:
    """R2: 40 steps of the tiny model in eleven lives equal 40 in one; each life has another number of players."""
    arguments = command("ten-deaths", *DETERMINISTIC)
    run = start(arguments)
    for death in range(10):
        run.until_trained(1)
        time.sleep(random.uniform(0, 0.2))
        run.signal(signal.SIGKILL)
        assert run.wait() == -signal.SIGKILL
        run = start([*arguments, "--resume", f"--players={1 + death % 6}"])
    assert run.wait() == 0, run.err
    chain = [read_steps(folder / "ledger.sqlite") for folder in (run.folder, uninterrupted)]
    assert [step.state_hash for step in chain[0]] == [step.state_hash for step in chain[1]]
    assert check_lineage(run.folder) == list(range(STEPS * SIZE))
    assert different_tensors(run.folder, uninterrupted) == []


def test_a_run_killed_after_its_last_checkpoint_is_marked_as_done(
    command: Callable[..., list[str]], uninterrupted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The mark is written last; without it nothing is trained again and nothing refused."""
    arguments = command("unmarked", *DETERMINISTIC)
    folder = uninterrupted.with_name("unmarked")
    shutil.copytree(uninterrupted, folder, dirs_exist_ok=True)
    marks = folder / "stages.json"
    stages = json.loads(marks.read_text())
    marks.write_text(json.dumps({stage: summary for stage, summary in stages.items() if stage != "train"}))
    assert main([*arguments, "--resume"]) == 0, capsys.readouterr().err
    assert json.loads(marks.read_text()) == stages
    assert f"train goes on at step {STEPS}: snapshot of step {STEPS}, 0 recorded" in capsys.readouterr().out
    assert check_lineage(folder) == list(range(STEPS * SIZE))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_ctrl_c_and_sigterm_say_how_to_go_on_and_twice_is_at_once(
    start: Callable[..., RunProcess], command: Callable[..., list[str]]
) -> None:
    """R12: no orphans in any case; the run says the command that goes on, and that ends with all steps."""
    run = start(command("stopped"))
    run.until_trained(EVERY + 1)
    run.press_ctrl_c()
    assert (run.wait(), run.orphans()) == (130, [])

    terminated = start(advice(run))
    terminated.until(terminated.engines)
    terminated.signal(signal.SIGTERM)
    assert (terminated.wait(), terminated.orphans()) == (130, [])
    assert advice(terminated) == advice(run)

    twice = start(advice(run))
    twice.until_trained(1)
    twice.engine.suspend()  # an orderly stop waits for it, so that the second Ctrl-C comes in the middle
    twice.press_ctrl_c()
    twice.until(lambda: "once more stops at once" in twice.err)
    twice.press_ctrl_c()
    assert (twice.wait(), twice.orphans()) == (130, [])
    assert twice.err.splitlines()[-1] == "soloist: stopped at once; the same command with --resume goes on"

    last = start(advice(run))
    assert last.wait() == 0, last.err
    check_lineage(last.folder)


@pytest.mark.slow
def test_a_stopped_engine_is_reported_and_replaced_but_not_for_ever(
    start: Callable[..., RunProcess], command: Callable[..., list[str]]
) -> None:
    """R6: the wait is never silent and never endless, whether players or the learner wait for the engine."""
    limits = ["--engine.request_seconds=1", "--health.stall_report_seconds=0.3", "--engine.restarts=1"]
    # Every request fails while the fresh child starts, since its deadline is shorter than that.
    run = start(command("stalled", *limits, "--health.max_failed_ratio=1", "--rollout.attempts=1000"))
    run.until_trained(5)
    stopped = run.engine
    stopped.suspend()
    run.until(lambda: "restart 1 of 1\n" in run.out)
    assert f"child {stopped.pid} gives no sign of life; killing it\n" in run.out
    report = next(line for line in run.out.splitlines() if " s: step " in line)
    assert report.startswith(("note: no full step for 0.", "note: not all engines have loaded version "))
    assert "rollouts: " in report
    assert "tasks: " in report

    run.until_trained(3)
    run.engine.kill()
    assert run.wait() == 1
    assert run.err.startswith("soloist: the run failed: ")
    assert "engine 'local-0' is lost after 1 restarts" in run.err
    assert run.err.count("\n") == 1
    assert trained_steps(run.folder) == list(range(len(trained_steps(run.folder))))
