"""Tiny mixtures of experts for tests: real Hugging Face directories, made once a session."""

import functools
import tempfile
from pathlib import Path
from typing import Any, Literal

import torch

from enginehouse_testing.models import EOS_ID, PAD_ID, VOCABULARY_SIZE, char_tokenizer, tiny_model


@functools.cache
def expert_model(family: Literal["qwen3_moe", "mixtral"] = "qwen3_moe", experts: int = 5, **changed: Any) -> str:
    """Directory of a tiny model whose experts transformers stores apart and runs fused; its config may be changed."""
    from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig

    kinds: dict[str, Any] = {
        "qwen3_moe": functools.partial(Qwen3MoeConfig, num_experts=experts, moe_intermediate_size=24),
        "mixtral": functools.partial(MixtralConfig, num_local_experts=experts),
    }
    config = kinds[family](
        vocab_size=VOCABULARY_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        num_experts_per_tok=2,
        initializer_range=0.2,
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
        bos_token_id=None,
        **{name: list(value) if isinstance(value, tuple) else value for name, value in changed.items()},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    path = Path(tempfile.mkdtemp(prefix=f"{family}-", dir=Path(tiny_model()).parent))  # removed with the tiny models
    model.save_pretrained(path)
    char_tokenizer().save_pretrained(path)
    return str(path)
