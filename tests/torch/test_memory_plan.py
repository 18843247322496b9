"""What `plan` says of the torch engine's memory, beside what its model, gradients and optimizer take as fake tensors;
and of a model's parameters, beside the model."""

import pytest
from measured_memory import MODELS, QWEN3_600M, empty_model, planned, torch_peak
from torch import float32

from enginehouse.engines.memory import ModelShape
from enginehouse_torch.options import TorchTrainOptions

LONGEST = 2048
SMALL = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}


@pytest.mark.parametrize(
    "config",
    [
        *({"model_type": kind, **SMALL} for kind in ("llama", "mistral", "qwen2")),
        {"model_type": "llama", **SMALL, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        {"model_type": "qwen3", **SMALL, "head_dim": 32},
        {"model_type": "mixtral", **SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
        {"model_type": "qwen3_moe", **SMALL, **EXPERTS, "num_experts": 4, "head_dim": 32},
        {"model_type": "qwen2_moe", **SMALL, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 40},
        *MODELS.values(),
    ],
    ids=lambda config: f"{config['model_type']}-{config['hidden_size']}",
)
def test_parameters_are_counted_as_the_model_has_them(config):
    shape = ModelShape.of(config)
    assert shape is not None
    assert shape.parameters == sum(p.numel() for p in empty_model(config, float32).parameters())


def test_a_config_that_tells_no_shape_has_none():
    assert ModelShape.of({"model_type": "gpt2", "n_embd": 64, "vocab_size": 320}) is None


def ratio(config, tokens: int) -> float:
    options = TorchTrainOptions(tokens_per_microbatch=tokens)
    return planned(options, config, 1, LONGEST) / torch_peak(config, options, tokens, LONGEST)


@pytest.mark.slow
def test_the_plan_of_a_small_model_is_within_a_tenth():
    assert 0.9 < ratio(QWEN3_600M | {"num_hidden_layers": 4}, 8192) < 1.1


@pytest.mark.slow
@pytest.mark.timeout(900)  # a machine that is busy with other tests
@pytest.mark.parametrize(
    "model", [one if one == "Qwen2.5-7B" else pytest.param(one, marks=pytest.mark.exhaustive) for one in MODELS]
)
def test_the_plan_is_within_a_tenth_of_what_is_measured(model):
    assert 0.9 < ratio(MODELS[model], 16384) < 1.1
