"""What SGLang's model holds after a load is read back: on a CPU, all of it."""

import os

import pytest

from enginehouse_testing.models import adapted_model, tiny_experts, tiny_model

pytestmark = pytest.mark.slow


def test_a_weight_that_changes_in_its_process_after_the_load_fails_the_update_by_name(replica, runtime, tmp_path):
    fault = tmp_path / "fault"
    fault.write_text("")
    path = os.pathsep.join([runtime.env["PYTHONPATH"], os.path.dirname(os.path.dirname(__file__))])
    with replica(WEIGHT_FAULT=str(fault), PYTHONPATH=path) as group:
        group.call("launch_with_faults", tiny_experts(), {})
        assert group.call("act", "update", tiny_experts(seed=1), 1)[0] == ("", "")
        read, unread = group.call("act", "read_back")[0]
        assert (read > 0, unread) == (True, 0)
        for version, (what, named) in enumerate(
            {
                "one bit of a norm": "model.layers.1.input_layernorm.weight",
                "two rows of the queries": "model.layers.0.self_attn.q_proj.weight",
                "two experts": "model.layers.1.mlp.experts.0.down_proj.weight, "
                "model.layers.1.mlp.experts.1.down_proj.weight",
            }.items(),
            start=2,
        ):
            fault.write_text(what)
            kind, message = group.call("act", "update", tiny_experts(seed=2), version)[0]
            assert kind == "WeightSyncError"
            assert f"does not hold {named} as sent" in message
            assert "version 1 is served again" in message
        assert group.call("act", "update", tiny_experts(seed=2), 9)[0] == ("", "")


def test_an_adapter_that_changes_in_its_process_after_the_load_fails_the_update_by_name(replica, runtime, tmp_path):
    fault = tmp_path / "fault"
    fault.write_text("")
    path = os.pathsep.join([runtime.env["PYTHONPATH"], os.path.dirname(os.path.dirname(__file__))])
    base = tiny_model(hidden=128, head=32)
    with replica(WEIGHT_FAULT=str(fault), PYTHONPATH=path) as group:
        group.call("launch_with_faults", adapted_model(base, None), {})
        (before,) = group.call("act", "draw")
        fault.write_text("one bit")
        assert "version 0 is served again" in group.call("act", "update", adapted_model(base, 0), 1)[0][1]
        assert group.call("act", "draw") == [before]
        assert group.call("act", "update", adapted_model(base, 0), 2)[0] == ("", "")
        assert group.call("act", "read_back")[0] == (28, 0)
        (served,) = group.call("act", "draw")
        assert served.token_ids != before.token_ids
        fault.write_text("one bit")
        kind, message = group.call("act", "update", adapted_model(base, 1), 3)[0]
        assert kind == "WeightSyncError"
        assert "does not hold base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight as sent" in message
        assert "version 2 is served again" in message
        assert group.call("act", "draw") == [served]
        assert group.call("act", "update", adapted_model(base, 1), 4)[0] == ("", "")
