"""The `fsdp` engine with sequences split over ranks, against the `torch` engine."""

import pytest
import torch
from fsdp_train_cases import assert_trained_like, refusal, train

from enginehouse_testing.models import tiny_model

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("sizes", "head", "family", "tied", "options"),
    [
        ([16], "causal_lm", "qwen3", True, {"context_parallel": 2}),
        ([16], "causal_lm", "llama", False, {"context_parallel": 2, "share_prompts": "never"}),
        ([16], "causal_lm", "llama", False, {"context_parallel": 4, "activation_checkpointing": True}),
        ([9, 7], "value", "qwen3", True, {"context_parallel": 2}),
        ([16], "causal_lm", "llama", False, {"context_parallel": 2, "tensor_parallel": 2}),
        ([16, 0], "causal_lm", "qwen3", True, {"context_parallel": 2, "replicas": 2}),
    ],
    ids=str,
)
def test_split_sequences_score_and_train_like_the_oracle(run_ranks, oracle, sizes, head, family, tied, options):
    path = tiny_model(family, tied, key_value_heads=4 if family == "llama" else 2)
    ranks = len(sizes) * options["context_parallel"] * options.get("tensor_parallel", 1)
    results = run_ranks(ranks, train, path, head, sizes, options)
    assert_trained_like(oracle(path, head), results, sizes)


def test_adapters_train_alike_on_whole_and_on_split_sequences(run_ranks):
    path = tiny_model()
    (whole,) = run_ranks(1, train, path, "causal_lm", [16], {"lora": {"rank": 4}})
    norms = [step["grad_norm"] for step in whole.stepped]
    for found in run_ranks(2, train, path, "causal_lm", [16], {"lora": {"rank": 4}, "context_parallel": 2}):
        assert [step["grad_norm"] for step in found.stepped] == pytest.approx(norms, rel=1e-5)
        for name, weight in whole.weights.items():
            torch.testing.assert_close(found.weights[name], weight, atol=1e-5, rtol=0)


def test_a_model_whose_attention_cannot_be_split_is_refused(run_ranks, tmp_path):
    from transformers import MistralConfig, MistralForCausalLM

    for said in run_ranks(4, refusal, tiny_model(), {"context_parallel": 4}):
        assert said == (
            "fsdp: context_parallel=4 does not divide the 2 key-value head(s) that each rank of Qwen3ForCausalLM has; "
            "nearest divisor: context_parallel=2"
        )
    config = MistralConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=8,
    )  # fmt: skip
    MistralForCausalLM(config).save_pretrained(tmp_path)
    for said in run_ranks(4, refusal, str(tmp_path), {"context_parallel": 2}):
        assert "MistralForCausalLM has layers that are not full attention" in said
