"""Is a step of the learner as fast as the machine allows? One policy and K = 2 value updates on one thread.

    python benchmarks/learner.py

"Theirs" is the obvious implementation: the plain Hugging Face model, micro-batches of 8 rollouts in arrival order,
padded, with an attention mask and full logits; the same losses, frozen parameters and optimizers. Both take turns.

equal_ratio       their seconds ÷ ours, all rollouts equally long
heavy_tail_ratio  the same, log-normal lengths with σ = 1
matmul_share      model FLOPs of a step ÷ its seconds ÷ FLOP/s of large matrix products (`model_flops`); both in
                  seconds of CPU time, as seconds of a shared machine would make shares above 1; wall_share is by the
                  clock, with the harness's rate measured right before and after
peak_mb           memory that a policy update adds at a vocabulary of 65,536, each in a process of its own
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import compare, matmul_rate, seconds, write_results
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from soloist.algorithms.advantages import gae_over_rollouts, length_adaptive_lambda
from soloist.algorithms.gradients import clip_by_global_norm_
from soloist.algorithms.losses import POLICY_LOSSES
from soloist.config import ModelConfig, RunConfig, build_config
from soloist.models.optimizers import build_optimizer
from soloist.models.tiny import tiny_policy
from soloist.models.tokenizer import build_tokenizer
from soloist.models.value import ValueModel, freeze_parameters
from soloist.training.learner import Learner
from soloist.types import Rollout, Segment, Turn, VersionSpan

SIZES = {
    "0.46M": ModelConfig(),
    "10M": ModelConfig(hidden_size=320, layers=8, heads=8, mlp_size=960),
    "100M": ModelConfig(hidden_size=768, layers=12, heads=12, mlp_size=2304),
}
THEIR_ROLLOUTS = 8
VOCABULARY = 65_536


def rollouts_of(lengths: Sequence[int], vocabulary: int = 120, seed: int = 0) -> list[Rollout]:
    """Rollouts of random tokens: a quarter prompt, then one action."""
    random = np.random.default_rng(seed)
    made = []
    for index, length in enumerate(lengths):
        start = max(1, length // 4)
        segment = Segment(
            token_ids=random.integers(0, vocabulary, length).tolist(),
            action_mask=[position >= start for position in range(length)],
            rollout_log_probs=[-math.log(vocabulary) if position >= start else None for position in range(length)],
            version_spans=[VersionSpan(version=0, start=start, end=length)],
        )
        turn = Turn(segment=0, start=start, end=length, finish_reason="stop")
        made.append(
            Rollout(
                rollout_id=f"r{index}", task_id="t", group_id="g", environment="random", state="scored",
                status="completed", score=float(random.random() < 0.5), segments=[segment], turns=[turn],
            )
        )  # fmt: skip
    return made


def heavy_tail(count: int, median: int = 48, longest: int = 1024) -> list[int]:
    """Log-normal lengths, σ = 1."""
    drawn = np.random.default_rng(1).lognormal(math.log(median), 1.0, count)
    return np.clip(drawn, 4, longest).astype(int).tolist()


class Theirs:
    """The obvious implementation of the same step."""

    def __init__(self, policy: PreTrainedModel, value: ValueModel, config: RunConfig) -> None:
        self.policy, self.value, self.config = policy, value, config
        freeze_parameters(value, config.value.freeze)
        self.policy_optimizer = build_optimizer(policy.parameters(), config.policy.lr, 0.0, eps=config.policy.adam_eps)
        self.value_optimizer = build_optimizer(value.parameters(), config.value.lr, 0.0)

    def batches(self, rollouts: list[Rollout]) -> list[dict[str, Tensor]]:
        """Padded batches of 8 in arrival order."""
        made = []
        for start in range(0, len(rollouts), THEIR_ROLLOUTS):
            part = [rollout.segments[0] for rollout in rollouts[start : start + THEIR_ROLLOUTS]]

            def padded(rows: list[Any]) -> Tensor:
                return torch.nn.utils.rnn.pad_sequence(list(map(torch.tensor, rows)), batch_first=True)

            made.append(
                {
                    "ids": padded([segment.token_ids for segment in part]),
                    "attention_mask": padded([[1] * len(segment.token_ids) for segment in part]),
                    "action": padded([segment.action_mask for segment in part])[:, 1:],
                    "log_mu": padded([[p or 0.0 for p in segment.rollout_log_probs] for segment in part])[:, 1:],
                    "score": torch.tensor([rollout.score for rollout in rollouts[start : start + THEIR_ROLLOUTS]]),
                }
            )
        return made

    def values(self, batch: dict[str, Tensor]) -> Tensor:
        """V of all positions but the last."""
        output = self.value.backbone(input_ids=batch["ids"], attention_mask=batch["attention_mask"], use_cache=False)
        found: Tensor = self.value.head(output.last_hidden_state.float())[:, :-1, 0]
        return found

    def step(self, rollouts: list[Rollout]) -> None:
        """K value updates, advantages, one policy update."""
        batches = self.batches(rollouts)
        tokens = sum(int(batch["action"].sum()) for batch in batches)
        for _ in range(self.config.value.updates_per_step):
            for batch in batches:
                errors = (self.values(batch) - batch["score"][:, None]) ** 2
                (errors[batch["action"]].sum() / tokens).backward()
            self.finish(self.value, self.value_optimizer)
        for batch in batches:
            advantages = self.advantages(batch)
            self.policy_loss(batch, advantages, tokens).backward()
        self.finish(self.policy, self.policy_optimizer)

    @torch.no_grad()
    def advantages(self, batch: dict[str, Tensor]) -> Tensor:
        """Of the action tokens of a batch, in one row."""
        lengths = batch["action"].sum(dim=1)
        rewards = torch.zeros(int(lengths.sum()))
        rewards[lengths.cumsum(0) - 1] = batch["score"]
        lam = length_adaptive_lambda(lengths, 1.5)
        return gae_over_rollouts(rewards, self.values(batch)[batch["action"]], lengths, gamma=1.0, lam=lam)

    def policy_loss(self, batch: dict[str, Tensor], advantages: Tensor, tokens: int) -> Tensor:
        """DIS over one batch, from full logits; the entropy is a metric."""
        output = self.policy(input_ids=batch["ids"], attention_mask=batch["attention_mask"], use_cache=False)
        log_probs = torch.log_softmax(output.logits[:, :-1].float(), dim=-1)
        with torch.no_grad():
            self.entropy = -(log_probs.exp() * log_probs).sum(-1)[batch["action"]].sum()
        chosen = log_probs.gather(-1, batch["ids"][:, 1:, None]).squeeze(-1)
        weights = torch.full_like(advantages, 1 / tokens)
        log_mu = batch["log_mu"][batch["action"]]
        loss, _ = POLICY_LOSSES["dis"](chosen[batch["action"]], log_mu, advantages, weights, eps_low=0.3, eps_high=5.0)
        return loss

    def finish(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Clip, step and clear."""
        float(clip_by_global_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def ours_step(learner: Learner, rollouts: list[Rollout]) -> None:
    """The same with the learner, packing included."""
    for _ in range(learner.config.value.updates_per_step):
        learner.update_value(rollouts)
    learner.update_policy(rollouts)


def config_of(token_budget: int = 2048) -> RunConfig:
    """The calculator recipe's settings as far as they cost time."""
    return build_config({"token_budget": token_budget}, "benchmark")


def model_flops(model: PreTrainedModel, rollouts: list[Rollout], config: RunConfig) -> float:
    """FLOPs of one step that the mathematics asks for, multiply and add counted as two.

    With M the parameters of the layers' matrices, n tokens, a action tokens, H the head's parameters, A the attention's
    products (4 · n·L/2 · width in each layer, causal): forward 2·M·n + A, backward twice that; the head 6·H·a. Frozen
    matrices (F of M) have no weight gradient: 2·F·n less. So policy 6·M·n + 3·A + 6·H·a; each value update
    6·M·n + 3·A − 2·F·n; the values for advantages 2·M·n + A. Norms, activations, optimizer: not counted.
    """
    layers = [(name, p) for name, p in model.base_model.named_parameters() if p.dim() == 2 and "embed" not in name]
    matrices = sum(p.numel() for _, p in layers)
    frozen = sum(p.numel() for name, p in layers if "self_attn" in name)
    head = model.get_output_embeddings().weight.numel()
    lengths = [len(rollout.segments[0].token_ids) for rollout in rollouts]
    width = model.config.num_attention_heads * model.config.head_dim
    n, a = sum(lengths), sum(rollout.action_tokens for rollout in rollouts)
    attention = sum(2 * length**2 * width * model.config.num_hidden_layers for length in lengths)
    forward = 2 * matrices * n + attention
    updates = config.value.updates_per_step
    return float(3 * forward + 6 * head * a + updates * (3 * forward - 2 * frozen * n) + forward)


def speed(lengths: list[int], pairs: int) -> dict[str, Any]:
    """Ours against theirs on the 0.46 M model."""
    rollouts, config, tokenizer = rollouts_of(lengths), config_of(), build_tokenizer()
    ours_policy, their_policy = (tiny_policy(SIZES["0.46M"], 0, tokenizer) for _ in range(2))
    learner = Learner(ours_policy, ValueModel.from_policy(ours_policy), config)
    theirs = Theirs(their_policy, ValueModel.from_policy(their_policy), config)
    found = compare(lambda: ours_step(learner, rollouts), lambda: theirs.step(rollouts), pairs=pairs)
    return {
        "ratio": round(found.ratio, 3),
        "spread": [round(ratio, 3) for ratio in found.spread],
        "ours_s": [round(taken, 3) for taken in found.ours_s],
        "theirs_s": [round(taken, 3) for taken in found.theirs_s],
        "rollouts": len(rollouts),
        "tokens": sum(lengths),
        "longest": max(lengths),
    }


def matmul_share(size: str, count: int, length: int, repeats: int) -> dict[str, Any]:
    """How much of the rate of large matrix products a step reaches."""
    policy = tiny_policy(SIZES[size], 0, build_tokenizer())
    learner = Learner(policy, ValueModel.from_policy(policy), config_of())
    rollouts = rollouts_of([length] * count)
    flops = model_flops(policy, rollouts, learner.config)
    ours_step(learner, rollouts)
    shares, wall_shares, rates = [], [], []
    for _ in range(repeats):
        before, cpu_before, start = matmul_rate(repeats=20), cpu_matmul_rate(), time.process_time()
        taken = seconds(lambda: ours_step(learner, rollouts))
        used = time.process_time() - start
        rates.append((cpu_before + cpu_matmul_rate()) / 2)
        shares.append(flops / used / rates[-1])
        wall_shares.append(flops / taken / ((before + matmul_rate(repeats=20)) / 2))
    return {
        "share": round(float(np.median(shares)), 3),
        "shares": [round(share, 3) for share in shares],
        "wall_shares": [round(share, 3) for share in wall_shares],
        "matmul_gflops": [round(rate / 1e9, 1) for rate in rates],
        "parameters": sum(p.numel() for p in policy.parameters()),
        "tokens": count * length,
        "tflop": round(flops / 1e12, 3),
    }


def cpu_matmul_rate(size: int = 1024, count: int = 20) -> float:
    """As `harness.matmul_rate`, per second of CPU time."""
    left, right = torch.randn(2, size, size)
    start = time.process_time()
    for _ in range(count):
        left @ right
    return 2 * size**3 * count / (time.process_time() - start)


def peak_memory(whose: str) -> float:
    """MB that one step's policy update adds to this process's peak."""
    shape = {"hidden_size": 96, "intermediate_size": 288, "num_hidden_layers": 4, "num_attention_heads": 4}
    settings = Qwen3Config(vocab_size=VOCABULARY, num_key_value_heads=4, head_dim=24, tie_word_embeddings=True, **shape)
    torch.manual_seed(0)
    policy = Qwen3ForCausalLM(settings).eval()
    config = config_of()
    value = ValueModel.from_policy(policy)
    rollouts = rollouts_of([128] * 16, vocabulary=VOCABULARY)
    learner, theirs = Learner(policy, value, config), Theirs(policy, value, config)
    # The peak starts anew: a child's begins with what its parent held.
    Path("/proc/self/clear_refs").write_text("5")
    before = memory_mb("VmRSS")
    if whose == "ours":
        learner.update_policy(rollouts)
    else:
        batches = theirs.batches(rollouts)
        for batch in batches:
            theirs.policy_loss(batch, theirs.advantages(batch), 1000).backward()
        theirs.finish(policy, theirs.policy_optimizer)
    return memory_mb("VmHWM") - before


def memory_mb(name: str) -> float:
    """A line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(name))) / 1024


def peaks() -> dict[str, Any]:
    """Both in processes of their own."""
    found = {}
    for whose in ("ours", "theirs"):
        command = [sys.executable, __file__, "--peak", whose]
        found[whose] = round(float(subprocess.run(command, capture_output=True, text=True, check=True).stdout), 1)
    return found | {"vocabulary": VOCABULARY, "tokens": 2048, "ratio": round(found["theirs"] / found["ours"], 2)}


def main() -> None:
    """Measure all and write `results/learner.json`."""
    if sys.argv[1:2] == ["--peak"]:
        print(peak_memory(sys.argv[2]))
        return
    torch.set_num_threads(1)
    equal, tail = speed([96] * 64, pairs=5), speed(heavy_tail(128), pairs=5)
    shares = {
        "0.46M": matmul_share("0.46M", 64, 96, 5),
        "10M": matmul_share("10M", 16, 96, 3),
        "100M": matmul_share("100M", 8, 96, 3),
    }
    figures = {
        "equal_ratio": equal["ratio"],
        "heavy_tail_ratio": tail["ratio"],
        "matmul_share": {size: found["share"] for size, found in shares.items()},
        "peak_mb": peaks(),
        "equal": equal,
        "heavy_tail": tail,
        "matmul": shares,
    }
    write_results("learner", json.loads(json.dumps(figures)))


if __name__ == "__main__":
    main()
