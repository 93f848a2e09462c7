"""A fused forward for decoders of the Llama kind: packed tokens, joined projections, attention over used columns only.

All new tokens of a step, those of running rows and those of prompts, are packed into one list, through which linear
layers go once; attention reads the cache block by block, of each block the rows that have reached it. Weights are views
of the model's own.

Guarantees: the same numbers as the model's own forward up to the order of sums; `fused_forward` compares them at start
and gives None when they differ. No padding is computed, nothing waits for the device.
Not covered: sliding windows, rotary tables that depend on the length, other activations: see `known`.

Legend: T packed tokens, B decoded rows (the first B tokens), R predicting tokens, C hidden size, H query heads, G
key/value heads, D head size, K columns seen, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from soloist.engines.local.blocks import BlockCache
from soloist.engines.local.experts import DenseMlp, Mlp, MoeMlp, joined
from soloist.engines.local.own_forward import Stretch
from soloist.engines.local.products import Room
from soloist.engines.local.rows import Reach
from soloist.engines.local.state import SlotState

FAMILIES = ("qwen3", "qwen3_moe", "llama", "qwen2", "mistral")
ROTARY = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embedding whose angles depend on the position alone."""


def known(model: Any) -> bool:
    """Whether the fused forward has what this architecture needs."""
    config = model.config
    rotary = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    return (
        config.model_type in FAMILIES
        and config.hidden_act == "silu"
        and rotary in ROTARY
        and set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
        and (config.model_type != "mistral" or config.sliding_window is None)
    )


@dataclass(frozen=True)
class _Decoded:
    """The decoded rows of one pass: what all layers share. A room, or else a mask [B, 1, 1, K] for sdpa."""

    count: int
    room: Room | None
    mask: Tensor | None


@dataclass(frozen=True)
class _Prompts:
    """Equal stretches of neighbouring rows: packed tokens from `token` on, row by row."""

    token: int
    row: int
    rows: int
    start: int
    end: int
    mask_QK: Tensor | None
    """None for a whole prompt, which is plainly causal."""


@dataclass(frozen=True)
class _Packed:
    """The tokens of one pass."""

    ids_T: Tensor
    positions_T: Tensor
    places: Tensor
    """Where keys and values go."""
    decoded: _Decoded | None
    prompts: list[_Prompts]
    last_R: Tensor | None
    """Tokens that predict; None when all do."""


class _Layer:
    """One decoder layer's weights, as views of the model's."""

    def __init__(self, layer: Any) -> None:
        attention = layer.self_attn
        self.qkv, self.qkv_bias = joined([attention.q_proj, attention.k_proj, attention.v_proj])
        self.output = attention.o_proj.weight.detach().t()
        self.output_bias = attention.o_proj.bias
        self.norm, self.mlp_norm = (
            Norm(norm.weight.detach(), norm.variance_epsilon)
            for norm in (layer.input_layernorm, layer.post_attention_layernorm)
        )
        self.head_norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None
        self.head_norm: Norm | None = None
        self.scaling: float = attention.scaling
        self.mlp: Mlp = MoeMlp(layer.mlp) if hasattr(layer.mlp, "experts") else DenseMlp(layer.mlp)

    def refresh(self, query_heads: int, key_heads: int) -> None:
        """Norm weights of all query and key heads as one table [H + G, D]."""
        if self.head_norms is None:
            return
        query, key = (norm.weight.detach() for norm in self.head_norms)
        table = torch.cat([query.expand(query_heads, -1), key.expand(key_heads, -1)])
        if self.head_norm is None:
            self.head_norm = Norm(table, self.head_norms[0].variance_epsilon)
        else:
            # In place: a recorded CUDA graph reads this very tensor.
            self.head_norm.weight.copy_(table)


class FusedForward:
    """Implements `own_forward.Forward` for the models that `known` accepts."""

    def __init__(self, model: Any, state: SlotState, vocab_size: int) -> None:
        config = model.config
        self._state = state
        self._vocab_size = vocab_size
        self._embedding, self._head = model.model.embed_tokens, model.lm_head
        self._norm = Norm(model.model.norm.weight.detach(), model.model.norm.variance_epsilon)
        self._layers = [_Layer(layer) for layer in model.model.layers]
        self._heads: int = config.num_attention_heads
        self._key_heads: int = config.num_key_value_heads
        self._dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        weight = self._embedding.weight
        self._cache = BlockCache(
            len(self._layers), state.slots, state.max_length, self._key_heads, weight.detach(), self._dim
        )
        self.swap, self.clear = self._cache.swap, self._cache.clear
        self._positions_P = torch.arange(state.max_length + 1, device=state.device)
        self._room: Room | None = None
        self._columns_P = torch.arange(self._cache.count * self._cache.size, device=state.device)
        self._rows_S = torch.arange(state.slots, device=state.device)
        self._cos_PD, self._sin_PD = rotary_tables(model, self._positions_P)
        self._lowest = torch.finfo(weight.dtype).min
        self.refresh()

    @torch.inference_mode()
    def refresh(self) -> None:
        """Projections are views of the model's weights; only the small tables are made anew."""
        for layer in self._layers:
            layer.refresh(self._heads, self._key_heads)

    def decode(self, slots_B: Tensor, reach: Reach) -> Tensor:
        """See `Forward.decode`."""
        return self._run(self._pack(slots_B, reach, [], []))

    def advance(self, slots_B: Tensor, reach: Reach, stretches: Sequence[Stretch], rows: Sequence[int]) -> Tensor:
        """See `Forward.advance`. One pass for all."""
        # Neighbouring rows next to each other, so that equal prompts share an attention call.
        order = sorted(range(len(stretches)), key=lambda i: rows[i])
        packed = self._pack(slots_B, reach, [stretches[i] for i in order], [rows[i] for i in order])
        logits_RV = self._run(packed)
        if order == list(range(len(order))):
            return logits_RV
        places = [len(slots_B) + order.index(i) for i in range(len(order))]
        return logits_RV[[*range(len(slots_B)), *places]]

    def _pack(self, slots_B: Tensor, reach: Reach, stretches: Sequence[Stretch], rows: Sequence[int]) -> _Packed:
        state, count = self._state, slots_B.shape[0]
        positions_B = state.lengths_S.index_select(0, slots_B).sub_(1)
        writes = [positions_B]
        if self._cache.count == 1:
            # Recorded graphs compute rows that don't run, too: an empty one must not look before its beginning, and
            # what they compute must not land where somebody reads.
            positions_B.clamp_(min=0)
            writes = [torch.where(state.active_S[slots_B], positions_B, state.max_length)]
        ids = [state.tokens_at(slots_B, positions_B)]
        positions = [positions_B]
        owners = [self._rows_S[:count]]
        last, token = [], count
        for stretch, row in zip(stretches, rows, strict=True):
            ids.append(state.tokens_SP[stretch.slot, stretch.start : stretch.end])
            positions.append(self._positions_P[stretch.start : stretch.end])
            owners.append(self._rows_S[row].expand(stretch.end - stretch.start))
            token += stretch.end - stretch.start
            last.append(token - 1)
        decoded = self._decoded(positions_B, reach)
        if not stretches:
            places = self._cache.places(owners[0], writes[0])
            return _Packed(ids[0], positions_B, places, decoded, [], None)
        return _Packed(
            torch.cat(ids),
            torch.cat(positions),
            self._cache.places(torch.cat(owners), torch.cat(writes + positions[1:])),
            decoded,
            self._prompts(count, stretches, rows),
            state.ids([*range(count), *last]),
        )

    def _decoded(self, positions_B: Tensor, reach: Reach) -> _Decoded | None:
        """Masks once a step, for all layers."""
        count = positions_B.shape[0]
        if not count:
            return None
        if self._cache.count == 1:
            return _Decoded(count, None, self._mask(positions_B, reach.width)[:, None, None])
        size = self._cache.size
        counts = [reach.rows(first) for first in range(0, reach.width, size)]
        if self._room is None or self._room.counts != counts:
            self._room = Room(self._cache, counts, self._heads, self._key_heads)
        self._room.see(positions_B)
        return _Decoded(count, self._room, None)

    def _mask(self, positions_Q: Tensor, columns: int) -> Tensor:
        """0 where a token at this position sees the column, the lowest number elsewhere: [Q, K]."""
        later_QK = self._columns_P[:columns] > positions_Q[:, None]
        mask_QK = torch.zeros(later_QK.shape, dtype=self._cache.data.dtype, device=self._state.device)
        return mask_QK.masked_fill_(later_QK, self._lowest)

    def _prompts(self, token: int, stretches: Sequence[Stretch], rows: Sequence[int]) -> list[_Prompts]:
        found: list[_Prompts] = []
        for stretch, row in zip(stretches, rows, strict=True):
            start, end = stretch.start, stretch.end
            before = found[-1] if found else None
            if before and (before.start, before.end, before.row + before.rows) == (start, end, row):
                found[-1] = _Prompts(before.token, before.row, before.rows + 1, start, end, before.mask_QK)
            else:
                found.append(
                    _Prompts(
                        token, row, 1, start, end, self._mask(self._positions_P[start:end], end) if start else None
                    )
                )
            token += end - start
        return found

    def _run(self, packed: _Packed) -> Tensor:
        """Logits [R, V]."""
        cos_T1D, sin_T1D = (
            table.index_select(0, packed.positions_T)[:, None] for table in (self._cos_PD, self._sin_PD)
        )
        x_TC = functional.embedding(packed.ids_T, self._embedding.weight)
        for index, layer in enumerate(self._layers):
            heads_THD = self._project(layer, x_TC, cos_T1D, sin_T1D)
            self._cache.write(index, packed.places, heads_THD[:, self._heads :])
            seen_TC = self._attend(layer, index, heads_THD, packed)
            if layer.output_bias is not None:
                x_TC += layer.output_bias
            # In place: the stream is this pass's own.
            x_TC.addmm_(seen_TC, layer.output)
            x_TC = layer.mlp(x_TC, layer.mlp_norm(x_TC))
        if packed.last_R is not None:
            x_TC = x_TC[packed.last_R]
        # Rows beyond the vocabulary are cut before they are computed.
        return functional.linear(self._norm(x_TC), self._head.weight[: self._vocab_size])

    def _project(self, layer: _Layer, x_TC: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
        """Queries, keys and values [T, H + 2G, D] of a layer, the first two normed and rotated."""
        joined_TX = functional.linear(layer.norm(x_TC), layer.qkv, layer.qkv_bias)
        heads_THD = joined_TX.view(x_TC.shape[0], -1, self._dim)
        rotated_THD = heads_THD[:, : self._heads + self._key_heads]
        turned_THD = rotated_THD
        if layer.head_norm is not None:
            turned_THD = layer.head_norm(rotated_THD)
        # x · cos + half-turned x · sin, the sign of the half turn being in the table.
        other_THD = turned_THD.roll(self._dim // 2, -1)
        torch.addcmul(turned_THD * cos_T1D, other_THD, sin_T1D, out=rotated_THD)
        return heads_THD

    def _attend(self, layer: _Layer, index: int, heads_THD: Tensor, packed: _Packed) -> Tensor:
        """Attention [T, H · D]: decoded rows first, then prompts."""
        queries_THD = heads_THD[:, : self._heads]
        decoded_BHD = None
        if packed.decoded is not None:
            decoded_BHD = self._attend_decoded(layer, index, queries_THD[: packed.decoded.count], packed.decoded)
            if not packed.prompts:
                return decoded_BHD.flatten(1)
        seen_THD = torch.empty(queries_THD.shape, dtype=queries_THD.dtype, device=queries_THD.device)
        if decoded_BHD is not None:
            seen_THD[: len(decoded_BHD)] = decoded_BHD
        for prompt in packed.prompts:
            length = prompt.end - prompt.start
            part = slice(prompt.token, prompt.token + prompt.rows * length)
            # A whole prompt sees what this pass has computed; a later piece also what is stored.
            new = heads_THD[part, self._heads :].unflatten(1, (2, -1)).unflatten(0, (prompt.rows, length))
            stored = self._cache.rows(index, prompt.row, prompt.row + prompt.rows, prompt.end) if prompt.start else None
            keys, values = new.permute(2, 0, 3, 1, 4) if stored is None else stored
            result = functional.scaled_dot_product_attention(
                queries_THD[part].unflatten(0, (prompt.rows, length)).transpose(1, 2),
                keys,
                values,
                attn_mask=prompt.mask_QK,
                is_causal=prompt.mask_QK is None,
                scale=layer.scaling,
                enable_gqa=self._heads != self._key_heads,
            )
            seen_THD[part] = result.transpose(1, 2).flatten(0, 1)
        return seen_THD.flatten(1)

    def _attend_decoded(self, layer: _Layer, index: int, queries_BHD: Tensor, decoded: _Decoded) -> Tensor:
        """Attention [B, H, D] of one query a row."""
        if decoded.room is not None:
            return decoded.room.attend(index, queries_BHD, layer.scaling)
        assert decoded.mask is not None
        keys, values = self._cache.rows(index, 0, decoded.count, decoded.mask.shape[-1])
        result = functional.scaled_dot_product_attention(
            queries_BHD[:, :, None],
            keys,
            values,
            attn_mask=decoded.mask,
            scale=layer.scaling,
            enable_gqa=self._heads != self._key_heads,
        )
        return result[:, :, 0]


class Norm:
    """x ÷ √(mean x² + ε) · weight over the last dimension."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        self.weight = weight
        self._epsilon = epsilon
        self._epsilon_1 = weight.new_tensor([epsilon])
        self._plain = weight.dtype in (torch.float32, torch.float64)

    def __call__(self, x: Tensor) -> Tensor:
        """The normed tensor, a new one."""
        if not self._plain:
            # Squares need fp32, which torch's own takes care of.
            return functional.rms_norm(x, (x.shape[-1],), None, self._epsilon).mul_(self.weight)
        # A third faster on a few rows than torch's own, which is a chain of nine calls on CPUs.
        norms: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scales = torch.addcmul(self._epsilon_1, norms, norms, value=1 / x.shape[-1]).rsqrt_()
        return (x * scales).mul_(self.weight)


def rotary_tables(model: Any, positions_P: Tensor) -> tuple[Tensor, Tensor]:
    """cos and signed sin [P, D] of every position, from the model's own rotary module.

    sin is negative in the first half of D, so that x · cos + roll(x, D/2) · sin is the model's rotation.
    """
    like = model.model.embed_tokens.weight
    cos_1PD, sin_1PD = model.model.rotary_emb(like, positions_P[None])
    half = cos_1PD.shape[-1] // 2
    return cos_1PD[0].clone(), torch.cat([-sin_1PD[0, :, :half], sin_1PD[0, :, half:]], -1)
