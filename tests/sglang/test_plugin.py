"""What the sglang plugin declares, and that it holds on to nothing of SGLang but its server's protocol."""

import argparse
import ast
import contextlib
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest
from pydantic import ValidationError

from enginehouse.engines.model import ModelSpec, ProcessContext
from enginehouse.errors import ConfigError, UserError
from enginehouse.plugin import plugins, resolve
from enginehouse_rl.config.load import load_config
from enginehouse_rl.config.schema import Config
from enginehouse_rl.plan.plan import plan
from enginehouse_sglang.options import OURS, SGLangOptions
from enginehouse_sglang.process import format_arguments
from enginehouse_sglang.starting import server_arguments
from enginehouse_testing.matrix.task import make_task

SOURCES = Path(str(resources.files("enginehouse_sglang")))
FOR_CPU = SOURCES / "on_cpu"
CONFIG = {
    "max_position_embeddings": 2048, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "hidden_size": 128,
}  # fmt: skip


def arguments(*, device="cpu", takes_turns=False, **options):
    spec, context = ModelSpec("/models/m"), ProcessContext("rollout", device=device, takes_turns=takes_turns)
    return server_arguments(spec, CONFIG, SGLangOptions(**options), context, has_tokenizer=True)


@pytest.mark.parametrize("trusts", [False, True])
def test_sglang_is_told_whether_the_code_of_a_model_is_run(trusts):
    spec, context = ModelSpec("/models/m", trust_remote_code=trusts), ProcessContext("rollout")
    told = server_arguments(spec, CONFIG, SGLangOptions(), context, has_tokenizer=True)
    assert told["trust_remote_code"] is trusts


def test_of_sglang_is_imported_what_stands_in_for_a_gpu_what_hides_keys_adapters_and_where_an_update_ends():
    found = set()
    for source in SOURCES.rglob("*.py"):
        if FOR_CPU in source.parents or source.name == "adapter_loader.py":
            continue
        for node in ast.walk(ast.parse(source.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            found |= {(source.name, name) for name in names if name.partition(".")[0] == "sglang"}
    assert found == {("serve.py", "sglang.srt.entrypoints"), ("loader.py", "sglang.srt.model_loader.loader")}


def test_declaring_the_backend_imports_no_engine():
    code = (
        "import sys, enginehouse_sglang.plugin, enginehouse_sglang.options\n"
        "sys.exit(', '.join({'torch', 'ray', 'sglang'} & set(sys.modules)) or None)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_engine_is_imported_without_sglang():
    assert resolve(plugins().get("rollout", "sglang", elsewhere=True).engine).__name__ == "SGLangRollout"


@pytest.mark.parametrize("name", [*sorted(OURS), "tp-size"])
def test_an_argument_that_the_backend_sets_itself_is_refused(name):
    with pytest.raises(ValidationError, match=f"'{name}' is set by the sglang backend"):
        SGLangOptions(native={name: 1})


def test_memory_of_a_gpu_can_be_freed_where_others_have_it_in_turns():
    assert arguments(device="cuda", takes_turns=True)["enable_memory_saver"] is True
    assert "enable_memory_saver" not in arguments(device="cuda")
    assert "enable_memory_saver" not in arguments(takes_turns=True)  # there is no torch-memory-saver for a CPU


def test_an_idle_scheduler_leaves_its_core_to_others_on_a_cpu_unless_told_otherwise():
    assert arguments()["sleep_on_idle"] is True
    assert arguments(native={"sleep-on-idle": False})["sleep_on_idle"] is False
    assert "sleep_on_idle" not in arguments(device="cuda")


def test_native_arguments_are_those_of_the_command_line():
    native = {"schedule_policy": "lpm", "disable_radix_cache": True, "enable_metrics": False}
    words = format_arguments(arguments(native=native))
    assert words[words.index("--schedule-policy") + 1] == "lpm"
    assert "--disable-radix-cache" in words
    assert "--enable-metrics" not in words


def test_a_key_that_begins_with_a_dash_is_no_argument_of_its_own():
    parser = argparse.ArgumentParser()  # SGLang's is one too
    parser.add_argument("--admin-api-key")
    parser.add_argument("--sizes", nargs="+")
    given = {"admin_api_key": "-Qk0_", "sizes": [1, 2]}
    assert vars(parser.parse_args(format_arguments(given))) == {"admin_api_key": "-Qk0_", "sizes": ["1", "2"]}


def test_memory_for_keys_and_values_is_counted_in_tokens():
    bytes_of_a_token = 2 * 2 * 2 * 32 * 4  # keys and values, layers, heads, width, float32
    assert arguments(kv_cache_mib=64)["max_total_tokens"] == (64 << 20) // bytes_of_a_token
    assert arguments(kv_cache_mib=1)["max_total_tokens"] >= 2 * 2048  # at least what one sequence needs


def test_sglangs_context_has_room_for_what_it_keeps_to_itself():
    assert arguments(max_model_tokens=100)["context_length"] == 108
    assert arguments()["context_length"] == 2056


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"endpoint": ["localhost:30000"]}, "is not the URL of a server"),
        ({"endpoint": ["http://a:300000"]}, "is not the URL of a server"),
        ({"endpoint": ["http://a:1"], "deterministic": False}, "deterministic is only for servers"),
        ({"native": {"schedule_policy:lpm": None}}, "is not the name of an argument"),
        ({"endpoint": ["http://a:1", "http://a:1/"]}, "two replicas cannot share a server"),
        ({"endpoint": ["http://a:1", "http://a:1"]}, "two replicas cannot share a server"),
        ({"endpoint": ["http://a:1"], "tensor_parallel": 2}, "tensor_parallel is only for servers"),
        ({"endpoint": ["http://a:1"], "native": {"log_level": "info"}}, "native is only for servers"),
    ],
)
def test_endpoints_that_cannot_be_meant_are_refused(options, said):
    with pytest.raises(ValidationError, match=said):
        SGLangOptions(**options)


def test_there_is_one_url_for_each_replica():
    options = SGLangOptions(endpoint=["http://a:1", "http://a:2"])
    options.check(2)
    with pytest.raises(ConfigError, match=r"one URL for each replica, but has 2 for 1 replica.*start 2 replicas"):
        options.check(1)


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """Plans a run with SGLang, where there is no runtime of it."""
    monkeypatch.setenv("ENGINEHOUSE_RUNTIMES", str(tmp_path / "none"))
    config = make_task(tmp_path)

    def planned(*overrides):
        overrides = ("rollout.engine.backend=sglang", f"run.directory={tmp_path / 'run'}", *overrides)
        return plan(load_config(config, overrides, Config), plugins(), config_path=config)

    return planned


ATTACHED = 'rollout.engine.options={"endpoint": ["http://127.0.0.1:30000"]}'


def test_servers_that_run_already_are_used_from_where_sglang_is_not_installed(planned):
    attached = planned(ATTACHED)
    assert attached.roles["rollout"].interpreter.python is None
    assert attached.roles["rollout"].shares is None
    assert attached.roles["rollout"].gpus == 0
    assert "http://127.0.0.1:30000" in dict(attached.facts)["rollout"]
    planned(ATTACHED, "weights.transport=differences")  # whose copies are in the servers' memory
    with pytest.raises(UserError, match="enginehouse runtime create sglang"):
        planned()


def test_a_server_belongs_to_one_role(planned):
    with pytest.raises(UserError, match=r"http://127\.0\.0\.1:30000 is also a server of the rollout"):
        planned(
            ATTACHED,
            "evaluation.engine.backend=sglang",
            'evaluation.engine.options={"endpoint": ["http://127.0.0.1:30000/"]}',
        )


def test_a_run_on_gpus_is_planned_with_those_of_each_replica(planned):
    with pytest.raises(UserError, match=r"needs 3 GPUs \(actor 1, rollout 2\)"):
        planned("cluster.device=cuda", "rollout.placement=separate", "rollout.engine.options.tensor_parallel=2")
    with pytest.raises(UserError, match=r"needs 1 GPU \(actor 1\)"):
        planned("cluster.device=cuda", ATTACHED)


def test_servers_that_run_already_take_no_turns_with_the_actor(planned):
    with pytest.raises(UserError, match="the servers of the rollout already run on other devices"):
        planned(ATTACHED, "rollout.placement=shared")


@pytest.mark.parametrize("options", [SGLangOptions, resolve(plugins().get("rollout", "vllm", elsewhere=True).options)])
def test_a_replica_has_a_gpu_for_each_process_and_they_share_out_the_heads(options):
    split = options(tensor_parallel=4)
    assert split.gpus() == 4
    split.check_model({"num_attention_heads": 8})
    with pytest.raises(ConfigError, match=r"tensor_parallel=4 does not divide the model's 6 attention heads.*=3"):
        split.check_model({"num_attention_heads": 6})


def test_what_a_user_gives_up_is_a_surprise():
    assert list(SGLangOptions(openai_endpoint="loopback").surprises()) == []
    assert "SGLANG_API_KEY" in "".join(SGLangOptions(openai_endpoint="node").surprises())
    assert "seed" in "".join(SGLangOptions(deterministic=False).surprises())
    assert "seed" in "".join(SGLangOptions().for_device("cuda").surprises())
    assert list(SGLangOptions().for_device("cpu").surprises()) == []
    assert "--enable-deterministic-inference" in "".join(SGLangOptions(endpoint=["http://a:1"]).surprises())


def test_seeds_are_heeded_unless_that_would_cost_a_gpus_speed():
    assert arguments()["enable_deterministic_inference"] is True
    on_gpu = ProcessContext("rollout", device="cuda")
    for given, seeded in ((None, False), (True, True)):
        options = SGLangOptions(deterministic=given)
        found = server_arguments(ModelSpec("/models/m", "bfloat16"), CONFIG, options, on_gpu, has_tokenizer=True)
        assert found["enable_deterministic_inference"] is seeded


@pytest.mark.parametrize(
    ("options", "dtype", "device", "refused"),
    [
        ({"deterministic": True}, "float32", "cuda", True),
        ({"deterministic": True}, "bfloat16", "cuda", False),
        ({"deterministic": True}, "float32", "cpu", False),
        ({}, "float32", "cuda", False),
        ({"deterministic": True, "native": {"attention-backend": "triton"}}, "float32", "cuda", False),
    ],
)
def test_what_sglang_attends_with_deterministically_knows_half_precision_alone(options, dtype, device, refused):
    typed = SGLangOptions(**options).for_device(device)
    with pytest.raises(ConfigError, match=r"set model\.dtype=bfloat16") if refused else contextlib.nullcontext():
        typed.check_device(device, dtype)
