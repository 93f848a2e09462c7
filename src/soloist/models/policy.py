"""Log-probabilities of chosen tokens under a causal LM: the one forward pass that policy, SFT and probes share.

Legend: B rows of a micro-batch, L its length, t its selected tokens, V vocabulary.

Guarantees: log-probabilities are fp32 whatever the model's type (fp64 for fp64), at the sampling temperature, of the
full distribution; only selected positions pass through the vocabulary head, in chunks. A model whose logits are more
than head(hidden), capped or scaled ones for example, is noticed and gives its own logits.
Not covered: making micro-batches (`rows.py`), losses (`algorithms/`).

Rows come without an attention mask. None is needed: attention is causal, so a token sees only what stands to its left,
and padding stands to the right of every selected token. Experts of a MoE layer take each token by itself.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from soloist.models.packed import model_inputs
from soloist.models.rows import MicroBatch
from soloist.models.vocabulary import chosen_log_probs

ENLARGED = 100.0

_plain_heads: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def action_log_probs(
    model: PreTrainedModel,
    micro: MicroBatch,
    temperature: float,
    *,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """log π(a_t) = log_softmax(z_{t−1} / temperature)[a_t] and the entropy −Σ_v π_v·log π_v in nats.

    The temperature is the one that the engine sampled with: at another, an unchanged policy has a ratio other than 1
    (methods §9). With temperature 1 the negative of the first result is SFT's loss per token. Results are [t];
    the entropy is a metric without gradient unless `entropy_gradient`. Raises ValueError unless the temperature is > 0.
    """
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; log-probabilities need one above 0, as training samples with")
    if has_plain_head(model):
        hidden_tD = model.base_model(**model_inputs(micro)).last_hidden_state.flatten(0, 1)[micro.before_t]
        head = model.get_output_embeddings()
        return chosen_log_probs(
            hidden_tD, head.weight, head.bias, micro.targets_t, temperature, entropy_gradient=entropy_gradient
        )
    logits_tV = _own_logits(model, micro)
    logits_tV = logits_tV.to(torch.promote_types(logits_tV.dtype, torch.float32)) / temperature
    log_probs_tV = torch.log_softmax(logits_tV, dim=-1)
    entropy_t = torch.special.entr(log_probs_tV.exp()).sum(dim=-1)
    log_probs_t = log_probs_tV.gather(-1, micro.targets_t[:, None]).squeeze(-1)
    return log_probs_t, entropy_t if entropy_gradient else entropy_t.detach()


def _own_logits(model: PreTrainedModel, micro: MicroBatch) -> Tensor:
    """The model's own logits, [t, V]; of a packed row only those that are asked for are made."""
    if micro.layout is None:
        logits_BLV: Tensor = model(**model_inputs(micro)).logits
        return logits_BLV.flatten(0, 1)[micro.before_t]
    # Sorted and once each, as a cut of the sequence is what the argument is made for.
    places, index_t = micro.before_t.unique(return_inverse=True)
    logits_1NV: Tensor = model(**model_inputs(micro), logits_to_keep=places).logits
    return logits_1NV[0][index_t]


@torch.no_grad()
def has_plain_head(model: PreTrainedModel) -> bool:
    """Whether the model's logits are exactly its head applied to its last hidden states; tried once on a few tokens."""
    if model not in _plain_heads:
        _plain_heads[model] = _try_head(model)
    return _plain_heads[model]


def _try_head(model: PreTrainedModel) -> bool:
    head, base = model.get_output_embeddings(), model.base_model
    # A model without a base of its own is its own base, and would give logits for hidden states.
    if type(head) is not nn.Linear or base is model:
        return False
    embedding = model.get_input_embeddings().weight
    ids = torch.randint(0, embedding.shape[0], (1, 6), generator=torch.Generator().manual_seed(0)).to(embedding.device)
    states: list[Tensor] = []

    def enlarge(module: nn.Module, arguments: object, output: Any) -> Any:
        # A cap of 30 would not show on the small logits of a new model.
        output.last_hidden_state = output.last_hidden_state * ENLARGED
        states.append(output.last_hidden_state)
        return output

    hook = base.register_forward_hook(enlarge)
    try:
        expected = model(input_ids=ids, use_cache=False).logits.double()
    finally:
        hook.remove()
    if not states:
        return False
    error = (head(states[0]).double() - expected).abs().max()
    return bool(error <= 1e-5 * expected.abs().max())
