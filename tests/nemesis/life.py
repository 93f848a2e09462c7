"""One life of a run: a forked process that trains until it ends or is ended.

`python life.py KIND` does the imports once, then reads one JSON line for each life from stdin, forks it, and prints its
process id and, when it has ended, its exit code. Hooks of this file stand around the product's own code: they kill at
fault points, deliver results twice or late, break episodes, and write down what was acknowledged as being on disk.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import json
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

TINY_IMPORTS = ("soloist.cli", "soloist.report.progress", "soloist.report.summary", "soloist.training.stages")
TINY = """
steps = 6
rollouts_per_step = 4
players = 4
[engine]
slots = 4
[rollout]
max_new_tokens = 8
max_tokens = 120
max_turns = 1
[value_pretraining]
rollouts = 8
epochs = 1
gate = -1e9
[eval]
problems = 2
samples = 1
"""
ARCHITECTURE = """[model]
hidden_size = 16
layers = 1
heads = 2
mlp_size = 32
"""
"""Of the model that is built once; runs name its folder, which has its own."""


class Notebook:
    """Appends lines to a file outside the run folder; a line is in the page cache before the call returns."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, line: str) -> None:
        """One line, in one write."""
        os.write(self._file, line.encode() + b"\n")


class Points:
    """A plan for `seams.installed_faults`: kills the process at the n-th passing of a name."""

    def __init__(self, plan: list[tuple[str, int, str]], fired: Notebook) -> None:
        self._plan = plan
        self._fired = fired
        self._passed: Counter[str] = Counter()

    def __call__(self, name: str) -> None:
        for wanted, n, _ in self._plan:
            if name != wanted and not (wanted.endswith(":") and name.startswith(wanted)):
                continue
            self._passed[wanted] += 1
            if self._passed[wanted] == n:
                self._fired.write(f"point {name if name == wanted else wanted}")
                os.kill(os.getpid(), signal.SIGKILL)


def wrapped(owner: type, name: str, around: Callable[..., Any]) -> None:
    """Replace a coroutine method by `around(original, self, …)`."""
    original = getattr(owner, name)

    async def method(self: Any, *args: Any, **named: Any) -> Any:
        return await around(original, self, *args, **named)

    setattr(owner, name, method)


def install_witness(home: Path) -> None:
    """Write down what the ledger said was on disk."""
    from soloist.runtime.ledger import Ledger

    notebook = Notebook(home / "witness.jsonl")

    async def ended(original: Any, ledger: Any, rollout: Any, *args: Any, **named: Any) -> Any:
        accepted = await original(ledger, rollout, *args, **named)
        if accepted:
            notebook.write(json.dumps({"ended": [rollout.rollout_id, rollout.attempt]}))
        return accepted

    async def commit(original: Any, ledger: Any, step: int, *args: Any, **named: Any) -> Any:
        result = await original(ledger, step, *args, **named)
        notebook.write(json.dumps({"committed": [step, named["state_hash"]]}))
        return result

    wrapped(Ledger, "ended", ended)
    wrapped(Ledger, "commit", commit)


def install_messengers(plan: dict[str, Any], rng: random.Random, fired: Notebook) -> None:
    """Deliver some results twice, at once or later, and hold others back, so that they overtake each other."""
    from soloist.training.run import Run

    late: set[asyncio.Task[None]] = set()

    async def again(original: Any, run: Any, args: Any, seconds: float) -> None:
        await asyncio.sleep(seconds)
        fired.write("duplicate")
        await original(run, *args)

    async def ended(original: Any, run: Any, *args: Any) -> Any:
        if rng.random() < plan["reorder"]:
            fired.write("reorder")
            await asyncio.sleep(rng.uniform(0.0, 0.08))
        result = await original(run, *args)
        if rng.random() < plan["duplicate"]:
            task = asyncio.create_task(again(original, run, args, rng.choice([0.0, 0.0, 0.05, 0.2])))
            late.add(task)
            task.add_done_callback(late.discard)
        return result

    wrapped(Run, "ended", ended)


def install_breakage(plan: dict[str, Any], rng: random.Random, fired: Notebook) -> None:
    """Episodes of one row always fail, others now and then."""
    from soloist.environments.calculator import Calculator

    original = Calculator.episode

    def episode(self: Calculator, task: Any) -> Any:
        poisoned = task.task_id == f"calculator/line/{plan['poison'] + 1}"
        if poisoned or rng.random() < plan["broken"]:
            fired.write("broken")
            raise RuntimeError("the nemesis broke this episode")
        return original(self, task)

    Calculator.episode = episode  # type: ignore[method-assign]


def install_slowness() -> None:
    """Episodes that last longer than a lease of two seconds, with a sign of life in the middle."""
    from soloist.environments.calculator import CalculatorEpisode

    async def slowly(original: Any, episode: Any) -> Any:
        await asyncio.sleep(1.2)
        return await original(episode)

    wrapped(CalculatorEpisode, "reset", slowly)
    wrapped(CalculatorEpisode, "score", slowly)


def begin(spec: dict[str, Any]) -> None:
    """In the fresh process: files, environment, shim."""
    os.setsid()
    home = Path(spec["home"])
    log = os.open(home / "log", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    for number, file in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
        os.dup2(file, number)
    os.environ.update(spec["environment"])
    try:
        ctypes.CDLL(None).nemesis_begin()
    except AttributeError:
        # No compiler, no shim.
        return


def live(spec: dict[str, Any]) -> int:
    """Train; returns the exit code."""
    begin(spec)
    from soloist.seams import installed_faults

    home, plan = Path(spec["home"]), spec["plan"]
    if plan is None:
        return make_tiny(home)
    fired = Notebook(Path(spec["environment"]["NEMESIS_FIRED"]))
    rng = random.Random(f"life/{plan['number']}/{spec['number']}")
    install_witness(home)
    if plan["duplicate"] or plan["reorder"]:
        install_messengers(plan, rng, fired)
    if plan["broken"] or plan["poison"] >= 0:
        install_breakage(plan, rng, fired)
    if plan["slow"]:
        install_slowness()
    with installed_faults(Points(spec["points"], fired)):
        return train_tiny(home, Path(spec["base"]), plan) if plan["kind"] == "tiny" else train_stand_in(home, plan)


def make_tiny(home: Path) -> int:
    """A model that answers 1+1 with 2 or 3, each half of the time, and value pretraining; once for all runs."""
    import torch

    from soloist.cli import main
    from soloist.config_files import load_config
    from soloist.environments.registry import build_environment
    from soloist.models.loading import load_policy, load_tokenizer, save_folder
    from soloist.models.tiny import build_tiny
    from soloist.rollout.rendering import build_renderer

    config = load_config(str(write_recipe(home, ARCHITECTURE)))
    untrained = build_tiny(config.model, 0, home / "untrained")
    model, tokenizer = load_policy(untrained), load_tokenizer(untrained)
    rendering, environment = build_renderer(tokenizer, "auto"), build_environment(config.environment, 0)
    tools = environment.demonstration(0).tools
    said = [[{"role": "user", "content": "1+1"}, {"role": "assistant", "content": answer}] for answer in "23"]
    ids, sampled = zip(*(rendering.training_tokens(messages, tools) for messages in said), strict=True)
    labels = torch.where(torch.tensor(sampled), torch.tensor(ids), -100)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        model(input_ids=torch.tensor(ids), labels=labels).loss.backward()
        optimizer.step()
    save_folder(model, tokenizer, home / "coin")
    (home / "tasks.jsonl").write_text('{"problem": "1+1", "answer": 2}\n')
    code = main(["pretrain-value", str(write_recipe(home)), "--name", "run", *of_the_coin(home)])
    # The settings of the runs stand in their own folders.
    (home / "runs" / "run" / "config.resolved.toml").unlink()
    return code


def write_recipe(home: Path, more: str = "") -> Path:
    """A recipe whose run lies in `home/runs`."""
    recipe = home / "tiny.toml"
    recipe.write_text(f'runs_dir = "{home / "runs"}"\n{TINY}{more}')
    return recipe


def of_the_coin(base: Path) -> list[str]:
    """Options that name the model and its task."""
    fixed = ["--sft.steps=0", "--value_pretraining.rollouts=64", "--value_pretraining.holdout=0.5"]
    return [f"--model.path={base / 'coin'}", f"--environment.tasks={base / 'tasks.jsonl'}", *fixed]


def train_tiny(home: Path, base: Path, plan: dict[str, Any]) -> int:
    """`soloist train`, as a user calls it."""
    from soloist.cli import main

    options: list[str] = of_the_coin(base)
    for key, value in plan["config"].items():
        pairs = [(f"{key}.{inner}", one) for inner, one in value.items()] if isinstance(value, dict) else [(key, value)]
        options += [f"--{name}={json.dumps(one) if not isinstance(one, str) else one}" for name, one in pairs]
    resume = ["--resume"] if (home / "runs" / "run" / "config.resolved.toml").exists() else []
    return main(["train", str(write_recipe(home)), "--name", "run", *options, *resume])


def train_stand_in(home: Path, plan: dict[str, Any]) -> int:
    """The product's training with stand-ins for model, rendering and engine child."""
    import trial_bench

    return trial_bench.train(home, plan)


def main() -> None:
    """The nursery."""
    # Done once here, so that a life begins at once.
    for module in TINY_IMPORTS if sys.argv[1] == "tiny" else ("trial_bench",):
        importlib.import_module(module)
    for line in sys.stdin:
        spec = json.loads(line)
        pid = os.fork()
        if not pid:
            code = 70
            try:
                code = live(spec)
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                # Not sys.exit: threads that hang must not keep a finished life alive unseen.
                os._exit(code)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
