"""Checkpoints as people have them, each saved by transformers, and what is in their exports.

Each form is a function of a directory. What it leaves there is a whole model with a tokenizer.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from enginehouse.weights.names import stored_names, weight_files
from enginehouse_testing.models import EOS_ID, PAD_ID, VOCABULARY_SIZE, char_tokenizer, tiny_model

TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY_SIZE, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128,
    "bos_token_id": None, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID, "initializer_range": 0.2,
}  # fmt: skip
LINEAR = {
    "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}  # fmt: skip
"""Three layers of linear attention and one of full."""
VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip


def saved(model: Any, to: Path, **options: Any) -> Path:
    """Save a model made of random weights, and a tokenizer beside it."""
    model.save_pretrained(to, **options)
    char_tokenizer().save_pretrained(to)
    return to


def made(name: str, settings: dict[str, Any], kind: str = "ForCausalLM") -> Any:
    """A model of a class of transformers with random weights."""
    import transformers

    torch.manual_seed(0)
    return getattr(transformers, name + kind)(getattr(transformers, name + "Config")(**settings))


def rewritten(directory: Path, change: Any, **config: Any) -> Path:
    """Change a model's tensors, and its config."""
    (file,) = weight_files(directory)
    weights = load_file(file)
    change(weights)
    save_file(weights, file, {"format": "pt"})
    about = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(about | config))
    return directory


def copied(to: Path, **options: Any) -> Path:
    shutil.copytree(tiny_model(**options), to)
    return to


def plain(to: Path) -> Path:
    return copied(to, tied=False)


def tied(to: Path) -> Path:
    return copied(to)


def tied_with_its_head(to: Path) -> Path:
    """The head is in the file, too, as the embedding is."""

    def change(weights):
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()

    return rewritten(copied(to), change)


def one_more_layer(to: Path) -> Path:
    """A layer behind those that the config counts, as of DeepSeek and GLM to predict a further token."""
    return rewritten(
        copied(to, family="llama", tied=False, layers=3),
        lambda weights: None,
        num_hidden_layers=2,
        num_nextn_predict_layers=1,
    )


def prediction_head(to: Path) -> Path:
    """A head to predict further tokens, some of it in another dtype."""

    def change(weights):
        weights["mtp.layers.0.self_attn.q_proj.weight"] = torch.randn(64, 32)
        weights["mtp.norm.weight"] = torch.randn(32).bfloat16()

    return rewritten(copied(to), change, num_nextn_predict_layers=1)


def shards(to: Path) -> Path:
    from transformers import AutoModelForCausalLM

    return saved(AutoModelForCausalLM.from_pretrained(tiny_model("llama", False)), to, max_shard_size="20KB")


def without_prefix(to: Path) -> Path:
    """Saved from the decoder alone: `layers.0...` in the place of `model.layers.0...`."""

    def change(weights):
        for name in list(weights):
            weights[name.removeprefix("model.")] = weights.pop(name)

    return rewritten(copied(to), change)


def experts(to: Path) -> Path:
    """One tensor an expert and matrix, which transformers runs as one."""
    settings = {**TEXT, "moe_intermediate_size": 32, "num_experts": 3, "num_experts_per_tok": 2}
    return saved(made("Qwen3Moe", settings), to)


def tower_beside(to: Path) -> Path:
    """A vision tower that the class for text does not have (Qwen3.5)."""
    text = {**TEXT, **LINEAR}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    return saved(made("Qwen3_5", {"text_config": text, "vision_config": vision}, "ForConditionalGeneration"), to)


def tower_within(to: Path) -> Path:
    """A vision tower that the class for text has, too (Gemma 3)."""
    text = {**TEXT, "sliding_window": 64, "query_pre_attn_scalar": 16}
    settings = {
        "text_config": text, "vision_config": VISION, "mm_tokens_per_image": 4, "image_token_index": 30,
        "boi_token_index": 28, "eoi_token_index": 29, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID,
    }  # fmt: skip
    return saved(made("Gemma3", settings, "ForConditionalGeneration"), to)


FORMS = {
    form.__name__: form
    for form in (
        plain, tied, tied_with_its_head, one_more_layer, prediction_head, shards, without_prefix, experts, tower_beside,
        tower_within,
    )
}  # fmt: skip


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in weight_files(directory):
        found |= load_file(file)
    return found


def faults(source: Path, export: Path, trained: set[str]) -> list[str]:
    """What is wrong with an export after a step of training: by names, dtypes, bytes, config and files.

    Args:
        source: what was trained.
        export: what was written.
        trained: names of the tensors that a step changes.
    """
    before, after = tensors_of(source), tensors_of(export)
    found = [f"lacks {name}" for name in before.keys() - after.keys()]
    found += [f"has {name} too" for name in after.keys() - before.keys()]
    for name in before.keys() & after.keys():
        same = before[name].dtype == after[name].dtype and torch.equal(before[name], after[name])
        if same == (name in trained):
            found.append(f"{name} is {'as it was' if same else 'changed'}")
    if stored_names(export) != after.keys():
        found.append("its index names other tensors")
    was, now = (json.loads((place / "config.json").read_text()) for place in (source, export))
    found += [
        f"config.{key}: {was.get(key)} is {now.get(key)}"
        for key in was.keys() | now.keys()
        if was.get(key) != now.get(key)
    ]
    there = {str(file.relative_to(export)) for file in export.rglob("*")}
    wanted = {str(file.relative_to(source)) for file in source.rglob("*") if file.suffix != ".safetensors"}
    found += [f"lacks the file {name}" for name in wanted - there if not name.endswith(".index.json")]
    return found
