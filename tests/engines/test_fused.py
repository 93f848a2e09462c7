"""The fused forward against plain Hugging Face forward passes: families, prompts in pieces, moved rows, loads."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from soloist.engines.local import agreement, blocks, experts
from soloist.engines.local.batch import ContinuousBatch
from soloist.engines.local.model_runner import ModelRunner
from soloist.engines.local.own_forward import Stretch
from soloist.engines.local.rows import Reach
from soloist.engines.local.sampler import keyed_uniforms, sample, stream_key
from soloist.engines.local.state import SlotState
from soloist.models.loading import parameter_table, save_weights
from soloist.types import Completion, GenerateRequest, Sampling, WeightsRef

VOCAB, MAX_LENGTH, SLOTS = 61, 200, 6
ROUNDING = 5e-6
"""Of the softmax in fp32; everything before it is computed in fp64 on both sides."""
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "attn_implementation": "sdpa",
}  # fmt: skip
MOE = {"moe_intermediate_size": 20, "num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
CONFIGS = {
    "qwen3": Qwen3Config(**SHAPE, tie_word_embeddings=True),
    "qwen3 with biases": Qwen3Config(**SHAPE, attention_bias=True),
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, **MOE, mlp_only_layers=[1]),
    "llama": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "llama3 rotary": LlamaConfig(**SHAPE, rope_parameters=LLAMA3),
    "qwen2": Qwen2Config(**{k: v for k, v in SHAPE.items() if k != "head_dim"}),
    "mistral": MistralConfig(**SHAPE, sliding_window=None),
}


def build(config: Any, seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    """Random weights of a size at which wrong attention shows; norms and biases random, too."""
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    if hasattr(config, "num_experts"):
        # The grouped kernels know no fp64.
        model.set_experts_implementation("eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.25
            parameter.copy_(noise + 1 if "norm" in name else noise)
    return model


@pytest.fixture(params=CONFIGS)
def model(request: pytest.FixtureRequest) -> Any:
    return build(CONFIGS[request.param])


def batch_of(model: Any, *, chunk: int = 256, recompute: bool = False, **options: Any) -> ContinuousBatch:
    runner = ModelRunner(model, slots=SLOTS, max_length=MAX_LENGTH, **options)
    return ContinuousBatch(runner, prefill_chunk=chunk, recompute=recompute)


def ask(name: str, length: int, tokens: int, rollout: str = "", prompt: list[int] | None = None) -> GenerateRequest:
    ids = prompt or [(7 * i * i + 3 * i + length) % VOCAB for i in range(length)]
    return GenerateRequest(
        request_id=name,
        rollout_id=rollout or name,
        prompt_ids=ids,
        sampling=Sampling(max_new_tokens=tokens),
        key=length,
    )


def finish(batch: ContinuousBatch) -> dict[str, Completion]:
    done = {}
    while batch.busy:
        for answer in batch.step():
            assert answer.completion is not None, answer.reason
            done[answer.request_id] = answer.completion
    return done


@torch.no_grad()
def error(model: Any, request: GenerateRequest, done: Completion) -> float:
    """Largest distance of recorded log-probabilities from one plain forward pass in the model's own type."""
    ids = torch.tensor([request.prompt_ids + done.token_ids])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(request.prompt_ids) - 1 : -1]
    wanted = torch.log_softmax(logits.double(), -1).gather(-1, torch.tensor(done.token_ids)[:, None])[:, 0]
    return float((torch.tensor(done.log_probs, dtype=torch.float64) - wanted).abs().max())


def test_mixed_lengths_equal_a_plain_forward_pass(model: Any) -> None:
    """Whole prompts, prompts in pieces beside decoding, rows over several blocks, and requests that wait for a slot."""
    batch = batch_of(model, chunk=16)
    assert batch.runner.fused
    requests = [ask(f"q{i}", 3 + 23 * i % 150, 2 + 17 * i % 47) for i in range(14)]
    for request in requests:
        batch.submit(request)
    done = finish(batch)
    assert max(len(r.prompt_ids) + len(done[r.request_id].token_ids) for r in requests) > 2 * blocks.BLOCK
    for request in requests:
        assert len(done[request.request_id].token_ids) == request.sampling.max_new_tokens
        # The log-probabilities are stored in fp32.
        assert error(model, request, done[request.request_id]) < ROUNDING


def test_the_fused_forward_agrees_with_the_own_one_on_every_token(model: Any) -> None:
    requests = [ask(f"q{i}", 3 + 31 * i, 30) for i in range(5)]
    found = []
    for fused in (True, False):
        batch = batch_of(model, fused=fused)
        assert batch.runner.fused is fused
        for request in requests:
            batch.submit(request)
        found.append(finish(batch))
    for name, done in found[0].items():
        assert done.token_ids == found[1][name].token_ids
        assert done.log_probs == pytest.approx(found[1][name].log_probs, abs=ROUNDING)


def test_long_rows_keep_their_tokens_when_short_ones_leave_and_rows_move(model: Any) -> None:
    """The last request has the highest slot; when the others are gone, it is decoded alone in row 0."""
    batch = batch_of(model)
    requests = [ask(f"q{i}", 5 + 11 * i, 3 if i < 5 else 120) for i in range(6)]
    for request in requests:
        batch.submit(request)
    batch.step()
    for _ in range(4):
        batch.step()
    assert list(batch.table.running) == [5]
    batch.step()
    assert batch.runner._order.row_of[5] == 0
    again = ask("again", 0, 9, rollout="q2", prompt=[*requests[2].prompt_ids, 1, 2, 3])
    batch.submit(again)
    done = finish(batch)
    assert error(model, requests[5], done["q5"]) < ROUNDING
    assert error(model, again, done["again"]) < ROUNDING, "the idle prefix moved, too"


@pytest.mark.parametrize("recompute", [False, True])
def test_a_load_in_mid_flight_reaches_every_projection(model: Any, tmp_path: Path, recompute: bool) -> None:
    """Fused weights are views: after a load nothing of the old ones is left."""
    newer = build(model.config, seed=1)
    path = tmp_path / "w.safetensors"
    weights = WeightsRef(path=str(path), version=3, sha256=save_weights(newer, path))
    batch = batch_of(model, recompute=recompute, chunk=8)
    requests = [ask("running", 9, 30), ask("in pieces", 150, 10)]
    for request in requests:
        batch.submit(request)
        for _ in range(3):
            batch.step()
    batch.load(weights)
    later = ask("later", 80, 12)
    batch.submit(later)
    done = finish(batch)
    assert error(newer, later, done["later"]) < ROUNDING
    assert {span.version for span in done["running"].version_spans} == {0, 3}
    assert [span.version for span in done["in pieces"].version_spans] == [3]
    if recompute:
        assert error(newer, requests[1], done["in pieces"]) < ROUNDING
    else:
        assert error(newer, requests[1], done["in pieces"]) > 1e-3, "the first pieces were read by the old weights"


@pytest.mark.parametrize("work", [0, 10**9])
def test_both_ways_to_compute_experts_give_the_same(monkeypatch: pytest.MonkeyPatch, work: int) -> None:
    monkeypatch.setattr(experts, "ALL_EXPERTS_WORK", work)
    model = build(CONFIGS["qwen3_moe"])
    batch = batch_of(model)
    requests = [ask(f"q{i}", 4 + 40 * i, 20) for i in range(4)]
    for request in requests:
        batch.submit(request)
    done = finish(batch)
    assert batch.runner.fused
    assert max(error(model, request, done[request.request_id]) for request in requests) < ROUNDING


def test_experts_are_those_of_the_models_own_router() -> None:
    """Each layer's chosen experts, seen through hooks: the same sets in a fused step and in a plain forward pass."""
    model, chosen = build(CONFIGS["qwen3_moe"]), []
    for layer in (model.model.layers[0], model.model.layers[2]):
        layer.mlp.gate.register_forward_hook(lambda _module, _inputs, output: chosen.append(output[2].sort(-1).values))
    batch = batch_of(model)
    request = ask("q", 40, 1)
    chosen.clear()
    batch.submit(request)
    finish(batch)
    fused = list(chosen)
    chosen.clear()
    model(input_ids=torch.tensor([request.prompt_ids]), use_cache=False)
    assert len(fused) == len(chosen) == 2
    assert all(torch.equal(left, right) for left, right in zip(fused, chosen, strict=True))


def test_models_it_does_not_know_are_served_by_their_own_forward() -> None:
    gemma = Gemma3TextConfig(
        **SHAPE, sliding_window=16, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    )
    window = MistralConfig(**SHAPE, sliding_window=7)
    gelu = LlamaConfig(**SHAPE, hidden_act="gelu")
    for config in (gemma, window, gelu):
        model = build(config)
        batch = batch_of(model, chunk=16)
        assert not batch.runner.fused
        requests = [ask(f"q{i}", 4 + 30 * i, 40) for i in range(4)]
        for request in requests:
            batch.submit(request)
        done = finish(batch)
        assert max(error(model, request, done[request.request_id]) for request in requests) < ROUNDING, (
            config.model_type
        )


def test_a_fused_forward_that_differs_does_not_serve(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A family may change in a release of transformers: the probe finds out, and the model's own forward serves."""
    model = build(CONFIGS["llama"])
    monkeypatch.setattr(agreement.FusedForward, "decode", lambda self, slots, reach: torch.zeros(1, VOCAB))
    batch = batch_of(model)
    assert not batch.runner.fused
    assert "differs from the model's own by 1 of its logits" in caplog.text
    assert not batch.runner._state.active_S.any(), "the probe leaves nobody running"
    request = ask("q", 30, 10)
    batch.submit(request)
    assert error(model, request, finish(batch)["q"]) < ROUNDING


def test_weights_stay_those_of_the_model_and_cost_no_memory_twice() -> None:
    model = build(CONFIGS["qwen3_moe"])
    before, table = {name: p.clone() for name, p in model.named_parameters()}, parameter_table(model)
    batch_of(model)
    assert parameter_table(model) == table
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    attention = model.model.layers[0].self_attn
    shared = {p.weight.untyped_storage().data_ptr() for p in (attention.q_proj, attention.k_proj, attention.v_proj)}
    assert len(shared) == 1


def test_bfloat16_gives_log_probs_near_those_of_the_models_own_forward() -> None:
    model = build(CONFIGS["qwen3"], dtype=torch.bfloat16)
    batch = batch_of(model)
    requests = [ask(f"q{i}", 4 + 40 * i, 20) for i in range(4)]
    for request in requests:
        batch.submit(request)
    done = finish(batch)
    exact = build(CONFIGS["qwen3"])
    exact.load_state_dict({name: tensor.double() for name, tensor in model.state_dict().items()})
    ours = [error(exact, request, done[request.request_id]) for request in requests]
    with torch.no_grad():
        ids = torch.tensor([requests[3].prompt_ids + done["q3"].token_ids])
        apart = (model(input_ids=ids).logits.double() - exact(input_ids=ids).logits).abs().max()
    assert batch.runner.fused
    assert max(ours) < 3 * float(apart), "no further from the exact numbers than bfloat16 itself"


@torch.no_grad()
def slow_completion(model: Any, request: GenerateRequest) -> tuple[list[int], list[float]]:
    """One token at a time, each from a forward pass over everything before it."""
    stream = torch.tensor([stream_key(request.sampling.seed, request.key)])
    ids, log_probs = list(request.prompt_ids), []
    for _ in range(min(request.sampling.max_new_tokens, MAX_LENGTH - len(ids))):
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1:]
        uniform = keyed_uniforms(stream, torch.tensor([len(ids)]))
        token, log_prob, _ = sample(logits, torch.tensor([request.sampling.temperature]), uniform)
        ids.append(int(token))
        log_probs.append(float(log_prob))
        if ids[-1] in request.sampling.stop_token_ids:
            break
    return ids[len(request.prompt_ids) :], log_probs


PLAIN = build(CONFIGS["qwen3"])


# Shrinking a workload takes minutes and tells little.
@settings(max_examples=8, phases=[Phase.generate])
@given(st.randoms(use_true_random=False), st.sampled_from([8, 40, 256]))
def test_any_workload_equals_a_loop_over_plain_forward_passes(chance: random.Random, chunk: int) -> None:
    """Random lengths, turns, temperatures, stop tokens, arrivals and aborts: every completion, token by token."""
    batch, waiting, done = batch_of(PLAIN, chunk=chunk), {}, {}
    left = 12
    while left or batch.busy:
        if left and chance.random() < 0.4:
            left -= 1
            before = [name for name in done if chance.random() < 0.5]
            history = [*waiting[before[0]].prompt_ids, *done[before[0]].token_ids] if before else []
            prompt = history + [chance.randrange(VOCAB) for _ in range(chance.randint(1, 60))]
            sampling = Sampling(
                max_new_tokens=chance.choice([1, 2, 9, 40]), temperature=chance.choice([0.0, 0.7, 1.0, 1.4]),
                stop_token_ids=(chance.randrange(VOCAB),), seed=chance.randrange(3),
            )  # fmt: skip
            name = f"q{left}"
            rollout = waiting[before[0]].rollout_id if before else name
            waiting[name] = GenerateRequest(
                request_id=name, rollout_id=rollout, prompt_ids=prompt[: MAX_LENGTH - 1], sampling=sampling, key=left
            )
            assert batch.submit(waiting[name]) is None
        elif chance.random() < 0.05:
            done |= {answer.request_id: answer.completion for answer in batch.abort([f"q{chance.randrange(12)}"])}
        done |= {answer.request_id: answer.completion for answer in batch.step()}
    assert len(done) == 12
    for name, completion in done.items():
        tokens, log_probs = slow_completion(PLAIN, waiting[name])
        count = len(completion.token_ids)
        assert count == len(tokens) or completion.finish_reason == "abort"
        assert completion.token_ids == tokens[:count]
        assert completion.log_probs == pytest.approx(log_probs[:count], abs=ROUNDING)


def test_rows_that_do_not_run_are_computed_without_harm_where_each_row_is_one_piece(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As recorded graphs decode: all slots, of which some are empty and some have stopped."""
    monkeypatch.setattr(blocks, "BLOCK", 4 * MAX_LENGTH)
    model = build(CONFIGS["qwen3"])
    tokens = torch.randint(0, VOCAB, (9,), generator=torch.Generator().manual_seed(0))
    alone = model(input_ids=tokens[None]).logits[0, -1].detach()
    state = SlotState(SLOTS, MAX_LENGTH, torch.device("cpu"))
    forward = agreement.fused_forward(model, state, VOCAB)
    assert forward is not None
    state.tokens_SP[2, :9] = state.tokens_SP[4, :9] = tokens
    with torch.inference_mode():
        for slot in (2, 4):
            forward.advance(state.ids([]), Reach([]), [Stretch(slot, 0, 8)], [slot])
        state.lengths_S[2] = state.lengths_S[4] = 9
        state.active_S[2] = True
        kept = forward._cache.data.clone()
        logits = forward.decode(torch.arange(SLOTS), Reach.of([MAX_LENGTH] * SLOTS))
    torch.testing.assert_close(logits[2], alone, rtol=0, atol=ROUNDING)
    changed = (forward._cache.data != kept).any(-1).any(1).any(1).any(0).any(1)
    assert changed[2].nonzero().flatten().tolist() == [8]
    # Of all others only the scratch column.
    assert not changed[[0, 1, 3, 4, 5], :MAX_LENGTH].any()
