"""Do engine, learner and a plain float64 forward of transformers agree, on four architectures?

    python benchmarks/parity.py [--families qwen3 gemma3] [--rollouts 12]

For each family a random tiny model plays rollouts of three turns in the engine's own code: observations between the
turns, and two loads of other weights in the middle, after which the caches are computed anew. Every action token is
then evaluated again in float64, one rollout at a time without padding, by the weights that its stamp names. Reported
are the largest differences of log-probabilities (engine and learner), of the ratio π/μ from 1, and of the gradients
that the learner applies (relative to the largest gradient). `--write` adds benchmarks/results/parity.json.
"""

from __future__ import annotations

import argparse
import copy
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from soloist.config import RunConfig, build_config
from soloist.engines.local.batch import ContinuousBatch
from soloist.engines.local.model_runner import ModelRunner
from soloist.models.loading import save_weights
from soloist.models.value import ValueModel
from soloist.training.learner import Learner
from soloist.types import Completion, GenerateRequest, Rollout, Sampling, Segment, Turn, VersionSpan, WeightsRef

VOCABULARY = 113
TEMPERATURES = (1.0, 0.7)
SLOTS, MAX_LENGTH = 4, 160
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "attn_implementation": "sdpa",
}  # fmt: skip


def _qwen3() -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=True))


def _qwen3_moe() -> PreTrainedModel:
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "norm_topk_prob": True}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **experts))


def _llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SHAPE))


def _gemma3() -> PreTrainedModel:
    # A window shorter than the rollouts, in every second layer, so that a wrong window shows.
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    return Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, sliding_window=9, layer_types=kinds, query_pre_attn_scalar=12))


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "llama": _llama,
    "gemma3": _gemma3,
}


@torch.no_grad()
def moved(model: PreTrainedModel, seed: int, scale: float) -> PreTrainedModel:
    """A copy whose matrices differ by normal noise: far from uniform, so that an error in any part shows."""
    other = copy.deepcopy(model).eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in other.parameters():
        if parameter.dim() > 1:
            parameter += scale * torch.randn(parameter.shape, generator=generator)
    return other


class Game:
    """Rollouts in play: each has `TURNS` actions with random observations between them."""

    TURNS = 3

    def __init__(self, number: int, temperature: float) -> None:
        self.rng = random.Random(number)
        self.number = number
        self.temperature = temperature
        self.ids = self._noise(3, 9)
        self.mask = [False] * len(self.ids)
        self.log_probs: list[float | None] = [None] * len(self.ids)
        self.spans: list[VersionSpan] = []
        self.turns: list[Turn] = []

    def _noise(self, least: int, most: int) -> list[int]:
        return [self.rng.randrange(VOCABULARY) for _ in range(self.rng.randint(least, most))]

    def request(self) -> GenerateRequest:
        """The next turn's request."""
        sampling = Sampling(temperature=self.temperature, max_new_tokens=self.rng.randint(2, 12), stop_token_ids=(7,))
        name = f"r{self.number}"
        return GenerateRequest(
            request_id=f"{name}/{len(self.turns)}",
            rollout_id=name,
            prompt_ids=list(self.ids),
            sampling=sampling,
            key=self.number,
        )

    def take(self, completion: Completion) -> bool:
        """Append an action and an observation; whether another turn follows."""
        start, count = len(self.ids), len(completion.token_ids)
        self.ids += completion.token_ids
        self.mask += [True] * count
        self.log_probs += completion.log_probs
        self.spans += [
            VersionSpan(version=span.version, start=start + span.start, end=start + span.end)
            for span in completion.version_spans
        ]
        self.turns.append(Turn(segment=0, start=start, end=start + count, finish_reason=completion.finish_reason))
        observed = self._noise(1, 6)
        self.ids += observed
        self.mask += [False] * len(observed)
        self.log_probs += [None] * len(observed)
        return len(self.turns) < self.TURNS

    def rollout(self) -> Rollout:
        """What the learner gets."""
        segment = Segment(
            token_ids=self.ids, action_mask=self.mask, rollout_log_probs=self.log_probs, version_spans=self.spans
        )
        name = f"r{self.number}"
        return Rollout(
            rollout_id=name, task_id=name, group_id=name, environment="noise", state="scored", status="completed",
            terminated=True, segments=[segment], turns=self.turns, score=float(self.rng.random()),
            sampling=Sampling(temperature=self.temperature),
        )  # fmt: skip


def play(versions: Sequence[PreTrainedModel], count: int, temperature: float) -> list[Rollout]:
    """Play `count` rollouts; the weights of version 1 and 2 are loaded after a third and two thirds of the actions."""
    runner = ModelRunner(copy.deepcopy(versions[0]), slots=SLOTS, max_length=MAX_LENGTH)
    batch = ContinuousBatch(runner, recompute=True)
    games = {f"r{number}": Game(number, temperature) for number in range(count)}
    for game in games.values():
        batch.submit(game.request())
    pending, done = len(games), 0
    with tempfile.TemporaryDirectory() as folder:
        while pending:
            for answer in batch.step():
                if answer.completion is None:
                    raise RuntimeError(f"request {answer.request_id} was refused: {answer.reason}")
                game, done = games[answer.request_id.partition("/")[0]], done + 1
                if game.take(answer.completion):
                    batch.submit(game.request())
                else:
                    pending -= 1
            due = done * len(versions) // (count * Game.TURNS)
            if runner.version < due < len(versions):
                path = Path(folder) / f"{due}.safetensors"
                batch.load(WeightsRef(path=str(path), version=due, sha256=save_weights(versions[due], path)))
    return [game.rollout() for game in games.values()]


def exact(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights in float64, its experts one after the other."""
    double = copy.deepcopy(model).double()
    if "moe" in model.config.model_type:
        # The grouped product has no float64 version.
        double.set_experts_implementation("eager")
    return double


def log_probs(model: PreTrainedModel, rollout: Rollout) -> Tensor:
    """log π of every token of a rollout but the first, in the model's own type, no padding, [L − 1]."""
    ids = torch.tensor([rollout.segments[0].token_ids])
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1] / rollout.sampling.temperature
    return torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None])[:, 0]


@torch.no_grad()
def engine_error(versions: Sequence[PreTrainedModel], rollouts: Sequence[Rollout]) -> float:
    """Largest |log μ − float64 log π of the stamped version|."""
    doubles = [exact(model) for model in versions]
    worst = 0.0
    for rollout in rollouts:
        segment = rollout.segments[0]
        references = [log_probs(model, rollout) for model in doubles]
        for position, version in enumerate(segment.versions()):
            recorded = segment.rollout_log_probs[position]
            if version is not None and recorded is not None:
                worst = max(worst, abs(recorded - float(references[version][position - 1])))
    return worst


def config_for(temperature: float) -> RunConfig:
    """SGD at learning rate 1 moves each parameter by its gradient; small micro-batches of mixed lengths."""
    raw = {
        "token_budget": 256,
        "rollout": {"temperature": temperature},
        "policy": {"lr": 1.0, "warmup_steps": 0, "max_grad_norm": 1e9},
        "value": {"lr": 1.0, "warmup_steps": 0, "max_grad_norm": 1e9},
    }
    return build_config(raw, "parity")


def learner_of(policy: PreTrainedModel, value: ValueModel, config: RunConfig) -> Learner:
    """The real learner with plain gradient descent in place of AdamW."""
    learner = Learner(policy, value, config)
    learner._actor.optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    trained = [parameter for parameter in value.parameters() if parameter.requires_grad]
    learner._critic.optimizer = torch.optim.SGD(trained, lr=1.0)
    return learner


def reference_gradients(
    policy: PreTrainedModel, value: ValueModel, rollouts: Sequence[Rollout], config: RunConfig
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of the value loss, then of DIS with the moved critic's advantages; float64, one rollout at a time."""
    policy, value = exact(policy), copy.deepcopy(value).double()
    if "moe" in policy.config.model_type:
        value.backbone.set_experts_implementation("eager")
    tokens = sum(rollout.action_tokens for rollout in rollouts)
    actions = [torch.tensor(rollout.segments[0].action_mask)[1:] for rollout in rollouts]

    def values(rollout: Rollout, mask: Tensor) -> Tensor:
        hidden = value.backbone(input_ids=torch.tensor([rollout.segments[0].token_ids]), use_cache=False)
        found: Tensor = value.head(hidden.last_hidden_state[0, :-1])[:, 0][mask]
        return found

    for rollout, mask in zip(rollouts, actions, strict=True):
        # γ = λ_value = 1: the target of every token is the score, since no turn has a reward of its own.
        ((values(rollout, mask) - (rollout.score or 0.0)).square().sum() / tokens).backward()
    value_gradients = {name: p.grad.clone() for name, p in value.named_parameters() if p.grad is not None}
    with torch.no_grad():
        for parameter in value.parameters():
            parameter -= 0.0 if parameter.grad is None else parameter.grad
    for rollout, mask in zip(rollouts, actions, strict=True):
        chosen = log_probs(policy, rollout)[mask]
        recorded = torch.tensor([x for x in rollout.segments[0].rollout_log_probs if x is not None]).double()
        ratio = (chosen - recorded).exp().detach()
        inside = (ratio > 1 - config.loss.eps_low) & (ratio < 1 + config.loss.eps_high)
        advantages = advantages_of(values(rollout, mask).detach(), rollout, config)
        (-(ratio * inside * advantages * chosen).sum() / tokens).backward()
    return {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}, value_gradients


def advantages_of(values: Tensor, rollout: Rollout, config: RunConfig) -> Tensor:
    """Skip-observation GAE with λ = 1 − 1/(α·l), one token after the other."""
    lam = max(0.0, 1 - 1 / (config.advantage.length_adaptive_alpha * len(values)))
    ends = [*values.tolist(), 0.0]
    advantage, found = 0.0, []
    for t in reversed(range(len(values))):
        reward = (rollout.score or 0.0) if t == len(values) - 1 else 0.0
        advantage = reward + ends[t + 1] - ends[t] + lam * advantage
        found.append(advantage)
    return torch.tensor(found[::-1], dtype=torch.float64)


def relative_difference(before: dict[str, Tensor], model: torch.nn.Module, gradients: dict[str, Tensor]) -> float:
    """Largest |applied − reference| ÷ largest |reference| over all parameters."""
    moves = {name: before[name] - p.detach().double() for name, p in model.named_parameters() if name in gradients}
    scale = max(float(gradient.abs().max()) for gradient in gradients.values())
    return max(float((moves[name] - gradients[name]).abs().max()) for name in moves) / scale


def measure(family: str, temperature: float, count: int) -> dict[str, float]:
    """All differences of one family at one temperature."""
    torch.manual_seed(0)
    versions = [moved(FAMILIES[family](), seed, 0.12) for seed in (0,)]
    versions += [moved(versions[0], seed, 0.01) for seed in (1, 2)]
    rollouts = play(versions, count, temperature)
    config = config_for(temperature)
    latest = versions[-1]
    policy = copy.deepcopy(latest)
    value = ValueModel.from_policy(latest)
    torch.nn.init.normal_(value.head.weight, std=0.3, generator=torch.Generator().manual_seed(5))
    learner = learner_of(policy, value, config)
    # Only what the latest weights sampled has a ratio of exactly 1; the rest is off-policy by one or two versions.
    stamped = [v for rollout in rollouts for v in rollout.segments[0].versions() if v is not None]
    errors = learner.log_prob_errors(rollouts)
    fresh = [error for error, version in zip(errors, stamped, strict=True) if version == len(versions) - 1]
    figures = {
        "tokens": float(len(stamped)),
        "fresh_tokens": float(len(fresh)),
        "spanning": sum(len({span.version for span in rollout.spans()}) > 1 for rollout in rollouts) / len(rollouts),
        "engine_log_prob": engine_error(versions, rollouts),
        "learner_log_prob": learner_error(learner, latest, rollouts),
        "ratio": max(fresh),
    }
    policy_gradients, value_gradients = reference_gradients(latest, value, rollouts, config)
    padded_policy, padded_value = copy.deepcopy(latest), copy.deepcopy(value)
    before = {name: p.detach().double().clone() for name, p in policy.named_parameters()}
    before_value = {name: p.detach().double().clone() for name, p in value.named_parameters()}
    learner.update_value(rollouts)
    figures["value_gradient"] = relative_difference(before_value, value, value_gradients)
    learner.update_policy(rollouts)
    figures["policy_gradient"] = relative_difference(before, policy, policy_gradients)
    figures["packed"] = float(learner._packed)
    padded = learner_of(padded_policy, padded_value, config)
    padded._packed = False
    padded.update_value(rollouts)
    padded.update_policy(rollouts)
    moves = {name: before[name] - p.detach().double() for name, p in padded_policy.named_parameters()}
    figures["packed_against_padded"] = relative_difference(before, policy, moves)
    return figures


@torch.no_grad()
def learner_error(learner: Learner, model: PreTrainedModel, rollouts: Sequence[Rollout]) -> float:
    """Largest |learner's log π − float64 log π|, of the newest weights, over all action tokens."""
    double = exact(model)
    worst = 0.0
    for rollout in rollouts:
        mask = torch.tensor(rollout.segments[0].action_mask)[1:]
        precise = log_probs(double, rollout)[mask]
        segment = rollout.segments[0]
        # The exact values in place of the engine's: what is left of |π/μ − 1| is the learner's own error.
        given: list[float | None] = [None] * len(segment.token_ids)
        for position, value in zip(mask.nonzero().flatten().tolist(), precise.tolist(), strict=True):
            given[position + 1] = value
        changed = Segment(
            token_ids=segment.token_ids, action_mask=segment.action_mask, rollout_log_probs=given,
            version_spans=segment.version_spans,
        )  # fmt: skip
        worst = max(worst, *learner.log_prob_errors([_with(rollout, changed)]))
    return worst


def _with(rollout: Rollout, segment: Segment) -> Rollout:
    fields = {name: getattr(rollout, name) for name in rollout.__struct_fields__}
    return Rollout(**fields | {"segments": [segment]})


def table(rows: dict[str, dict[str, float]]) -> str:
    """The figures as a Markdown table."""
    names = list(next(iter(rows.values())))
    lines = ["| family, T | " + " | ".join(names) + " |", "|" + "---|" * (len(names) + 1)]
    for label, row in rows.items():
        cells = [f"{row[name]:.2g}" if abs(row[name]) < 1 else f"{row[name]:.0f}" for name in names]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure all and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--rollouts", type=int, default=24)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, Any] = {
        f"{family}, {temperature}": measure(family, temperature, arguments.rollouts)
        for family in arguments.families
        for temperature in TEMPERATURES
    }
    print(table(rows))
    if arguments.write:
        from harness import write_results  # beside this file

        write_results("parity", {"rows": rows})


if __name__ == "__main__":
    main()
