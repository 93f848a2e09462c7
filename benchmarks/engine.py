"""Is the local engine faster than `transformers` generate, and as exact?

    python benchmarks/engine.py [--requests 512] [--pairs 3]

512 requests through 64 slots against `generate` in static batches of 64: the same model, prompts, numbers of new tokens
and sampling (T = 1, no top-k, no top-p), one thread each, in turns in one process; for the default tiny dense Qwen3 and
for a Qwen3-MoE of the same size. Once with equal lengths, once with log-normal ones (σ = 1), where `generate` must run
each batch to its longest and only the tokens that were asked for count. Then loads in the middle of decoding, and the
recorded log-probabilities against a plain float64 forward pass. The same ratios in CPU seconds stand beside, and those
of a tail that is cut at a slot of the default length. Writes benchmarks/results/engine.json.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import compare, write_results

from soloist.config import EngineConfig, ModelConfig
from soloist.engines.local.batch import ContinuousBatch
from soloist.engines.local.child import MEMORY_SETTINGS
from soloist.engines.local.engine import LocalEngine
from soloist.engines.local.loads import Loads
from soloist.engines.local.model_runner import ModelRunner
from soloist.models.loading import load_policy, parameter_table, save_weights
from soloist.models.tiny import build_tiny
from soloist.types import Completion, GenerateRequest, Sampling, WeightsRef

SLOTS, PROMPT, EQUAL, MEDIAN, LONGEST = 64, 64, 64, 40, 512
DEFAULT_LONGEST = EngineConfig().max_length - PROMPT
"""Where the tail is cut in a slot of the default length."""
MODELS = {
    "dense": ModelConfig(),
    # Eight experts of 36 hold as many parameters as the dense MLP of 288; each token uses two.
    "moe": ModelConfig(family="qwen3_moe", mlp_size=36),
}
LOADS = 30
CHECKED = 96
"""Completions whose log-probabilities are recomputed."""


class Workload:
    """Prompts and numbers of new tokens."""

    def __init__(self, lengths: list[int], vocab_size: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.lengths = lengths
        self.tokens = sum(lengths)
        self.prompts = torch.randint(0, vocab_size, (len(lengths), PROMPT), generator=generator).tolist()
        self._round = 0

    def requests(self) -> list[GenerateRequest]:
        """Fresh requests: ids and rollouts are new each time, so no prefix is reused."""
        self._round += 1
        return [
            GenerateRequest(
                request_id=f"{self._round}.{i}", rollout_id=f"{self._round}.{i}", prompt_ids=prompt, key=i,
                sampling=Sampling(max_new_tokens=length),
            )
            for i, (prompt, length) in enumerate(zip(self.prompts, self.lengths, strict=True))
        ]  # fmt: skip


def heavy_lengths(requests: int, longest: int) -> list[int]:
    """Log-normal numbers of new tokens."""
    normal = torch.randn(requests, generator=torch.Generator().manual_seed(0))
    lengths: list[int] = (MEDIAN * normal.exp()).round().clamp(1, longest).int().tolist()
    return lengths


class Stopwatch:
    """Calls something and notes the CPU seconds of each call: on a busy machine they tell more than the clock."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self.cpu_s: list[float] = []

    def __call__(self) -> None:
        """One call."""
        start = time.process_time()
        self._work()
        self.cpu_s.append(time.process_time() - start)

    @property
    def median(self) -> float:
        """Median CPU seconds; the first call, a warm-up, does not count when there are more."""
        return statistics.median(self.cpu_s[1:] or self.cpu_s)


def serve(batch: ContinuousBatch, load: Workload) -> dict[str, tuple[GenerateRequest, Completion]]:
    """All requests at once, stepped until the last is done."""
    requests = {request.request_id: request for request in load.requests()}
    for request in requests.values():
        batch.submit(request)
    done = {}
    while batch.busy:
        for answer in batch.step():
            assert answer.completion is not None, answer.reason
            done[answer.request_id] = (requests[answer.request_id], answer.completion)
    assert sum(len(completion.token_ids) for _, completion in done.values()) == load.tokens
    return done


@torch.inference_mode()
def generate(model: Any, load: Workload) -> None:
    """Static batches, each to its longest."""
    for first in range(0, len(load.lengths), SLOTS):
        ids = torch.tensor(load.prompts[first : first + SLOTS])
        longest = max(load.lengths[first : first + SLOTS])
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=longest, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        assert found.shape[1] == PROMPT + longest


def load_pauses(batch: ContinuousBatch, load: Workload, folder: Path) -> dict[str, float]:
    """Extra milliseconds of the step in which weights are swapped, with all slots decoding, as the worker does it."""
    path = folder / "weights.safetensors"
    sha256 = save_weights(batch.runner.model, path)
    loads = Loads(parameter_table(batch.runner.model))
    for request in load.requests():
        batch.submit(request)
    plain, swapped, version = [], [], batch.runner.version
    while len(swapped) < LOADS:
        if not loads.pending and len(plain) >= 5 * (len(swapped) + 1):
            version += 1
            loads.ask(WeightsRef(path=str(path), version=version, sha256=sha256))
        start = time.perf_counter()
        verified = loads.collect()
        for one in verified:
            assert one.tensors is not None, one.reason
            batch.swap(one.tensors, one.weights.version)
        batch.step()
        (swapped if verified else plain).append(time.perf_counter() - start)
        if not batch.busy:
            for request in load.requests():
                batch.submit(request)
    batch.abort(None)
    loads.close()
    extra = sorted(1e3 * (seconds - statistics.median(plain)) for seconds in swapped)
    return {
        "load_pause_ms": statistics.median(extra),
        "load_pause_worst_ms": extra[-1],
        # What a step differs by without any load, on a machine that others use, too.
        "step_ms": 1e3 * statistics.median(plain),
        "step_p99_ms": 1e3 * sorted(plain)[int(0.99 * len(plain))],
    }


@torch.no_grad()
def log_prob_error(model: Any, done: list[tuple[GenerateRequest, Completion]]) -> dict[str, float]:
    """Largest distance of recorded log-probabilities from a plain float64 forward pass.

    Experts are the same by necessity where the router's choice is no tie; from a tie on (two experts closer than 1e-6)
    the tokens of a sequence are left out, and their share is told.
    """
    if hasattr(model, "set_experts_implementation"):
        # The grouped kernels know no float64.
        model.set_experts_implementation("eager")
    margins: list[torch.Tensor] = []
    for module in model.modules():
        if hasattr(module, "top_k"):
            module.register_forward_hook(lambda module, _, output: margins.append(margin(module.top_k, output[0])))
    worst, left_out, tokens = 0.0, 0, 0
    for request, completion in done:
        margins.clear()
        ids = torch.tensor([request.prompt_ids + completion.token_ids])
        logits = model(input_ids=ids, use_cache=False).logits[0, PROMPT - 1 : -1]
        wanted = torch.log_softmax(logits, -1).gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        error = (torch.tensor(completion.log_probs, dtype=torch.float64) - wanted).abs()
        tied = torch.stack(margins).amin(0) < 1e-6 if margins else torch.zeros(ids.shape[1], dtype=torch.bool)
        # The token at position p was sampled from what positions before p computed.
        sound = ~tied.cummax(0).values[PROMPT - 1 : -1]
        worst = max(worst, float(error[sound].max()) if bool(sound.any()) else 0.0)
        left_out += int((~sound).sum())
        tokens += len(error)
    return {"logprob_error": worst, "logprob_left_out": left_out / tokens}


def margin(top_k: int, router_logits: torch.Tensor) -> torch.Tensor:
    """Distance in probability between the last expert that was chosen and the first that was not."""
    ranked = router_logits.softmax(-1).sort(-1, descending=True).values
    return ranked[:, top_k - 1] - ranked[:, top_k]


async def through_the_child(folder: Path, load: Workload) -> float:
    """Tokens a second of the whole engine: child process, messages and futures included."""
    config = EngineConfig(slots=SLOTS, max_length=PROMPT + LONGEST, request_seconds=600)
    engine = LocalEngine("benchmark", folder, config)
    await engine.start()
    try:
        await asyncio.gather(*(engine.generate(request) for request in load.requests()[:SLOTS]))
        start = time.perf_counter()
        await asyncio.gather(*(engine.generate(request) for request in load.requests()))
        return load.tokens / (time.perf_counter() - start)
    finally:
        await engine.close()


def measure(config: ModelConfig, requests: int, pairs: int, folder: Path) -> dict[str, Any]:
    """All figures of one model."""
    build_tiny(config, 0, folder / "model")
    model, theirs = load_policy(folder / "model"), load_policy(folder / "model")
    vocab_size = model.config.vocab_size
    equal = Workload([EQUAL] * requests, vocab_size)
    heavy = Workload(heavy_lengths(requests, LONGEST), vocab_size)
    shorter = Workload(heavy_lengths(requests, DEFAULT_LONGEST), vocab_size)
    batch = ContinuousBatch(ModelRunner(model, slots=SLOTS, max_length=PROMPT + LONGEST))
    assert batch.runner.fused
    ours, theirs_equal = Stopwatch(lambda: serve(batch, equal)), Stopwatch(lambda: generate(theirs, equal))
    ours_heavy, theirs_heavy = Stopwatch(lambda: serve(batch, heavy)), Stopwatch(lambda: generate(theirs, heavy))
    ours_shorter = Stopwatch(lambda: serve(batch, shorter))
    same = compare(ours, theirs_equal, pairs=pairs)
    tail = compare(ours_heavy, theirs_heavy, pairs=1, warm_up=0)
    own = compare(ours, ours_heavy, pairs=pairs, warm_up=0)
    own_shorter = compare(ours, ours_shorter, pairs=pairs, warm_up=0)
    parameters = sum(parameter.numel() for parameter in theirs.parameters())
    checked = list(serve(batch, heavy).values())[:CHECKED]
    return {
        "parameters": parameters,
        "equal_ratio": same.ratio,
        "equal_spread": same.spread,
        "heavy_tail_ratio": tail.ratio,
        "tail_efficiency": heavy.tokens / equal.tokens / own.ratio,
        "tail_efficiency_spread": [heavy.tokens / equal.tokens / ratio for ratio in own.spread[::-1]],
        "tail_efficiency_default_slot": shorter.tokens / equal.tokens / own_shorter.ratio,
        "cpu": {
            "equal_ratio": theirs_equal.median / ours.median,
            "heavy_tail_ratio": theirs_heavy.median / ours_heavy.median,
            "tail_efficiency": heavy.tokens / equal.tokens * ours.median / ours_heavy.median,
            "tail_efficiency_default_slot": shorter.tokens / equal.tokens * ours.median / ours_shorter.median,
            "equal_tokens_per_s": equal.tokens / ours.median,
            "heavy_tokens_per_s": heavy.tokens / ours_heavy.median,
        },
        "equal_tokens_per_s": equal.tokens / statistics.median(same.ours_s),
        "generate_tokens_per_s": equal.tokens / statistics.median(same.theirs_s),
        "heavy_tokens_per_s": heavy.tokens / statistics.median(own.theirs_s),
        "child_tokens_per_s": asyncio.run(through_the_child(folder / "model", equal)),
        **load_pauses(batch, equal, folder),
        **log_prob_error(theirs.double(), checked),
    }


def main() -> None:
    """Measure both models and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--pairs", type=int, default=3)
    arguments = parser.parse_args()
    wanted = {"OMP_NUM_THREADS": "1", **MEMORY_SETTINGS}
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        # Read when a process starts. Both sides get what the engine gives its own child.
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | wanted)
    torch.set_num_threads(1)
    figures: dict[str, Any] = {"requests": arguments.requests, "slots": SLOTS, "prompt": PROMPT}
    figures |= {
        "new_tokens": {"equal": EQUAL, "median": MEDIAN, "sigma": 1, "longest": LONGEST, "default": DEFAULT_LONGEST}
    }
    for name, config in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            figures[name] = measure(config, arguments.requests, arguments.pairs, Path(folder))
    write_results("engine", figures)


if __name__ == "__main__":
    main()
