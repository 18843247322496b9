"""LoRA in the `megatron` engine against plain `peft` in one process, row by row."""

import pytest
import torch
from adapted_by_peft import OPTIONS, STEPS, adapted_by_peft, column_by_peft, compare_with_peft, trained_by_peft
from measured_memory import QWEN3_600M
from rank_processes import rank_processes
from safetensors.torch import load_file
from torch_train_cases import POLICY, SQUARED_ERROR, make_batch, weights_of

from enginehouse.engines.memory import MemoryDemand, ModelShape
from enginehouse.engines.model import ModelSpec, ProcessContext
from enginehouse.engines.train import Outputs
from enginehouse.errors import ConfigError, EnginehouseError
from enginehouse_megatron.options import MegatronOptions
from enginehouse_testing.checks.train.outgoing import judge_weights, read_source
from enginehouse_testing.models import tiny_experts, tiny_model
from enginehouse_torch.modeling.files import CheckpointError
from enginehouse_torch.modeling.loading import load_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LORA = {"rank": 4, "alpha": 8}


@pytest.fixture(scope="module")
def run_ranks():
    with rank_processes("enginehouse_megatron.engine", "transformers.models.qwen3.modeling_qwen3", "peft") as run:
        yield run


def make_adapted(path, rank=0, world_size=1, head="causal_lm", dtype="float32", lora=LORA, **options):
    from enginehouse_megatron.engine import MegatronEngine

    engine = MegatronEngine()
    context = ProcessContext(role="actor", rank=rank, world_size=world_size, local_rank=rank)
    spec = ModelSpec(path=path, head=head, dtype=dtype)
    engine.setup(spec, MegatronOptions(**{**OPTIONS, "lora": lora, **options}), context)
    return engine


def step(engine, head="causal_lm", sizes=(16,)):
    shard = make_batch(4, 4).split(list(sizes))[engine.mesh.dp_rank]
    engine.forward_backward(shard, POLICY if head == "causal_lm" else SQUARED_ERROR)
    return engine.optim_step()["grad_norm"]


def _first_adapter(rank, world_size, path, directory, lora):
    engine = make_adapted(path, rank, world_size, lora=lora)
    engine.export_adapter(directory)
    engine.shutdown()


def _train(rank, world_size, path, head, sizes, lora, options, directory):
    engine = make_adapted(path, rank, world_size, head, lora=lora, **options)
    start = read_source(engine.adapter_source())[1], weights_of(engine)
    norms = [step(engine, head, sizes) for _ in range(STEPS)]
    merged, adapter = read_source(engine.weight_source()), read_source(engine.adapter_source())
    outputs = Outputs(temperature=0.7) if head == "causal_lm" else Outputs(logprobs=False, values=True)
    scores = engine.forward(make_batch(4, 4).split(list(sizes))[engine.mesh.dp_rank], outputs)
    engine.export_hf(f"{directory}/merged")
    if head == "causal_lm":
        engine.export_adapter(f"{directory}/adapter")
    engine.shutdown()
    return start, norms, merged, adapter, scores


@pytest.mark.parametrize(
    ("sizes", "head", "tied", "lora", "options"),
    [
        ([16], "causal_lm", False, {"targets": ["q_proj", "v_proj", "o_proj", "up_proj"]}, {"tensor_parallel": 2}),
        ([16], "causal_lm", True, {}, {"tensor_parallel": 2, "pipeline_parallel": 2, "recompute": "full"}),
        ([9, 7], "causal_lm", True, {"rank": 3}, {}),
        ([16], "value", True, {}, {"tensor_parallel": 2, "sequence_parallel": False}),
    ],
    ids=str,
)
def test_any_layout_trains_serves_and_exports_as_peft_does(run_ranks, tmp_path, sizes, head, tied, lora, options):
    path, lora = tiny_model("qwen3", tied), {**LORA, **lora}
    run_ranks(1, _first_adapter, path, str(tmp_path / "first"), lora)
    first = load_file(tmp_path / "first" / "adapter_model.safetensors")
    expected_norms, expected_adapter, expected = trained_by_peft(path, str(tmp_path / "first"), head)
    base = load_model(ModelSpec(path=path, head=head), "cpu").state_dict()
    ranks = len(sizes) * options.get("tensor_parallel", 1) * options.get("pipeline_parallel", 1)
    results = run_ranks(ranks, _train, path, head, sizes, lora, options, str(tmp_path))
    for kind, what in ((2, "merged weights"), (3, "the adapter")):
        sources = [result[kind] for result in results]
        parts = judge_weights(sources, sources[0][1], what)
        assert parts.error == 0, parts.detail
    targets = tuple(lora.get("targets", ["proj"]))
    for (drawn, untrained), norms, (_, last, _), (_, adapter, _), _ in results:
        assert all(torch.equal(drawn[name], first[name]) for name in first), "A depends on the layout"
        assert norms == pytest.approx(expected_norms, rel=1e-4)
        assert set(last) == set(base) - ({"lm_head.weight"} if tied else set())
        compare_with_peft(adapter, expected_adapter, untrained, last, base, expected, targets)
    exported = load_model(ModelSpec(path=str(tmp_path / "merged"), head=head), "cpu").state_dict()
    assert all(torch.equal(exported[name], weight) for name, weight in results[0][2][1].items()), "not bit for bit"
    if head == "causal_lm":
        loaded = adapted_by_peft(path, str(tmp_path / "adapter"), trainable=False)
        batch = make_batch(4, 4)
        with torch.no_grad():
            logprobs = torch.where(batch.ragged("loss_mask").values, column_by_peft(loaded, head, batch), 0.0)
        scored = torch.cat([scores["logprobs"].values for *_, scores in results if scores is not None])
        torch.testing.assert_close(scored, logprobs, atol=1e-5, rtol=1e-5)


def _save(rank, world_size, path, directory, options):
    engine = make_adapted(path, rank, world_size, **options)
    step(engine)
    engine.save(f"{directory}/saved")
    step(engine)
    weights = weights_of(engine)
    engine.shutdown()
    return weights


def _go_on(rank, world_size, path, directory, sizes, options):
    engine = make_adapted(path, rank, world_size, **options)
    engine.load(f"{directory}/saved")
    step(engine, sizes=sizes)
    weights = weights_of(engine)
    engine.shutdown()
    return weights


def test_a_checkpoint_holds_no_base_weights_and_goes_on_alike_in_any_layout(run_ranks, tmp_path):
    from torch.distributed.checkpoint import FileSystemReader

    path = tiny_model()
    expected, *_ = run_ranks(2, _save, path, str(tmp_path), {"tensor_parallel": 2})
    for sizes, options in (([16], {}), ([8, 8], {}), ([16], {"tensor_parallel": 2}), ([16], {"pipeline_parallel": 2})):
        ranks = 1 if sizes == [16] and not options else 2
        for weights in run_ranks(ranks, _go_on, path, str(tmp_path), sizes, options):
            for name, weight in expected.items():
                torch.testing.assert_close(weights[name], weight, atol=1e-6, rtol=0)
    held = FileSystemReader(tmp_path / "saved").read_metadata().state_dict_metadata
    tensors = [name for name in held if not name.startswith("rng") and hasattr(held[name], "size")]
    assert len(tensors) == 4 * 2 * 2 * 7, "not A and B, their float32 values and two moments, in 2 x 7 matrices"
    assert all(".lora_" in name for name in tensors)


def test_a_checkpoint_that_does_not_belong_is_refused(tmp_path):
    adapted, whole = str(tmp_path / "adapted"), str(tmp_path / "whole")
    for directory, lora in ((adapted, LORA), (whole, None)):
        engine = make_adapted(tiny_model(), lora=lora)
        engine.save(directory)
        engine.shutdown()

    def refused(directory, lora):
        engine = make_adapted(tiny_model(), lora=lora)
        with pytest.raises(CheckpointError) as caught:
            engine.load(directory)
        engine.shutdown()
        return str(caught.value)

    assert "holds adapters: set the option lora" in refused(adapted, None)
    assert "holds a whole model and no adapters" in refused(whole, LORA)
    assert "its lora.alpha is 8.0, but this model's is 16.0" in refused(adapted, {**LORA, "alpha": 16})
    assert "its lora.rank is 4, but this model's is 2" in refused(adapted, {**LORA, "rank": 2})
    assert "is '14 of down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj (" in refused(
        adapted, {**LORA, "targets": ["q_proj"]}
    )


def test_only_adapters_have_gradients_and_optimizer_state_and_a_half_base_stays_as_it_is():
    engine = make_adapted(tiny_model(), dtype="bfloat16")
    plain = make_adapted(tiny_model(), dtype="bfloat16", lora=None)
    stored = weights_of(plain)
    plain.shutdown()
    step(engine)
    trained = sum(matrix.numel() for _, matrix in engine.adapter_source().iter_full())
    state = engine._state_by_tag()
    assert trained <= sum(buffer.numel() for buffer in state["grads"]) < 1.2 * trained  # padded
    assert sum(tensor.numel() for tensor in state["optimizer"]) < 3.1 * trained
    frozen = {name: weight for name, weight in weights_of(engine).items() if "_proj" not in name}
    engine.shutdown()
    assert frozen
    assert all(weight.dtype == torch.bfloat16 and torch.equal(weight, stored[name]) for name, weight in frozen.items())


def test_a_plan_counts_no_gradients_and_no_optimizer_state_of_frozen_weights():
    shape = ModelShape.of(QWEN3_600M)
    demand = MemoryDemand(shape=shape, itemsize=2, processes=4, rows=64, longest=1024, trained=True, device="cuda")
    adapted, whole = (MegatronOptions(tensor_parallel=2, lora=lora).memory(demand).held for lora in (LORA, None))
    hidden, feed_forward = shape.hidden, shape.feed_forward
    ends = 2 * (hidden + shape.queries) + 2 * (hidden + shape.keys) + 3 * (hidden + feed_forward)
    trained = LORA["rank"] * shape.layers * ends  # as if no rank split them
    assert adapted == {"weights": whole["weights"], "gradients": 4 * trained, "optimizer": 12 * trained // 2}
    assert adapted["gradients"] + adapted["optimizer"] < 0.02 * (whole["gradients"] + whole["optimizer"])


def test_a_plan_refuses_what_has_no_adapters_here():
    def check(lora, config):
        options = MegatronOptions(lora={**LORA, **lora})
        options.check_model({"model_type": "qwen3", **config})
        options.check_files(ModelSpec(path=tiny_model("qwen3", False)))

    def refused(lora, **config):
        with pytest.raises(ConfigError) as caught:
            check(lora, config)
        return str(caught.value)

    check({}, {})

    assert "megatron: lora: this engine does not adapt models with experts" in refused({}, num_experts=4)
    assert "megatron: lora.targets: this engine does not adapt the output layer" in refused({"targets": ["lm_head"]})
    assert "megatron: lora.targets: Qwen3ForCausalLM has no linear layer 'q_prj'. Did you mean 'q_proj'?" in refused(
        {"targets": ["v_proj", "q_prj"]}
    )
    assert "has no linear layer 'q_norm'" in refused({"targets": ["q_norm"]})
    assert "has no linear layer 'embed_tokens'" in refused({"targets": ["embed_tokens"]})
    assert "lora.rank is 33, but 'model.layers.0." in refused({"rank": 33})
    assert "lora.targets is empty" in refused({"targets": []})
    with pytest.raises(ConfigError, match="this engine does not adapt models with experts"):
        make_adapted(tiny_experts())


def _stage_without(rank, world_size, path):
    with pytest.raises(ConfigError) as caught:
        make_adapted(path, rank, world_size, lora={**LORA, "targets": ["layers.1.mlp.up_proj"]}, pipeline_parallel=2)
    return str(caught.value)


def test_a_stage_that_would_train_nothing_is_refused_on_every_rank(run_ranks):
    for message in run_ranks(2, _stage_without, tiny_model()):
        assert "lora.targets: stage 0 of the pipeline has no layer to adapt" in message


def test_an_adapter_is_exported_only_where_that_says_all():
    for lora, head, says in ((None, "causal_lm", "lora is unset"), (LORA, "value", "a value head needs a whole model")):
        engine = make_adapted(tiny_model(), lora=lora, head=head)
        try:
            with pytest.raises(EnginehouseError, match=says):
                engine.export_adapter("nowhere")
        finally:
            engine.shutdown()
