"""The value model: the policy's transformer without its vocabulary head, with a scalar head in fp32 (methods §1.3).

Legend: B rows of a micro-batch, L its length, t its selected tokens.

Guarantees: V of a token is the value of the state *before* it is emitted; parameters are named `backbone.…` and
`head.…` for every architecture; frozen parameters get no gradient, hence no optimizer state, and don't
change by a single bit. Weights are saved and read like the policy's (`loading.save_weights`, …).
Not covered: targets and advantages (`algorithms/`), when to freeze (`training/`).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from soloist.models.frozen import FrozenStates
from soloist.models.loading import load_policy
from soloist.models.packed import model_inputs
from soloist.models.rows import MicroBatch


class ValueModel(nn.Module):
    """V(s) = w·h(s) + b, with h the last hidden state of the backbone, cast to fp32.

    The head starts at zero, so that V is 0 everywhere and the first advantages are the plain returns: a random head
    would add noise of the size of the reward to every one of them. The first update moves only the head, as h is not
    zero; from the second on the backbone's gradient is not zero either.
    Example: `ValueModel.from_policy(Path("runs/x/sft"))`.
    """

    def __init__(self, backbone: PreTrainedModel) -> None:
        super().__init__()
        self.backbone = backbone
        device = next(backbone.parameters()).device
        self.head = nn.Linear(backbone.config.hidden_size, 1, dtype=torch.float32, device=device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @classmethod
    def from_policy(cls, policy: PreTrainedModel | Path, dtype: str = "float32", device: str = "cpu") -> ValueModel:
        """A value model on the policy's weights, all trainable: a copy of a model, or read from its folder.

        `dtype` and `device` apply to a folder; a model keeps its own. Raises UserError for a folder that is refused.
        """
        if isinstance(policy, Path):
            backbone = load_policy(policy, dtype, device).base_model
        else:
            backbone = copy.deepcopy(policy.base_model)
        return cls(backbone).requires_grad_(True).eval()

    def values(self, micro: MicroBatch, recall: FrozenStates | None = None) -> Tensor:
        """V_t of the state before token t, which has seen everything up to there (eqs 4–5), float32 [t].

        A token after the end of its sequence asks for the state that a truncated rollout stopped in. Units: reward.
        With `recall`, the frozen first layers are computed at the first call with that micro-batch only.
        """
        with recall.of(micro) if recall is not None else nullcontext():
            hidden_BLD = self.backbone(**model_inputs(micro)).last_hidden_state
        values_t: Tensor = self.head(hidden_BLD.flatten(0, 1)[micro.before_t].float()).squeeze(-1)
        return values_t

    def forward(self, micro: MicroBatch) -> Tensor:
        """The same as `values`."""
        return self.values(micro)


def freeze_parameters(module: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Stop the training of all parameters whose name a pattern is found in (`re.search`); return their names.

    Other parameters stay as they are. Raises ValueError for a pattern that matches nothing, which would leave something
    training that was meant to stand still, and for one that is no regular expression.
    """
    parameters = dict(module.named_parameters())
    frozen: set[str] = set()
    for pattern in patterns:
        try:
            matches = {name for name in parameters if re.search(pattern, name)}
        except re.error as error:
            raise ValueError(f"freeze pattern {pattern!r} is no regular expression: {error}") from error
        if not matches:
            raise ValueError(
                f"freeze pattern {pattern!r} matches none of {len(parameters)} parameters; mend value.freeze, names "
                f"look like {', '.join(list(parameters)[:3])}"
            )
        frozen |= matches
    for name in frozen:
        parameters[name].requires_grad_(False)
    return sorted(frozen)
