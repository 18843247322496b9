"""LoRA in the `fsdp` engine against plain `peft` in one process, row by row."""

import math
from pathlib import Path

import pytest
import torch
from adapted_by_peft import OPTIONS, STEPS, adapted_by_peft, column_by_peft, compare_with_peft, trained_by_peft
from expert_models import expert_model
from fsdp_train_cases import go_on, own_shard, save
from rank_processes import rank_processes
from safetensors.torch import load_file
from torch_train_cases import (
    POLICY,
    SQUARED_ERROR,
    make_batch,
    oracle_outputs,
    plain_model,
    weights_of,
)

from enginehouse.engines.model import ModelSpec, ProcessContext
from enginehouse.engines.train import Outputs
from enginehouse.errors import ConfigError, EnginehouseError
from enginehouse_testing.checks.train.outgoing import judge_weights, read_source
from enginehouse_testing.models import tiny_model
from enginehouse_torch.modeling.files import CheckpointError
from enginehouse_torch.modeling.loading import load_model

pytestmark = pytest.mark.slow

LORA = {"rank": 4, "alpha": 8}


@pytest.fixture(scope="module")
def run_ranks():
    with rank_processes("enginehouse_fsdp.engine", "transformers.models.qwen3.modeling_qwen3", "peft") as run:
        yield run


def make_adapted(path, rank=0, world_size=1, head="causal_lm", dtype="float32", seed=0, lora=LORA, **options):
    from enginehouse_fsdp.engine import FSDPEngine
    from enginehouse_fsdp.options import FSDPOptions

    engine = FSDPEngine()
    context = ProcessContext(role="actor", rank=rank, world_size=world_size, local_rank=rank)
    spec = ModelSpec(path=path, head=head, dtype=dtype, seed=seed)
    engine.setup(spec, FSDPOptions(**{**OPTIONS, "lora": lora, **options}), context)
    return engine


def outputs_of(head):
    return Outputs(entropy=True, temperature=0.7) if head == "causal_lm" else Outputs(logprobs=False, values=True)


def train(engine, head, shard, steps=STEPS):
    stepped = []
    for _ in range(steps):
        engine.forward_backward(shard, POLICY if head == "causal_lm" else SQUARED_ERROR)
        stepped.append(engine.optim_step())
    return stepped


def _first_adapter(rank, world_size, path, directory, seed, lora, split=1):
    engine = make_adapted(path, rank, world_size, seed=seed, lora=lora, tensor_parallel=split)
    engine.export_adapter(directory)
    engine.shutdown()


def _train(rank, world_size, path, head, sizes, lora, options, directory):
    engine = make_adapted(path, rank, world_size, head, lora=lora, **options)
    shard = own_shard(engine, sizes)
    first = weights_of(engine)
    norms = [step["grad_norm"] for step in train(engine, head, shard)]
    merged, adapter = read_source(engine.weight_source()), read_source(engine.adapter_source())
    scores = engine.forward(shard, outputs_of(head))
    engine.export_hf(f"{directory}/merged")
    if head == "causal_lm":
        engine.export_adapter(f"{directory}/adapter")
    engine.shutdown()
    return first, norms, merged, adapter, scores


@pytest.mark.parametrize(
    ("sizes", "head", "tied", "lora", "options"),
    [
        ([16], "causal_lm", True, {}, {}),
        ([9, 7], "causal_lm", False, {"targets": ["q_proj", "down_proj", "lm_head"]}, {}),
        ([16, 0], "causal_lm", True, {"rank": 3}, {"activation_checkpointing": True}),
        ([8, 8], "value", True, {}, {}),
        ([3, 13], "value", False, {}, {"reshard_after_forward": False}),
        ([4, 0, 6, 6], "causal_lm", False, {"rank": 1}, {"cpu_offload": True, "replicas": 2}),
        ([16], "causal_lm", False, {"targets": ["q_proj", "o_proj", "down_proj", "lm_head"]}, {"tensor_parallel": 2}),
        ([9, 7], "causal_lm", True, {"rank": 3}, {"tensor_parallel": 2, "activation_checkpointing": True}),
        ([3, 13], "value", False, {}, {"tensor_parallel": 2, "cpu_offload": True}),
    ],
    ids=str,
)
def test_any_layout_trains_serves_and_exports_as_peft_does(run_ranks, tmp_path, sizes, head, tied, lora, options):
    path, lora = tiny_model("qwen3", tied), {**LORA, **lora}
    run_ranks(1, _first_adapter, path, str(tmp_path / "first"), 0, lora)
    expected_norms, expected_adapter, expected = trained_by_peft(path, str(tmp_path / "first"), head)
    base = load_model(ModelSpec(path=path, head=head), "cpu").state_dict()
    ranks = len(sizes) * options.get("tensor_parallel", 1)
    results = run_ranks(ranks, _train, path, head, sizes, lora, options, str(tmp_path))
    targets = tuple(lora.get("targets", ["proj"]))
    for kind, what in ((2, "merged weights"), (3, "the adapter")):
        sources = [result[kind] for result in results]
        parts = judge_weights(sources, sources[0][1], what)
        assert parts.error == 0, parts.detail
    for first, norms, (_, last, _), (_, adapter, _), _ in results:
        assert norms == pytest.approx(expected_norms, rel=1e-4)
        assert list(first) == list(last)
        assert set(last) == set(base) - ({"lm_head.weight"} if tied else set())
        compare_with_peft(adapter, expected_adapter, first, last, base, expected, targets)
    exported = load_model(ModelSpec(path=str(tmp_path / "merged"), head=head), "cpu").state_dict()
    assert all(torch.equal(exported[name], weight) for name, weight in results[0][2][1].items()), "not bit for bit"
    if head == "causal_lm":
        loaded = adapted_by_peft(path, str(tmp_path / "adapter"), trainable=False)
        batch = make_batch(4, 4)
        mask = batch.ragged("loss_mask").values
        with torch.no_grad():
            logprobs = torch.where(mask, column_by_peft(loaded, head, batch), 0.0)
        found = torch.cat([scores["logprobs"].values for *_, scores in results if scores is not None])
        torch.testing.assert_close(found, logprobs, atol=1e-5, rtol=1e-5)


def _scores_of_a_copy(rank, world_size, path, sizes, dtype):
    engine = make_adapted(path, rank, world_size, dtype=dtype, lora=None)
    scores = engine.forward(make_batch(4, 4).split(sizes)[rank], outputs_of("causal_lm"))
    engine.shutdown()
    return scores


def _scores_of_the_base(rank, world_size, path, sizes, dtype):
    """Of the base before anything and after steps, and logprobs of the adapted model after some of them and all."""
    shard = make_batch(4, 4).split(sizes)[rank]
    engine = make_adapted(path, rank, world_size, dtype=dtype)
    before = engine.forward_base(shard, outputs_of("causal_lm"))
    moved = []
    for _ in range(2):
        train(engine, "causal_lm", shard, 2)
        moved.append(engine.forward(shard, outputs_of("causal_lm"))["logprobs"].values)
        after = engine.forward_base(shard, outputs_of("causal_lm"))
    assert torch.equal(engine.forward(shard, outputs_of("causal_lm"))["logprobs"].values, moved[-1]), (
        "left switched off"
    )
    engine.shutdown()
    return before, after, moved


@pytest.mark.parametrize(("sizes", "dtype"), [([16], "float32"), ([9, 7], "float32"), ([9, 7], "bfloat16")], ids=str)
def test_without_its_adapters_a_model_is_the_reference_that_a_copy_would_be(run_ranks, sizes, dtype):
    arguments = (tiny_model(), sizes, dtype)
    copies = run_ranks(len(sizes), _scores_of_a_copy, *arguments)
    for copy, (before, after, moved) in zip(copies, run_ranks(len(sizes), _scores_of_the_base, *arguments)):
        for column in ("logprobs", "entropy"):
            assert torch.equal(before[column].values, copy[column].values)
            assert torch.equal(after[column].values, copy[column].values)
        first, last = moved
        assert (first - copy["logprobs"].values).abs().max() > 1e-3
        assert (last - first).abs().max() > 1e-3, "adapters train no more"


def test_the_first_adapters_depend_on_seed_and_name_alone(run_ranks, tmp_path):
    found = []
    for number, (world_size, seed, split) in enumerate([(1, 0, 1), (2, 0, 1), (2, 0, 2), (1, 1, 1)]):
        run_ranks(world_size, _first_adapter, tiny_model(), str(tmp_path / str(number)), seed, LORA, split)
        found.append(load_file(tmp_path / str(number) / "adapter_model.safetensors"))
    one, sharded, split, other = found
    assert one.keys() == sharded.keys() == split.keys() == other.keys()
    assert all(torch.equal(one[name], sharded[name]) and torch.equal(one[name], split[name]) for name in one)
    downs = [name for name in one if ".lora_A." in name]
    assert len(downs) == 2 * 7
    assert not any(torch.equal(one[name], other[name]) for name in downs)
    assert not any(one[name].any() for name in one if ".lora_B." in name)
    assert len({tuple(one[name].flatten()[:4].tolist()) for name in downs}) == len(downs), "two layers drew the same"
    for name in downs:
        bound = one[name].shape[1] ** -0.5
        assert 0.8 * bound < one[name].abs().max() <= bound


def _half(rank, world_size, path, directory, sizes, options):
    engine = make_adapted(path, rank, world_size, dtype="bfloat16", **options)
    shard = own_shard(engine, sizes)
    scores = engine.forward(shard, outputs_of("causal_lm"))
    train(engine, "causal_lm", shard)
    engine.export_adapter(directory)
    kept = {(str(p.dtype), p.requires_grad) for p in engine._model.parameters()}
    weights = weights_of(engine)
    engine.shutdown()
    return scores, kept, weights


@pytest.mark.parametrize(("sizes", "options"), [([8, 8], {}), ([16], {"tensor_parallel": 2})], ids=str)
def test_half_precision_trains_float32_adapters_on_a_half_base_and_rounds_what_it_serves_once(
    run_ranks, tmp_path, sizes, options
):
    path = tiny_model()
    results = run_ranks(2, _half, path, str(tmp_path), sizes, options)
    assert [kept for _, kept, _ in results] == [{("torch.bfloat16", False), ("torch.float32", True)}] * 2
    batch = make_batch(4, 4)
    coarse = plain_model(path).bfloat16().float()
    merged = adapted_by_peft_on(coarse, str(tmp_path)).merge_and_unload().state_dict()
    weights = results[0][2]
    assert {str(weight.dtype) for weight in weights.values()} == {"torch.bfloat16"}
    for name, weight in weights.items():
        torch.testing.assert_close(weight.float(), merged[name], rtol=2**-8, atol=1e-6)
    logprobs = torch.cat([oracle_outputs(plain_model(path), batch.row(row)["input_ids"], 0.7)[0] for row in range(16)])
    logprobs = torch.where(batch.ragged("loss_mask").values, logprobs, 0.0)
    found = torch.cat([scores["logprobs"].values for scores, *_ in results if scores is not None])
    assert 0 < (found - logprobs).abs().max() < 0.2


def adapted_by_peft_on(model, adapter):
    from peft import PeftModel

    return PeftModel.from_pretrained(model, adapter)


LAYOUTS = {"single": ([16], 1), "shard2": ([8, 8], 1), "tp2": ([16], 2), "tp2xshard2": ([8, 8], 2)}
"""Rows of each data-parallel rank, and the number of ranks that split matrices."""


@pytest.mark.parametrize(
    ("written", "read"), [("shard2", ("single", "shard2", "tp2")), ("tp2xshard2", ("shard2", "tp2"))]
)
def test_a_checkpoint_holds_no_base_weights_and_goes_on_alike_with_other_ranks(run_ranks, tmp_path, written, read):
    from torch.distributed.checkpoint import FileSystemReader

    path = tiny_model()

    def run(case, layout):
        sizes, split = LAYOUTS[layout]
        options = {**OPTIONS, "lora": LORA, "tensor_parallel": split}
        return run_ranks(len(sizes) * split, case, path, sizes, str(tmp_path), options)

    (_, expected), *_ = run(save, written)
    for layout in read:
        for _, found in run(go_on, layout):
            for name, weight in expected.items():
                torch.testing.assert_close(found[name], weight, atol=1e-6, rtol=0)
    held = FileSystemReader(tmp_path / "saved").read_metadata().state_dict_metadata
    tensors = [name for name in held if name.startswith(("model.model.", "optimizer.exp_avg"))]
    assert len(tensors) == 3 * 2 * 2 * 7, "not A and B and their two moments, in two layers of seven matrices"
    assert all(".lora_" in name for name in tensors)
    others = [held[name] for name in held if name not in tensors and not name.startswith("rng.")]
    assert all(other.size.numel() == 1 for other in others), "something else is large"


def test_a_checkpoint_that_does_not_belong_is_refused(tmp_path):
    adapted, whole = str(tmp_path / "adapted"), str(tmp_path / "whole")
    for directory, lora in ((adapted, LORA), (whole, None)):
        engine = make_adapted(tiny_model(), lora=lora)
        engine.save(directory)
        engine.shutdown()

    def refused(directory, lora, path=None):
        engine = make_adapted(path or tiny_model(), lora=lora)
        before = weights_of(engine)
        with pytest.raises(CheckpointError) as caught:
            engine.load(directory)
        assert all(torch.equal(before[name], weight) for name, weight in weights_of(engine).items())
        engine.shutdown()
        return str(caught.value)

    assert "holds adapters: set the option lora" in refused(adapted, None)
    assert "holds a whole model and no adapters" in refused(whole, LORA)
    assert "saved with lora.alpha 8, but this run has 16" in refused(adapted, {**LORA, "alpha": 16})
    assert "adapters of a base model with other names or shapes" in refused(adapted, LORA, tiny_model(layers=3))
    assert "has shape (4, 32), but this engine's has (2, 32)" in refused(adapted, {**LORA, "rank": 2})


def test_what_cannot_be_is_said_before_weights_are_loaded(tmp_path):
    path = tmp_path / "model"
    model = plain_model(tiny_model())
    model.model.norm.weight.data.fill_(math.nan)  # so that no weights of it are loaded
    model.save_pretrained(path)

    def said(lora, model=str(path), **options):
        with pytest.raises(ConfigError) as caught:
            make_adapted(model, lora={**LORA, **lora}, **options)
        return str(caught.value)

    assert "has no linear layer 'q_prj'. Did you mean 'q_proj'?" in said({"targets": ["v_proj", "q_prj"]})
    assert "has no linear layer 'q_norm'" in said({"targets": ["q_norm"]})
    assert "'lm_head' cannot have adapters: it is tied to the embedding" in said({"targets": ["lm_head"]})
    assert "lora.rank is 33, but 'model.layers.0.self_attn.q_proj' has the shape (64, 32)" in said({"rank": 33})
    assert "lora.targets is empty" in said({"targets": []})
    assert "has no linear layer 'lm_head'" in said({"targets": ["lm_head"]}, tiny_model("qwen3", False), head="value")


def test_fused_experts_are_served_as_stored_beside_adapted_layers():
    engine = make_adapted(expert_model())
    first = weights_of(engine)
    train(engine, "causal_lm", make_batch(2, 2), steps=1)
    last = weights_of(engine)
    engine.shutdown()
    stored = {}
    for file in Path(expert_model()).glob("*.safetensors"):
        stored |= load_file(file)
    assert first.keys() == last.keys() == stored.keys()
    assert all(torch.equal(first[name], weight) for name, weight in stored.items())
    changed = {name.split(".")[-2] for name in last if not torch.equal(last[name], first[name])}
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_an_adapter_is_exported_only_where_that_says_all():
    for lora, head, says in ((None, "causal_lm", "lora is unset"), (LORA, "value", "a value head needs a whole model")):
        engine = make_adapted(tiny_model(), lora=lora, head=head)
        try:
            with pytest.raises(EnginehouseError, match=says):
                engine.export_adapter("nowhere")
        finally:
            engine.shutdown()


def test_adapters_are_in_the_groups_of_the_weights_they_are_added_to():
    batch = make_batch(4, 4)
    engine = make_adapted(
        tiny_model(), lora={**LORA, "targets": ["q_proj", "v_proj"]}, lr_groups={"*.q_proj.weight": 0}
    )
    before = weights_of(engine)
    train(engine, "causal_lm", batch, 2)
    moved = {name for name, weight in weights_of(engine).items() if not torch.equal(weight, before[name])}
    engine.shutdown()
    assert moved
    assert all("v_proj" in name for name in moved)
