"""The `fsdp` engine on GPUs, compared with the `torch` engine on the CPU. Where there is no GPU these are not run."""

import pytest
import torch
from fsdp_train_cases import make_sharded, score_and_train
from torch_train_cases import make_batch, weights_of

from enginehouse.engines.train import Outputs
from enginehouse_testing.models import tiny_model
from enginehouse_torch.modeling.memory import OutOfMemory

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

ROUNDING = {"float32": (1e-4, 1e-3), "bfloat16": (0.2, 0.2)}
"""By dtype: how far a logprob may be off, and a gradient's norm relative to it. Sums are taken in another order."""


def _train(rank, world_size, path, dtype, options):
    import torch.distributed as dist

    engine = make_sharded(path, rank, world_size, dtype=dtype, device="cuda", **options)
    scores, stepped, _ = score_and_train(engine, make_batch(4, 4).split(world_size)[rank])
    parameters = [parameter.to_local() for parameter in engine._model.parameters()]
    facts = {
        "groups": dist.get_backend_config(),
        "homes": {parameter.device.type for parameter in parameters},
        "pinned": all(parameter.is_pinned() for parameter in parameters if parameter.device.type == "cpu"),
        "fused": engine._get_optimizer()._adamw.defaults["fused"],
    }
    weights = {name: weight.cpu() for name, weight in weights_of(engine).items()}
    engine.shutdown()
    return scores, stepped, weights, facts


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "options", "homes"),
    [
        ("float32", {}, {"cuda"}),
        ("float32", {"activation_checkpointing": True, "reshard_after_forward": False}, {"cuda"}),
        ("float32", {"cpu_offload": True}, {"cpu"}),
        ("bfloat16", {}, {"cuda"}),
        ("bfloat16", {"cpu_offload": True, "reduce_dtype": "bfloat16"}, {"cpu"}),
    ],
    ids=str,
)
def test_gpus_train_like_a_cpu(run_ranks, oracle, world_size, dtype, options, homes):
    if torch.cuda.device_count() < world_size:
        pytest.skip("needs two GPUs")
    scores, stepped, _, weights = oracle(tiny_model(), "causal_lm")
    results = run_ranks(world_size, _train, tiny_model(), dtype, options)
    found = torch.cat([part["logprobs"].values for part, *_ in results])
    off, norms_off = ROUNDING[dtype]
    torch.testing.assert_close(found, scores["logprobs"].values, atol=off, rtol=0)
    for _, steps, full, facts in results:
        assert facts == {"groups": "cpu:gloo,cuda:nccl", "homes": homes, "pinned": True, "fused": True}
        alike = len(stepped) if dtype == "float32" else 1  # rounded steps lead to other gradients
        for ours, theirs in zip(steps[:alike], stepped[:alike], strict=True):
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=norms_off)
        assert {str(weight.dtype) for weight in full.values()} == {f"torch.{dtype}"}
        for name, weight in weights.items():
            torch.testing.assert_close(
                full[name].float(), weight, atol=0.01 if dtype == "bfloat16" else 1e-3, rtol=0.01
            )


def _exhausted(rank, world_size, path):
    engine = make_sharded(path, rank, world_size, device="cuda", tokens_per_microbatch=1 << 20)
    torch.cuda.set_per_process_memory_fraction(0.001)  # of an 80 GB device: less than the logits take
    try:
        engine.forward(make_batch(64, 64, longest=60), Outputs())
    except Exception as error:
        return type(error), str(error)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_out_of_gpu_memory_is_told_as_such(run_ranks):
    ((kind, said),) = run_ranks(1, _exhausted, tiny_model(vocabulary=50_000))
    assert kind is OutOfMemory, said
    assert said.startswith("actor rank 0/1 on localhost: out of GPU memory while computing the forward pass")
