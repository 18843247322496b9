"""Models whose experts transformers runs fused and stores apart: sharded, trained and given back in the stored form."""

import shutil
from pathlib import Path

import pytest
import torch
from expert_models import expert_model
from fsdp_train_cases import OPTIONS, make_sharded, score_and_train
from torch_train_cases import make_batch, make_engine, weights_of

from enginehouse.errors import ModelError
from enginehouse.weights.names import stored_names
from enginehouse_torch.modeling.stored import StoredForm

pytestmark = pytest.mark.slow


def _train(rank, world_size, path, sizes, options, directory):
    engine = make_sharded(path, rank, world_size, **options)
    began, owned = weights_of(engine), sum(p.to_local().numel() for p in engine._model.parameters())
    parts = {meta.name: meta for meta in engine.weight_source().metadata()}
    held = {name: (parts[name], tensor.clone()) for name, tensor in engine.weight_source().iter_local()}
    scores, stepped, _ = score_and_train(engine, make_batch(4, 4).split(sizes)[rank])
    weights = weights_of(engine)
    engine.export_hf(f"{directory}/exported")
    engine.shutdown()
    return began, owned, held, scores, stepped, weights


@pytest.mark.parametrize(
    ("family", "experts", "sizes", "options"),
    [
        ("qwen3_moe", 5, [16], {}),
        ("qwen3_moe", 5, [9, 7], {"activation_checkpointing": True}),
        ("qwen3_moe", 3, [6, 4, 0, 6], {}),  # the last rank has no expert, the third no row
        ("qwen3_moe", 5, [4, 4, 4, 4], {"replicas": 2, "cpu_offload": True}),
        ("mixtral", 4, [8, 8], {}),
    ],
    ids=str,
)
def test_experts_are_sharded_and_train_like_the_oracle(run_ranks, tmp_path, family, experts, sizes, options):
    from transformers import AutoModelForCausalLM

    path = expert_model(family, experts)
    oracle = make_engine(path, **OPTIONS)
    before = weights_of(oracle)
    scores, stepped, _ = score_and_train(oracle, make_batch(4, 4))
    after = weights_of(oracle)
    results = run_ranks(len(sizes), _train, path, sizes, options, str(tmp_path))
    found = torch.cat([part["logprobs"].values for *_, part, _, _ in results])
    torch.testing.assert_close(found, scores["logprobs"].values, atol=1e-5, rtol=1e-5)
    for began, _, _, _, steps, weights in results:
        assert began.keys() == before.keys() == stored_names(Path(path))
        assert all(torch.equal(began[name], weight) for name, weight in before.items())
        for ours, theirs in zip(steps, stepped, strict=True):
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
        for name, weight in after.items():
            torch.testing.assert_close(weights[name], weight, atol=1e-4, rtol=0)
    everything = sum(weight.numel() for weight in before.values())
    shards = len(sizes) // options.get("replicas", 1)
    assert sum(owned for _, owned, *_ in results) == everything * len(sizes) / shards, "something is held twice"
    for rank, (_, _, held, *_) in enumerate(results):
        for name, (meta, part) in held.items():
            if meta.owners and not meta.placements:  # an expert, whole where it is
                assert rank in meta.owners
                assert torch.equal(part, before[name])
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    form = StoredForm.of(exported, stored_names(tmp_path / "exported"))
    loaded = dict(form.apart(exported.state_dict()))
    assert loaded.keys() == after.keys()
    assert all(torch.equal(loaded[name], weight) for name, weight in results[0][-1].items())


def test_a_missing_expert_is_named(tmp_path):
    from safetensors.torch import load_file, save_file

    path = shutil.copytree(expert_model(), tmp_path / "model")
    weights = load_file(path / "model.safetensors")
    del weights["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"lack model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight"):
        make_sharded(str(path))
