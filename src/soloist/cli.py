"""The command `soloist`: parses, refuses, runs stages, and turns every ending into an exit code.

Guarantees: `--help` loads neither torch nor transformers; bad input ends with code 2 and one sentence on stderr, a run
that went wrong with 1, an interrupted one with 130 after saying how to go on. The first Ctrl-C or SIGTERM stops in
order, the second at once. Not covered: what the stages do (`training/stages.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import NoReturn

from soloist.config import RunConfig
from soloist.config_files import describe_fields, dump_config, load_config, packaged_recipes
from soloist.errors import RunError, UserError
from soloist.report.fates import describe_fates, explain_rollout
from soloist.report.run_files import find_run
from soloist.report.text import one_sentence, printable

STAGES: dict[str, tuple[tuple[str, ...], str]] = {
    "sft": (("sft",), "teach the model the format from demonstrations that are mixed on purpose"),
    "pretrain-value": (("pretrain-value",), "fit the value model to rollouts of the fixed SFT policy"),
    "train": (("train",), "reinforcement learning from single asynchronous rollouts"),
    "eval": (("eval",), "measure one version on held-out tasks"),
    "run": (("sft", "pretrain-value", "train", "eval"), "all stages in order; those that are done are skipped"),
}
"""Command → (stages it runs, what it does)."""

REPORT = "write a run's report.html and its pictures, during the run or after it"
FATES = "say what became of every rollout that a run started, and why one was not trained"
REPLAY = "train again from the rollouts that a run stored, bit for bit or with changed settings"
WITH_VALUE = ("--name", "--rollout", "--to", "--set")
OWN_OPTIONS = ("--resume", "--dry-run", "--help", "--version", "--every", *WITH_VALUE)
ON_RUNS = (["config"], ["check"], ["report"], ["fates"], ["replay"])
"""Commands that are not resumed."""
INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    """Reports mistakes as `UserError`, so that they look like all others."""

    def error(self, message: str) -> NoReturn:
        """Raise UserError with argparse's message and the way to the help."""
        raise UserError(f"{message}; `{self.prog} --help` shows what is possible")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (0 done, 1 run failed, 2 bad input, 130 interrupted)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except UserError as error:
        print(f"soloist: error: {one_sentence(error)}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"soloist: the run failed: {one_sentence(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"soloist: stopped; go on with: {_resuming(arguments)}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe (`| head`) is gone; without this the interpreter complains again while it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _resuming(arguments: list[str]) -> str:
    # The same command again, so that the overrides stay; shlex keeps names with spaces whole.
    more = [] if "--resume" in arguments or arguments[:1] in ON_RUNS else ["--resume"]
    return shlex.join(["soloist", *arguments, *more])


def _dispatch(arguments: list[str]) -> int:
    # Overrides go first: argparse would take the value of an option that it doesn't know for the recipe.
    own, overrides = split_overrides(arguments)
    parsed = _parser().parse_args(own)
    if parsed.action in (_report, _fates, _replay):
        parsed.action(parsed, _runs_dir(parsed, overrides))
        return 0
    if parsed.name is not None:
        overrides["name"] = json.dumps(parsed.name)  # quoted, so that `--name 7` stays text
    config = load_config(parsed.recipe, overrides)
    run: Callable[[argparse.Namespace, RunConfig], None] = parsed.action
    run(parsed, config)
    return 0


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Separate our own options from config keys: `--policy.lr 3e-4`, `--policy.lr=3e-4`, `--steps 5`.

    Every other option that begins with `--` is a key of the config. Raises UserError when its value is missing.
    """
    own: list[str] = []
    overrides: dict[str, str] = {}
    rest = iter(arguments)
    for argument in rest:
        option, equals, value = argument.partition("=")
        if not option.startswith("--") or option in OWN_OPTIONS:
            own.append(argument)
            # Values of our own options may look like anything.
            own += islice(rest, 1) if argument in WITH_VALUE else []
            continue
        found = value if equals else next(rest, None)
        if found is None or (not equals and found.startswith("--")):
            raise UserError(
                f"option {option} has no value, found {found or 'the end of the line'}; write {option}=VALUE"
            )
        overrides[option[2:]] = found
    return own, overrides


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="soloist",
        description="Train language-model agents by asynchronous reinforcement learning from single rollouts.",
        epilog="Any key of the config is an option: --policy.lr 3e-4, --steps=5; `soloist config --help` lists them.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"soloist {version('soloist')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (_, purpose) in STAGES.items():
        command = _add_command(commands, name, purpose, _run_stages)
        command.add_argument("--resume", action="store_true", help="go on in the existing run folder")
        command.add_argument(
            "--dry-run", action="store_true", help="print the config and what it will cost, start nothing"
        )
        command.set_defaults(stages=STAGES[name][0], skip_done=name == "run")
    # The key tree has its own line breaks; argparse would fill it into one paragraph.
    config = _add_command(commands, "config", "print the resolved config", _print_config, recipe="?")
    config.formatter_class = argparse.RawDescriptionHelpFormatter
    config.epilog = _key_tree()
    _add_reader(commands, "report", REPORT, _report)
    fates = _add_reader(commands, "fates", FATES, _fates)
    fates.add_argument("--rollout", metavar="ID", help="all attempts at one rollout, and why it was trained or not")
    fates.add_argument("--every", action="store_true", help="one line for each attempt, too")
    replay = _add_reader(commands, "replay", REPLAY, _replay)
    replay.add_argument("--to", metavar="STEP", type=int, help="last step to train again; all by default")
    replay.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], help="another setting, such as loss.policy_loss=ppo"
    )
    _add_command(commands, "check", "say what works on this machine and what a config will do", _check, recipe="?")
    return parser


def _add_command(
    commands: argparse._SubParsersAction[_Parser],
    name: str,
    purpose: str,
    action: Callable[[argparse.Namespace, RunConfig], None],
    recipe: str | None = None,
) -> argparse.ArgumentParser:
    known = ", ".join(packaged_recipes())
    command = commands.add_parser(name, help=purpose, description=f"{purpose.capitalize()}.", allow_abbrev=False)
    default = "calculator" if recipe else None
    command.add_argument(
        "recipe",
        metavar="RECIPE",
        nargs=recipe,
        default=default,
        help=f"packaged recipe ({known}) or path of a TOML file",
    )
    command.add_argument("--name", help="folder of the run under runs_dir; by default the recipe's name")
    command.set_defaults(action=action)
    return command


def _add_reader(
    commands: argparse._SubParsersAction[_Parser],
    name: str,
    purpose: str,
    action: Callable[[argparse.Namespace, Path], None],
) -> argparse.ArgumentParser:
    """A command on an existing run, which has no config of its own."""
    command = commands.add_parser(name, help=purpose, description=f"{purpose.capitalize()}.", allow_abbrev=False)
    command.add_argument("run", metavar="RUN", help="folder of a run, or its name under --runs_dir (default: runs)")
    command.set_defaults(action=action, name=None, command=name)
    return command


def _key_tree() -> str:
    lines = ["keys, with their defaults:"]
    for name, default, description in describe_fields():
        lines += [f"  {name} = {default}", f"      {description}"]
    return "\n".join(lines)


def _print_config(_: argparse.Namespace, config: RunConfig) -> None:
    print(dump_config(config), end="")


def _check(_: argparse.Namespace, config: RunConfig) -> None:
    from soloist.report.check import describe_machine, describe_plan

    print("\n".join([*describe_machine(), "", *describe_plan(config)]))


def _runs_dir(parsed: argparse.Namespace, overrides: dict[str, str]) -> Path:
    runs_dir = Path(overrides.pop("runs_dir", RunConfig().runs_dir))
    if overrides:
        raise UserError(
            f"a {parsed.command} has no config, found --{next(iter(overrides))}; only --runs_dir is possible"
        )
    return runs_dir


def _report(parsed: argparse.Namespace, runs_dir: Path) -> None:
    _write_report(parsed.run, runs_dir)


def _fates(parsed: argparse.Namespace, runs_dir: Path) -> None:
    folder = find_run(parsed.run, runs_dir)
    if parsed.rollout is not None:
        print("\n".join(explain_rollout(folder, parsed.rollout)))
        return
    print("\n".join(describe_fates(folder, every=parsed.every)))


def _replay(parsed: argparse.Namespace, runs_dir: Path) -> None:
    pairs = [text.partition("=") for text in parsed.set]
    if broken := [key for key, equals, _ in pairs if not equals]:
        raise UserError(f"--set {broken[0]} has no value; write --set {broken[0]}=VALUE")
    from soloist.report.progress import ConsoleObserver
    from soloist.training.replay import replay

    with interruptible(), ConsoleObserver() as observer:
        found = replay(
            find_run(parsed.run, runs_dir), observer, to_step=parsed.to, changes={key: value for key, _, value in pairs}
        )
    print(f"{found.describe()}; metrics and weights: {printable(found.folder)}")


def _write_report(run: str, runs_dir: Path) -> None:
    from soloist.report.report import write_report

    print(f"report: {printable(str(write_report(find_run(run, runs_dir))))}")


def _run_stages(parsed: argparse.Namespace, config: RunConfig) -> None:
    from soloist.report.check import describe_plan, refuse_missing_devices

    # Before the stages load: a GPU that isn't there is a sentence here, and an assertion deep in torch later.
    refuse_missing_devices(config)
    if parsed.dry_run:
        print("\n".join([dump_config(config), *describe_plan(config, parsed.stages)]))
        return
    from soloist.report.progress import ConsoleObserver
    from soloist.training.stages import run_stages

    with interruptible(), ConsoleObserver() as observer:
        run_stages(config, parsed.stages, resume=parsed.resume, skip_done=parsed.skip_done, observer=observer)
    if "train" in parsed.stages:
        _print_summary(config)


def _print_summary(config: RunConfig) -> None:
    from soloist.report.summary import write_summary

    try:
        print("\n" + "\n".join(write_summary(config.folder)))
        _write_report(str(config.folder), Path(config.runs_dir))
    except Exception as error:  # the run is over and on disk; a report that fails must not make it a failure
        print(f"soloist: no report of {config.folder}: {printable(repr(error))}", file=sys.stderr)


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM acts like Ctrl-C, and the second of either ends the process at once, with code 130 for a shell.

    asyncio turns the first SIGINT into a cancellation of the main task, but only while Python's own handler is in
    place; so signals are counted by a thread that reads the interpreter's wake-up pipe, and the handlers stay.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    counter = threading.Thread(target=_count_signals, args=(reader,), name="signal counter", daemon=True)
    counter.start()
    try:
        yield
    except KeyboardInterrupt:
        # What is left is to say how to go on and to exit; one more signal then ends the process, without a traceback.
        before = signal.SIG_DFL
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        raise
    finally:
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGTERM, before)
        os.close(writer)
        counter.join()


def _count_signals(reader: int) -> None:
    stops = terms = 0
    while numbers := os.read(reader, 64):
        first = not stops and not terms
        # A SIGTERM comes back as SIGINT, but only when the main thread has a moment; so each kind counts for itself.
        stops += numbers.count(signal.SIGINT)
        terms += numbers.count(signal.SIGTERM)
        if max(stops, terms) > 1:
            _say_at_once(b"soloist: stopped at once; the same command with --resume goes on\n")
            # No cleaning up: children end when they see that their parent is gone, and the ledger survives a kill.
            os._exit(INTERRUPTED)
        if first and (stops or terms):
            _say_at_once(b"\nsoloist: stopping in order; once more stops at once\n")
    os.close(reader)


def _say_at_once(text: bytes) -> None:
    # Past Python's buffers and locks, which the main thread may hold; a closed stderr must not end the counting.
    with suppress(OSError):
        os.write(2, text)
