"""TRL's GRPOTrainer on our calculator, from our SFT model, with our rollouts: what end_to_end.py compares with.

    python -m venv /tmp/trl && /tmp/trl/bin/pip install torch==2.13.0 trl==1.16.0 -e .
    /tmp/trl/bin/python benchmarks/trl_grpo.py RUN --steps 60 --lr 4e-4

Runs in an environment of its own, since TRL is no dependency of ours. RUN is a run folder whose SFT stage is done. The
rollouts are played by our episode player over our batching engine in this process, always with the trainer's newest
weights, so both sides share model, environment, tool, tokens and sampling speed; what differs is the trainer: groups of
`--group` rollouts for each prompt, no critic, generation and training in turns on all threads. Prints one JSON line a
step and, at the end, the held-out accuracy.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
import tomllib
from pathlib import Path
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from soloist.config import RunConfig, build_config
from soloist.engines.local.batch import ContinuousBatch
from soloist.engines.local.model_runner import ModelRunner
from soloist.models.loading import load_policy, load_tokenizer
from soloist.rollout.play import EpisodePlayer
from soloist.seams import SystemClock
from soloist.training.evaluation import evaluate, play_tasks
from soloist.training.setup import build_rendered
from soloist.types import Completion, GenerateRequest, Rollout, Sampling


class InProcess:
    """The batching engine without its process: whoever waits for a completion drives the next step."""

    def __init__(self, batch: ContinuousBatch) -> None:
        self._batch = batch
        self._waiting: dict[str, asyncio.Future[Completion]] = {}
        self._driver: asyncio.Task[None] | None = None

    async def generate(self, request: GenerateRequest) -> Completion:
        """Continue a prompt."""
        future = asyncio.get_running_loop().create_future()
        self._waiting[request.request_id] = future
        answer = self._batch.submit(request)
        if answer is not None and answer.completion is not None:
            return answer.completion
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        return await future

    async def _drive(self) -> None:
        while self._batch.busy:
            for answer in self._batch.step():
                assert answer.completion is not None, answer.reason
                self._waiting.pop(answer.request_id).set_result(answer.completion)
            # Lets players whose action is complete ask for their next turn before the next step.
            await asyncio.sleep(0)

    async def release(self, rollout_id: str) -> None:
        """Forget the rollout's prefix."""
        self._batch.release(rollout_id)

    async def abort(self, rollout_ids: list[str] | None = None) -> None:
        """Not needed: nothing runs out of time here."""


class Rollouts:
    """The rollout function: plays every prompt's task once, in one batch, and hands TRL tokens and rewards."""

    def __init__(self, config: RunConfig, folder: Path, model: torch.nn.Module) -> None:
        self.config = config
        self.environment, self.rendering = build_rendered(config, folder / "sft" / "model")
        self._runner = ModelRunner(
            load_policy(folder / "sft" / "model"), slots=config.engine.slots, max_length=config.engine.max_length
        )
        self._model = model
        self.batch = ContinuousBatch(self._runner)
        self.seed = 0

    def players(self) -> EpisodePlayer:
        """A player over the newest weights."""
        self._runner.load({name: p.detach() for name, p in self._model.named_parameters()}, self.seed)
        return EpisodePlayer(
            environment=self.environment,
            engine=InProcess(self.batch),
            rendering=self.rendering,
            budget=self.config.rollout,
            max_length=self.config.engine.max_length,
            clock=SystemClock(),
        )

    def sampling(self) -> Sampling:
        """Other random numbers each step."""
        self.seed += 1
        return Sampling(
            temperature=self.config.rollout.temperature,
            max_new_tokens=self.config.rollout.max_new_tokens,
            stop_token_ids=tuple(self.rendering.stop_token_ids),
            seed=self.seed,
        )

    async def play(self, indices: list[int]) -> list[Rollout]:
        """One rollout for each training task."""
        tasks = [self.environment.train_task(index) for index in indices]
        episodes, sampling = self.players(), self.sampling()
        return await play_tasks(
            episodes, tasks, sampling=sampling, config=self.config, clock=SystemClock(), prefix=f"s{self.seed}-"
        )

    async def evaluate(self, version: int) -> dict[str, Any]:
        """Held-out accuracy, as `soloist eval` measures it."""
        tasks = [self.environment.heldout_task(index) for index in range(self.config.eval.problems)]
        stops = tuple(self.rendering.stop_token_ids)
        return await evaluate(
            self.players(), tasks, config=self.config, stop_token_ids=stops, clock=SystemClock(), version=version
        )


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=64, help="rollouts a step")
    parser.add_argument("--group", type=int, default=8, help="rollouts a prompt")
    parser.add_argument("--lr", type=float, default=4e-4)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    config = build_config(
        tomllib.loads((arguments.run / "config.resolved.toml").read_text()), source=str(arguments.run)
    )
    folder = arguments.run / "sft" / "model"
    model = load_policy(folder)
    rollouts = Rollouts(config, arguments.run, model)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(rollouts.environment.start())
    started = time.monotonic()

    def play(prompts: list[str], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        played = loop.run_until_complete(rollouts.play([int(prompt) for prompt in prompts]))
        rewards = [rollout.reward or 0.0 for rollout in played]
        # Generation and the last training step are both paid for when the next rewards are there.
        print(
            json.dumps(
                {
                    "step": rollouts.seed - 1,
                    "seconds": time.monotonic() - started,
                    "reward": sum(rewards) / len(rewards),
                    "rollouts": len(rewards),
                }
            ),
            flush=True,
        )
        segments = [rollout.segments[0] for rollout in played]
        starts = [segment.action_mask.index(True) for segment in segments]
        pairs = list(zip(segments, starts, strict=True))
        return {
            "prompt_ids": [segment.token_ids[:start] for segment, start in pairs],
            "completion_ids": [segment.token_ids[start:] for segment, start in pairs],
            "logprobs": [[value or 0.0 for value in segment.rollout_log_probs[start:]] for segment, start in pairs],
            "env_mask": [[int(action) for action in segment.action_mask[start:]] for segment, start in pairs],
            "score": rewards,
        }

    def reward(completions: list[str], score: list[float], **_: Any) -> list[float]:
        return score

    prompts = Dataset.from_dict({"prompt": [str(index) for index in range(arguments.steps * arguments.batch)]})
    settings = GRPOConfig(
        output_dir=str(arguments.run / "trl"),
        per_device_train_batch_size=arguments.batch,
        num_generations=arguments.group,
        max_steps=arguments.steps,
        learning_rate=arguments.lr,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        temperature=config.rollout.temperature,
        max_completion_length=config.rollout.max_tokens,
        beta=0.0,
        bf16=False,
        activation_checkpointing=False,
        use_cpu=True,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=config.seed,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=settings,
        train_dataset=prompts,
        processing_class=load_tokenizer(folder),
        rollout_func=play,
    )
    started = time.monotonic()
    trainer.train()
    seconds = time.monotonic() - started
    found = loop.run_until_complete(rollouts.evaluate(arguments.steps))
    loop.run_until_complete(rollouts.environment.close())
    print(json.dumps({"trained_s": seconds, "eval": found["avg"], "steps": arguments.steps}), flush=True)


if __name__ == "__main__":
    main()
