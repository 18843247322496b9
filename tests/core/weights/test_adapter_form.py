"""What an update of an adapter alone may bring."""

import pytest
import torch

from enginehouse.engines.model import ModelSpec
from enginehouse.engines.options import LoraOptions
from enginehouse.engines.weights import ParamMeta, WeightChunk, WeightSyncError, WeightUpdate
from enginehouse.errors import EnginehouseError
from enginehouse.weights.form import ModelForm, adapted_layers
from enginehouse.weights.staging import StagedWeights
from enginehouse_testing.models import ADAPTER, adapted_model, stored_adapter, tiny_model

LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def adapter() -> dict[str, torch.Tensor]:
    return stored_adapter(adapted_model(tiny_model(tied=False), 0))


@pytest.fixture
def weights() -> StagedWeights:
    return StagedWeights(ModelSpec(tiny_model(tied=False), adapter=ADAPTER), "replica 0")


def announce(weights: StagedWeights, adapter: dict[str, torch.Tensor], version: int = 1) -> None:
    weights.start(WeightUpdate(version, [ParamMeta.of(name, tensor) for name, tensor in adapter.items()]))


def test_an_adapter_may_have_matrices_of_every_linear_layer_but_the_output_layer(adapter):
    form = ModelForm.of(ModelSpec(tiny_model(tied=False), adapter=ADAPTER))
    assert form.parameters == {name: (tuple(tensor.shape), "float32") for name, tensor in adapter.items()}


def test_targets_choose_layers_by_the_last_part_of_a_name(adapter):
    def chosen(*targets: str) -> list[str]:
        return adapted_layers(LoraOptions(targets=list(targets)), adapter)

    assert adapted_layers(ADAPTER, adapter) == sorted({name.split(".")[-3] for name in adapter})
    assert chosen("q_proj", "model.layers.0.mlp.up_proj", "lm_head") == ["q_proj", "up_proj"]


def test_an_adapter_arrives_whole_or_not_at_all(weights, adapter):
    few = {name: tensor for name, tensor in adapter.items() if name.startswith(LAYER)}
    announce(weights, few)
    weights.stage(WeightChunk(list(few.items())[:1]))
    with pytest.raises(WeightSyncError, match=r"lacks base_model.*lora_B\.weight"):
        weights._complete(1)
    weights.stage(WeightChunk(list(few.items())[1:]))
    assert set(weights._complete(1).arrived) == set(few)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda found: {}, "without matrices"),
        (lambda found: {f"{LAYER}.lora_A.weight": found[f"{LAYER}.lora_A.weight"]}, r"lacks .*q_proj\.lora_B\.weight"),
        (lambda found: {**found, f"{LAYER}.lora_A.weight": torch.zeros(2, 32)}, "was sent .* as float32 .2, 32."),
        (lambda found: {**found, "model.norm.weight": torch.zeros(32)}, "has no parameter 'model.norm.weight'"),
    ],
)
def test_what_is_no_adapter_of_the_model_is_refused(weights, adapter, change, said):
    with pytest.raises(WeightSyncError, match=said):
        announce(weights, change(adapter))


def test_weights_that_no_update_brings_back_cannot_sleep(weights):
    with pytest.raises(EnginehouseError, match="updates bring an adapter alone"):
        weights.forget()


def test_models_with_equal_adapters_have_equal_hashes():
    first, second = (ModelSpec("model", adapter=LoraOptions(targets=["q_proj", "v_proj"])) for _ in range(2))
    other = ModelSpec("model", adapter=LoraOptions(rank=8))
    assert {first, second, other} == {first, other}
