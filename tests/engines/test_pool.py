"""A set of engines: rollouts stay where their prefix is, the lost are replaced by the living, versions are honest."""

import asyncio
from pathlib import Path

import pytest

from soloist.config import EngineConfig
from soloist.engines.base import Capabilities, EngineHealth
from soloist.engines.pool import EngineSet, pinned_engine, sampling_engines
from soloist.errors import RolloutError, RunError
from soloist.types import Completion, GenerateRequest, Sampling, VersionSpan, WeightsRef

WEIGHTS = WeightsRef(path="w", version=3, sha256="")


class CountingEngine:
    """A small real engine: token n+1 follows token n; it can be told to die, to refuse weights and to wait."""

    capabilities = Capabilities(in_flight_load=True)

    def __init__(self, name: str) -> None:
        self.name = name
        self.version = 0
        self.served: list[str] = []
        self.released: list[str] = []
        self.dead = ""
        self.refuses = ""
        self.closed = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def start(self) -> None:
        if self.dead:
            raise RunError(f"{self.name}: {self.dead}")

    async def generate(self, request: GenerateRequest) -> Completion:
        self.served.append(request.request_id)
        await self.gate.wait()
        if self.dead or self.refuses:
            raise RolloutError("engine", self.dead or self.refuses)
        tokens = [request.prompt_ids[-1] + 1]
        span = VersionSpan(version=self.version, start=0, end=1)
        return Completion(token_ids=tokens, log_probs=[0.0], finish_reason="length", version_spans=[span])

    async def release(self, rollout_id: str) -> None:
        self.released.append(rollout_id)

    async def load(self, weights: WeightsRef) -> None:
        if self.dead or self.refuses:
            raise RunError(self.dead or self.refuses)
        self.version = weights.version

    async def abort(self, rollout_ids: list[str] | None = None) -> None:
        self.gate.set()

    async def health(self) -> EngineHealth:
        return EngineHealth(
            alive=not self.dead, version=self.version, running=0, waiting=0, restarts=0, tokens=0, busy_s=0.0
        )

    async def close(self) -> None:
        self.closed += 1


def ask(rollout: str, turn: int = 0) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"{rollout}.{turn}", rollout_id=rollout, prompt_ids=[turn], sampling=Sampling(max_new_tokens=1)
    )


@pytest.fixture
def pair() -> tuple[EngineSet, CountingEngine, CountingEngine]:
    a, b = CountingEngine("a"), CountingEngine("b")
    return EngineSet([a, b]), a, b


async def test_turns_of_a_rollout_stay_and_new_rollouts_go_where_fewest_are(pair) -> None:
    engines, a, b = pair
    for turn in range(3):
        for rollout in ("r0", "r1", "r2"):
            await engines.generate(ask(rollout, turn))
    assert a.served == [f"{rollout}.{turn}" for turn in range(3) for rollout in ("r0", "r2")]
    assert b.served == ["r1.0", "r1.1", "r1.2"]
    await engines.release("r0")
    await engines.release("r2")
    assert a.released == ["r0", "r2"]
    await engines.generate(ask("r3"))
    assert a.served[-1] == "r3.0"
    assert (engines.engine_of("r3"), engines.engine_of("r0")) == ("a", "")


async def test_version_is_the_oldest_and_each_rollout_knows_its_own(pair) -> None:
    engines, a, b = pair
    await engines.load(WEIGHTS)
    assert engines.version == a.version == b.version == 3
    b.version = 2
    assert engines.version == 2
    assert engines.version_for("r0") == 3
    assert engines.version_for("r1") == 2, "looking assigns, so that the promise holds"
    assert engines.version_for("r0") == 3
    assert (await engines.generate(ask("r1"))).version_spans[0].version == 2


async def test_a_failing_request_stays_a_failure_while_its_engine_lives(pair) -> None:
    engines, a, b = pair
    a.refuses = "non-finite logits"
    with pytest.raises(RolloutError, match="non-finite"):
        await engines.generate(ask("r0"))
    assert b.served == []
    assert engines.lost == {}


async def test_rollouts_of_a_lost_engine_go_on_elsewhere_and_the_last_loss_ends_the_run(pair) -> None:
    """RB-115: one of two dies in mid-generation, then both; the end names every reason."""
    engines, a, b = pair
    a.gate.clear()
    going = asyncio.create_task(engines.generate(ask("r0")))
    await asyncio.sleep(0)
    a.dead = "killed by signal 9"
    a.gate.set()
    assert (await going).token_ids == [1]
    assert b.served == ["r0.0"]
    assert engines.living == [b]
    await engines.load(WEIGHTS)
    assert engines.version == 3, "the dead one's version does not count"
    b.dead = "out of memory"
    with pytest.raises(RunError, match=r"all 2 engines are lost.*a: killed by signal 9; b: out of memory"):
        await engines.generate(ask("r0", 1))
    with pytest.raises(RunError, match="all 2 engines"):
        engines.version  # noqa: B018


async def test_an_engine_that_dies_in_a_load_leaves_the_set_and_one_that_refuses_raises(pair) -> None:
    """RB-115, R11: kill during a weight transfer; refusal is an error and the version stays the oldest."""
    engines, a, b = pair
    a.refuses = "hash differs"
    with pytest.raises(RunError, match="hash differs"):
        await engines.load(WEIGHTS)
    assert (a.version, b.version, engines.version) == (0, 3, 0)
    a.refuses, a.dead = "", "killed"
    await engines.load(WEIGHTS)
    assert (engines.living, engines.version) == ([b], 3)
    b.dead = "killed too"
    with pytest.raises(RunError, match="all 2 engines"):
        await engines.load(WEIGHTS)


async def test_a_set_that_cannot_start_closes_what_it_started() -> None:
    a, b = CountingEngine("a"), CountingEngine("b")
    b.dead = "no such folder"
    with pytest.raises(RunError, match="b: no such folder"):
        await EngineSet([a, b]).start()
    assert (a.closed, b.closed) == (1, 1)


async def test_health_and_abort_reach_every_engine(pair) -> None:
    engines, a, b = pair
    await engines.start()
    b.version = 4
    assert {name: state.version for name, state in (await engines.health()).items()} == {"a": 0, "b": 4}
    a.gate.clear()
    b.gate.clear()
    tasks = [asyncio.create_task(engines.generate(ask(rollout))) for rollout in ("r0", "r1")]
    await asyncio.sleep(0)
    await engines.abort()
    assert [len(done.token_ids) for done in await asyncio.gather(*tasks)] == [1, 1]


def test_sets_are_built_from_the_config_and_names_must_differ() -> None:
    engines = sampling_engines(Path("m"), EngineConfig(count=3))
    assert [engine.name for engine in engines.engines] == ["local-0", "local-1", "local-2"]
    assert pinned_engine(Path("m"), EngineConfig()).name == "evaluation"
    for wrong in ([], [CountingEngine("a"), CountingEngine("a")]):
        with pytest.raises(ValueError, match="different names"):
            EngineSet(wrong)
