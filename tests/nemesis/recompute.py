"""The checker's own arithmetic: what the numeric stand-in and the stub engine must have produced.

Written from the formulas below and not from `standin.py` or `stub_worker.py`, so that neither can be wrong unseen.

    number(rollout)  first 8 bytes of SHA-256 of "id|tokens|mask|log-probs|reward"
    value update     m_i ← 3 m_i + n + k + i                   v_i ← v_i + (i + 1) m_i + v_{i+1 mod 4}
    policy update    m_i ← 5 m_i + (n ⊕ v_{i mod 4}) + 7 k     p_i ← 31 p_i + m_i + version
                     for rollout k of the step with number n, all mod P = 2⁶¹ − 1
    token            SHA-256 of "weights/seed/place/position": stop (0) below 40, else 1 + second byte mod 127
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

P = (1 << 61) - 1
SIZES = {"policy": 8, "policy_m": 8, "value": 4, "value_m": 4}


def compact(data: Any) -> bytes:
    """JSON without spaces, keys sorted."""
    return json.dumps(data, sort_keys=True, separators=(",", ":")).encode()


def number_of(rollout: dict[str, Any]) -> int:
    """A rollout, as the payload holds it, in 64 bits."""
    segments = rollout["segments"]
    tokens = [str(token) for one in segments for token in one["token_ids"]]
    mask = ["1" if action else "0" for one in segments for action in one["action_mask"]]
    log_probs = ["-" if p is None else repr(float(p)) for one in segments for p in one["rollout_log_probs"]]
    reward = rollout["score"] + sum(turn.get("reward", 0.0) for turn in rollout["turns"])
    fields = [rollout["rollout_id"], ",".join(tokens), ",".join(mask), ",".join(log_probs), repr(float(reward))]
    return int.from_bytes(hashlib.sha256("|".join(fields).encode()).digest()[:8], "big")


class Straight:
    """The state after each step, if every step trained exactly the rollouts that are on record for it.

    Example: `straight = Straight(seed=3, updates=2); straight.train(numbers); straight.fingerprints[-1]`.
    """

    def __init__(self, seed: int, updates: int) -> None:
        self._updates = updates
        self._state: dict[str, list[int]] = {
            name: [self._begin(seed, name, i) for i in range(size)] for name, size in SIZES.items()
        }
        self.version = 0
        self.value_updates = 0
        self.fingerprints = [self._fingerprint()]
        """State after 0, 1, 2 … steps."""
        self.weights: list[bytes | None] = [self._published()]
        """Bytes of the weights file of version 0, 1, 2 …; None where nobody can know them."""
        self.parts: list[dict[str, list[int]] | None] = [self._parts()]

    def skip_to(self, step: int, parts: dict[str, list[int]]) -> str:
        """Go on from a snapshot's vectors, where rollouts before it are no longer kept; returns the fingerprint."""
        self._state = {name: list(parts[name]) for name in SIZES}
        missing = step - self.version - 1
        self.version, self.value_updates = step, step * self._updates
        self.fingerprints += [""] * missing + [self._fingerprint()]
        self.weights += [*[None] * missing, self._published()]
        self.parts += [*[None] * missing, self._parts()]
        return self.fingerprints[-1]

    @staticmethod
    def _begin(seed: int, name: str, i: int) -> int:
        return int.from_bytes(hashlib.sha256(f"{seed}/{name}/{i}".encode()).digest()[:7], "big")

    def train(self, numbers: list[int]) -> None:
        """One step on rollouts in their order."""
        for _ in range(self._updates):
            self._value_update(numbers)
        s = self._state
        for k, n in enumerate(numbers):
            s["policy_m"] = [(5 * m + (n ^ s["value"][i % 4]) + 7 * k) % P for i, m in enumerate(s["policy_m"])]
            s["policy"] = [(31 * p + m + self.version) % P for p, m in zip(s["policy"], s["policy_m"], strict=True)]
        self.version += 1
        self.fingerprints.append(self._fingerprint())
        self.weights.append(self._published())
        self.parts.append(self._parts())

    def _value_update(self, numbers: list[int]) -> None:
        m, v = self._state["value_m"], self._state["value"]
        for k, n in enumerate(numbers):
            for i in range(4):
                m[i] = (3 * m[i] + n + k + i) % P
                v[i] = (v[i] + (i + 1) * m[i] + v[(i + 1) % 4]) % P
        self.value_updates += 1

    def _fingerprint(self) -> str:
        everything = {**self._state, "version": self.version, "value_updates": self.value_updates}
        return hashlib.sha256(compact(everything)).hexdigest()

    def _published(self) -> bytes:
        return compact({"policy": self._state["policy"], "version": self.version})

    def _parts(self) -> dict[str, list[int]]:
        return {name: list(values) for name, values in self._state.items()}


def wrong_token(rollout: dict[str, Any], weights: list[bytes | None]) -> str:
    """Why a sampled token can't come from the weights of the version that it is stamped with; empty when all can."""
    seed, place = rollout["sampling"]["seed"], rollout["place"]
    for segment in rollout["segments"]:
        stamped: dict[int, int] = {}
        for span in segment["version_spans"]:
            stamped |= dict.fromkeys(range(span["start"], span["end"]), span["version"])
        actions = [i for i, action in enumerate(segment["action_mask"]) if action]
        if sorted(stamped) != actions:
            return f"{rollout['rollout_id']}: version spans cover {len(stamped)} positions, actions are {len(actions)}"
        for i in actions:
            if not 0 <= stamped[i] < len(weights):
                return f"{rollout['rollout_id']}: token {i} is of version {stamped[i]}, which was never trained"
            known = weights[stamped[i]]
            if known is None:
                continue
            digest = hashlib.sha256(known + f"/{seed}/{place}/{i}".encode()).digest()
            token = 0 if digest[0] < 40 else 1 + digest[1] % 127
            log_prob = -(1 + int.from_bytes(digest[2:4], "big")) / 32768
            found = segment["token_ids"][i], segment["rollout_log_probs"][i]
            if found != (token, log_prob):
                return f"{rollout['rollout_id']}: token {i} is {found}, version {stamped[i]} gives {(token, log_prob)}"
    return ""
