"""What cannot work is said before anything is built, with what would work."""

import contextlib
import json
import logging
from pathlib import Path

import pytest
from models_with_code import model_with_code  # noqa: F401 - a fixture

from enginehouse.engines.model import ModelSpec, ProcessContext
from enginehouse.errors import ConfigError, ModelError
from enginehouse_megatron.options import MegatronOptions
from enginehouse_testing.models import tiny_experts, tiny_model, with_weight


def set_up(path: str, processes: int = 1, dtype: str = "float32", **options):
    from enginehouse_megatron.engine import MegatronEngine

    spec = ModelSpec(path=path, dtype=dtype)
    MegatronEngine().setup(spec, MegatronOptions(**options), ProcessContext("actor", 0, processes))


def changed(path: str, to: Path, **values) -> str:
    """A model directory whose config says something else."""
    to.mkdir()
    for file in Path(path).iterdir():
        (to / file.name).symlink_to(file)
    (to / "config.json").unlink()
    config = json.loads((Path(path) / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | values))
    return str(to)


@pytest.mark.parametrize(
    ("processes", "options", "said"),
    [
        (6, {"tensor_parallel": 4}, r"tensor_parallel=4 does not divide the 6 rank.*nearest divisor: .*=3"),
        (4, {"tensor_parallel": 2, "pipeline_parallel": 4}, r"pipeline_parallel=4 does not divide the 2 .*=2"),
        (3, {"context_parallel": 2}, "context_parallel=2 does not divide the 3"),
        (2, {"virtual_stages": 2}, "virtual_stages=2 needs a pipeline"),
        (4, {"pipeline_parallel": 2, "expert_parallel": 4}, r"expert_parallel=4 does not divide the 2 .*stage.*=2"),
    ],
)
def test_a_plan_refuses_axes_that_do_not_divide_the_processes(processes, options, said):
    with pytest.raises(ConfigError, match=said):
        MegatronOptions(**options).check(processes)


@pytest.mark.parametrize(
    ("processes", "options", "said"),
    [
        (8, {"tensor_parallel": 8}, r"tensor_parallel=8 does not divide the model's 4 key-value heads.*=4"),
        (16, {"tensor_parallel": 16}, r"tensor_parallel=16 does not divide the model's 8 attention heads.*=8"),
        (4, {"pipeline_parallel": 4}, r"pipeline_parallel=4 does not divide the model's 2 layers.*=2"),
        (
            2,
            {"pipeline_parallel": 2, "virtual_stages": 2},
            r"virtual_stages=2 does not divide .* 1 layers of a pipeline",
        ),
    ],
)
def test_a_layout_that_does_not_divide_the_model_names_the_nearest_that_does(processes, options, said):
    with pytest.raises(ConfigError, match=said):
        set_up(tiny_model("llama", False, heads=8, key_value_heads=4), processes, **options)


@pytest.mark.parametrize(
    ("processes", "options", "said"),
    [
        (3, {"expert_parallel": 3}, r"expert_parallel=3 does not divide the model's 4 experts.*=4"),
        (2, {"tensor_parallel": 2, "sequence_parallel": False}, "experts needs sequence_parallel=true"),
    ],
)
def test_a_layout_that_cannot_hold_experts_says_what_can(processes, options, said):
    with pytest.raises(ConfigError, match=said):
        set_up(tiny_experts(), processes, **options)


def test_a_model_whose_weights_are_no_numbers_is_refused_by_parameter_and_file():
    name = "model.layers.1.mlp.up_proj.weight"
    path = with_weight(tiny_model(heads=8, key_value_heads=4), name, (3, 2), float("nan"))
    with pytest.raises(ModelError, match=f"not finite .*: {name} in {path}/model.safetensors"):
        set_up(path)


def test_float16_is_refused_with_the_reason():
    with pytest.raises(ModelError, match="megatron: no engine trains in float16"):
        set_up(tiny_model(), dtype="float16")


def test_a_pipeline_rank_without_experts_is_refused(tmp_path):
    path = changed(tiny_experts(), tmp_path / "model", mlp_only_layers=[1])
    with pytest.raises(ConfigError, match=r"leaves rank 1 .* without a layer that has experts .* the layers \[0\]"):
        set_up(path, 2, pipeline_parallel=2)


def test_a_mixture_of_experts_nobody_wrote_down_says_what_to_write(tmp_path):
    path = changed(tiny_experts(), tmp_path / "model", model_type="olmoe")
    with pytest.raises(ModelError, match=r"model_type 'olmoe' \(known: .*qwen3_moe.*\).*Architecture"):
        set_up(path)


def test_a_model_nobody_wrote_down_says_what_to_write(tmp_path):
    path = changed(tiny_model("llama", False), tmp_path / "model", model_type="mistral")
    with pytest.raises(
        ModelError, match=r"model_type 'mistral' \(known: llama, qwen2, qwen3, qwen3_moe, mixtral\).*Architecture"
    ):
        set_up(path)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "kind 'yarn'"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"sliding_window": 8}, "attention within a window"),
        ({"attention_bias": True}, "biases of all linear layers"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier=12"),
    ],
)
def test_a_model_that_computes_otherwise_is_refused(tmp_path, values, said):
    with pytest.raises(ModelError, match=said):
        set_up(changed(tiny_model("llama", False), tmp_path / "model", **values))


def test_tensors_that_the_architecture_does_not_name_are_refused():
    """Left out without a word, the norms of queries and keys would be missing to the model."""
    with pytest.raises(ModelError, match=r"hold model\.layers\.0\.self_attn\.k_norm\.weight, .* another model"):
        set_up(tiny_model("qwen3"), architecture="enginehouse_megatron.architectures:LLAMA")


def test_an_unknown_setting_is_refused():
    with pytest.raises(ConfigError, match=r"TransformerConfig refuses .*no_such_setting"):
        set_up(tiny_model("llama", False), native={"no_such_setting": 1})


def test_roles_that_share_processes_share_a_layout():
    from enginehouse_megatron import parallel
    from enginehouse_megatron.engine import MegatronEngine

    engine = MegatronEngine()
    engine.setup(ModelSpec(path=tiny_model()), MegatronOptions(), ProcessContext("actor"))
    try:
        with pytest.raises(ConfigError, match="one has pp1 x dp1 x cp1 x tp1 and another pp1 x dp1 x cp1 x tp2"):
            parallel.join({"pp": 1, "dp": 1, "cp": 1, "tp": 2})
    finally:
        engine.shutdown()


@pytest.mark.parametrize("installed", [True, False])
def test_float32_is_refused_where_transformer_engine_would_compute_it(monkeypatch, installed):
    monkeypatch.setattr("enginehouse_megatron.options.has_transformer_engine", lambda: installed)
    options = MegatronOptions()
    options.check_device("cuda", "bfloat16")
    options.check_device("cpu", "float32")
    with pytest.raises(ConfigError, match=r"set model\.dtype=bfloat16") if installed else contextlib.nullcontext():
        options.check_device("cuda", "float32")


@pytest.mark.parametrize("installed", [True, False])
def test_missing_kernels_are_named_where_a_gpu_would_use_them(monkeypatch, caplog, installed):
    from enginehouse_megatron import kernels

    monkeypatch.setattr(kernels, "has_transformer_engine", lambda: installed)
    monkeypatch.setattr(kernels, "missing", lambda: ["transformer_engine", "apex"])
    with caplog.at_level(logging.WARNING):
        kernels.say_missing("cpu")
        assert not caplog.records, "a CPU has no use of them"
        kernels.say_missing("cuda")
    said = [record.getMessage() for record in caplog.records]
    assert [("transformer_engine (" in one, "apex (" in one) for one in said] == [(True, True)] * (not installed)


def test_the_code_of_a_model_is_run_only_if_asked(model_with_code):  # noqa: F811
    from enginehouse_megatron.build import model_config

    with pytest.raises(ModelError, match="trust_remote_code"):
        model_config(ModelSpec(str(model_with_code.path)))
    assert not model_with_code.code_ran
    assert model_config(ModelSpec(str(model_with_code.path), trust_remote_code=True)).model_type == "brought"
    assert model_with_code.code_ran
