"""The `fsdp` engine against the `torch` engine, on real ranks: what is sharded changes nothing but where it lies."""

import pytest
import torch
from fsdp_train_cases import OPTIONS, assert_trained_like, make_sharded, refusal, score_and_train, train
from torch_train_cases import NOT_FINITE, POLICY, make_batch, make_engine, weights_of

from enginehouse.errors import ConfigError, ModelError
from enginehouse_testing.models import tiny_model, with_weight
from enginehouse_torch.modeling.files import CheckpointError

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("sizes", "head", "tied", "options"),
    [
        ([16], "causal_lm", True, {}),
        ([9, 7], "causal_lm", False, {}),
        ([16, 0], "causal_lm", True, {"activation_checkpointing": True}),
        ([8, 8], "value", True, {}),
        ([3, 13], "value", False, {"reshard_after_forward": False}),
        ([9, 0, 1, 6], "causal_lm", True, {"replicas": 2}),
        ([4, 4, 4, 4], "causal_lm", False, {"cpu_offload": True}),
    ],
    ids=str,
)
def test_any_layout_scores_and_trains_like_the_oracle(run_ranks, oracle, sizes, head, tied, options):
    path = tiny_model("qwen3", tied)
    results = run_ranks(len(sizes), train, path, head, sizes, options)
    assert_trained_like(oracle(path, head), results, sizes)
    for found in results:
        assert list(found.weights) == [parameter.name for parameter in found.described]
        assert found.mesh.dp_size == len(sizes)


GROUPS = {"*.embed_tokens.*": 0.0, "model.layers.0.*": 0.25, "*.norm*": 4.0}


def test_groups_of_parameters_have_the_learning_rates_that_they_have_in_one_process(run_ranks):
    path = tiny_model("qwen3", False)
    alone = make_engine(path, **OPTIONS, weight_decay=0.1, lr_groups=GROUPS)
    _, stepped, _ = score_and_train(alone, make_batch(4, 4))
    norms = [one["grad_norm"] for one in stepped]
    for found in run_ranks(2, train, path, "causal_lm", [9, 7], {"weight_decay": 0.1, "lr_groups": GROUPS}):
        assert [one["lr"] for one in found.stepped] == [one["lr"] for one in stepped]
        assert [one["grad_norm"] for one in found.stepped] == pytest.approx(norms, rel=1e-3)
        for name, weight in weights_of(alone).items():
            torch.testing.assert_close(found.weights[name], weight, atol=1e-4, rtol=0)


def test_a_pattern_that_no_parameter_matches_is_an_error_at_the_start(run_ranks):
    said = run_ranks(1, refusal, tiny_model(), {"lr_groups": {"*.layers.*.qproj.*": 0.5}})
    assert "lr_groups: no trained parameter matches '*.layers.*.qproj.*'" in said[0]


def _half(rank, world_size, path):
    engine = make_sharded(path, rank, world_size, dtype="bfloat16")
    scores, *_ = score_and_train(engine, make_batch(4, 4).split(world_size)[rank], steps=1)
    dtypes = {str(weight.dtype) for weight in weights_of(engine).values()}
    kept = {str(parameter.dtype) for parameter in engine._model.parameters()}
    engine.shutdown()
    return scores, dtypes, kept


def test_half_precision_computes_in_it_keeps_float32_and_gives_half(run_ranks, oracle):
    path = tiny_model()
    scores, *_ = oracle(path, "causal_lm")
    results = run_ranks(2, _half, path)
    found = torch.cat([part["logprobs"].values for part, *_ in results])
    assert (found - scores["logprobs"].values).abs().max() < 0.2
    assert (found - scores["logprobs"].values).abs().max() > 0
    assert [dtypes for _, dtypes, _ in results] == [{"torch.bfloat16"}] * 2
    assert [kept for *_, kept in results] == [{"torch.float32"}] * 2


def _skip(rank, world_size, path):
    engine = make_sharded(path, rank, world_size)
    before = weights_of(engine)
    engine.forward_backward(make_batch(1, 2, seed=rank), NOT_FINITE if rank == 1 else POLICY)
    stepped = engine.optim_step()
    same = all(torch.equal(before[name], weight) for name, weight in weights_of(engine).items())
    engine.shutdown()
    return stepped["skipped"], same


def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_on_all(run_ranks):
    assert run_ranks(2, _skip, tiny_model()) == [(1.0, True)] * 2


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    engine = make_sharded(tiny_model())
    engine.save(str(tmp_path / "saved"))
    engine.shutdown()
    other = make_sharded(tiny_model(hidden=64))
    try:
        with pytest.raises(CheckpointError, match="has shape"):
            other.load(str(tmp_path / "saved"))
        with pytest.raises(CheckpointError, match=r"no file \.metadata"):
            other.load(str(tmp_path / "nothing"))
    finally:
        other.shutdown()


def test_what_cannot_be_is_said_at_setup(tmp_path):
    with pytest.raises(ConfigError, match=r"1 rank\(s\) cannot hold 2 replicas"):
        make_sharded(tiny_model(), replicas=2)
    with pytest.raises(ModelError, match="not a directory"):
        make_sharded(str(tmp_path / "none"))
    with pytest.raises(ModelError, match="fsdp: no engine trains in float16"):
        make_sharded(tiny_model(), dtype="float16")
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(ModelError, match=f"not finite .*: {name} in "):
        make_sharded(with_weight(tiny_model(), name, (3, 2), float("nan")))
    with pytest.raises(ConfigError, match="fully_shard refuses"):
        make_sharded(tiny_model(), native={"no_such_argument": 1})
