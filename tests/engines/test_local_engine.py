"""The embedded engine with a real child process: loads, crashes, hangs, deadlines and clean ends.

One child is shared by the tests of this file, as importing torch takes seconds; crash tests leave a fresh one behind.
"""

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
import torch

import soloist.engines.local.engine as local_engine
from soloist.config import EngineConfig, ModelConfig
from soloist.engines.local.child import Child, child_environment
from soloist.engines.local.engine import LocalEngine
from soloist.errors import RolloutError, RunError
from soloist.models.loading import load_policy, save_weights
from soloist.models.tiny import build_tiny
from soloist.seams import installed_faults
from soloist.types import Completion, GenerateRequest, Sampling, WeightsRef

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONFIG = EngineConfig(slots=4, max_length=1000, restarts=3, request_seconds=100.0)
LONG = 900
"""Tokens of a request that certainly still runs when the next line acts."""

FILES_BEFORE: list[int] = []
"""Open files of this process before the engine started."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = ModelConfig(hidden_size=32, layers=2, heads=2, mlp_size=48)
    return build_tiny(tiny, 0, tmp_path_factory.mktemp("engine") / "model")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(folder: Path) -> AsyncIterator[LocalEngine]:
    os.environ["SOLOIST_CANARY_TOKEN"] = "secret-4711"
    FILES_BEFORE.append(psutil.Process().num_fds())
    engine = LocalEngine("local-0", folder, CONFIG)
    await engine.start()
    yield engine
    await engine.close()
    del os.environ["SOLOIST_CANARY_TOKEN"]


@pytest.fixture(scope="module")
def weights(folder: Path) -> WeightsRef:
    """Version 5: the folder's weights, scaled so that answers differ."""
    model = load_policy(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    path = folder.parent / "version_5.safetensors"
    return WeightsRef(path=str(path), version=5, sha256=save_weights(model, path))


def ask(name: str, tokens: int = 8, rollout: str = "") -> GenerateRequest:
    return GenerateRequest(
        request_id=name, rollout_id=rollout or name, prompt_ids=[3, 4, 5], sampling=Sampling(max_new_tokens=tokens)
    )


async def running(engine: LocalEngine, requests: int) -> None:
    """Wait until exactly so many requests sit in slots."""
    async with asyncio.timeout(30):
        while (await engine.health()).running != requests:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def versions(completion: Completion) -> set[int]:
    return {span.version for span in completion.version_spans}


async def test_the_child_knows_no_secrets_and_uses_no_network(engine: LocalEngine) -> None:
    """S12: its environment is an allow-list, read from the process itself."""
    seen = psutil.Process(engine.child_pid).environ()
    assert "SOLOIST_CANARY_TOKEN" not in seen
    assert not any("secret-4711" in value for value in seen.values())
    assert (seen["HF_HUB_OFFLINE"], seen["OMP_NUM_THREADS"]) == ("1", "1")
    assert "AWS_SECRET_ACCESS_KEY" not in child_environment(1, {"AWS_SECRET_ACCESS_KEY": "x", "PATH": "/bin"})


async def test_equal_requests_get_equal_answers_and_health_counts_them(engine: LocalEngine) -> None:
    before = await engine.health()
    first = await engine.generate(ask("a"))
    second = await engine.generate(ask("b"))
    after = await engine.health()
    assert first.token_ids == second.token_ids
    assert first.log_probs == pytest.approx(second.log_probs, abs=1e-5)
    assert versions(first) == {0}
    assert after.alive
    assert after.tokens - before.tokens == 16
    assert after.busy_s > before.busy_s


async def test_a_slow_sign_of_life_holds_up_nobody_and_is_no_death(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RB-130: a child too busy to answer its health check (here: stopped) is alive, and the loop goes on meanwhile."""
    monkeypatch.setattr(local_engine, "HEALTH_SECONDS", 0.5)
    expected = await engine.generate(ask("before the check"))
    tokens, pid = (await engine.health()).tokens, engine.child_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    checks = [asyncio.create_task(engine.health()) for _ in range(3)]
    turns = 0
    while not all(check.done() for check in checks):
        await asyncio.sleep(0.01)
        turns += 1
    os.kill(pid, signal.SIGCONT)
    assert turns >= 10, "the event loop was free while the checks waited"
    assert {(await check).alive for check in checks} == {True}
    assert {(await check).tokens for check in checks} == {tokens}, "the numbers known last"
    again = await engine.generate(ask("after the check"))
    assert (again.token_ids, engine.child_pid, engine.restarts) == (expected.token_ids, pid, 0)


async def test_a_refused_request_names_its_reason_and_an_id_in_use_is_refused(engine: LocalEngine) -> None:
    with pytest.raises(RolloutError, match="0 tokens") as caught:
        await engine.generate(GenerateRequest(request_id="e", rollout_id="e", prompt_ids=[], sampling=Sampling()))
    assert caught.value.boundary == "engine"
    running_one = asyncio.create_task(engine.generate(ask("twice", LONG)))
    await running(engine, 1)
    with pytest.raises(RolloutError, match="twice is in use"):
        await engine.generate(ask("twice"))
    await engine.abort(["twice"])
    assert (await running_one).finish_reason == "abort"


async def test_abort_ends_the_named_rollouts_only_and_a_cancelled_caller_frees_its_slot(engine: LocalEngine) -> None:
    tasks = [asyncio.create_task(engine.generate(ask(f"abort {i}", LONG))) for i in range(3)]
    await running(engine, 3)
    await engine.abort(["abort 0"])
    aborted = await tasks[0]
    assert aborted.finish_reason == "abort"
    assert len(aborted.token_ids) == len(aborted.log_probs) >= 1
    tasks[1].cancel()
    await running(engine, 1)
    assert not tasks[2].done()
    await engine.abort()
    assert (await tasks[2]).finish_reason == "abort"


async def test_weights_that_do_not_verify_leave_the_old_ones_answering_identically(
    engine: LocalEngine, weights: WeightsRef
) -> None:
    """R11, RB-109, RB-113: the version is not published and the answers do not change by a bit."""
    before = await engine.generate(ask("c"))
    for bad in (
        WeightsRef(path=weights.path, version=6, sha256="0" * 64),
        WeightsRef(path="/nowhere", version=6, sha256=weights.sha256),
        WeightsRef(path=weights.path, version=-1, sha256=weights.sha256),
    ):
        with pytest.raises(RunError, match=r"local-0.*(version|keeps)"):
            await engine.load(bad)
    await engine.release("c")
    assert engine.version == 0
    assert await engine.generate(ask("c")) == before


async def test_a_load_swaps_in_flight_and_concurrent_loads_are_serialised(
    engine: LocalEngine, weights: WeightsRef
) -> None:
    """RB-110, RB-114: requests go on, each token tells its version, the last load wins."""
    seen: list[str] = []
    task = asyncio.create_task(engine.generate(ask("through", LONG)))
    await running(engine, 1)
    with installed_faults(seen.append):
        await asyncio.gather(
            engine.load(WeightsRef(path=weights.path, version=4, sha256=weights.sha256)), engine.load(weights)
        )
    done = await task
    assert seen == ["engine:load:before", "engine:load:after"] * 2
    assert engine.version == (await engine.health()).version == 5
    found = [span.version for span in done.version_spans]
    assert found == sorted(set(found))
    assert (found[0], found[-1]) == (0, 5)
    assert done.version_spans[-1].end == len(done.token_ids) == LONG


async def test_after_a_crash_a_fresh_child_has_the_weights_and_goes_on(
    engine: LocalEngine, weights: WeightsRef, caplog: pytest.LogCaptureFixture
) -> None:
    """RB-115, trap 7: kill −9 in mid-generation; the request is answered, and its version is not lower than before."""
    await engine.load(weights)
    expected = await engine.generate(ask("before"))
    old_pid, tokens = engine.child_pid, (await engine.health()).tokens
    going = [asyncio.create_task(engine.generate(ask(f"crash {i}", LONG))) for i in range(2)]
    await running(engine, 2)
    with caplog.at_level(logging.ERROR, logger="soloist.engines"):
        os.kill(old_pid or 0, signal.SIGKILL)
        async with asyncio.timeout(1):
            while engine.child_pid == old_pid:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        aborted = asyncio.create_task(engine.generate(ask("aborted in between", LONG)))
        await asyncio.sleep(0)
        await engine.abort(["aborted in between", "crash 1"])
        assert await aborted == await going[1]
        answered = await going[0]
    assert "killed by signal 9" in caplog.text
    assert versions(answered) == {5}
    assert len(answered.token_ids) == LONG
    assert (await aborted).finish_reason == "abort"
    assert engine.child_pid != old_pid
    again = await engine.generate(ask("after"))
    assert (again.token_ids, versions(again)) == (expected.token_ids, {5})
    health = await engine.health()
    assert (health.restarts, health.version) == (1, 5)
    assert health.tokens >= tokens + LONG


async def test_a_load_that_meets_a_hung_child_reaches_the_fresh_one(engine: LocalEngine, weights: WeightsRef) -> None:
    """R6: one hung engine never stops training, not even when the learner publishes to it."""
    pid = engine.child_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    engine.request_seconds = 0.5
    await engine.load(WeightsRef(path=weights.path, version=6, sha256=weights.sha256))
    engine.request_seconds = CONFIG.request_seconds
    assert (engine.version, engine.restarts) == (6, 2)
    assert engine.child_pid != pid
    assert versions(await engine.generate(ask("after the load"))) == {6}


async def test_a_hung_child_costs_a_deadline_and_its_end_is_told_to_everybody(engine: LocalEngine) -> None:
    """R6, RB-115: SIGSTOP with the restarts spent; errors come at the deadline, nobody waits for ever."""
    pid, engine.restarts = engine.child_pid, CONFIG.restarts
    assert pid is not None
    waiting = asyncio.create_task(engine.generate(ask("patient", LONG)))
    await running(engine, 1)
    os.kill(pid, signal.SIGSTOP)
    engine.request_seconds = 0.5
    with pytest.raises(RolloutError, match=r"hung had no answer from 'local-0' after .* engine.request_seconds = 0\.5"):
        await engine.generate(ask("hung"))
    with pytest.raises(RunError, match=r"did not load version 9|lost"):
        await engine.load(WeightsRef(path="/nowhere", version=9, sha256=""))
    with pytest.raises(RolloutError, match=r"lost after 3 restarts.*signal 9"):
        await waiting
    with pytest.raises(RolloutError, match="lost"):
        await engine.generate(ask("too late"))
    with pytest.raises(RunError, match="lost"):
        await engine.load(WeightsRef(path="/x", version=9, sha256=""))
    assert not psutil.pid_exists(pid)
    health = await engine.health()
    assert (health.alive, health.restarts) == (False, CONFIG.restarts)


async def test_close_is_idempotent_and_leaves_no_process_and_no_open_file(engine: LocalEngine) -> None:
    """R12, R13: after a restart and a loss."""
    await engine.close()
    await engine.close()
    assert engine.child_pid is None
    assert psutil.Process().children(recursive=True) == []
    await asyncio.sleep(0)  # transports close their files in the next turn of the loop
    assert psutil.Process().num_fds() <= FILES_BEFORE[0]
    with pytest.raises(RolloutError, match=r"lost|closed"):
        await engine.generate(ask("closed"))


async def test_a_folder_that_is_no_model_is_a_clear_error_at_start(tmp_path: Path) -> None:
    engine = LocalEngine("local-9", tmp_path / "nothing", CONFIG)
    with pytest.raises(RolloutError, match="not started"):
        await engine.generate(ask("early"))
    with pytest.raises(RunError, match=r"local-9.*exited with code 2.*found nothing, expected a model folder"):
        await engine.start()
    await engine.close()
    assert psutil.Process().children(recursive=True) == []


def killing_children(monkeypatch: pytest.MonkeyPatch, times: int) -> list[int]:
    """The first children are killed as soon as they are born. Returns their process ids."""
    killed: list[int] = []
    original = Child.spawn.__func__  # type: ignore[attr-defined]

    async def spawn(cls: type[Child], threads: int) -> Child:
        child: Child = await original(cls, threads)
        if len(killed) < times:
            killed.append(child.pid)
            child.kill()
        return child

    monkeypatch.setattr(Child, "spawn", classmethod(spawn))
    return killed


async def test_a_child_that_is_killed_during_its_first_start_is_replaced(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    killed = killing_children(monkeypatch, 2)
    engine = LocalEngine("local-1", folder, CONFIG)
    with caplog.at_level(logging.WARNING, logger="soloist.engines"):
        await engine.start()
    assert (len(killed), engine.restarts) == (2, 2)
    assert "killed by signal 9" in caplog.text
    assert len((await engine.generate(ask("first"))).token_ids) == 8
    await engine.close()
    assert psutil.Process().children(recursive=True) == []


async def test_first_starts_that_are_killed_again_and_again_end_with_the_budget(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = killing_children(monkeypatch, 99)
    engine = LocalEngine("local-2", folder, CONFIG.model_copy(update={"restarts": 1}))
    with pytest.raises(RunError, match=r"'local-2' did not start: child \d+ was killed by signal 9"):
        await engine.start()
    assert len(killed) == 2, "the first and one restart"
    await engine.close()
    assert psutil.Process().children(recursive=True) == []
