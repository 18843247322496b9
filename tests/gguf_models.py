"""A tiny llama and its GGUF files, which the package `gguf` writes: it is not what reads them."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")

SPECIAL = ("<pad>", "<|im_end|>", "<|im_start|>")
MERGES = (("Ġ", "t"), ("h", "e"), ("Ġt", "he"))
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LAYERS, HIDDEN, INNER, HEADS, KEY_VALUE_HEADS, POSITIONS, BASE = 2, 64, 96, 4, 2, 128, 5000.0
_BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def _words() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return [*SPECIAL, *sorted(ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]


@functools.cache
def tiny_llama(tied: bool = True, seed: int = 0) -> Path:
    """Return the directory of a model in safetensors, whose tokenizer is of bytes with a few merges."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = _words()
    inner = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, list(MERGES)))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(list(SPECIAL))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token=SPECIAL[0], eos_token=SPECIAL[1])
    tokenizer.chat_template = TEMPLATE
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_VALUE_HEADS,
        max_position_embeddings=POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": BASE},
        tie_word_embeddings=tied,
        initializer_range=0.2,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    directory = Path(tempfile.mkdtemp(prefix="tiny-llama-"))
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def write_gguf(
    file: Path,
    model: Path | None = None,
    kind: str = "F32",
    *,
    architecture: str = "llama",
    tokenizer: str = "gpt2",
    without: tuple[str, ...] = (),
    fields: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
) -> Path:
    """Write a file of `tiny_llama`.

    Args:
        file: the file.
        model: the directory with its weights.
        kind: the type of its matrices; vectors stay F32.
        architecture: the name of the architecture that stands in the file.
        tokenizer: the name of the kind of its tokenizer.
        without: names of tensors that are left out.
        fields: further fields, of text or whole numbers.
        tensors: further tensors.
    """
    from safetensors.numpy import load_file

    words = _words()
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_name("tiny")
    writer.add_context_length(POSITIONS)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_VALUE_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(BASE)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model(tokenizer)
    writer.add_tokenizer_pre("default")
    writer.add_token_list(words)
    writer.add_token_types([gguf.TokenType.CONTROL] * len(SPECIAL) + [gguf.TokenType.NORMAL] * (len(words) - 3))
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(TEMPLATE)
    for name, value in (fields or {}).items():
        (writer.add_string if isinstance(value, str) else writer.add_uint16)(name, value)
    stored = load_file((model or tiny_llama()) / "model.safetensors")
    named = {_rename(name): _order(name, weights) for name, weights in stored.items()}
    for name, weights in {**named, **(tensors or {})}.items():
        if name not in without:
            type_ = gguf.GGMLQuantizationType[kind if weights.ndim > 1 else "F32"]
            writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(weights), type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def rounded(weights: np.ndarray, kind: str) -> np.ndarray:
    """Return a matrix as a file of a kind has it."""
    type_ = gguf.GGMLQuantizationType[kind if weights.ndim > 1 else "F32"]
    return gguf.dequantize(gguf.quantize(weights, type_), type_)


def _rename(name: str) -> str:
    """Return the name in GGUF of a tensor of a llama."""
    stem, suffix = name.rsplit(".", 1)
    if stem in _WHOLE:
        return f"{_WHOLE[stem]}.{suffix}"
    _, _, number, part = stem.split(".", 3)
    return f"blk.{number}.{_BLOCK[part]}.{suffix}"


def _order(name: str, weights: np.ndarray) -> np.ndarray:
    """Return a tensor with the rows of queries and keys as GGUF orders them: a pair of a rotation side by side."""
    heads = {"q_proj": HEADS, "k_proj": KEY_VALUE_HEADS}.get(name.split(".")[-2])
    if heads is None:
        return weights
    return weights.reshape(heads, 2, -1, weights.shape[1]).swapaxes(1, 2).reshape(weights.shape)
