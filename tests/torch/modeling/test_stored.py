"""The stored form of a model's weights: what transformers itself would write, as views of what the model runs."""

from pathlib import Path

import pytest
import torch
from expert_models import expert_model
from torch_rollout_driver import launched
from torch_train_cases import make_engine, weights_of

from enginehouse.engines.weights import ParamMeta, WeightChunk, WeightUpdate
from enginehouse.errors import ModelError
from enginehouse.weights.checksums import checksum
from enginehouse.weights.names import stored_names, unique_state
from enginehouse_testing.models import tiny_model
from enginehouse_torch.modeling.stored import StoredForm


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_experts_come_apart_as_transformers_stores_them_and_as_views(family):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    path = Path(expert_model(family))
    model, stored = AutoModelForCausalLM.from_pretrained(path), stored_names(path)
    written = load_file(path / "model.safetensors")
    parts = dict(StoredForm.of(model, stored).apart(unique_state(model, stored)))
    assert parts.keys() == written.keys()
    assert all(torch.equal(parts[name], tensor) for name, tensor in written.items())
    last = next(name for name in reversed(list(parts)) if ".experts." in name)
    before = model.model.layers[1].mlp.experts.down_proj.clone()
    parts[last].zero_()
    assert not torch.equal(model.model.layers[1].mlp.experts.down_proj, before), "a copy"


def test_a_model_without_values_is_understood_alike():
    from transformers import AutoConfig, AutoModelForCausalLM

    path = Path(expert_model("mixtral"))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    parts = dict(StoredForm.of(model, stored_names(path)).apart(unique_state(model)))
    assert parts.keys() == stored_names(path)
    assert parts["model.layers.0.block_sparse_moe.experts.3.w3.weight"].shape == (48, 32)


def test_weights_stored_as_they_are_run_are_left_alone():
    from transformers import AutoModelForCausalLM

    path = Path(expert_model())
    model = AutoModelForCausalLM.from_pretrained(path)
    state = unique_state(model)
    parts = dict(StoredForm.of(model, frozenset(state)).apart(state))
    assert parts.keys() == state.keys()


def test_a_form_that_is_not_rows_of_one_tensor_is_refused():
    from transformers import AutoModelForCausalLM
    from transformers.core_model_loading import Chunk, WeightConverter

    model = AutoModelForCausalLM.from_pretrained(tiny_model())
    model._weight_conversions = [  # what transformers sets as it loads a model that is stored so
        WeightConverter("mlp.gate_up.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"], [Chunk(dim=0)])
    ]
    said = r"stores 'model\.layers\.0\.mlp\.gate_up\.weight' in a layout that is not supported"
    with pytest.raises(ModelError, match=said):
        StoredForm.of(model, frozenset())


async def test_the_torch_engines_move_experts_as_they_are_stored():
    path = expert_model()
    weights = {name: torch.randn_like(tensor) for name, tensor in weights_of(make_engine(path)).items()}
    metas = [ParamMeta(name, "float32", tuple(tensor.shape)) for name, tensor in weights.items()]
    async with launched(path) as rollout:
        await rollout.start_weight_update(WeightUpdate(1, metas))
        await rollout.update_weights(WeightChunk(list(weights.items())))
        await rollout.finish_weight_update(1)
        state = await rollout.weight_state()
    assert weights.keys() == stored_names(Path(path))
    assert state.checksums == {name: checksum(tensor) for name, tensor in weights.items()}
