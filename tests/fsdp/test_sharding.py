"""What a rank holds of a model: its own part of every parameter."""

import pytest
import torch
from fsdp_train_cases import make_sharded
from measured_memory import fake_ranks
from torch.distributed.tensor import DTensor

from enginehouse.engines.model import ModelSpec
from enginehouse_fsdp.options import FSDPOptions
from enginehouse_fsdp.sharding import build_empty_model, device_mesh, shard_model
from enginehouse_testing.models import tiny_model


@pytest.mark.slow
@pytest.mark.parametrize("head", ["causal_lm", "value"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_is_sharded(head, tied):
    engine = make_sharded(tiny_model(tied=tied), head=head)
    try:
        whole = [name for name, parameter in engine._model.named_parameters() if not isinstance(parameter, DTensor)]
        owned = {meta.name: meta.owners for meta in engine.weight_source().metadata()}
    finally:
        engine.shutdown()
    assert whole == []
    assert all(owners == (0,) for owners in owned.values())


def test_with_cpu_offload_tied_parameters_too_stay_in_host_memory_and_buffers_do_not():
    """`meta` stands for a GPU: a parameter that is moved there and back keeps the GPU as its own device."""
    with fake_ranks(2):
        mesh = device_mesh(torch.device("cpu"), {"dp_shard": 2})
        model, _ = build_empty_model(ModelSpec(tiny_model(tied=True)))
        options = FSDPOptions(lr=1e-3, cpu_offload=True)
        shard_model(model, ModelSpec(""), options, mesh, torch.device("meta"))
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
        assert {buffer.device.type for buffer in model.buffers()} == {"meta"}
