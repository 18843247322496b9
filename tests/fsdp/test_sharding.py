"""What a rank holds of a model: its own part of every parameter."""

import pytest
from fsdp_train_cases import make_sharded
from torch.distributed.tensor import DTensor

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
