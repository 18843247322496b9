"""What the weight-update benchmark makes up and how it judges."""

import json

import pytest
from benchmarks.weight_update import paired
from benchmarks.weight_update_model import describe, write_model
from transformers import AutoModelForCausalLM


def test_a_ratio_is_the_median_over_rounds_of_a_rounds_own_ratio():
    copies, transfers = [1.0, 10.0, 2.0], [2.0, 10.0, 1.0]
    assert paired(copies, transfers) == 1.0
    assert paired(copies, [2.0, 20.0, 8.0]) == 0.5, "a transfer that takes longer has a smaller ratio"


@pytest.mark.parametrize("parameters", [5_000_000, 500_000_000])
def test_a_model_is_about_as_large_as_asked_for(parameters):
    _, shapes = describe(parameters)
    assert sum(shape.numel() for shape in shapes.values()) == pytest.approx(parameters, rel=0.1)


def test_what_is_written_in_shards_is_the_model_that_was_described(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.weight_update_model.SHARD_BYTES", 4 << 20)
    count = write_model(tmp_path, 4_000_000)
    files = set(json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"].values())
    assert len(files) > 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert sum(parameter.numel() for parameter in loaded.parameters()) == count
    assert float(loaded.model.layers[0].self_attn.q_proj.weight.detach().std()) == pytest.approx(0.02, rel=0.05)
