"""Layers without transformer-engine or experts never wait for the device, counted on a pretend device (`pretend`)."""

from collections.abc import Mapping
from unittest import mock

import pytest
import torch
from pretend import Waits, count_waits, counted

from enginehouse.engines.train import Outputs
from enginehouse_testing.models import tiny_model
from enginehouse_testing.problem import batch


def pass_on(device: torch.device) -> Mapping[str, Waits]:
    """Count a forward pass over several micro-batches, each with rows of several lengths."""
    from megatron_train_cases import set_up

    engine = set_up("megatron", tiny_model(layers=3), 0, 1)
    passes = engine._passes
    with counted():
        for part in engine._models:
            part.to(device)
    passes.device = device
    # It gives an empty tensor the other's data, which a tensor of the pretend device cannot take.
    with mock.patch("megatron.core.utils._kernel_make_viewless_tensor", lambda tensor, _: tensor):
        with counted():  # the rotary embedding is made once, at the first pass
            passes.forward(engine._called, batch(), Outputs())
        with counted() as found:
            passes.forward(engine._called, batch(), Outputs())
    return {"forward": found}


@pytest.mark.slow
def test_a_pass_waits_for_its_results_alone():
    waits = count_waits(pass_on)["forward"]
    assert not waits.reads
    assert not waits.to_device
    assert set(waits.to_host) == {"forward.py:forward"}
