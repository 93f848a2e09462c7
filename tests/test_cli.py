"""The command line: exit codes, one sentence for every mistake, overrides, dry runs and Ctrl-C."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from soloist.cli import main, split_overrides
from soloist.config_files import describe_fields
from soloist.errors import RunError, UserError
from soloist.metrics import read_metrics

COMMANDS = ("sft", "pretrain-value", "train", "eval", "run", "config", "check")


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The sentence that a command is refused with."""
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("soloist: error: ")
    assert said.err.count("\n") == 1
    return said.err


def helped(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    said = helped(capsys, "--help")
    assert [command for command in COMMANDS if command not in said] == []
    assert "--policy.lr 3e-4" in said


def test_the_help_of_config_prints_the_whole_key_tree(capsys: pytest.CaptureFixture[str]) -> None:
    said = helped(capsys, "config", "--help")
    rows = describe_fields()
    assert [name for name, default, _ in rows if f"  {name} = {default}\n" not in said] == []
    assert [text for _, _, text in rows if text not in said] == []


def test_config_prints_toml_that_holds_the_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "config",
        "calculator",
        "--policy.lr",
        "3e-4",
        "--steps=5",
        "--name",
        "2026-11-29",
        "--on_stale",
        "drop",
    ]
    assert main(arguments) == 0
    printed = tomllib.loads(capsys.readouterr().out)
    assert (printed["policy"]["lr"], printed["steps"]) == (3e-4, 5)
    assert (printed["name"], printed["on_stale"]) == ("2026-11-29", "drop")


@pytest.mark.parametrize(
    ("arguments", "own", "overrides"),
    [
        (["train", "x", "--policy.lr", "3e-4"], ["train", "x"], {"policy.lr": "3e-4"}),
        (["--policy.lr=3e-4", "train", "x"], ["train", "x"], {"policy.lr": "3e-4"}),
        (["train", "--steps", "5", "x", "--resume"], ["train", "x", "--resume"], {"steps": "5"}),
        (["sft", "x", "--value_pretraining.gate", "-1"], ["sft", "x"], {"value_pretraining.gate": "-1"}),
        (["sft", "x", "--name", "--odd"], ["sft", "x", "--name", "--odd"], {}),
        (["sft", "x", "--environment.tasks=a=b"], ["sft", "x"], {"environment.tasks": "a=b"}),
    ],
)
def test_overrides_may_stand_anywhere(arguments: list[str], own: list[str], overrides: dict[str, str]) -> None:
    assert split_overrides(arguments) == (own, overrides)
    assert sum(map(len, split_overrides(arguments))) > 1


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["train", "nowhere"], ["recipe 'nowhere'", "calculator-moe", "path"]),
        (["train", "calculator", "--policy.lrr", "3"], ["calculator:", "'policy.lrr'", "value 3", "max_grad_norm"]),
        (["train", "calculator", "--policy.lr", "fast"], ["policy.lr", "'fast'", "number"]),
        (["train", "calculator", "--group_size", "0"], ["group_size", "found 0", "greater than or equal to 1"]),
        (["train", "calculator", "--group_size", "5"], ["rollouts_per_step = 256", "group_size = 5", "multiple"]),
        (
            ["train", "calculator", "--deterministic", "true"],
            ["deterministic = true", "max_staleness = 0 or a lag, found 2"],
        ),
        (["train", "calculator", "--steps"], ["--steps", "no value", "--steps=VALUE"]),
        (["train", "calculator", "--steps", "--resume"], ["--steps", "found --resume"]),
        (["train"], ["RECIPE", "soloist train --help"]),
        (["trian", "calculator"], ["'trian'", "'train'", "soloist --help"]),
        ([], ["COMMAND", "soloist --help"]),
        (["sft", "calculator", "extra"], ["extra"]),
        (["sft", "calculator", "-x"], ["-x"]),
        (["config", "--name.x", "3"], ["'name' holds 'calculator'"]),
    ],
)
def test_a_mistake_ends_with_code_2_and_one_sentence(
    arguments: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """R14, RB-144, RB-145, RB-148."""
    said = refused(capsys, *arguments)
    assert [part for part in parts if part not in said] == []
    assert "Traceback" not in said


def test_a_recipe_that_is_no_toml_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[policy\nlr = 3", encoding="utf-8")
    said = refused(capsys, "train", str(path))
    assert str(path) in said
    assert "TOML" in said


def test_hostile_text_in_a_mistake_reaches_the_terminal_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "train", "\x1b[2Jevil\r\n")
    assert "\\x1b[2Jevil" in said
    assert "\x1b" not in said


def test_a_dry_run_says_what_it_would_cost_and_starts_nothing(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(recipe), "--dry-run", "--steps=3"]) == 0
    said = capsys.readouterr().out
    assert "steps = 3\n" in said
    assert "12 rollouts, 1,440 tokens at most; 3 policy and 6 value updates" in said
    assert "parameters each" in said
    assert not (recipe.parent / "runs").exists()


def test_a_dry_run_of_one_stage_leaves_the_others_out(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft", str(recipe), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "2 steps of 2 demonstrations" in said
    assert "value updates" not in said


def test_check_says_what_works_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check"]) == 0
    said = capsys.readouterr().out
    assert "monty: works" in said
    assert "staleness at most 2" in said


@pytest.mark.parametrize("command", ["sft", "run"])
def test_a_missing_model_folder_is_named(command: str, recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = recipe.parent / "no-model"
    # A folder has its own sizes, so those of the recipe would be refused first.
    recipe.write_text(
        recipe.read_text(encoding="utf-8").replace("hidden_size = 16\nlayers = 1\nheads = 2\nmlp_size = 32\n", "")
    )
    said = refused(capsys, command, str(recipe), "--model.path", str(missing))
    assert str(missing) in said
    assert "model.path" in said


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def pickled_under_a_good_name(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x80\x04cos\nsystem\n(S'echo owned'\ntR.")


def cut_in_half(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


@pytest.mark.parametrize("command", ["sft", "train"])
@pytest.mark.parametrize(
    ("damage", "parts"),
    [
        (pickled, ["pytorch_model.bin", "found pickled weights", "expected model.safetensors", "torch.load"]),
        (pickled_under_a_good_name, ["model.safetensors", "no complete safetensors", "expected weights", "anew"]),
        (cut_in_half, ["model.safetensors", "no complete safetensors", "expected weights", "anew"]),
        (without_config, ["config.json", "found no such file", "expected a Hugging Face folder", "model.path"]),
    ],
)
def test_a_damaged_or_pickled_model_is_refused_before_work_starts(
    damage: Callable[[Path], None],
    parts: list[str],
    command: str,
    recipe: Path,
    coin: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """R14: also when `train` goes on from it, and nothing is left behind that a corrected retry would trip over."""
    folder = recipe.parent / "model"
    shutil.copytree(coin[0].removeprefix("--model.path="), folder)
    damage(folder)
    said = refused(capsys, command, str(recipe), *coin, f"--model.path={folder}")
    assert [part for part in [str(folder), *parts] if part not in said] == []
    assert not (recipe.parent / "runs").exists()


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("", ["tasks.jsonl", "no task found", "one object a line"]),
        ("\n\n", ["tasks.jsonl", "no task found"]),
        ('{"problem": "1+1", "answer": 2}\n[1, 2]\n', ["tasks.jsonl, line 2", "found list", "expected an object"]),
        ('{"problem": "1+1", "answer": 2}\n{"problem": \n', ["tasks.jsonl, line 2", "not JSON", "write one object"]),
        ('{"answer": 2}\n', ["tasks.jsonl, line 1", "'problem' is missing", "expected a text"]),
    ],
)
def test_a_bad_task_file_is_refused_before_work_starts(
    content: str, parts: list[str], recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """R14: naming file, line or field, what was found and what was expected."""
    tasks = recipe.parent / "tasks.jsonl"
    tasks.write_text(content, encoding="utf-8")
    said = refused(capsys, "sft", str(recipe), "--environment.tasks", str(tasks))
    assert [part for part in parts if part not in said] == []
    assert "Traceback" not in said


def test_train_without_sft_says_which_command_comes_first(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "train", str(recipe))
    assert "soloist sft" in said
    assert str(recipe.parent / "runs") in said


SWITCHED_ON = [
    "--shuffle_rewards=true", "--advantage.whiten=true", "--advantage.bootstrap_truncated=true",
    "--deterministic=true", "--max_staleness=0",
]  # fmt: skip


def test_two_steps_with_every_switch_on_end_in_a_summary(
    recipe: Path, coin: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """RB-150: every boolean option runs (off is the default, which all other runs have)."""
    assert main(["pretrain-value", str(recipe), *coin, *SWITCHED_ON]) == 0, capsys.readouterr().err
    assert main(["train", str(recipe), *coin, *SWITCHED_ON, "--resume"]) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    folder = recipe.parent / "runs" / "tiny"
    assert [record["step"] for record in read_metrics(folder / "metrics.jsonl", stage="train")] == [0, 1]
    assert (folder / "reward.png").is_file()
    assert "sample: calculator/line/1" in said
    assert "--resume" in refused(capsys, "train", str(recipe), *coin, *SWITCHED_ON)
    assert main(["train", str(recipe), *coin, *SWITCHED_ON, "--resume"]) == 0
    assert "train is done already, skipped" in capsys.readouterr().out
    assert main(["train", str(recipe), *coin, *SWITCHED_ON, "--resume", "--steps=3"]) == 0
    assert [record["step"] for record in read_metrics(folder / "metrics.jsonl", stage="train")] == [0, 1, 2]


def test_an_interrupted_stage_says_how_to_go_on(recipe: Path) -> None:
    command = [sys.executable, "-m", "soloist", "sft", str(recipe), "--sft.steps=5000"]
    with subprocess.Popen(command, **PIPES) as process:
        lines = iter(process.stdout.readline, "")
        assert any("/5000" in line for line in lines)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[-1].startswith("soloist: stopped; go on with: soloist sft ")
    assert err.endswith("--sft.steps=5000 --resume\n")
    assert "Traceback" not in err


ENDINGS = {
    UserError("bad\n input"): (2, "soloist: error: bad input\n"),
    RunError("the engine is gone"): (1, "soloist: the run failed: the engine is gone\n"),
    KeyboardInterrupt(): (130, "soloist: stopped; go on with: soloist config --steps 3"),
}


@pytest.mark.parametrize("ending", ENDINGS, ids=lambda ending: type(ending).__name__)
def test_every_ending_has_its_exit_code(
    ending: BaseException, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(*_: object) -> None:
        raise ending

    monkeypatch.setattr("soloist.cli.load_config", end)
    code, said = ENDINGS[ending]
    assert main(["config", "--steps", "3"]) == code
    assert capsys.readouterr().err.startswith(said)


SLEEPER = """
import sys, time
from soloist.cli import interruptible
with interruptible():
    try:
        print("ready", flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        print("cleaning up", flush=True)
        {cleanup}
        print("clean", flush=True)
sys.exit(7)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_stops_in_order(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", SLEEPER.format(cleanup="pass")], **PIPES) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    assert out == "cleaning up\nclean\n"
    assert "once more stops at once" in err
    assert process.returncode == 7


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_stops_at_once(number: signal.Signals) -> None:
    """R12: Ctrl-C twice is safe, also while the main thread is busy in something that can't be interrupted."""
    code = SLEEPER.format(cleanup="signal_mask() or time.sleep(60)").replace("import sys, time", MASK)
    with subprocess.Popen([sys.executable, "-c", code], **PIPES) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.readline() == "cleaning up\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    assert "clean\n" not in out
    assert err.endswith("stopped at once; the same command with --resume goes on\n")
    assert process.returncode == 130


LEAVER = """
import time
from soloist.cli import interruptible
try:
    with interruptible():
        print("ready", flush=True)
        time.sleep(60)
except KeyboardInterrupt:
    print("exiting", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_while_the_interpreter_exits_is_no_traceback(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", LEAVER], **PIPES) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.readline() == "exiting\n"
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
    assert process.returncode == -number
    assert err.endswith("once more stops at once\n")


PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
MASK = """
import sys, time
def signal_mask():
    # Swallow every further KeyboardInterrupt, as code that hangs while it cleans up would.
    while True:
        try:
            time.sleep(60)
        except KeyboardInterrupt:
            time.sleep(60)
"""
