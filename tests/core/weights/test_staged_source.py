"""A staged version, as the processes of an engine read it."""

import pytest
import torch

from enginehouse.engines.weights import ParamMeta, WeightSyncError
from enginehouse.weights.host_memory import lay_out
from enginehouse.weights.staged_source import StagedSource
from enginehouse.weights.staging import Version

NAMES = list("abcde")


@pytest.mark.parametrize("ranks", [1, 2, 7])
@pytest.mark.parametrize("changed", NAMES)
def test_exactly_one_rank_finds_each_changed_parameter(changed, ranks):
    tensors = {name: torch.arange(5.0) + number for number, name in enumerate(NAMES)}
    parameters = [ParamMeta.of(name, tensor) for name, tensor in tensors.items()]
    version = Version(1, parameters)
    for name, tensor in tensors.items():
        version.take(name, tensor, None, None)
    source = StagedSource(version.source()["parameters"])
    for rank in range(ranks):
        source.check(rank, ranks)
    assert version.copy is not None
    version.copy.memory[lay_out(parameters)[0][changed]] ^= 1
    found = []
    for rank in range(ranks):
        try:
            source.check(rank, ranks)
        except WeightSyncError as error:
            found += error.parameters
    assert found == [changed]
    source.close()
