"""Models beside those of the conformance suite: biases, and one that nobody wrote down."""

import contextlib
from unittest import mock

import pytest
import torch

from enginehouse.engines.model import ModelSpec, ProcessContext
from enginehouse.engines.train import Outputs
from enginehouse_megatron.options import MegatronOptions
from enginehouse_testing.models import VOCABULARY_SIZE, char_tokenizer
from enginehouse_testing.oracle import Oracle
from enginehouse_testing.problem import batch


@pytest.fixture
def save(tmp_path):
    """Saves a tiny model of a transformers config, with values in place of the biases' zeros."""

    def save(kind, **values) -> str:
        from transformers import AutoModelForCausalLM

        config = kind(
            vocab_size=VOCABULARY_SIZE,
            hidden_size=32,
            intermediate_size=96,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            initializer_range=0.2,
            **{"num_hidden_layers": 2} | values,
        )
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter)
        model.save_pretrained(tmp_path)
        char_tokenizer().save_pretrained(tmp_path)
        return str(tmp_path)

    return save


@contextlib.contextmanager
def engine_of(path: str, **options):
    from enginehouse_megatron.engine import MegatronEngine

    engine = MegatronEngine()
    engine.setup(ModelSpec(path=path), MegatronOptions(**options), ProcessContext("actor"))
    try:
        yield engine
    finally:
        engine.shutdown()


def assert_scores_as_transformers_does(engine, path):
    scored = engine.forward(batch().drop(["loss_mask"]), Outputs(entropy=True))
    for name, right in Oracle(path).scores(batch(), masked=False).items():
        assert (scored.ragged(name).values - right).abs().max() < 1e-5


def assert_is_as_transformers(path):
    """The model scores as in transformers, and gives its weights as they are stored."""
    with engine_of(path) as engine:
        assert_scores_as_transformers_does(engine, path)
        given = dict(engine.weight_source().iter_full())
    weights = Oracle(path).weights()
    assert given.keys() == weights.keys()
    assert all(torch.equal(given[name], weight) for name, weight in weights.items())


@pytest.mark.slow
def test_a_model_with_biases_of_queries_keys_and_values(save):
    from transformers import Qwen2Config

    assert_is_as_transformers(save(Qwen2Config, tie_word_embeddings=True))


@pytest.mark.slow
def test_a_model_nobody_wrote_down_runs_by_naming_its_architecture(save):
    from transformers import MistralConfig

    path = save(MistralConfig, sliding_window=None, tie_word_embeddings=False)
    with engine_of(path, architecture="enginehouse_megatron.architectures:LLAMA") as engine:
        assert_scores_as_transformers_does(engine, path)


@pytest.mark.slow
def test_rotary_embeddings_of_llama_3(save):
    from transformers import LlamaConfig

    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    path = save(LlamaConfig, rope_parameters=rope, tie_word_embeddings=False)
    with engine_of(path) as engine:
        assert_scores_as_transformers_does(engine, path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "values",
    [
        {"norm_topk_prob": True},
        {"norm_topk_prob": False, "num_experts_per_tok": 3},
        {"num_hidden_layers": 3, "mlp_only_layers": [1], "norm_topk_prob": True},
        {"num_hidden_layers": 3, "decoder_sparse_step": 2},
    ],
    ids=str,
)
def test_a_mixture_of_experts_with_or_without_dense_layers(save, values):
    from transformers import Qwen3MoeConfig

    experts = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
    assert_is_as_transformers(save(Qwen3MoeConfig, **(experts | values)))


@pytest.mark.slow
def test_mixtral(save):
    from transformers import MixtralConfig

    assert_is_as_transformers(save(MixtralConfig, num_local_experts=4, num_experts_per_tok=2, sliding_window=None))


@pytest.mark.slow
def test_recomputing_activations_changes_no_gradient(save):
    from transformers import Qwen2Config

    from enginehouse_megatron.layers import PackedAttention
    from enginehouse_testing.checks.train.gradients import READING
    from enginehouse_testing.problem import POLICY

    path = save(Qwen2Config, tie_word_embeddings=True)
    weights, computed = [], []
    for recompute in ("none", "full"):
        with (
            engine_of(path, recompute=recompute, **READING) as engine,
            mock.patch.object(
                PackedAttention, "forward", autospec=True, side_effect=PackedAttention.forward
            ) as attended,
        ):
            engine.forward_backward(batch(), POLICY)
            engine.optim_step()
            weights.append({name: tensor.clone() for name, tensor in engine.weight_source().iter_full()})
            computed.append(attended.call_count)
    assert all(torch.equal(weights[0][name], weight) for name, weight in weights[1].items())
    assert computed[1] == 2 * computed[0], "each layer is computed again going back"
