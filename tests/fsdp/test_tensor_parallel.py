"""The `fsdp` engine with matrices split over ranks, against the `torch` engine and against itself without."""

import json
import math
from pathlib import Path

import pytest
import torch
from expert_models import expert_model
from fsdp_train_cases import assert_trained_like, go_on, refusal, save, train
from safetensors.torch import load_file, save_file
from torch_train_cases import make_engine, weights_of

from enginehouse_testing.models import VOCABULARY_SIZE, tiny_model

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("sizes", "head", "family", "tied", "options"),
    [
        ([16], "causal_lm", "qwen3", True, {"tensor_parallel": 2}),
        ([16], "causal_lm", "llama", False, {"tensor_parallel": 4}),
        ([9, 7], "causal_lm", "qwen3", True, {"tensor_parallel": 2, "share_prompts": "never"}),
        ([16, 0], "causal_lm", "llama", False, {"tensor_parallel": 2, "activation_checkpointing": True}),
        ([9, 7], "causal_lm", "qwen3", False, {"tensor_parallel": 2, "replicas": 2}),
        ([3, 13], "value", "qwen3", True, {"tensor_parallel": 2}),
        ([16], "value", "llama", False, {"tensor_parallel": 2, "cpu_offload": True}),
    ],
    ids=str,
)
def test_split_matrices_score_and_train_like_the_oracle(run_ranks, oracle, sizes, head, family, tied, options):
    heads = 4 if options["tensor_parallel"] == 4 else 2
    path = tiny_model(family, tied, key_value_heads=heads, vocabulary=33 if family == "llama" else VOCABULARY_SIZE)
    ranks = len(sizes) * options["tensor_parallel"]
    results = run_ranks(ranks, train, path, head, sizes, options)
    assert_trained_like(oracle(path, head), results, sizes)
    _check_parts(results)


def _check_parts(results):
    """Every rank's own part is where its metadata say it is."""
    for described in results[0].described:
        if not described.owners:
            continue
        owners = torch.tensor(described.owners).view(described.mesh_shape)
        for rank, found in enumerate(results):
            place = (owners == rank).nonzero()[0].tolist()
            part = found.weights[described.name]
            for placement, index, size in zip(described.placements, place, described.mesh_shape, strict=True):
                if placement != "R":
                    dimension = int(placement[1:])
                    pieces = part.chunk(size, dimension)
                    part = pieces[index] if index < len(pieces) else part.narrow(dimension, 0, 0)
            held = found.held[described.name]
            assert torch.equal(held.reshape(part.shape), part), (described, rank)


LAYOUTS = {
    "single": ([16], {}),
    "shard2": ([9, 7], {}),
    "tp2": ([16], {"tensor_parallel": 2}),
    "tp2xshard2": ([9, 7], {"tensor_parallel": 2}),
    "shard4": ([4, 4, 4, 4], {}),
}


@pytest.mark.parametrize(
    ("model", "written", "read"),
    [
        ("tied", "tp2xshard2", ("single", "shard2", "tp2")),
        ("tied", "tp2", ("tp2xshard2",)),
        ("tied", "shard2", ("tp2", "tp2xshard2")),
        ("tied", "single", ("tp2xshard2",)),
        ("tied", "shard4", ("single", "shard2")),
        ("experts", "shard2", ("shard4",)),
    ],
)
def test_a_checkpoint_goes_on_alike_in_any_layout(run_ranks, tmp_path, model, written, read):
    path = expert_model() if model == "experts" else tiny_model("qwen3", True, vocabulary=33)
    sizes, options = LAYOUTS[written]
    world_size = len(sizes) * options.get("tensor_parallel", 1)
    (at_save, expected), *_ = run_ranks(world_size, save, path, sizes, str(tmp_path), options)
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []
    exported = weights_of(make_engine(str(tmp_path / "exported")))
    assert exported.keys() == at_save.keys()
    assert all(torch.equal(exported[name], weight) for name, weight in at_save.items()), "not bit for bit"
    for layout in read:
        sizes, options = LAYOUTS[layout]
        world_size = len(sizes) * options.get("tensor_parallel", 1)
        for at_load, found in run_ranks(world_size, go_on, path, sizes, str(tmp_path), options):
            assert all(torch.equal(at_load[name], weight) for name, weight in at_save.items()), "not bit for bit"
            for name, weight in expected.items():
                torch.testing.assert_close(found[name], weight, atol=1e-6, rtol=0)


def test_half_precision_computes_in_it_and_gives_it(run_ranks, oracle):
    path = tiny_model()
    scores, stepped, *_ = oracle(path, "causal_lm")
    results = run_ranks(2, train, path, "causal_lm", [16], {"dtype": "bfloat16", "tensor_parallel": 2})
    difference = (results[0].scores["logprobs"].values - scores["logprobs"].values).abs().max()
    assert 0 < difference < 0.2
    for found in results:
        assert found.stepped[0]["grad_norm"] == pytest.approx(stepped[0]["grad_norm"], rel=0.05)
        assert {weight.dtype for weight in found.weights.values()} == {torch.bfloat16}


def _with_config(path, directory, **changes):
    """A model directory with another config, and weights that are refused where they are read."""
    source, target = Path(path), directory / "model"
    target.mkdir()
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **changes}))
    weights = load_file(source / "model.safetensors")
    save_file(weights | {"model.norm.weight": weights["model.norm.weight"] * math.nan}, target / "model.safetensors")
    return str(target)


def _gpt2(directory):
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=32, n_layer=1, n_head=2)).save_pretrained(directory)
    return str(directory)


def test_what_does_not_divide_is_said_before_weights_are_read(run_ranks, tmp_path):
    broken = _with_config(tiny_model(), tmp_path)
    said = run_ranks(4, refusal, broken, {"tensor_parallel": 4})
    assert set(said) == {
        "fsdp: tensor_parallel=4 does not divide num_key_value_heads of Qwen3ForCausalLM (2); "
        "nearest divisor: tensor_parallel=2"
    }
    said = run_ranks(4, refusal, broken, {"tensor_parallel": 3})
    assert set(said) == {
        "fsdp: tensor_parallel=3 does not divide the 4 rank(s) that are left for it; nearest divisor: tensor_parallel=4"
    }


def test_a_model_without_a_plan_is_refused(run_ranks, tmp_path):
    for said in run_ranks(2, refusal, _gpt2(tmp_path), {"tensor_parallel": 2}):
        assert "GPT2LMHeadModel has no tensor-parallel plan" in said
        assert "use tensor_parallel=1" in said


def test_a_plan_with_an_unknown_style_is_refused(run_ranks, tmp_path):
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=2,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(tmp_path)
    for said in run_ranks(2, refusal, str(tmp_path), {"tensor_parallel": 2}):
        assert "the plan of MixtralForCausalLM has the style" in said
