"""What replicas serve against the files that they loaded."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from enginehouse.engines.weights import WeightState, WeightSyncError
from enginehouse.weights.checksums import checksum
from enginehouse.weights.files import compare_with_files

STORED = {"a": torch.arange(6.0).view(2, 3) / 7, "b": torch.ones(4), "unused": torch.zeros(2)}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_file({"a": STORED["a"]}, tmp_path / "model-1.safetensors")
    save_file({"b": STORED["b"], "unused": STORED["unused"]}, tmp_path / "model-2.safetensors")
    return tmp_path


def serving(**tensors: torch.Tensor) -> WeightState:
    return WeightState(0, {name: checksum(tensor) for name, tensor in tensors.items()})


def test_what_is_served_is_what_the_files_hold_in_the_models_dtype(model: Path):
    served = serving(a=STORED["a"].bfloat16(), b=STORED["b"], made=torch.ones(1))
    found = compare_with_files([served, served], model, "bfloat16", "rollout")
    assert (found.compared, found.served) == (2, 3)
    again = compare_with_files([serving(a=STORED["a"], b=STORED["b"])], model, "bfloat16", "rollout")
    assert found.checksum
    assert again.checksum != found.checksum


def test_a_replica_that_serves_something_else_is_named_with_it(model: Path):
    right, wrong = serving(a=STORED["a"], b=STORED["b"]), serving(a=STORED["a"] + 1e-6, b=STORED["b"])
    said = r"rollout replica 1 does not serve a as stored in .*: nothing is evaluated"
    with pytest.raises(WeightSyncError, match=said):
        compare_with_files([right, wrong], model, "float32", "rollout")
    with pytest.raises(WeightSyncError, match="rollout replica 0 does not serve a"):
        compare_with_files([serving(a=STORED["a"].bfloat16())], model, "float32", "rollout")
