"""The gradient's norm does not lose digits with the number of parameters."""

import pytest
import torch

from enginehouse_torch.optim import FlatAdamW
from enginehouse_torch.options import TorchTrainOptions


@pytest.mark.parametrize("size", [7, 4096, 2_500_001])
def test_the_norm_is_that_of_double_precision(size):
    parameter = torch.nn.Parameter(torch.zeros(size))
    optimizer = FlatAdamW({"weight": parameter}, TorchTrainOptions(), world_size=1)
    parameter.grad.copy_(torch.randn(size, generator=torch.Generator().manual_seed(0)))
    expected = parameter.grad.double().norm().item()
    optimizer.count(1.0)
    assert optimizer.step()["grad_norm"] == pytest.approx(expected, rel=1e-6)
