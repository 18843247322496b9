"""Planning a rollout whose engine serves quantized weights."""

from collections.abc import Callable

import pytest
from projects import Project, refusal

from enginehouse.plugin import PluginManager, load_plugins
from enginehouse.weights.effect import QUANTIZED_TOLERANCE
from enginehouse_rl.plan.plan import Plan

FP8 = "rollout.engine.options.quantization=fp8"
QUANTIZED = ("actor.engine.backend=fsdp", "rollout.engine.backend=vllm", "model.dtype=bfloat16", FP8)


@pytest.fixture(scope="module")
def plugins() -> PluginManager:
    return load_plugins(enabled=("torch", "fsdp", "vllm", "sglang"))


def test_a_quantized_rollout_may_be_further_from_the_actor_and_the_user_is_told(make: Callable[..., Plan]):
    planned = make(*QUANTIZED)
    assert planned.roles["rollout"].quantizes
    assert planned.effect_tolerance == QUANTIZED_TOLERANCE
    assert make(*QUANTIZED, "weights.effect_tolerance=0.5").effect_tolerance == 0.5
    assert "quantization is fp8" in planned.render()
    assert not make(*QUANTIZED, f"{FP8[:-3]}none").roles["rollout"].quantizes


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (("model.dtype=float32",), "rollout.engine.options: quantization=fp8: vllm quantizes weights of bfloat16, not"),
        (
            ("actor.engine.options.lora.rank=4", "weights.adapter=alone"),
            "engine 'vllm' cannot add it to the model: its weights are quantized (quantization); set weights.adapter",
        ),
        (("rollout.engine.backend=torch",), "engine 'vllm' has it; set rollout.engine.backend=vllm"),
        (("rollout.engine.backend=sglang",), "engine 'vllm' has it; set rollout.engine.backend=vllm"),
        (("rollout.engine.options.quantization=int8",), "'none' or 'fp8'"),
        (
            ("rollout.engine.options.native.quantization=fp8",),
            "'quantization' is set by the vllm backend: use the option quantization",
        ),
    ],
)
def test_what_cannot_be_quantized_is_refused(make: Callable[..., Plan], overrides: tuple[str, ...], why: str):
    assert why in refusal(make, *QUANTIZED, *overrides)


def test_a_mixture_of_experts_is_not_quantized(make: Callable[..., Plan], project: Project):
    project.make_model("experts", architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", num_experts=4)
    assert "a mixture of experts has not been tried in 8 bits" in refusal(make, *QUANTIZED, "model.path=experts")


def test_an_evaluation_is_quantized_only_with_the_rollout(make: Callable[..., Plan], project: Project):
    evaluation = ("evaluation.engine.backend=vllm", "evaluation.engine.options.quantization=fp8")
    why = "evaluation.engine serves quantized weights, and the rollout does not"
    assert why in refusal(make, *QUANTIZED[:-1], *evaluation)
    assert why not in refusal(make, *QUANTIZED, *evaluation, "model.dtype=float32")
