"""Log-probabilities of chosen tokens under a causal LM: the one forward pass that policy, SFT and probes share.

Legend: B rows of a padded batch, L its length, T selected tokens, V vocabulary.

Guarantees: log-probabilities are fp32 whatever the model's type, at the sampling temperature, of the full distribution;
only the selected positions pass through the softmax. Not covered: packing (`training/pack.py`), losses (`algorithms/`).

Batches are padded on the right and come without an attention mask. None is needed: attention is causal, so a token
sees only what stands to its left, and padding stands to the right of every selected token. Experts of a MoE layer take
each token by itself. Positions count from 0 in each row.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel


def action_log_probs(
    model: PreTrainedModel,
    input_ids_BL: Tensor,
    rows_T: Tensor,
    positions_T: Tensor,
    temperature: float,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """log π(a_t) = log_softmax(z_{t−1} / temperature)[a_t] and, if asked, the entropy −Σ_v π_v·log π_v in nats.

    Token t is the one at `input_ids_BL[rows_T, positions_T]`; its logits z_{t−1} stand one position before.
    The temperature is the one that the engine sampled with: at another, an unchanged policy has a ratio other than 1
    (methods §9). With temperature 1 the negative of the result is SFT's loss per token.

    Shapes: `input_ids_BL` [B, L] int64, `rows_T` and `positions_T` [T] int64, results [T] fp32. Differentiable.
    Raises ValueError when a position has no predecessor, lies beyond the row, or the temperature is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; log-probabilities need one above 0, as training samples with")
    check_selection(input_ids_BL, rows_T, positions_T, last=input_ids_BL.shape[1] - 1)
    logits_BLV = model(input_ids=input_ids_BL, use_cache=False).logits
    log_probs_TV = torch.log_softmax(logits_BLV[rows_T, positions_T - 1].float() / temperature, dim=-1)
    tokens_T = input_ids_BL[rows_T, positions_T]
    log_probs_T = log_probs_TV.gather(-1, tokens_T[:, None]).squeeze(-1)
    if not with_entropy:
        return log_probs_T, None
    return log_probs_T, -(log_probs_TV.exp() * log_probs_TV).sum(dim=-1)


def check_selection(input_ids_BL: Tensor, rows_T: Tensor, positions_T: Tensor, last: int) -> None:
    """Raise ValueError unless every selected (row, position) has rank 1, a row of the batch and 1 ≤ position ≤ `last`.

    Position 0 would silently wrap round to the end of the row, which is why this is checked each time.
    """
    if input_ids_BL.dim() != 2 or rows_T.dim() != 1 or rows_T.shape != positions_T.shape:
        raise ValueError(
            f"found input_ids {list(input_ids_BL.shape)}, rows {list(rows_T.shape)}, positions "
            f"{list(positions_T.shape)}; expected [B, L], [T] and [T]"
        )
    if rows_T.numel() == 0:
        return
    lowest, highest = int(positions_T.min()), int(positions_T.max())
    if lowest < 1 or highest > last:
        raise ValueError(f"positions span {lowest} … {highest}; a predicted one has a predecessor, so 1 … {last}")
    first_row, last_row = int(rows_T.min()), int(rows_T.max())
    if first_row < 0 or last_row >= input_ids_BL.shape[0]:
        raise ValueError(f"rows span {first_row} … {last_row}, but the batch has {input_ids_BL.shape[0]}")
