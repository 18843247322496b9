"""What `plan` says of a run on the `megatron` backend, before any process starts and without importing torch."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from projects import NO_WEIGHTS

from enginehouse.errors import UserError
from enginehouse_rl.config.load import load_config
from enginehouse_rl.config.schema import Config, SFTConfig
from enginehouse_rl.plan.plan import plan, plan_sft

MEGATRON = ["actor.engine.backend=megatron", "actor.processes=8", "rollout.replicas=8"]
OPTIONS = "actor.engine.options"
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 6,
    "intermediate_size": 64,
}


def write_model(directory: Path, **values: object) -> str:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(LLAMA | values))
    (directory / "tokenizer.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(NO_WEIGHTS)
    return str(directory)


@pytest.fixture
def config(tmp_path, monkeypatch) -> Path:
    """A run that could start, in a directory that is now the current one."""
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text('{"prompt": "a"}\n' * 64)
    (tmp_path / "rewards.py").write_text("def right(prompt, response, finish_reason, **columns): return 1.0\n")
    path = tmp_path / "run.yaml"
    path.write_text("model: {path: model}\ndata: {train: train.jsonl}\nreward: {function: rewards:right}\n")
    return path


def refusal(config: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        plan(load_config(config, [*MEGATRON, *overrides], Config), config_path=config)
    return str(caught.value)


DIVIDING = [
    ((f"{OPTIONS}.tensor_parallel=8",), "tensor_parallel=8 does not divide the model's 4 key-value heads", "=4"),
    ((f"{OPTIONS}.pipeline_parallel=4",), "pipeline_parallel=4 does not divide the model's 6 layers", "=3"),
    (
        (f"{OPTIONS}.pipeline_parallel=2", f"{OPTIONS}.virtual_stages=2"),
        "virtual_stages=2 does not divide the model's 3 layers of a pipeline rank",
        "=3",
    ),
]


@pytest.mark.parametrize(("overrides", "said", "nearest"), DIVIDING, ids=lambda value: str(value)[:40])
def test_a_layout_that_does_not_divide_the_model_names_the_nearest_that_does(config, overrides, said, nearest):
    found = refusal(config, *overrides)
    option = overrides[-1].removeprefix(f"{OPTIONS}.").partition("=")[0]
    assert found.startswith("actor.engine.options, model.path: megatron: ")
    assert f"{said}; nearest divisor: {option}{nearest}" in found


def test_an_architecture_without_a_mapping_says_what_to_write_and_where(config, tmp_path):
    path = write_model(tmp_path / "other", model_type="mamba")
    found = refusal(config, f"model.path={path}")
    assert "no architecture is known for model_type 'mamba' (known: llama, qwen2, qwen3" in found
    assert "a value of enginehouse_megatron.architectures.Architecture" in found
    assert "as module:NAME in the option `architecture`" in found


def test_a_mapping_of_ones_own_lets_any_model_through(config, tmp_path):
    path = write_model(tmp_path / "other", model_type="mamba")
    (tmp_path / "my_models.py").write_text("from enginehouse_megatron.architectures import LLAMA as MINE\n")
    overrides = [*MEGATRON, f"model.path={path}", f"{OPTIONS}.architecture=my_models:MINE"]
    plan(load_config(config, overrides, Config), config_path=config)


@pytest.mark.parametrize(
    ("architecture", "said"),
    [
        ("llama", "architecture='llama' is not module:NAME of an Architecture: its model_type is known"),
        ("mine", "architecture='mine' is not module:NAME"),
        ("no_such_models:MINE", "architecture: cannot import 'no_such_models'"),
        ("enginehouse_megatron.architectures:LAMA", "architecture: module .* has no 'LAMA'"),
    ],
)
def test_a_mapping_that_is_not_there_is_refused(config, architecture, said):
    assert re.search(said, refusal(config, f"{OPTIONS}.architecture={architecture}"))


def test_a_reference_model_of_its_own_is_checked_too(config, tmp_path):
    path = write_model(tmp_path / "reference", num_key_value_heads=1)
    overrides = (f"reference.path={path}", "algorithm.kl.coefficient=0.1", f"{OPTIONS}.tensor_parallel=2")
    found = refusal(config, *overrides)
    assert found.startswith("actor.engine.options, reference.path: megatron: tensor_parallel=2 does not divide")


def test_what_a_config_does_not_say_is_left_to_the_engine(config, tmp_path):
    path = write_model(tmp_path / "terse", num_key_value_heads=None)
    overrides = [*MEGATRON, f"model.path={path}", f"{OPTIONS}.tensor_parallel=8"]
    plan(load_config(config, overrides, Config), config_path=config)


def test_a_supervised_run_is_checked_too(config):
    path = config.with_name("sft.yaml")
    path.write_text("model: {path: model}\ndata: {train: taught.jsonl}\n")
    config.with_name("taught.jsonl").write_text('{"prompt": "a", "response": "b"}\n' * 64)
    overrides = ["actor.engine.backend=megatron", "actor.processes=4", f"{OPTIONS}.pipeline_parallel=4"]
    with pytest.raises(UserError, match="pipeline_parallel=4 does not divide the model's 6 layers"):
        plan_sft(load_config(path, overrides, SFTConfig), config_path=path)


@pytest.mark.parametrize("command", ["plan", "train"])
def test_a_command_ends_with_2_before_torch_is_imported(config, command):
    program = (
        "import sys; from enginehouse.cli.main import main\n"
        "try: main()\n"
        "finally: assert 'torch' not in sys.modules, 'torch was imported'"
    )
    arguments = [sys.executable, "-c", program, command, str(config), *MEGATRON, f"{OPTIONS}.tensor_parallel=8"]
    said = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert said.returncode == 2, said.stderr
    assert "does not divide the model's 4 key-value heads" in said.stderr
    assert "Traceback" not in said.stderr
    assert not (config.parent / "runs").exists(), "nothing was begun"


EXPERTS = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


@pytest.mark.parametrize(
    ("model", "overrides", "said"),
    [
        ({}, (f"{OPTIONS}.expert_parallel=2",), "expert_parallel=2 needs experts, but the model has none"),
        (EXPERTS, (f"{OPTIONS}.expert_parallel=8",), "expert_parallel=8 does not divide the model's 4 experts"),
        (
            EXPERTS,
            (f"{OPTIONS}.tensor_parallel=2", f"{OPTIONS}.sequence_parallel=false"),
            "a model with experts needs sequence_parallel=true",
        ),
        ({**EXPERTS, "num_experts_per_tok": 1}, (), "sends each token to one expert and normalises"),
    ],
    ids=["none", "division", "sequence_parallel", "router"],
)
def test_experts_that_a_layout_cannot_hold_are_refused(config, tmp_path, model, overrides, said):
    write_model(tmp_path / "experts", **model)
    assert said in refusal(config, "model.path=experts", *overrides)
