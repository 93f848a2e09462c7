"""Attention for packed rows, plugged into Hugging Face models through their own attention interface.

A packed row [1, N] is the concatenation of segments. All layers but attention take each token by itself, so they need
no padding at all; attention runs over buckets of segments of about equal length, padded within the bucket, which is
harmless as it is causal. On CUDA one variable-length kernel does it without padding. A mask of N × N is never built.

Guarantees: `packs(model)` compares the packed way with plain padded rows on the model itself before anybody relies on
it; a model that differs (recurrent layers, caps on scores, layers that lose keyword arguments) stays as it was.
Not covered: how rows are made (`rows.py`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from soloist.models.rows import SHORTEST_PREFIX, Integers, Layout, MicroBatch, build_layout, build_micro_batches

NAME = "soloist_packed"
VARLEN_TYPES = (torch.bfloat16, torch.float16)
# Arguments that change the scores in ways that are not computed here.
REFUSED = ("softcap", "s_aux", "position_bias", "head_mask")
PROBE_LENGTHS = (9, 9, 8, 5, 2)
PROBE_ERROR = {torch.float32: 1e-4, torch.float64: 1e-9}
LONGEST_PROBED_WINDOW = 512

_packs: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def model_inputs(micro: MicroBatch) -> dict[str, Any]:
    """Keyword arguments of a model's forward for one micro-batch."""
    if micro.layout is None:
        return {"input_ids": micro.input_ids_BL, "use_cache": False}
    return {
        "input_ids": micro.input_ids_BL,
        "position_ids": micro.position_ids_BL,
        "use_cache": False,
        "packed_layout": micro.layout,
    }


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    packed_layout: Layout | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """softmax(q·kᵀ·scaling)·v within each segment, causal, over the last `sliding_window` tokens if given.

    Shapes: query [B, H, N, D], key and value [B, H_kv, N, D], result [B, N, H, D]. Without a layout each of the B rows
    is one segment. Raises NotImplementedError for a mask, attention that isn't causal, or scores that are changed.
    """
    refused = [name for name in REFUSED if others.get(name) is not None]
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if refused or not causal or attention_mask is not None:
        raise NotImplementedError(
            f"packed attention got {refused}, is_causal = {causal}, a mask: {attention_mask is not None}; it computes "
            "plain causal attention only, so use the model's own implementation"
        )
    if packed_layout is None:
        query, key, value = (states.transpose(1, 2) for states in (query, key, value))
        return _causal(query, key, value, dropout, scaling, sliding_window), None
    rows = [states[0].transpose(0, 1) for states in (query, key, value)]
    if query.is_cuda and query.dtype in VARLEN_TYPES and dropout == 0.0 and _has_varlen(query.device, query.dtype):
        return _varlen(rows, packed_layout, scaling, sliding_window)[None], None
    return _bucketed(rows, packed_layout, dropout, scaling, sliding_window)[None], None


AttentionInterface.register(NAME, packed_attention)
# No mask function is registered under the name, so transformers makes no mask at all and looks for no packing itself.


def _bucketed(rows: list[Tensor], layout: Layout, dropout: float, scaling: float | None, window: int | None) -> Tensor:
    """Attention bucket by bucket; `rows` are q, k, v as [N, H, D], the result is [N, H, D]."""
    gather_P, scatter_N = layout.gather_P, layout.scatter_N
    shared = [states[: layout.prefix] for states in rows]
    rows = [states[layout.prefix :] for states in rows] if layout.prefix else rows
    if gather_P is not None:
        rows = [_Spread.apply(one, gather_P, scatter_N) for one in rows]  # type: ignore[no-untyped-call]
    found = []
    sizes = [count * width for count, width in layout.shapes]
    for (count, width), parts in zip(layout.shapes, zip(*(r.split(sizes) for r in rows), strict=True), strict=True):
        query, key, value = (part.unflatten(0, (count, width)) for part in parts)
        if layout.prefix:
            key, value = (
                torch.cat([before[None].expand(count, -1, -1, -1), own], dim=1)
                for before, own in zip(shared[1:], (key, value), strict=True)
            )
        found.append(_causal(query, key, value, dropout, scaling, window).flatten(0, 1))
    together = torch.cat(found) if len(found) > 1 else found[0]
    if gather_P is not None:
        together = _Collect.apply(together, gather_P, scatter_N)  # type: ignore[no-untyped-call]
    if not layout.prefix:
        return together
    query, key, value = (states[None] for states in shared)
    return torch.cat([_causal(query, key, value, dropout, scaling, window)[0], together])


def _causal(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, scaling: float | None, window: int | None
) -> Tensor:
    """Causal attention of rows of one length, [B, L, H, D] in and out; keys may begin before the first query.

    A mask is needed for such a prefix and within a window only; it is [L, keys of a row], never more.
    """
    length, keys, groups = query.shape[1], key.shape[1], query.shape[2] // key.shape[2]
    if groups > 1 and not query.is_cuda:  # the CPU's fast kernel wants as many key heads as query heads
        key, value = (states.repeat_interleave(groups, dim=2) for states in (key, value))
    narrow = window is not None and window < keys
    masked = narrow or keys > length
    attended = scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=_mask(length, keys, window if narrow else None, query.device) if masked else None,
        dropout_p=dropout,
        is_causal=not masked,
        scale=scaling,
        enable_gqa=groups > 1 and query.is_cuda,
    )
    return attended.transpose(1, 2)


@lru_cache(maxsize=64)
def _mask(length: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    distance = torch.arange(keys - length, keys, device=device)[:, None] - torch.arange(keys, device=device)[None, :]
    return (distance >= 0) & (distance < (keys if window is None else window))


class _Spread(torch.autograd.Function):
    """Packed tokens to places of buckets. Its gradient is a gather, as nothing flows back from padding.

    Padding stands behind its segment, so no real query sees it, and outputs at padding are dropped by `_Collect`.
    """

    @staticmethod
    def forward(ctx: Any, states_N: Tensor, gather_P: Tensor, scatter_N: Tensor) -> Tensor:
        ctx.save_for_backward(scatter_N)
        return states_N.index_select(0, gather_P)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (scatter_N,) = ctx.saved_tensors
        return gradients[0].index_select(0, scatter_N), None, None


class _Collect(torch.autograd.Function):
    """Places of buckets back to packed tokens; padding is dropped."""

    @staticmethod
    def forward(ctx: Any, places_P: Tensor, gather_P: Tensor, scatter_N: Tensor) -> Tensor:
        ctx.save_for_backward(scatter_N)
        ctx.places = places_P.shape
        return places_P.index_select(0, scatter_N)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (scatter_N,) = ctx.saved_tensors
        return gradients[0].new_zeros(ctx.places).index_copy_(0, scatter_N, gradients[0]), None, None


def _varlen(rows: list[Tensor], layout: Layout, scaling: float | None, window: int | None) -> Tensor:
    """The same with one variable-length kernel; [N, H, D]."""
    query, key, value = rows
    starts = key_starts = layout.starts
    longest = max(layout.prefix, *layout.lengths)
    if layout.prefix:
        key, value = (_with_prefix(states, layout) for states in (key, value))
        # Every segment but the first, which is the prefix itself, has the prefix's keys before its own.
        extra = torch.arange(-1, len(layout.lengths), device=starts.device, dtype=starts.dtype).clamp(min=0)
        key_starts = starts + layout.prefix * extra
    found = varlen_attn(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        starts,
        key_starts,
        longest,
        longest + layout.prefix,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),  # nothing to the right: causal
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(found, Tensor)  # it is a tuple only when more is asked for
    return found


def _with_prefix(states: Tensor, layout: Layout) -> Tensor:
    """Keys or values with the prefix repeated before each segment."""
    shared, *segments = states.split([layout.prefix, *layout.lengths])
    return torch.cat([shared, *(part for segment in segments for part in (shared, segment))])


@lru_cache(maxsize=8)
def _has_varlen(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the variable-length kernel runs here, with its gradient, and equals the buckets."""
    layout = build_layout(PROBE_LENGTHS, 3, str(device))
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(3, 3 + sum(PROBE_LENGTHS), 2, 64, generator=generator).to(device, dtype)
    rows = [one.clone().requires_grad_() for one in states]
    try:
        with torch.enable_grad():
            found = _varlen(rows, layout, None, 4)
            found.float().sum().backward()
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return False
    expected = _bucketed(list(states), layout, 0.0, None, 4)
    return bool(((found - expected).abs() < 0.05).all()) and all(r.grad is not None for r in rows)


def packs(model: PreTrainedModel) -> bool:
    """Whether packed rows give what padded rows give, tried on the model once; if so, it is set to packed attention.

    The model then takes padded rows through the same attention, too.
    """
    if model not in _packs:
        _packs[model] = _try_packing(model)
    return _packs[model]


@torch.no_grad()
def _try_packing(model: PreTrainedModel) -> bool:
    base = model.base_model
    own = base.config._attn_implementation
    sequences = _probe_sequences(base)
    device = str(base.get_input_embeddings().weight.device)
    segments, positions = zip(*((s, len(ids)) for s, ids in enumerate(sequences)), strict=True)
    where = np.array(segments), np.array(positions)
    try:
        expected = _states(base, build_micro_batches(sequences, *where, token_budget=1, packed=False, device=device))
        model.set_attn_implementation(NAME)
        found = _states(base, build_micro_batches(sequences, *where, token_budget=10**9, packed=True, device=device))
    except (RuntimeError, NotImplementedError, TypeError, ValueError, KeyError, AttributeError, IndexError):
        model.set_attn_implementation(own)
        return False
    limit = PROBE_ERROR.get(expected.dtype, 0.1) * max(1.0, float(expected.abs().max()))
    if not float((found - expected).abs().max()) <= limit:
        model.set_attn_implementation(own)
        return False
    return True


def _states(base: PreTrainedModel, micros: list[MicroBatch]) -> Tensor:
    """The last state of each sequence, in the order of the sequences."""
    found = [base(**model_inputs(micro))[0].flatten(0, 1)[micro.before_t] for micro in micros]
    order = torch.cat([micro.tokens_t for micro in micros])
    return torch.cat(found)[order.argsort()]


def _probe_sequences(base: PreTrainedModel) -> list[Integers]:
    """Random tokens after a common prefix; one sequence is longer than the sliding window if there is one."""
    window = getattr(base.config.get_text_config(), "sliding_window", None) or 0
    longest = [window + 5] if 0 < window <= LONGEST_PROBED_WINDOW else []
    random = np.random.default_rng(0)
    vocabulary = base.get_input_embeddings().weight.shape[0]
    prefix = random.integers(0, vocabulary, SHORTEST_PREFIX)
    return [np.concatenate([prefix, random.integers(0, vocabulary, n)]) for n in (*longest, *PROBE_LENGTHS)]
