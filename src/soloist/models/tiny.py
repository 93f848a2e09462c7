"""Tiny Qwen3 and Qwen3-MoE policies from scratch, so that every recipe runs on a two-core machine without a download.

Guarantees: the same config and seed give the same bytes on one machine; the folder is an ordinary Hugging Face folder
that `loading.load_policy` reads like any other. The process's own random state is left as it was.
Not covered: training them to do anything (`training/stages.py`).
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from soloist.config import ModelConfig
from soloist.models.loading import save_folder
from soloist.models.tokenizer import build_tokenizer

MAX_POSITIONS = 2048
ROPE_THETA = 10_000.0  # Qwen3's 1e6 spreads the angles over contexts that a tiny model never sees


def tiny_policy(config: ModelConfig, seed: int, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A freshly initialised fp32 causal LM of `config.family` on the CPU, with input and output embeddings tied.

    The default config has 0.49 M parameters, its MoE variant 2.8 M.
    """
    shape = {
        "vocab_size": len(tokenizer),
        "hidden_size": config.hidden_size,
        "intermediate_size": config.mlp_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.heads,
        "head_dim": config.hidden_size // config.heads,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
        "attn_implementation": "sdpa",
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if config.family == "qwen3":
            return Qwen3ForCausalLM(Qwen3Config(**shape)).eval()
        routing = {
            "moe_intermediate_size": config.mlp_size,
            "num_experts": config.experts,
            "num_experts_per_tok": config.experts_per_token,
            "norm_topk_prob": True,  # as the released Qwen3 MoE models have it
        }
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **routing)).eval()


def build_tiny(config: ModelConfig, seed: int, folder: Path) -> Path:
    """Build a tiny policy and its tokenizer, and save both as `folder`, whole or not at all.

    Raises FileExistsError when the folder is there already.
    """
    tokenizer = build_tokenizer()
    return save_folder(tiny_policy(config, seed, tokenizer), tokenizer, folder)
