"""What vLLM's model holds after a load is read back, as far as its build for CPUs does not pack it for its kernels."""

import os

import pytest
from vllm_weights_replica import updated_replica

from enginehouse_testing.models import adapted_model, tiny_model

pytestmark = pytest.mark.slow

LAYER = "base_model.model.model.layers.1"
PROMPT = [5, 6, 7, 8]
READ = {"layernorm", "q_norm", "k_norm", "model.norm"}


def model(seed):
    return tiny_model(hidden=128, seed=seed)


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param(1, id="one process"),
        pytest.param(2, id="two processes", marks=pytest.mark.exhaustive),
    ],
)
def test_a_weight_that_changes_in_a_process_after_the_load_fails_the_update_by_name(
    ray_cluster, runtime, tmp_path, ranks
):
    fault = tmp_path / "fault"
    fault.write_text("")
    env = {"WEIGHT_FAULT": str(fault), "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    if ranks > 1:
        env["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    env["PYTHONPATH"] = os.pathsep.join([runtime.env["PYTHONPATH"], os.path.dirname(os.path.dirname(__file__))])
    with updated_replica(runtime, model(0), env=env, tensor_parallel=ranks) as act:
        act("install_faults")
        first = act("update", model(1), 1)
        assert {name for name in first.checksums if not any(kind in name for kind in READ)} == set()
        assert all("_proj" in name or "embed_tokens" in name for name in first.unread)
        for version, (what, named) in enumerate(
            {
                "one bit of a norm": "model.layers.1.input_layernorm.weight",
                "the sign of the last norm": "model.norm.weight",
            }.items(),
            start=2,
        ):
            fault.write_text(what)
            kind, message, parameters = act("attempt", model(2), version)
            assert (kind, parameters) == ("WeightSyncError", (named,))
            assert "version 1 is served again" in message
        assert act("update", model(2), 9).checksums.keys() == first.checksums.keys()


def test_an_adapter_that_changes_in_a_process_after_the_load_fails_the_update_by_name(ray_cluster, runtime, tmp_path):
    fault = tmp_path / "fault"
    fault.write_text("")
    path = os.pathsep.join([runtime.env["PYTHONPATH"], os.path.dirname(os.path.dirname(__file__))])
    env = {"WEIGHT_FAULT": str(fault), "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "PYTHONPATH": path}
    with updated_replica(runtime, adapted_model(model(0), None), env=env) as act:
        act("install_faults", "install_for_adapter")
        before = act("draw", PROMPT, 8).completions[0]
        fault.write_text("one bit")
        assert "version 0 is served again" in act("attempt", adapted_model(model(0), 0), 1)[1]
        assert act("draw", PROMPT, 8).completions[0] == before
        state = act("update", adapted_model(model(0), 0), 2)
        served = act("draw", PROMPT, 8).completions[0]
        assert served.token_ids != before.token_ids
        assert (len(state.checksums), state.unread) == (28, ())
        fault.write_text("one bit")
        kind, message, parameters = act("attempt", adapted_model(model(0), 1), 3)
        assert (kind, parameters) == ("WeightSyncError", (f"{LAYER}.self_attn.q_proj.lora_A.weight",))
        assert "version 2 is served again" in message
        assert act("draw", PROMPT, 8).completions[0] == served
        assert act("update", adapted_model(model(0), 1), 4).checksums.keys() == state.checksums.keys()
