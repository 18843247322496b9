"""The `fsdp` engine with matrices split over ranks, against the `torch` engine and against itself without."""

import json
from pathlib import Path

import pytest
import torch
from fsdp_train_cases import STEPS, make_sharded, refusal, score_and_train
from torch_train_cases import make_batch, make_engine, weights_of

from enginehouse_testing.models import VOCABULARY_SIZE, tiny_model

pytestmark = pytest.mark.slow


def own_shard(engine, sizes):
    return make_batch(4, 4).split(sizes)[engine.mesh.dp_rank]


def _train(rank, world_size, path, head, sizes, options):
    engine = make_sharded(path, rank, world_size, head, **options)
    scores, stepped, metrics = score_and_train(engine, own_shard(engine, sizes), head)
    found = {
        "scores": scores,
        "stepped": stepped,
        "metrics": metrics,
        "weights": weights_of(engine),
        "described": engine.weight_source().metadata(),
        "held": dict(engine.weight_source().iter_local()),
        "mesh": engine.mesh,
    }
    engine.shutdown()
    return found


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
    scores, stepped, metrics, weights = oracle(path, head)
    ranks = len(sizes) * options["tensor_parallel"]
    results = run_ranks(ranks, _train, path, head, sizes, options)
    answers = [found for found in results if found["mesh"].is_output_rank]
    assert len(answers) == len(sizes)
    assert all(found["scores"] is None for found in results if found not in answers)
    for name in scores.columns:
        gathered = torch.cat([found["scores"][name].values for found in answers])
        torch.testing.assert_close(gathered, scores[name].values, atol=1e-5, rtol=1e-5)
    for step in range(STEPS):
        loss = sum(m["metrics"][step]["loss"].total for m in answers if m["metrics"][step])
        assert loss == pytest.approx(metrics[step]["loss"].total, rel=1e-4, abs=1e-4)
    for found in results:
        for ours, theirs in zip(found["stepped"], stepped, strict=True):
            assert ours["lr"] == theirs["lr"]
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
        assert found["weights"].keys() == weights.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(found["weights"][name], weight, atol=1e-4, rtol=0)
            assert torch.equal(found["weights"][name], results[0]["weights"][name]), "ranks gathered different weights"
        assert found["described"] == results[0]["described"], "ranks describe the weights differently"
    _check_parts(results)


def _check_parts(results):
    """Every rank's own part is where its metadata say it is."""
    for described in results[0]["described"]:
        if not described.owners:
            continue
        owners = torch.tensor(described.owners).view(described.mesh_shape)
        for rank, found in enumerate(results):
            place = (owners == rank).nonzero()[0].tolist()
            part = found["weights"][described.name]
            for placement, index, size in zip(described.placements, place, described.mesh_shape, strict=True):
                if placement != "R":
                    dimension = int(placement[1:])
                    pieces = part.chunk(size, dimension)
                    part = pieces[index] if index < len(pieces) else part.narrow(dimension, 0, 0)
            held = found["held"][described.name]
            assert torch.equal(held.reshape(part.shape), part), (described, rank)


def _save(rank, world_size, path, sizes, directory, options):
    engine = make_sharded(path, rank, world_size, **options)
    shard = own_shard(engine, sizes)
    score_and_train(engine, shard, steps=2)
    engine.save(f"{directory}/saved")
    engine.export_hf(f"{directory}/exported")
    at_save = weights_of(engine)
    score_and_train(engine, shard, steps=2)
    weights = weights_of(engine)
    engine.shutdown()
    return at_save, weights


def _load(rank, world_size, path, sizes, directory, options):
    engine = make_sharded(path, rank, world_size, **options)
    engine.load(f"{directory}/saved")
    at_load = weights_of(engine)
    score_and_train(engine, own_shard(engine, sizes), steps=2)
    weights = weights_of(engine)
    engine.shutdown()
    return at_load, weights


LAYOUTS = {
    "single": ([16], {}),
    "shard2": ([9, 7], {}),
    "tp2": ([16], {"tensor_parallel": 2}),
    "tp2xshard2": ([9, 7], {"tensor_parallel": 2}),
}


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("tp2xshard2", ("single", "shard2", "tp2")),
        ("tp2", ("tp2xshard2",)),
        ("shard2", ("tp2", "tp2xshard2")),
        ("single", ("tp2xshard2",)),
    ],
)
def test_a_checkpoint_goes_on_alike_in_any_layout(run_ranks, tmp_path, written, read):
    path = tiny_model("qwen3", True, vocabulary=33)
    sizes, options = LAYOUTS[written]
    world_size = len(sizes) * options.get("tensor_parallel", 1)
    (at_save, expected), *_ = run_ranks(world_size, _save, path, sizes, str(tmp_path), options)
    exported = weights_of(make_engine(str(tmp_path / "exported")))
    assert exported.keys() == at_save.keys()
    assert all(torch.equal(exported[name], weight) for name, weight in at_save.items()), "not bit for bit"
    for layout in read:
        sizes, options = LAYOUTS[layout]
        world_size = len(sizes) * options.get("tensor_parallel", 1)
        for at_load, found in run_ranks(world_size, _load, path, sizes, str(tmp_path), options):
            assert all(torch.equal(at_load[name], weight) for name, weight in at_save.items()), "not bit for bit"
            for name, weight in expected.items():
                torch.testing.assert_close(found[name], weight, atol=1e-6, rtol=0)


def _half(rank, world_size, path):
    engine = make_sharded(path, rank, world_size, dtype="bfloat16", tensor_parallel=2)
    scores, stepped, _ = score_and_train(engine, make_batch(4, 4), steps=1)
    weights = weights_of(engine)
    engine.shutdown()
    return scores, stepped[0]["grad_norm"], {str(weight.dtype) for weight in weights.values()}


def test_half_precision_computes_in_it_and_gives_it(run_ranks, oracle):
    path = tiny_model()
    scores, stepped, *_ = oracle(path, "causal_lm")
    results = run_ranks(2, _half, path)
    difference = (results[0][0]["logprobs"].values - scores["logprobs"].values).abs().max()
    assert 0 < difference < 0.2
    for _, norm, dtypes in results:
        assert norm == pytest.approx(stepped[0]["grad_norm"], rel=0.05)
        assert dtypes == {"torch.bfloat16"}


def _with_config(path, directory, **changes):
    """A model directory with another config and no weights that could be read."""
    source, target = Path(path), directory / "model"
    target.mkdir()
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **changes}))
    (target / "model.safetensors").write_bytes(b"never read")
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
        "nearest that does: tensor_parallel=2"
    }
    said = run_ranks(4, refusal, broken, {"tensor_parallel": 3})
    assert set(said) == {
        "fsdp: tensor_parallel=3 does not divide the 4 rank(s) there are for it; nearest that does: tensor_parallel=4"
    }


def test_a_model_without_a_plan_is_refused(run_ranks, tmp_path):
    for said in run_ranks(2, refusal, _gpt2(tmp_path), {"tensor_parallel": 2}):
        assert "GPT2LMHeadModel brings no tensor-parallel plan" in said
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
