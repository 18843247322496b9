"""An engine of this plugin that drops a weight update is found by the suite."""

import pytest
from dropped_updates import assert_found, judge


@pytest.mark.slow
@pytest.mark.parametrize("mutant", ["dropping_second", pytest.param("dropping", marks=pytest.mark.exhaustive)])
def test_a_dropped_update_is_found_at_a_learning_rate_of_one_millionth(mutant):
    assert_found("vllm", mutant)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutant", "said"),
    [
        ("adapter_not_named", "look "),
        ("adapters_cached_by_name", "look "),
        ("dropping_second", "the checksum of base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"),
    ],
)
def test_an_engine_that_serves_an_older_adapter_is_found(mutant, said):
    result = judge("vllm", mutant, "adapter_updates")
    assert result.outcome == "failed"
    assert said in result.detail
