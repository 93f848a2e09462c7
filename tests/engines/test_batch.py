"""Continuous batching against plain Hugging Face forward passes: log-probabilities, versions, caches, fixed shapes."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from soloist.config import ModelConfig
from soloist.engines.local.batch import Answer, ContinuousBatch
from soloist.engines.local.model_runner import ModelRunner
from soloist.engines.local.own_forward import attention_windows
from soloist.models.loading import load_policy, save_weights
from soloist.models.tiny import build_tiny
from soloist.types import Completion, GenerateRequest, Sampling, WeightsRef

TINY = ModelConfig(hidden_size=32, layers=2, heads=2, mlp_size=48, experts=4)
SLOTS, MAX_LENGTH = 4, 96


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    families = {"dense": TINY, "moe": TINY.model_copy(update={"family": "qwen3_moe"})}
    return {name: build_tiny(config, 1, root / name) for name, config in families.items()}


def sharpened(model: Any, seed: int = 0) -> Any:
    """Larger random weights, since a fresh model is so near to uniform that wrong attention would hardly show."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
    return model


def sliding_model() -> Any:
    """A model that alternates full attention with a window of 5."""
    config = Qwen3Config(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, use_sliding_window=True, sliding_window=5, max_window_layers=0,
        layer_types=["full_attention", "sliding_attention"] * 2, attn_implementation="sdpa",
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


@pytest.fixture
def models(folders: dict[str, Path]) -> dict[str, Any]:
    """A fresh copy of each model, as tests change weights."""
    return {
        "dense": sharpened(load_policy(folders["dense"])),
        "moe": sharpened(load_policy(folders["moe"])),
        "sliding": sharpened(sliding_model()),
    }


def batch_of(model: Any, **options: Any) -> ContinuousBatch:
    recompute = options.pop("recompute", False)
    runner = ModelRunner(model, slots=SLOTS, max_length=MAX_LENGTH, **options)
    return ContinuousBatch(runner, recompute=recompute)


def ask(name: str, prompt: Iterable[int], *, rollout: str = "", slot: int | None = None, key: int = 0, **sampling: Any):
    return GenerateRequest(
        request_id=name,
        rollout_id=rollout or name,
        prompt_ids=list(prompt),
        sampling=Sampling(**({"max_new_tokens": 12} | sampling)),
        key=key,
        slot=slot,
    )


def run(batch: ContinuousBatch, *requests: GenerateRequest) -> dict[str, Completion]:
    """Submit all, step until done."""
    answers = [answer for request in requests if (answer := batch.submit(request))]
    while batch.busy:
        answers += batch.step()
    return completions(answers)


def completions(answers: Iterable[Answer]) -> dict[str, Completion]:
    found = {}
    for answer in answers:
        assert answer.completion is not None, answer.reason
        found[answer.request_id] = answer.completion
    return found


@torch.no_grad()
def reference(model: Any, prompt: list[int], completion: Completion, temperature: float) -> torch.Tensor:
    """Log-probabilities of the completion by one plain forward pass without a cache."""
    ids = torch.tensor([prompt + completion.token_ids])
    logits = model(input_ids=ids, use_cache=False).logits[0].float()
    log_probs = torch.log_softmax(logits[len(prompt) - 1 : -1] / temperature, -1)
    return log_probs.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]


def distance(left: Iterable[float], right: torch.Tensor) -> float:
    return float((torch.tensor(list(left)) - right).abs().max())


def published(model: Any, path: Path, version: int) -> WeightsRef:
    return WeightsRef(path=str(path), version=version, sha256=save_weights(model, path))


@pytest.mark.parametrize("family", ["dense", "moe", "sliding"])
def test_log_probs_equal_a_plain_forward_pass_after_two_turns(models: dict[str, Any], family: str) -> None:
    """R10, trap 3, RB-037: ratio 1 within 1e-5 at every temperature, through prefix reuse and mixed lengths."""
    batch, model = batch_of(models[family]), models[family]
    temperatures = (0.5, 1.0, 1.3)
    first = [
        ask(f"{t}", range(3, 9 + 7 * i), temperature=t, key=i, max_new_tokens=5 + 4 * i)
        for i, t in enumerate(temperatures)
    ]
    turn_1 = run(batch, *first)
    second = [
        ask(f"{r.request_id} again", [*r.prompt_ids, *turn_1[r.request_id].token_ids, 7, 8, 9], rollout=r.rollout_id,
            temperature=r.sampling.temperature, key=r.key)
        for r in first
    ]  # fmt: skip
    for request in second:
        batch.submit(request)
    answers = batch.step()
    assert {seat.reused for seat in batch.table.running.values()} == {len(r.prompt_ids) - 4 for r in second}
    while batch.busy:
        answers += batch.step()
    turn_2 = completions(answers)
    for request, done in zip(first + second, [*turn_1.values(), *turn_2.values()], strict=False):
        done = (turn_1 | turn_2)[request.request_id]
        wanted = reference(model, request.prompt_ids, done, request.sampling.temperature)
        assert distance(done.log_probs, wanted) < 1e-5
        assert len(done.token_ids) == request.sampling.max_new_tokens
        assert done.finish_reason == "length"


def test_requests_that_join_and_leave_do_not_change_what_others_sample(models: dict[str, Any]) -> None:
    requests = [ask(f"q{i}", range(3, 6 + i), key=i, max_new_tokens=3 + 2 * i) for i in range(9)]
    alone = {r.request_id: run(batch_of(models["dense"]), r)[r.request_id] for r in requests}
    batch, answers = batch_of(models["dense"]), []
    for request in requests:
        batch.submit(request)
        answers += batch.step()
    while batch.busy:
        answers += batch.step()
    together = completions(answers)
    assert {name: done.token_ids for name, done in together.items()} == {
        name: done.token_ids for name, done in alone.items()
    }
    for name, done in together.items():
        assert distance(done.log_probs, torch.tensor(alone[name].log_probs)) < 1e-5


def test_a_stop_token_ends_the_action_and_belongs_to_it(models: dict[str, Any]) -> None:
    free = run(batch_of(models["dense"]), ask("q", [3, 4], key=5))["q"]
    stop = free.token_ids[4]
    stopped = run(batch_of(models["dense"]), ask("q", [3, 4], key=5, stop_token_ids=(1, stop)))["q"]
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert stopped.finish_reason == "stop"
    assert stopped.log_probs == pytest.approx(free.log_probs[: len(stopped.token_ids)], abs=1e-5)


def test_the_budget_is_clamped_to_the_slot_and_the_reason_is_length(models: dict[str, Any]) -> None:
    """RB-074: context 96, history 90, 20 asked for: 6 come, as `length`; a full context gives none, not an error."""
    batch = batch_of(models["dense"])
    done = run(batch, ask("q", [5] * 90, max_new_tokens=20), ask("full", [5] * 96), ask("over", [5] * 120))
    assert [len(done[name].token_ids) for name in ("q", "full", "over")] == [6, 0, 0]
    assert {completion.finish_reason for completion in done.values()} == {"length"}
    wanted = reference(models["dense"], [5] * 90, done["q"], 1.0)
    assert distance(done["q"].log_probs, wanted) < 1e-5


def test_requests_that_make_no_sense_are_refused_and_disturb_nobody(models: dict[str, Any]) -> None:
    batch = batch_of(models["dense"])
    refused = [
        ask("empty", []),
        ask("foreign id", [3, 10_000]),
        ask("negative id", [-1]),
        ask("foreign stop", [3], stop_token_ids=(10_000,)),
        ask("cold", [3], temperature=-0.5),
        ask("nan", [3], temperature=math.nan),
        ask("no slot", [3], slot=SLOTS),
    ]
    answers = [batch.submit(request) for request in refused]
    reasons = [answer.reason for answer in answers if answer is not None and answer.completion is None]
    assert len(reasons) == len(refused)
    assert "10000 is outside the vocabulary" in reasons[1]
    assert len(run(batch, ask("good", [3, 4]))["good"].token_ids) == 12


def test_ids_beyond_the_vocabulary_cannot_be_sampled(models: dict[str, Any]) -> None:
    """RB-047: padded rows of the output layer must be impossible, whatever their logits are."""
    model = models["dense"]
    with torch.no_grad():
        # All tokens after the 20th get the largest logits by far.
        model.lm_head.weight[20:] = 50 * model.lm_head.weight[5]
    padded = run(batch_of(model), ask("q", [5, 5], max_new_tokens=40))["q"]
    assert max(padded.token_ids) >= 20, "the model itself would take them"
    cut = run(batch_of(model, vocab_size=20), ask("q", [5, 5], max_new_tokens=40))["q"]
    assert max(cut.token_ids) < 20
    logits = model(input_ids=torch.tensor([[5, 5]])).logits[0, -1, :20].detach()
    assert cut.log_probs[0] == pytest.approx(float(torch.log_softmax(logits, -1)[cut.token_ids[0]]), abs=1e-5)


@pytest.fixture
def newer(folders: dict[str, Path], tmp_path: Path) -> tuple[Any, WeightsRef]:
    """Other weights for the dense model, as a model and as a published file of version 7."""
    model = sharpened(load_policy(folders["dense"]), seed=1)
    return model, published(model, tmp_path / "w.safetensors", 7)


def swapped_after_five_tokens(batch: ContinuousBatch, weights: WeightsRef, request: GenerateRequest) -> Completion:
    """Each step samples one token, the first one with the prompt."""
    batch.submit(request)
    for _ in range(5):
        assert batch.step() == []
    batch.load(weights)
    answers = []
    while batch.busy:
        answers += batch.step()
    return completions(answers)[request.request_id]


@torch.no_grad()
def mixed_reference(old: Any, new: Any, prompt: list[int], done: Completion, swap: int) -> torch.Tensor:
    """Log-probabilities when `swap` tokens come from the old model and the new one goes on with the old one's cache."""
    cache, rows = DynamicCache(config=old.config), []
    ids = torch.tensor([prompt])
    for position, token in enumerate(done.token_ids):
        model = old if position < swap else new
        logits = model(input_ids=ids, cache=cache, use_cache=True).logits[0, -1].float()
        rows.append(torch.log_softmax(logits, -1)[token])
        ids = torch.tensor([[token]])
    return torch.stack(rows)


def test_tokens_carry_the_version_whose_weights_made_their_logits(
    models: dict[str, Any], folders: dict[str, Path], newer: tuple[Any, WeightsRef]
) -> None:
    """Trap 7, RB-114, RB-048: swapped in mid-sequence, each label equals what the logits say; the cache is kept."""
    old, (new, weights) = sharpened(load_policy(folders["dense"])), newer
    request = ask("q", [3, 4, 5], key=2)
    done = swapped_after_five_tokens(batch_of(models["dense"]), weights, request)
    assert [(s.version, s.start, s.end) for s in done.version_spans] == [(0, 0, 5), (7, 5, 12)]
    assert distance(done.log_probs, mixed_reference(old, new, request.prompt_ids, done, swap=5)) < 1e-5
    for wrong in (4, 6):
        assert distance(done.log_probs, mixed_reference(old, new, request.prompt_ids, done, swap=wrong)) > 1e-3


def test_an_idle_rollout_keeps_its_cache_through_a_load_while_others_are_decoded(
    models: dict[str, Any], folders: dict[str, Path], newer: tuple[Any, WeightsRef]
) -> None:
    """R11: running rollouts keep their prefixes, also between two turns; only the new tokens meet the new weights."""
    old, (new, weights) = sharpened(load_policy(folders["dense"])), newer
    batch = batch_of(models["dense"])
    first = run(batch, ask("idle", [8, 9, 10], max_new_tokens=3))["idle"]
    swapped_after_five_tokens(batch, weights, ask("beside", [3, 4, 5]))
    prompt = [8, 9, 10, *first.token_ids, 11]
    for name, length in (("later", 5), ("other", 9)):
        batch.submit(ask(name, prompt if name == "later" else [7] * length, rollout="idle" if name == "later" else ""))
    answers = []
    while batch.busy:
        answers += batch.step()
    later = completions(answers)["later"]
    cache = DynamicCache(config=old.config)
    with torch.no_grad():
        old(input_ids=torch.tensor([prompt[:5]]), cache=cache, use_cache=True)
        ids = torch.tensor([prompt[5:] + later.token_ids])
        logits = new(input_ids=ids, cache=cache, use_cache=True).logits[0, 1:-1].float()
    wanted = torch.log_softmax(logits, -1).gather(-1, torch.tensor(later.token_ids)[:, None])[:, 0]
    assert distance(later.log_probs, wanted) < 1e-5
    assert distance(later.log_probs, reference(new, prompt, later, 1.0)) > 1e-3
    assert [span.version for span in later.version_spans] == [7]


def test_recompute_continues_as_if_the_new_weights_had_read_everything(
    models: dict[str, Any], folders: dict[str, Path], newer: tuple[Any, WeightsRef]
) -> None:
    """Trap 10: in-flight requests with caches computed anew, and the idle prefix of another rollout too."""
    old, (new, weights) = sharpened(load_policy(folders["dense"])), newer
    batch = batch_of(models["dense"], recompute=True)
    idle = run(batch, ask("idle", [8, 9, 10], max_new_tokens=3))["idle"]
    request = ask("q", [3, 4, 5], key=2)
    done = swapped_after_five_tokens(batch, weights, request)
    assert [s.version for s in done.version_spans] == [0, 7]
    assert distance(done.log_probs[:5], reference(old, request.prompt_ids, done, 1.0)[:5]) < 1e-5
    assert distance(done.log_probs[5:], reference(new, request.prompt_ids, done, 1.0)[5:]) < 1e-5
    prompt = [8, 9, 10, *idle.token_ids, 11]
    later = run(batch, ask("later", prompt, rollout="idle"))["later"]
    assert distance(later.log_probs, reference(new, prompt, later, 1.0)) < 1e-5


def test_a_new_rollout_after_a_load_equals_a_cold_engine(models: dict[str, Any], newer: tuple[Any, WeightsRef]) -> None:
    """RB-111, trap 10: the same prompt before and after a load, with prefixes kept in between."""
    new, weights = newer
    batch = batch_of(models["dense"])
    before = run(batch, ask("a", [3, 4, 5]))["a"]
    batch.load(weights)
    after = run(batch, ask("b", [3, 4, 5]))["b"]
    cold = run(batch_of(new), ask("b", [3, 4, 5]))["b"]
    assert after.token_ids == cold.token_ids
    assert after.log_probs == pytest.approx(cold.log_probs, abs=1e-5)
    assert (before.token_ids, before.version_spans) != (after.token_ids, after.version_spans)


def broken_files(good: WeightsRef, model: Any, folder: Path) -> dict[str, WeightsRef]:
    data = Path(good.path).read_bytes()
    (folder / "flipped").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    (folder / "short").write_bytes(data[:-8])
    other = sharpened(sliding_model())
    with torch.no_grad():
        model.model.norm.weight[0] = math.nan
    return {
        "another hash": WeightsRef(path=str(folder / "flipped"), version=8, sha256=good.sha256),
        "cut off": WeightsRef(path=str(folder / "short"), version=8, sha256=good.sha256),
        "absent": WeightsRef(path=str(folder / "nowhere"), version=8, sha256=good.sha256),
        "another model": published(other, folder / "other", 8),
        "not finite": published(model, folder / "nan", 8),
        "negative version": WeightsRef(path=good.path, version=-1, sha256=good.sha256),
    }


def test_weights_that_do_not_fit_change_nothing(
    models: dict[str, Any], newer: tuple[Any, WeightsRef], tmp_path: Path
) -> None:
    """R11, S4, RB-109, RB-113: verified per tensor before the swap; the old weights answer identically."""
    model, weights = newer
    batch = batch_of(models["dense"])
    before = run(batch, ask("q", [3, 4, 5]))["q"]
    for name, bad in broken_files(weights, model, tmp_path).items():
        with pytest.raises((ValueError, OSError)):
            batch.load(bad)
        assert batch.counters.version == 0, name
    batch.release("q")
    assert run(batch, ask("q", [3, 4, 5]))["q"] == before


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_logits_fail_their_request_and_leave_nothing_behind(models: dict[str, Any], bad: float) -> None:
    """RB-045, RB-046: named and refused; the slot is clean for the next request."""
    model = models["dense"]
    batch = batch_of(model)
    # The neighbour is longer, so that attention passes over what the broken request left in the slot of "q".
    pair = ask("q", [3, 4, 5]), ask("neighbour", range(3, 40))
    before = run(batch, *pair)
    batch.release("q")
    batch.release("neighbour")
    norm = model.model.layers[0].input_layernorm.weight
    good = norm.detach().clone()
    with torch.no_grad():
        norm.fill_(bad)
    batch.submit(ask("broken", range(3, 30)))
    (answer,) = batch.step()
    assert answer.completion is None
    assert "non-finite logits at token 1" in answer.reason
    assert batch.table.running == {}
    with torch.no_grad():
        norm.copy_(good)
    assert run(batch, *pair) == before


def test_abort_returns_what_was_sampled_and_cancel_returns_nothing(models: dict[str, Any]) -> None:
    batch = batch_of(models["dense"])
    for i in range(6):
        batch.submit(ask(f"q{i}", [3, 4], max_new_tokens=30))
    batch.step()
    some = completions(batch.abort(["q1", "q5"]))
    assert {name: len(done.token_ids) for name, done in some.items()} == {"q1": 1, "q5": 0}
    batch.cancel("q0")
    batch.cancel("q4")
    rest = completions(batch.abort(None))
    assert set(rest) == {"q2", "q3"}
    assert {done.finish_reason for done in (some | rest).values()} == {"abort"}
    assert not batch.busy
    assert reference(models["dense"], [3, 4], some["q1"], 1.0).tolist() == pytest.approx(some["q1"].log_probs, abs=1e-5)


def test_counters_add_up(models: dict[str, Any]) -> None:
    batch = batch_of(models["dense"])
    done = run(batch, *(ask(f"q{i}", [3, 4], max_new_tokens=1 + i) for i in range(7)))
    assert batch.counters.tokens == sum(len(completion.token_ids) for completion in done.values()) == 28
    assert batch.counters.busy_s > 0
    assert (batch.counters.running, batch.counters.waiting) == (0, 0)


def test_models_with_layers_that_cannot_be_cached_are_refused() -> None:
    config = Qwen3Config(num_hidden_layers=2)
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ValueError, match="linear_attention"):
        attention_windows(config)
    assert attention_windows(sliding_model().config) == {"full_attention": None, "sliding_attention": 5}


def test_weights_in_bfloat16_still_give_log_probs_in_fp32(models: dict[str, Any]) -> None:
    model = models["dense"].to(torch.bfloat16)
    done = run(batch_of(model), ask("q", [3, 4, 5]))["q"]
    assert distance(done.log_probs, reference(model, [3, 4, 5], done, 1.0)) < 0.05
    assert any(value != float(torch.tensor(value).bfloat16()) for value in done.log_probs)
