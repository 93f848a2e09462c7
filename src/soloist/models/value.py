"""The value model: the policy's transformer without its vocabulary head, with a scalar head in fp32 (methods §1.3).

Legend: B rows of a padded batch, L its length, T selected tokens.

Guarantees: V of a token is the value of the state *before* it is emitted; parameters are named `backbone.…` and
`head.…` for every architecture; frozen parameters get no gradient, hence no optimizer state, and don't
change by a single bit. Weights are saved and read like the policy's (`loading.save_weights`, …).
Not covered: targets and advantages (`algorithms/`), when to freeze (`training/`).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from soloist.models.loading import load_policy
from soloist.models.policy import check_selection


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

    def values(self, input_ids_BL: Tensor, rows_T: Tensor, positions_T: Tensor) -> Tensor:
        """V_t of the state before token t: read at `positions_T` − 1, which has seen everything up to there (eqs 4–5).

        A position equal to the length of a row's tokens gives the state after its last token, for the bootstrap of a
        truncated rollout. Shapes: `input_ids_BL` [B, L] int64, padded on the right without a mask (see `policy.py`);
        `rows_T`, `positions_T` [T] int64; result [T] fp32, in units of reward. Raises ValueError for positions
        outside 1 … L.
        """
        check_selection(input_ids_BL, rows_T, positions_T, last=input_ids_BL.shape[1])
        hidden_BLD = self.backbone(input_ids=input_ids_BL, use_cache=False).last_hidden_state
        values_T: Tensor = self.head(hidden_BLD[rows_T, positions_T - 1].float()).squeeze(-1)
        return values_T

    def forward(self, input_ids_BL: Tensor, rows_T: Tensor, positions_T: Tensor) -> Tensor:
        """The same as `values`."""
        return self.values(input_ids_BL, rows_T, positions_T)


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
