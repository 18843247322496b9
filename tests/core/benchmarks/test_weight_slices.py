"""What `weight_slices` counts and plans."""

import math

import torch
from benchmarks.weight_slices import ByteCounter, experts_model


def test_bytes_are_counted_where_staged_tensors_are_read():
    staged, held = torch.ones(8, 4), torch.zeros(8, 4)
    counter = ByteCounter()
    with counter:
        ((_, tensor),) = counter.follow(iter([("w", staged)]))
        tensor.view(4, 8).narrow(0, 0, 2)
        assert counter.bytes_read == 0, "a view reads nothing"
        held[:2].copy_(tensor[2:4])
        assert counter.bytes_read == 2 * 4 * 4
        torch.empty(8, 4, device="meta").copy_(tensor)
        held.mul_(2)
        assert counter.bytes_read == 2 * 4 * 4
        tensor.to(torch.float64)
        torch.add(held, other=tensor)
        assert counter.bytes_read == (2 + 8 + 8) * 4 * 4
        list(counter.follow(iter([("w", held)])))
        tensor.clone()
        assert counter.bytes_read == (2 + 8 + 8) * 4 * 4, "an earlier version is not counted"


def test_the_planned_model_has_the_parameters_of_qwen3_30b_a3b():
    parameters = list(experts_model())
    assert len({name for name, _, _ in parameters}) == len(parameters) == 18867
    assert sum(math.prod(shape) for _, shape, _ in parameters) == 30_532_122_624
