"""The stand-ins of a nemesis run: a learner of a few integers, a rendering of bytes, and the stub engine's child.

Everything else of such a run is the product: main loop, buffer, ledger, snapshots, recovery, engine supervision, the
calculator and its sandbox. The formulas stand in `recompute.py`, which is written apart from this file.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

from soloist.engines.local.child import Child, child_environment
from soloist.environments.arithmetic import evaluate
from soloist.environments.base import Action, ToolCall
from soloist.seams import Storage, fault_point
from soloist.types import Message, Rollout, WeightsRef

MODULUS = 2**61 - 1
HERE = Path(__file__).parent
Metrics = dict[str, float | None]
State = dict[str, tuple[dict[str, Any], dict[str, Any]]]


def _compact(data: Any) -> bytes:
    return json.dumps(data, sort_keys=True, separators=(",", ":")).encode()


def _number(rollout: Rollout) -> int:
    text = rollout.rollout_id
    text += "|" + ",".join(str(t) for s in rollout.segments for t in s.token_ids)
    text += "|" + ",".join(str(int(a)) for s in rollout.segments for a in s.action_mask)
    text += "|" + ",".join("-" if p is None else repr(p) for s in rollout.segments for p in s.rollout_log_probs)
    text += f"|{rollout.reward!r}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])


class NumericLearner:
    """`StepLearner` whose result depends on every bit of the rollouts and on their order. No torch.

    Example: `learner = NumericLearner(seed=3, step_seconds=0.01)`.
    """

    def __init__(self, seed: int, step_seconds: float, storage: Storage) -> None:
        self.version = 0
        self.tokens = None
        self._updates = 0
        self._seconds = step_seconds
        self._storage = storage
        self._vectors = {
            name: [int.from_bytes(hashlib.sha256(f"{seed}/{name}/{i}".encode()).digest()[:7]) for i in range(size)]
            for name, size in (("policy", 8), ("policy_m", 8), ("value", 4), ("value_m", 4))
        }

    async def update_value(self, rollouts: list[Rollout]) -> Metrics:
        """Fold the rollouts into the value vector."""
        await asyncio.sleep(self._seconds / 4)
        value, momentum = self._vectors["value"], self._vectors["value_m"]
        for position, number in enumerate(map(_number, rollouts)):
            for i in range(4):
                momentum[i] = (momentum[i] * 3 + number + position + i) % MODULUS
                value[i] = (value[i] + momentum[i] * (i + 1) + value[(i + 1) % 4]) % MODULUS
        fault_point("standin:value:step")
        self._updates += 1
        return {"critic/loss": float(value[0] % 997)}

    async def update_policy(self, rollouts: list[Rollout]) -> Metrics:
        """Fold the rollouts into the policy vector; one version more."""
        await asyncio.sleep(self._seconds / 2)
        policy, momentum, value = (self._vectors[name] for name in ("policy", "policy_m", "value"))
        for position, number in enumerate(map(_number, rollouts)):
            for i in range(8):
                momentum[i] = (momentum[i] * 5 + (number ^ value[i % 4]) + position * 7) % MODULUS
                policy[i] = (policy[i] * 31 + momentum[i] + self.version) % MODULUS
            # In the middle of a step: half of the rollouts are in the weights.
            fault_point("standin:policy:step")
        self.version += 1
        return {"actor/pg_loss": float(policy[0] % 997)}

    def prepare(self, rollout: Rollout) -> None:
        """Nothing can be done before the step."""

    async def fingerprint(self) -> str:
        """Digest of everything that `state` holds."""
        everything = self._vectors | {"version": self.version, "value_updates": self._updates}
        return hashlib.sha256(_compact(everything)).hexdigest()

    async def publish(self, folder: Path) -> WeightsRef:
        """Write the policy vector as `model.safetensors`, staged and renamed like the real one."""
        folder.mkdir(parents=True, exist_ok=True)
        path, staged = folder / "model.safetensors", folder / ".model.safetensors.tmp"
        data = _compact({"policy": self._vectors["policy"], "version": self.version})
        self._storage.write(staged, data)
        self._storage.rename(staged, path)
        return WeightsRef(path=str(path), version=self.version, sha256=hashlib.sha256(data).hexdigest())

    async def state(self) -> State:
        """Copies of everything."""
        v = {name: list(vector) for name, vector in self._vectors.items()}
        return {
            "policy": ({"weight": v["policy"]}, {"version": self.version}),
            "policy_optimizer": ({"weight": v["policy_m"]}, {}),
            "value": ({"weight": v["value"]}, {"updates": self._updates}),
            "value_optimizer": ({"weight": v["value_m"]}, {}),
        }

    async def load_state(self, state: State) -> None:
        """Take back what `state` gave."""
        self._vectors = {
            name: list(state[part][0]["weight"])
            for name, part in (
                ("policy", "policy"),
                ("policy_m", "policy_optimizer"),
                ("value", "value"),
                ("value_m", "value_optimizer"),
            )
        }
        self.version = state["policy"][1]["version"]
        self._updates = state["value"][1]["updates"]

    async def close(self) -> None:
        """Nothing is held."""


class ByteRendering:
    """`Rendering` of bytes: token b + 1 is byte b. What was sampled decides about the action by its sum."""

    stop_token_ids = (0,)

    def prompt(self, messages: list[Message], tools: list[dict[str, Any]]) -> list[int]:
        """All contents, a line each."""
        return [1 + byte % 127 for one in messages for byte in f"{one['content']}\n".encode()]

    def parse(self, prompt_ids: list[int], completion_ids: list[int], tools: Any = None) -> Action:
        """A third calls the tool, a third answers rightly, a third answers anything."""
        total = sum(completion_ids)
        problem = bytes(max(token - 1, 0) for token in prompt_ids).decode().split("\n")[0]
        if total % 3 == 0:
            return Action(text="", tool_calls=[ToolCall(name="python", arguments={"code": problem})])
        return Action(text=str(evaluate(problem)) if total % 3 == 1 else str(total))

    def extend(
        self, prompt_ids: list[int], completion_ids: list[int], new_messages: list[Message], tools: Any
    ) -> list[int]:
        """Prompt, action and observation."""
        return [*prompt_ids, *completion_ids, *self.prompt(new_messages, tools)]

    def assistant_message(self, action: Action) -> Message:
        """The action's text."""
        return {"role": "assistant", "content": action.text}

    def text_of(self, token_id: int) -> str:
        """The byte as text."""
        return chr(max(token_id - 1, 32))


def stub_child(token_seconds: float) -> type[Child]:
    """A `Child` that runs the stub worker instead of the one with torch."""

    class StubChild(Child):
        @classmethod
        async def spawn(cls, threads: int) -> Child:
            ours, theirs = socket.socketpair()
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "soloist.engines.local.lifeline", str(os.getpid()),
                sys.executable, "-P", str(HERE / "stub_worker.py"), str(theirs.fileno()), str(token_seconds),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                env=child_environment(threads, os.environ),
                start_new_session=True,
            )  # fmt: skip
            theirs.close()
            reader, writer = await asyncio.open_unix_connection(sock=ours)
            return cls(process, reader, writer)

    return StubChild
