"""What `plan` says of the torch engine's memory, beside what its model, gradients and optimizer take as fake tensors;
and of a model's parameters, beside the model."""

import pytest
from measured_memory import MODELS, QWEN3_600M, QWEN25_7B, empty_model, planned, torch_peak
from torch import float32

from enginehouse.engines.memory import MemoryDemand, ModelShape
from enginehouse_torch.modeling.sizes import LEAST_CPU_TOKENS, MOST_CPU_TOKENS, cpu_tokens
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


SMOLLM2_135M = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}


def test_a_pass_on_a_cpu_has_as_many_tokens_as_keep_a_gib():
    small, large = ModelShape.of({"model_type": "llama", **SMALL}), ModelShape.of(QWEN25_7B)
    assert cpu_tokens(small, 4) == cpu_tokens(None, 4) == MOST_CPU_TOKENS
    assert 512 <= cpu_tokens(ModelShape.of(SMOLLM2_135M), 4) < 640
    assert cpu_tokens(large, 4) == LEAST_CPU_TOKENS


def test_the_plan_of_a_run_on_a_cpu_counts_no_more_tokens_than_a_pass_has():
    shape = ModelShape.of(SMOLLM2_135M)
    assert shape is not None
    demand = MemoryDemand(shape=shape, itemsize=4, processes=1, rows=64, longest=49, trained=True, device="cpu")
    by_default, fewer = (
        sum(TorchTrainOptions(**options).memory(demand).working.values())
        for options in ({}, {"tokens_per_microbatch": cpu_tokens(shape, 4) // 2})
    )
    assert 0.9 * 2**30 < by_default < 1.4 * 2**30
    assert fewer < 0.7 * by_default


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
