"""Log-probabilities of given tokens from hidden states and the vocabulary head, without a [T × V] tensor for large V.

Legend: T selected tokens, D hidden size, V vocabulary, C tokens of one chunk.
Guarantees: at most `CHUNK` logits exist at a time, or a quarter as many as the head has weights if that is more, in
forward and backward; results are fp32 for fp32 and smaller
types, fp64 for fp64; a token whose logit is far above or below all others gives finite numbers.
Not covered: heads that cap or scale logits (`policy.py` notices them and takes the model's own logits).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK = 2**22  # logits: 16 MiB in fp32, a few times that with what is made of them
KEPT = 2**22  # probabilities kept for the backward pass instead of being made again


def chosen_log_probs(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    tokens_T: Tensor,
    temperature: float,
    *,
    entropy_gradient: bool = False,
    chunk: int = CHUNK,
    kept: int = KEPT,
) -> tuple[Tensor, Tensor]:
    """log softmax(z/τ)[a] and the entropy −Σ_v p_v·log p_v, with z = W·h + b; both [T].

    Backward makes the logits again, chunk by chunk: with p = softmax(z/τ),
        ∂ log p_a/∂z_v = (1[v = a] − p_v)/τ,   ∂ entropy/∂z_v = −p_v·(log p_v + entropy)/τ.
    Where T·V ≤ `kept`, the probabilities are kept instead. Gradients go to hidden, weight and bias (tied embeddings
    add theirs); the entropy has one only with `entropy_gradient`. Once differentiable.
    """
    log_probs_T, entropy_T = _ChosenLogProbs.apply(  # type: ignore[no-untyped-call]
        hidden_TD, weight_VD, bias_V, tokens_T, temperature, entropy_gradient, chunk, kept
    )
    return log_probs_T, entropy_T


class _ChosenLogProbs(torch.autograd.Function):
    """See `chosen_log_probs`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        tokens_T: Tensor,
        temperature: float,
        entropy_gradient: bool,
        chunk: int,
        kept: int,
    ) -> tuple[Tensor, Tensor]:
        vocabulary = weight_VD.shape[0]
        # Each chunk reads and writes the whole gradient of the head, so that short chunks would cost more than they
        # save: their logits may take as much as a quarter of the head's own weights.
        rows = max(1, chunk // vocabulary, weight_VD.shape[1] // 4)
        log_probs_T, entropy_T = (
            hidden_TD.new_empty(len(tokens_T), dtype=torch.promote_types(hidden_TD.dtype, torch.float32))
            for _ in range(2)
        )
        keep = not entropy_gradient and len(tokens_T) * vocabulary <= min(kept, rows * vocabulary)
        probs_TV = None
        for start in range(0, len(tokens_T), rows):
            part = slice(start, start + rows)
            log_probs_CV = _log_softmax(hidden_TD[part], weight_VD, bias_V, temperature)
            log_probs_T[part] = log_probs_CV.gather(-1, tokens_T[part, None]).squeeze(-1)
            probs_TV = log_probs_CV.exp_()
            # entr(0) = 0, where −p·log p would be 0·∞
            entropy_T[part] = torch.special.entr(probs_TV).sum(dim=-1)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_T)
        ctx.save_for_backward(
            hidden_TD, weight_VD, bias_V, tokens_T, entropy_T if entropy_gradient else None, probs_TV if keep else None
        )
        ctx.temperature, ctx.rows = temperature, rows
        return log_probs_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TD, weight_VD, bias_V, tokens_T, entropy_T, probs_TV = ctx.saved_tensors
        wanted_hidden, wanted_weight, wanted_bias = ctx.needs_input_grad[:3]
        hidden_grad_TD = torch.empty_like(hidden_TD) if wanted_hidden else None
        # Sums over many chunks of a small type would lose what single chunks add.
        sums = gradients[0].dtype
        weight_grad_VD = torch.zeros_like(weight_VD, dtype=sums) if wanted_weight else None
        bias_grad_V = torch.zeros_like(bias_V, dtype=sums) if wanted_bias else None
        for start in range(0, len(tokens_T), ctx.rows):
            part = slice(start, start + ctx.rows)
            given_C = gradients[0][part, None]
            if probs_TV is not None:
                slope_CV = probs_TV[part] * -given_C
            else:
                log_probs_CV = _log_softmax(hidden_TD[part], weight_VD, bias_V, ctx.temperature)
                slope_CV = log_probs_CV.exp()
                if entropy_T is not None:
                    factor_CV = log_probs_CV.add_(entropy_T[part, None]).mul_(gradients[1][part, None])
                    slope_CV.mul_(factor_CV.add_(given_C).neg_())
                else:
                    slope_CV.mul_(-given_C)
            slope_CV.scatter_add_(-1, tokens_T[part, None], given_C.to(slope_CV.dtype))
            slope_CV = slope_CV.div_(ctx.temperature).to(hidden_TD.dtype)
            if hidden_grad_TD is not None:
                hidden_grad_TD[part] = slope_CV @ weight_VD
            if weight_grad_VD is not None:
                if weight_grad_VD.dtype == slope_CV.dtype:
                    weight_grad_VD.addmm_(slope_CV.T, hidden_TD[part])
                else:
                    weight_grad_VD += slope_CV.T @ hidden_TD[part]
            if bias_grad_V is not None:
                bias_grad_V += slope_CV.sum(dim=0)
        weight_grad = None if weight_grad_VD is None else weight_grad_VD.to(weight_VD.dtype)
        bias_grad = None if bias_grad_V is None else bias_grad_V.to(bias_V.dtype)
        return hidden_grad_TD, weight_grad, bias_grad, None, None, None, None, None


def _log_softmax(hidden_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, temperature: float) -> Tensor:
    """log softmax(z/τ) in fp32 or better, [C, V]; the logits are rounded to the head's type before, as in the model."""
    logits_CV = torch.nn.functional.linear(hidden_CD, weight_VD, bias_V)
    logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    if temperature != 1.0:
        logits_CV = logits_CV.div_(temperature)
    return torch.log_softmax(logits_CV, dim=-1)
