"""What `plan` says of a run on the `fsdp` backend, before any process starts and without importing torch."""

import json
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from checkpoint_forms import prediction_head
from families import FAMILIES
from projects import NO_WEIGHTS

from enginehouse.errors import UserError
from enginehouse.plugin.manager import PluginManager
from enginehouse_rl.config.load import load_config
from enginehouse_rl.config.schema import Config, RMConfig
from enginehouse_rl.plan.plan import plan, plan_preferences
from enginehouse_testing.models import tiny_experts, tiny_model

FSDP = ["actor.engine.backend=fsdp", "actor.processes=4", "rollout.replicas=4"]
OPTIONS = "actor.engine.options"
FITTING = ["reward.function=rewards:right", "rollout.sampling.max_tokens=8"]
"""What fits a tiny model, with the fixture's reward."""


@pytest.fixture
def config(tmp_path, monkeypatch) -> Path:
    """A run that could start, in a directory that is now the current one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    described = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": "float32"}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "model" / "config.json").write_text(json.dumps(described | heads))
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_bytes(NO_WEIGHTS)
    (tmp_path / "train.jsonl").write_text('{"prompt": "a"}\n' * 64)
    (tmp_path / "rewards.py").write_text("def right(prompt, response, finish_reason): return 1.0\n")
    path = tmp_path / "run.yaml"
    path.write_text("model: {path: model}\ndata: {train: train.jsonl}\nreward: {function: exact_match}\n")
    return path


def planned(config: Path, *overrides: str):
    return plan(load_config(config, ["reward.function=builtins:len", *FSDP, *overrides], Config), config_path=config)


def refusal(config: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        planned(config, *overrides)
    return str(caught.value)


def test_a_run_on_fsdp_is_planned_without_torch(config):
    """`enginehouse plan` imports it to show the first row."""
    program = (
        "import sys; from enginehouse_rl.config.load import load_config; from enginehouse_rl.plan.plan import plan\n"
        "print(plan(load_config(sys.argv[1], sys.argv[2:]), config_path=sys.argv[1]).render())\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    command = [sys.executable, "-c", program, str(config), *FSDP, "reward.function=rewards:right"]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    assert "fsdp, 4 ranks" in said.stdout


def test_adapters_are_compared_with_their_base_unless_another_reference_is_named(config):
    lora = [f"{OPTIONS}.lora={{rank: 4}}", "algorithm.kl.coefficient=0.1", "reward.function=exact_match"]
    (config.parent / "train.jsonl").write_text('{"prompt": "a", "answer": "b"}\n' * 64)
    based = planned(config, *lora)
    assert "reference" in [stage.name for stage in based.stages]
    assert "reference" not in based.roles
    assert dict(based.facts)["reference"].startswith("the actor's base model, without its adapters; 0.1 times the k3")
    for others in (["reference.path=model"], [f"{OPTIONS}.lora=null"]):
        apart = planned(config, *lora, *others)
        assert "reference" in [stage.name for stage in apart.stages]
        assert apart.roles["reference"].shares == "actor"
        assert dict(apart.facts)["reference"].startswith("model, in the actor's processes")
    assert "reference" not in [stage.name for stage in planned(config, *lora, "algorithm.kl.coefficient=0").stages]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([f"{OPTIONS}.replicas=3"], "4 rank(s) cannot hold 3 replicas: replicas must divide the number of ranks"),
        ([f"{OPTIONS}.tensor_parallel=3"], "nearest divisor: tensor_parallel="),
        ([f"{OPTIONS}.tensor_parallel=4"], "does not divide the model's 2 key-value heads; nearest divisor: tensor_"),
        (
            [f"{OPTIONS}.context_parallel=4"],
            "does not divide the 2 key-value head(s) of a rank; nearest divisor: co",
        ),
        (
            [f"{OPTIONS}.tensor_parallel=2", f"{OPTIONS}.context_parallel=2"],
            "context_parallel=2 does not divide the 1 key-value head(s) of a rank; nearest divisor: context_",
        ),
        ([f"{OPTIONS}.replica=2"], f"unknown key '{OPTIONS}.replica'. Did you mean 'replicas'?"),
        ([f"{OPTIONS}.lora.rnk=2"], f"unknown key '{OPTIONS}.lora.rnk'. Did you mean 'rank'?"),
        ([f"{OPTIONS}.reduce_dtype=float16"], "expected one of 'float32' or 'bfloat16', got the string 'float16'"),
        (["actor.engine.backend=fdsp"], "Did you mean 'fsdp'?"),
        (
            ["rollout.replicas=2", "rollout.placement=colocated"],
            "rollout.replicas (2) must equal actor.processes (4)",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_cannot_run_is_refused_with_the_key_and_a_cure(config, overrides, said):
    found = refusal(config, *overrides)
    assert said in found
    assert "actor.engine" in found or "rollout.replicas" in found


def test_without_its_package_the_way_to_install_it_is_said(config):
    manager = PluginManager()
    manager.load(point for point in metadata.entry_points(group="enginehouse") if point.name != "fsdp")
    loaded = load_config(config, ["reward.function=builtins:len", *FSDP], Config)
    with pytest.raises(UserError, match=r"'fsdp' is not installed\. Try: pip install .*fsdp"):
        plan(loaded, plugins=manager, config_path=config)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ((), "the actor has no adapter: set actor.engine.options.lora, or train.export=merged"),
        (("actor.engine.backend=torch",), "engine 'torch' cannot train adapters (capability 'lora')"),
    ],
)
def test_an_adapter_is_exported_only_where_there_is_one(config, overrides, said):
    right = ("reward.function=rewards:right", "train.export=adapter")
    assert said in refusal(config, *right, *overrides)
    assert planned(config, *right, f"{OPTIONS}.lora.rank=2").config.train.export == "adapter"
    path = config.with_name("rm.yaml")
    path.write_text("model: {path: model}\ndata: {train: train.jsonl}\ntrain: {export: both}\n")
    with pytest.raises(UserError, match="cannot hold the head of a reward model"):
        plan_preferences(load_config(path, [*FSDP[:2], f"{OPTIONS}.lora.rank=2"], RMConfig), config_path=path)


def test_models_that_are_taken_to_split_heads_do_so_by_their_own_plan():
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from enginehouse_fsdp.axes import SPLIT_BY_HEADS

    for model_type in SPLIT_BY_HEADS:
        rules = CONFIG_MAPPING[model_type].base_model_tp_plan
        assert {rules[f"layers.*.self_attn.{one}_proj"] for one in "qkv"} == {"colwise"}, model_type


def test_adapters_of_layers_that_the_model_does_not_have_are_refused(config):
    shutil.copytree(tiny_model(), "model", dirs_exist_ok=True)
    for target in ("embed_tokens", "model.norm"):
        said = refusal(config, *FITTING, f"{OPTIONS}.lora.targets=[q_proj, {target}]")
        assert f"lora.targets: '{target}' is no linear layer of model. Available: down_proj" in said
    said = refusal(config, *FITTING, f"{OPTIONS}.lora.targets=[query_key_value, q_proj, self_attn.v_proj]")
    assert "no tensor in model belongs to a layer 'query_key_value'. Available: down_proj" in said
    said = refusal(config, *FITTING, f"{OPTIONS}.lora.targets=[decoder.q_proj, v_proj]")
    assert "Qwen3ForCausalLM has no linear layer 'decoder.q_proj'" in said, "as the class calls it"
    assert not any("lora.targets" in one for one in planned(config, *FITTING, f"{OPTIONS}.lora.rank=2").notes)
    said = planned(config, *FITTING, OPTIONS + ".lr_groups={'*.q_proj.*': 2, '*.layers.*.qproj.*': 0.5}").notes
    (note,) = [one for one in said if "lr_groups" in one]
    assert "lr_groups: no tensor in model matches '*.layers.*.qproj.*'. " in note


def test_what_adapters_of_all_layers_leave_is_said(config):
    shutil.copytree(tiny_experts(), "model", dirs_exist_ok=True)
    said = planned(config, f"{OPTIONS}.lora.rank=2", *FITTING).notes
    (note,) = [one for one in said if "lora.targets" in one]
    assert "does not adapt model.layers.*.mlp.experts.down_proj, model.layers.*.mlp.experts.gate_up_proj" in note


def test_what_a_class_does_not_read_is_said_once(config):
    prediction_head(config.parent / "with_head")
    said = planned(config, "model.path=with_head", *FITTING).notes
    (note,) = [one for one in said if "mtp" in one]
    said = "model.path: the model's class does not read 2 tensors (mtp.layers, mtp.norm): they are not trained"
    assert note.startswith(said)


def test_a_model_that_no_engine_can_train_is_refused_by_plan(config):
    """The message is the engine's own, whatever the class lacks."""
    FAMILIES["Mamba"](config.parent / "mamba")
    said = refusal(config, "model.path=mamba")
    assert "a MambaForCausalLM, cannot be trained or sampled" in said
    assert "it has no attention" in said


FLASH = f"{OPTIONS}.attention=flash_attention_2"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["cluster.device=cpu", FLASH], "has kernels only for cuda, but this run is on cpu; use attention=auto"),
        (["cluster.device=cpu", f"{OPTIONS}.attention=flex_attention"], "has kernels only for cuda"),
        (["cluster.device=cuda", "model.dtype=float32", FLASH], "has no kernels for float32; use model.dtype=bfloat16"),
        (["cluster.device=cuda", "model.dtype=bfloat16", FLASH], "needs flash-attn, which is not installed here"),
        (
            ["cluster.device=cuda", f"{OPTIONS}.attention=flex_attention", f"{OPTIONS}.context_parallel=2"],
            "does not support sequences that are split over ranks (context_parallel=2)",
        ),
    ],
)
def test_attention_that_has_no_kernels_here_is_refused_with_a_cure(config, overrides, said):
    assert said in refusal(config, *overrides)


@pytest.mark.parametrize("attention", ["auto", "sdpa"])
def test_attention_that_is_anywhere_is_taken_on_a_cpu(config, attention):
    assert "attention" not in refusal(config, "cluster.device=cpu", f"{OPTIONS}.attention={attention}")
