"""Prompts are shared by models that take a tree of rows, and by no others."""

import pytest
import torch

from enginehouse.engines.model import ModelSpec
from enginehouse_testing.models import tiny_model
from enginehouse_torch.modeling.loading import load_model
from enginehouse_torch.modeling.sharing import can_share_prompts


@pytest.mark.parametrize("head", ["causal_lm", "value"])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_full_attention_models_share(family, head):
    assert can_share_prompts(load_model(ModelSpec(path=tiny_model(family), head=head), "cpu"))


def test_half_precision_is_no_hindrance():
    assert can_share_prompts(load_model(ModelSpec(path=tiny_model(), dtype="bfloat16"), "cpu"))


@pytest.mark.parametrize("kind", ["sliding window", "recurrent", "positions from the mask", "eager attention"])
def test_other_models_do_not(kind):
    from transformers import AutoModelForCausalLM, BloomConfig, MambaConfig, MistralConfig

    sizes = {"vocab_size": 32, "hidden_size": 32}
    if kind == "sliding window":
        config = MistralConfig(
            **sizes, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
            sliding_window=4,
        )  # fmt: skip
    elif kind == "recurrent":
        config = MambaConfig(**sizes, num_hidden_layers=1, state_size=4)
    elif kind == "positions from the mask":
        config = BloomConfig(**sizes, n_layer=1, n_head=4)
    else:
        config = load_model(ModelSpec(path=tiny_model()), "cpu").config
        config._attn_implementation = "eager"
    torch.manual_seed(0)
    assert not can_share_prompts(AutoModelForCausalLM.from_config(config).eval())


@pytest.mark.slow
def test_a_model_whose_rows_see_each_other_does_not_pass_for_one_that_rounds():
    """A new model, nearly uniform: whatever it does wrong changes its logprobs by little."""
    path = tiny_model(hidden=256, initializer_range=0.02)
    model = load_model(ModelSpec(path=path, dtype="bfloat16"), "cpu")
    assert can_share_prompts(model)
    forward = model.model.forward
    model.model.forward = lambda **given: forward(**{**given, "attention_mask": None})
    assert not can_share_prompts(model)
