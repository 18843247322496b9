"""Hugging Face directories that the `fsdp` engine writes: what lay there before, and what cannot be written."""

import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from fsdp_train_cases import make_sharded
from rank_processes import rank_processes
from torch_train_cases import make_engine, weights_of

from enginehouse.engines.weights import ParamMeta
from enginehouse_testing.models import tiny_model
from enginehouse_torch.modeling import export

PARAMETERS = [ParamMeta(name, "float32", (4,)) for name in ("a", "b", "c")]


def weights():
    return iter([(meta.name, torch.full((4,), float(place))) for place, meta in enumerate(PARAMETERS)])


def written(directory):
    return {file.name for file in directory.iterdir()}


def test_an_export_replaces_one_that_was_cut_into_other_files(tmp_path):
    in_parts = {"model.safetensors.index.json", *(f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3))}
    with mock.patch.object(export, "FILE_BYTES", 16):
        assert export.write_weights(tmp_path, PARAMETERS, weights(), writes=True) is None
    assert written(tmp_path) == in_parts
    assert export.write_weights(tmp_path, PARAMETERS, weights(), writes=True) is None
    assert written(tmp_path) == {"model.safetensors"}
    (tmp_path / "adapter_model.safetensors").touch()
    with mock.patch.object(export, "FILE_BYTES", 16):
        export.write_weights(tmp_path, PARAMETERS, weights(), writes=True)
    assert written(tmp_path) == {*in_parts, "adapter_model.safetensors"}, "only what an export wrote is removed"


def test_a_rank_that_cannot_write_gathers_to_the_end(tmp_path):
    (tmp_path / "model-00001-of-00003.safetensors").mkdir()
    left = weights()
    with mock.patch.object(export, "FILE_BYTES", 16):
        failure = export.write_weights(tmp_path, PARAMETERS, left, writes=True)
    assert failure is not None
    assert list(left) == []


@pytest.mark.slow
def test_an_export_names_the_class_that_the_model_came_with(tmp_path):
    """An engine that serves it looks its class up by this name, and torch calls a sharded one otherwise."""
    engine = make_sharded(tiny_model())
    engine.export_hf(str(tmp_path))
    engine.shutdown()
    came, went = (json.loads(Path(path, "config.json").read_text()) for path in (tiny_model(), tmp_path))
    assert went["architectures"] == came["architectures"]


def _export(rank, world_size, path, directory):
    engine = make_sharded(path, rank, world_size)
    try:
        engine.export_hf(directory)
    except Exception as error:
        said = str(error)
    weights = weights_of(engine)  # the ranks are still together
    if rank == 0:
        (Path(directory) / "model.safetensors").rmdir()
    engine.export_hf(directory)
    engine.shutdown()
    return said, weights


@pytest.mark.slow
def test_an_export_that_fails_is_said_on_all_ranks_and_can_be_tried_again(tmp_path):
    (tmp_path / "model.safetensors").mkdir()
    with rank_processes("enginehouse_fsdp.engine", "transformers.models.qwen3.modeling_qwen3") as run:
        (_, weights), (said, _) = run(2, _export, tiny_model(), str(tmp_path))
    assert "failed on rank 0" in said
    exported = weights_of(make_engine(str(tmp_path)))
    assert all(torch.equal(exported[name], weight) for name, weight in weights.items())
