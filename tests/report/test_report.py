"""`soloist report`: one page that shows a run and can do nothing else, whatever the run wrote, whatever is missing."""

from __future__ import annotations

import asyncio
import base64
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from soloist.cli import main
from soloist.config import RunConfig
from soloist.config_files import dump_config
from soloist.errors import UserError
from soloist.metrics import MetricsLog
from soloist.report import page
from soloist.report.colors import Scale
from soloist.report.figures import masked_by_staleness
from soloist.report.markup import LONG, attribute, text
from soloist.report.report import write_report
from soloist.report.rollouts import MOST_TOKENS
from soloist.report.run_files import RunFiles, find_run, read_run
from soloist.report.text import printable
from soloist.report.timeline import choose_window, lanes_of, load_curve, parts_of, steps_of
from soloist.runtime.ledger import Ledger
from soloist.training.samples import Samples, TokenTable
from soloist.types import Failure, Rollout, Segment, Turn, VersionSpan

STEPS, PER_STEP = 6, 4
EVIL = "</pre><script>alert(1)</script>\"'><img src=http://evil.example/x onerror=alert(2)>\x1b[2J\u202e\x00\ud800&amp;"
VOID = {"meta", "img", "input", "hr"}


class Page(HTMLParser):
    """Tags, attributes and text of a page; complains about tags that are not closed."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.data = ""
        self._open: list[str] = []
        self.feed(source)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.data += data if self._open[-1:] != ["style"] else ""

    def all(self, tag: str, **attributes: str) -> list[dict[str, str]]:
        """Attributes of the tags with this name and these attributes."""
        return [found for name, found in self.tags if name == tag and attributes.items() <= found.items()]


def rollout(number: int, step: int, **changes: Any) -> Rollout:
    """Two turns with a tool call between; odd ones fail their task. It was played within second `step`."""
    segment = Segment(
        token_ids=[1, 2, 10, 11, 3, 12],
        action_mask=[False, False, True, True, False, True],
        rollout_log_probs=[None, None, -0.1, -0.2, None, -0.3],
        version_spans=[VersionSpan(version=max(0, step - number % 2), start=2, end=6)],
    )
    start = step + 0.1 * (number % PER_STEP)
    messages = [
        {"role": "user", "content": "Compute 3+4"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "python", "arguments": {"code": "3+4"}}}]},
        {"role": "tool", "content": "7"},
        {"role": "assistant", "content": f"It is {7 + number % 2}"},
    ]
    base = Rollout(
        rollout_id=f"r{number}", task_id=f"calculator/train/{number}", group_id=f"g{number}", environment="calculator",
        state="scored", status="completed", terminated=True, segments=[segment], score=float(1 - number % 2),
        turns=[
            Turn(segment=0, start=2, end=4, finish_reason="stop", sampled_at=start + 0.2, observed_at=start + 0.25),
            Turn(segment=0, start=5, end=6, finish_reason="stop", sampled_at=start + 0.4, observed_at=start + 0.4),
        ],
        messages=messages, started_at=start, finished_at=start + 0.5, place=number,
    )  # fmt: skip
    return msgspec.structs.replace(base, **changes)


def tokens_of(rollouts: list[Rollout]) -> TokenTable:
    """The first action token of each odd rollout is masked."""
    lengths = [one.action_tokens for one in rollouts]
    outside = torch.cat([torch.arange(n) < i % 2 for i, n in enumerate(lengths)])
    total = sum(lengths)
    return TokenTable(
        lengths_R=lengths,
        log_ratio_T=torch.where(outside, 2.0, 0.01),
        advantages_T=torch.linspace(-0.5, 0.5, total),
        values_T=torch.linspace(0, 1, total),
        in_band_T=~outside,
    )


async def make_run(folder: Path, text_of: Any = "<{}>".format, **changes: Any) -> Path:
    """A run of `STEPS` steps as the stages leave it."""
    folder.mkdir(parents=True)
    (folder / "config.resolved.toml").write_text(dump_config(RunConfig(steps=STEPS, rollouts_per_step=PER_STEP)))
    (folder / "stages.json").write_text('{"sft": {"steps": 3, "eval": {"avg": 0.25, "samples": 4, "version": 0}}}')
    log = MetricsLog(folder / "metrics.jsonl")
    samples = Samples(folder, 2, text_of, lambda note: pytest.fail(note), first_step=0)
    ledger = await Ledger.open(folder / "ledger.sqlite")
    events = []
    for step in range(STEPS):
        rollouts = [rollout(PER_STEP * step + n, step, **changes) for n in range(PER_STEP)]
        for one in rollouts:
            await ledger.started(one, unit=one.place, expires_at=0.0)
            await ledger.ended(one)
        await ledger.commit(step, rollouts, {})
        samples.record(step, rollouts, tokens_of(rollouts), last=step == STEPS - 1)
        values: dict[str, float | None] = {"reward/mean": step / 10, "critic/explained_var": 0.5 - step / 100}
        values |= {"critic/skill": -3.0, "trainer/idle_ratio": 0.25, "queue/size": 4.0, "loop/delay_p99_ms": 12.0}
        log.write("train", step, float(step), values)
        for what, begin, end in (("wait_for_rollouts", 0, 0.5), ("update_policy", 0.5, 0.9), ("weight_sync", 0.9, 1)):
            events.append(f'{{"who": "learner", "what": "{what}", "start": {step + begin}, "end": {step + end}}}\n')
    failed = rollout(900, 2, failure=Failure(boundary="engine", reason="gone"), status="failed", score=None)
    await ledger.started(failed, unit=900, expires_at=0.0)
    await ledger.ended(failed)
    await ledger.close()
    log.write("eval", STEPS, 99.0, {"eval/calculator/avg@4": 0.75})
    (folder / "timeline.jsonl").write_text("".join(events))
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = asyncio.run(make_run(tmp_path_factory.mktemp("runs") / "one"))
    write_report(folder)
    return folder


def read(folder: Path) -> Page:
    return Page((folder / "report.html").read_text(encoding="utf-8"))


def addresses(found: Page) -> Iterator[str]:
    for _, attributes in found.tags:
        yield from (value for name, value in attributes.items() if name in ("src", "href", "action", "data", "srcset"))


def test_the_page_needs_nothing_but_itself(run: Path) -> None:
    found = read(run)
    assert {"script", "link", "iframe", "object", "form", "base"}.isdisjoint(tag for tag, _ in found.tags)
    assert all(address.startswith("data:image/png;base64,") for address in addresses(found))
    (policy,) = found.all("meta", **{"http-equiv": "Content-Security-Policy"})
    assert policy["content"].startswith("default-src 'none'")
    source = (run / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"https?://|@import|url\(", source)
    assert not [name for _, attributes in found.tags for name in attributes if name.startswith("on")]


def test_every_panel_is_in_the_page_and_beside_it_as_the_same_picture(run: Path) -> None:
    found = read(run)
    names = ["reward", "critic", "masked", "staleness", "lengths", "idle", "queue", "delay", "timeline"]
    assert [figure["id"] for figure in found.all("figure")] == names
    inside = [base64.b64decode(image["src"].partition(",")[2]) for image in found.all("img")]
    assert inside == [(run / "report" / f"{name}.png").read_bytes() for name in names]
    assert all(png.startswith(b"\x89PNG") for png in inside)
    assert all(image["alt"] for image in found.all("img"))


def numbers_under(folder: Path, panel: str) -> list[list[str]]:
    """Cells of the tables of one panel."""
    source = (folder / "report.html").read_text(encoding="utf-8")
    figure = source[source.index(f"id='{panel}'") :].partition("</figure>")[0]
    return [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", figure) if "<td>" in row]


def test_the_numbers_under_the_pictures_are_those_of_the_files(run: Path) -> None:
    # Two of four rollouts are odd: a version old from step 1 on, and with one masked token of three.
    assert masked_by_staleness(read_run(run)) == {0: (3 * (12 + 2), 2), 1: (3 * 10, 10)}
    assert numbers_under(run, "masked") == [["0", "42", "2", "4.762 %"], ["1", "30", "10", "33.333 %"]]
    assert numbers_under(run, "staleness") == [["0", "14", "58.3 %"], ["1", "10", "41.7 %"]]
    assert numbers_under(run, "lengths") == [["failed", "1", "3.00"], ["trained", "24", "3.00"]]
    rewards = numbers_under(run, "reward")
    assert rewards[:2] == [["eval/avg@4", "0", "0.2500"], ["eval/calculator/avg@4", "6", "0.7500"]]
    assert rewards[2:] == [[str(step), f"{step / 10:.4f}"] for step in range(STEPS)]
    said = read(run).data
    assert "0.200 → 0.300" in said
    assert "6 of 6 policy updates" in said


def test_a_step_that_was_trained_again_counts_as_it_was_trained_last() -> None:
    first = {"step": 3, "staleness": [0, 2], "tokens": [10, 20], "masked": [1, 2]}
    again = {"step": 3, "staleness": [1], "tokens": [5], "masked": [4]}
    other = {"step": 4, "staleness": [0, 1], "tokens": [7, 1], "masked": [0, 1]}
    assert masked_by_staleness(RunFiles(folder=Path(), staleness=[first, again, other])) == {0: (7, 0), 1: (6, 5)}
    assert masked_by_staleness(RunFiles(folder=Path())) == {}


def test_sample_rollouts_switch_between_four_views_without_a_script(run: Path) -> None:
    found = read(run)
    buttons = found.all("input", type="radio")
    assert [button["class"] for button in buttons] == ["mask", "ratio", "advantage", "value"] * 3
    assert len({button["name"] for button in buttons}) == 3
    assert [button["class"] for button in buttons if "checked" in button] == ["mask"] * 3
    assert {label["for"] for label in found.all("label")} == {button["id"] for button in buttons}
    tokens = [attributes for tag, attributes in found.tags if tag == "i" and "title" in attributes]
    kinds = [token["class"] for token in tokens]
    assert len(tokens) == 18
    assert kinds.count("o") == 9
    assert [token["class"] == "x" for token in tokens] == ["· masked ·" in token["title"] for token in tokens]
    assert 1 <= kinds.count("x") <= 3
    acted = [token for token in tokens if token["class"] != "o"]
    assert all({"--r:", "--a:", "--v:"} <= set(re.findall(r"--\w:", token["style"])) for token in acted)
    assert all("style" not in token for token in tokens if token["class"] == "o")
    assert any("masked · ratio 7.389" in token["title"] for token in acted)
    assert "python({'code': '3+4'})" in found.data
    assert re.findall(r"(?:Early|Middle|Last): step \d", found.data) == [
        "Early: step 0",
        "Middle: step 3",
        "Last: step 5",
    ]


async def test_hostile_text_is_shown_as_text_and_bounded(tmp_path: Path) -> None:
    # The ledger takes no half of a surrogate pair; JSON does.
    evil = EVIL.replace("\ud800", "")
    messages = [{"role": evil, "content": evil + "x" * 9_000, "tool_calls": [evil] * 50}] * 60
    changes = {"task_id": evil, "messages": messages}
    folder = await make_run(tmp_path / "<b>evil&", lambda token: EVIL, **changes)
    (folder / "origin.jsonl").write_text('{"commit": "<script>", "torch": "\\u202e"}\n')
    write_report(folder)
    found = read(folder)
    assert {"script", "b>", "iframe"}.isdisjoint(tag for tag, _ in found.tags)
    assert not [name for _, attributes in found.tags for name in attributes if name.startswith("on")]
    assert all(address.startswith("data:image/png;base64,") for address in addresses(found))
    assert "</pre><script>alert(1)</script>" in found.data
    assert "\\x1b[2J\\u202e\\x00&amp;" in found.data
    assert not set("\x1b\x00\u202e\ud800") & set(found.data)
    assert len(found.data) < 400_000
    assert "more characters" in found.data
    assert "more messages" in found.data


@given(st.text() | st.text("<>\"'&;ab", max_size=30), st.integers(1, 40))
def test_any_text_comes_out_as_it_is_spelled_or_cut(value: str, limit: int) -> None:
    shown = Page(f"<p>{text(value, limit)}</p>")
    assert shown.data.startswith(printable(value[:limit], keep_newlines=False))
    assert [tag for tag, _ in shown.tags] == ["p", "span"][: 1 + (len(value) > limit)]
    (image,) = Page(f'<img alt="{attribute(value, limit)}">').all("img")
    assert image["alt"].removesuffix("…") == printable(value[:limit], keep_newlines=False).removesuffix("…")
    assert list(image) == ["alt"]


async def test_a_huge_rollout_shows_some_of_its_tokens_and_says_how_many_are_left(tmp_path: Path) -> None:
    count = MOST_TOKENS + 70
    segment = Segment(
        token_ids=[1] * count,
        action_mask=[False] + [True] * (count - 1),
        rollout_log_probs=[None] + [-0.1] * (count - 1),
        version_spans=[VersionSpan(version=0, start=1, end=count)],
    )
    folder = await make_run(tmp_path / "long", segments=[segment])
    (folder / "samples.jsonl").unlink()
    write_report(folder)
    found = read(folder)
    assert len([token for token in found.all("i") if "title" in token]) == 3 * MOST_TOKENS
    assert found.data.count("70 more tokens") == 3
    assert "no tokenizer that can be read" in found.data


def test_an_old_run_says_what_it_lacks_and_shows_the_rest(run: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    shutil.copytree(run, old)
    for name in ("samples.jsonl", "staleness.jsonl", "report.html"):
        (old / name).unlink()
    write_report(old)
    found = read(old)
    assert "staleness.jsonl is missing or empty, so there are no masked tokens by staleness." in found.data
    assert "origin.jsonl is missing" in found.data
    assert "masked" not in [figure["id"] for figure in found.all("figure")]
    assert [button["class"] for button in found.all("input")] == ["mask"] * 3


def test_torn_lines_and_a_damaged_ledger_cost_their_part_only(run: Path, tmp_path: Path) -> None:
    torn = tmp_path / "torn"
    shutil.copytree(run, torn)
    for name in ("metrics", "timeline", "staleness", "samples"):
        path = torn / f"{name}.jsonl"
        path.write_bytes(path.read_bytes() + b'{"stage": "train", "step": 6, "rew\xff')
    (torn / "ledger.sqlite").write_bytes(b"SQLite format 3\x00" + b"\xff" * 5000)
    for leftover in torn.glob("ledger.sqlite-*"):
        leftover.unlink()
    write_report(torn)
    found = read(torn)
    assert {"reward", "masked", "timeline"} <= {figure["id"] for figure in found.all("figure")}
    assert "The ledger can't be read" in found.data
    assert "Its messages are not on record any more." in found.data
    assert numbers_under(torn, "masked") == numbers_under(run, "masked")


def test_a_run_that_has_just_begun_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "config.resolved.toml").write_text(dump_config(RunConfig()))
    (tmp_path / "metrics.jsonl").write_text("")
    write_report(tmp_path)
    found = read(tmp_path)
    assert "There is nothing to draw yet." in found.data
    assert "No rollout has been trained yet." in found.data
    assert "stages done: none; not finished" in found.data


def test_a_panel_that_breaks_is_a_sentence_and_the_others_stay(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Any) -> None:
        raise ZeroDivisionError("<no> rollouts")

    monkeypatch.setattr(page, "PANELS", (broken, *page.PANELS[:2]))
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    write_report(copy)
    found = read(copy)
    assert "The panel 'broken' could not be made (ZeroDivisionError: <no> rollouts)." in found.data
    assert [figure["id"] for figure in found.all("figure")] == ["reward", "critic", "timeline"]


def test_the_command_takes_a_folder_or_a_name_and_refuses_what_is_no_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "report.html").unlink()
    assert main(["report", "one", "--runs_dir", str(run.parent)]) == 0
    assert capsys.readouterr().out == f"report: {run / 'report.html'}\n"
    assert main(["report", str(run)]) == 0
    assert (run / "report.html").is_file()
    capsys.readouterr()
    refusals = [["nope", "--runs_dir", str(run.parent)], [str(tmp_path)], [str(run), "--steps", "3"], []]
    for arguments in refusals:
        assert main(["report", *arguments]) == 2, arguments
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("soloist: error: ")
    with pytest.raises(UserError, match="runs there: one"):
        find_run("nope", run.parent)


def test_reading_leaves_the_run_as_it_was(run: Path) -> None:
    before = {path: path.read_bytes() for path in run.iterdir() if path.suffix in (".jsonl", ".json", ".toml")}
    write_report(run)
    assert {path: path.read_bytes() for path in before} == before
    assert not [path for path in run.iterdir() if path.name.startswith(".")]


# --- timeline ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0.01, 10)), max_size=40))
def test_rows_hold_every_rollout_once_without_overlap_and_are_as_few_as_possible(
    plays: list[tuple[float, float]],
) -> None:
    rollouts = [rollout(n, 0, started_at=start, finished_at=start + length) for n, (start, length) in enumerate(plays)]
    lanes = lanes_of(rollouts)
    assert sorted(one.rollout_id for lane in lanes for one in lane) == sorted(one.rollout_id for one in rollouts)
    assert all(before.finished_at <= after.started_at for lane in lanes for before, after in pairwise(lane))
    _, counts = load_curve([(one.started_at, one.finished_at) for one in rollouts])
    assert len(lanes) == max(counts, default=0)
    assert counts[-1:] in ([], [0])


def test_a_rollout_is_sampled_and_observed_in_turn() -> None:
    sampled, observed = parts_of(rollout(0, 2))
    assert sampled == [(2.0, 2.2), (2.25, 2.4)]
    assert observed == [(2.2, 2.25), (2.4, 2.4), (2.4, 2.5)]


@pytest.mark.parametrize(("per_step", "players", "steps"), [(4, 4, 6), (192, 6, 2), (1000, 2, 1)])
def test_the_window_lies_in_the_middle_and_stays_readable(per_step: int, players: int, steps: int) -> None:
    events = [
        {"what": what, "start": step + begin, "end": step + begin + 0.5}
        for step in range(40)
        for what, begin in (("wait_for_rollouts", 0.0), ("update_policy", 0.5))
    ]
    laps = steps_of([*events, {"what": "wait_for_rollouts", "start": 40.0, "end": 41.0}])
    assert len(laps) == 40, "a step that isn't over is left out"
    window = choose_window(laps, per_step, players)
    assert len(window.steps) == steps
    assert window.steps[0] + window.steps[-1] in (38, 39, 40)
    assert (window.start, window.end) == (window.steps[0], window.steps[-1] + 1)


@given(st.floats(), st.floats(0.01, 100))
def test_every_number_has_a_colour_and_the_centre_is_white(value: float, width: float) -> None:
    diverging, rising = Scale(-width, width, centre=0.0), Scale(0.0, width)
    assert all(re.fullmatch("#[0-9a-f]{6}", scale.color(value)) for scale in (diverging, rising))
    assert diverging.color(0.0) == "#ffffff"
    assert diverging.color(2 * width) == diverging.color(width) != diverging.color(-width)
    assert Scale(-1.0, 1.0, centre=0.0, log=True).color(1.0) == "#ffffff"


def test_a_message_is_cut_at_its_limit() -> None:
    shown = Page(f"<pre>{text('y' * (LONG + 1234), LONG)}</pre>").data
    assert shown == "y" * LONG + "… 1,234 more characters"
