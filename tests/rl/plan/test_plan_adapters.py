"""Planning what an update of a model with adapters sends: the adapter alone, or merged weights."""

from collections.abc import Callable

import pytest
from projects import refusal

from enginehouse.plugin import PluginManager, load_plugins
from enginehouse_rl.plan.plan import Plan

LORA = ("actor.engine.backend=fsdp", "actor.engine.options.lora.rank=4")
ALONE = (*LORA, "rollout.engine.backend=vllm", "weights.adapter=alone")


@pytest.fixture(scope="module")
def plugins() -> PluginManager:
    return load_plugins(enabled=("torch", "fsdp", "vllm"))


def test_an_engine_that_adds_adapters_gets_them_alone_on_request(make: Callable[..., Plan]):
    planned = make(*ALONE)
    adapter = planned.roles["rollout"].model.adapter
    assert adapter is not None
    assert (adapter.rank, adapter.alpha, adapter.targets) == (4, 32.0, "all-linear")
    assert "the adapter alone" in dict(planned.facts)["weights"]
    assert planned.roles["actor"].model.adapter is None
    assert make(*ALONE, "weights.adapter=merged").roles["rollout"].model.adapter is None


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (("rollout.engine.backend=torch",), "engine 'torch' lacks the capability 'adapter_updates'"),
        (("rollout.placement=shared",), "the rollout's weights do not stay in memory while the actor has its devices"),
        (("actor.engine.options.lora.rank=4096",), "engine 'vllm' cannot add it to the model: its rank is above 512"),
        (
            ("evaluation.engine.backend=torch", "data.validation=train.jsonl"),
            "the engine of evaluation.engine gets whole weights",
        ),
    ],
)
def test_an_adapter_that_cannot_be_added_is_refused(make: Callable[..., Plan], overrides: tuple[str, ...], why: str):
    assert f"weights.adapter is alone, but {why}; set weights.adapter=merged" in refusal(make, *ALONE, *overrides)


def test_an_adapter_that_there_is_not_cannot_be_sent(make: Callable[..., Plan]):
    said = refusal(make, "actor.engine.backend=fsdp", *ALONE[2:])
    assert "weights.adapter is alone, but the actor has no adapter: set actor.engine.options.lora" in said
