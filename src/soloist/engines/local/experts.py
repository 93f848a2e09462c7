"""The MLP of a layer for packed tokens: dense, or a mixture of experts with the model's own router.

Guarantees: the experts of a token and their weights come from the model's own router module, so they are the model's;
only the order of sums differs from it.
Not covered: shared experts, biases in experts (`fused` does not take such models).

Legend: T packed tokens, C hidden size, I inner size, E experts, K experts a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

ALL_EXPERTS_WORK = 64 * 288
"""Up to tokens × experts × inner size, computing every expert costs less than sorting tokens (docs/log.md)."""

Mlp = Callable[[Tensor, Tensor], Tensor]
"""(residual [T, C], input [T, C]) → residual + mlp(input), in the memory of the residual where that is cheaper."""


def joined(modules: list[Any]) -> tuple[Tensor, Tensor | None]:
    """One weight [sum of outputs, C] (and bias) for several linear layers, which become views of it.

    Views rather than copies: the model costs no memory twice, and weights loaded into it are loaded here, too.
    """
    weight = torch.cat([module.weight.data for module in modules])
    bias = None if modules[0].bias is None else torch.cat([module.bias.data for module in modules])
    first = 0
    for module in modules:
        end = first + module.weight.shape[0]
        module.weight.data = weight[first:end]
        if bias is not None:
            module.bias.data = bias[first:end]
        first = end
    return weight, bias


class DenseMlp:
    """residual + W_down(silu(W_gate x) · W_up x), gate and up in one product."""

    def __init__(self, mlp: Any) -> None:
        self._gate_up, self._bias = joined([mlp.gate_proj, mlp.up_proj])
        self._down, self._down_bias = mlp.down_proj.weight.detach().t(), mlp.down_proj.bias

    def __call__(self, residual_TC: Tensor, x_TC: Tensor) -> Tensor:
        """See `Mlp`."""
        hidden_TI = gated(functional.linear(x_TC, self._gate_up, self._bias))
        if self._down_bias is not None:
            residual_TC += self._down_bias
        return residual_TC.addmm_(hidden_TI, self._down)


class MoeMlp:
    """residual + Σ over the K experts of a token of weight · expert(x)."""

    def __init__(self, block: Any) -> None:
        self._router, self._experts = block.gate, block.experts
        self._gate_up = self._experts.gate_up_proj
        self._down = self._experts.down_proj
        self._count, double, self._size = self._gate_up.shape
        self._inner = double // 2
        self._on_cpu = self._gate_up.device.type == "cpu"
        if self._on_cpu:
            # Stored as [C, E, I], so that all experts' outputs are one product; the model sees [E, C, I] as before.
            self._down.data = self._down.data.permute(1, 0, 2).contiguous().permute(1, 0, 2)

    def __call__(self, residual_TC: Tensor, x_TC: Tensor) -> Tensor:
        """See `Mlp`."""
        _, weights_TK, experts_TK = self._router(x_TC)
        if not self._on_cpu:
            # There the model's own grouped kernels need no host synchronisation.
            outputs_TC: Tensor = self._experts(x_TC, experts_TK, weights_TK)
            return residual_TC + outputs_TC
        if len(x_TC) * self._count * self._inner <= ALL_EXPERTS_WORK:
            return self._all(residual_TC, x_TC, weights_TK, experts_TK)
        return self._grouped(residual_TC, x_TC, weights_TK, experts_TK)

    def _all(self, residual_TC: Tensor, x_TC: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        """Every expert for every token, the ones not chosen with weight 0: two products for all."""
        weights_TE = weights_TK.new_zeros((len(x_TC), self._count)).scatter_(1, experts_TK, weights_TK)
        joined_TX = functional.linear(x_TC, self._gate_up.flatten(0, 1))
        hidden_TEI = gated(joined_TX.view(len(x_TC), self._count, -1)).mul_(weights_TE[:, :, None])
        return residual_TC.addmm_(hidden_TEI.flatten(1), self._down.permute(1, 0, 2).flatten(1).t())

    def _grouped(self, residual_TC: Tensor, x_TC: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        """Tokens sorted by expert, so that each expert is two products over its own tokens."""
        chosen_X = experts_TK.flatten()
        order_X = chosen_X.argsort()
        counts = torch.bincount(chosen_X, minlength=self._count).tolist()
        tokens_X = order_X.div(experts_TK.shape[1], rounding_mode="floor")
        sorted_XC = x_TC[tokens_X]
        joined_XI = x_TC.new_empty((len(order_X), 2 * self._inner))
        self._products(sorted_XC, self._gate_up, joined_XI, counts)
        outputs_XC = torch.empty_like(sorted_XC)
        self._products(gated(joined_XI), self._down, outputs_XC, counts)
        outputs_XC *= weights_TK.flatten()[order_X, None]
        return residual_TC.index_add(0, tokens_X, outputs_XC)

    @staticmethod
    def _products(inputs: Tensor, weights: Tensor, outputs: Tensor, counts: list[int]) -> None:
        first = 0
        for weight, count in zip(weights, counts, strict=True):
            if count:
                torch.mm(inputs[first : first + count], weight.t(), out=outputs[first : first + count])
            first += count


def gated(gate_up: Tensor) -> Tensor:
    """silu(gate) · up for gate and up side by side in the last dimension."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)
