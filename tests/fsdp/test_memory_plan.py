"""What `plan` says of the fsdp engine's memory, beside what its model, gradients and optimizer take as fake tensors."""

import pytest
from measured_memory import MODELS, QWEN3_600M, fsdp_peak, planned

from enginehouse_fsdp.options import FSDPOptions

LONGEST = 2048


def ratio(config, options: FSDPOptions, ranks: int) -> float:
    return planned(options, config, ranks, LONGEST) / fsdp_peak(
        config, options, ranks, options.tokens_per_microbatch, LONGEST
    )


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [True, False])
def test_the_plan_of_a_small_model_is_within_a_tenth(checkpointing):
    options = FSDPOptions(activation_checkpointing=checkpointing, tokens_per_microbatch=8192)
    assert 0.9 < ratio(QWEN3_600M | {"num_hidden_layers": 4}, options, 8) < 1.1


EVERY = [
    pytest.param(model, ranks, marks=() if (model, ranks) == ("Qwen2.5-7B", 8) else pytest.mark.exhaustive)
    for model in MODELS
    for ranks in (1, 8, 16)
]


@pytest.mark.slow
@pytest.mark.timeout(900)  # a machine that is busy with other tests
@pytest.mark.parametrize(("model", "ranks"), EVERY)
def test_the_plan_is_within_a_tenth_of_what_is_measured(model, ranks):
    assert 0.9 < ratio(MODELS[model], FSDPOptions(activation_checkpointing=True), ranks) < 1.1


@pytest.mark.slow
@pytest.mark.timeout(900)  # a machine that is busy with other tests
def test_the_plan_is_within_a_tenth_where_every_activation_is_kept():
    options = FSDPOptions(activation_checkpointing=False, reduce_dtype="bfloat16", tokens_per_microbatch=4096)
    assert 0.9 < ratio(MODELS["Qwen2.5-7B"], options, 8) < 1.1
