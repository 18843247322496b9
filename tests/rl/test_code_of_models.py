"""Code that a model's directory brings is run if `model.trust_remote_code` says so, and never else."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from models_with_code import ModelWithCode, model_with_code  # noqa: F401 - a fixture

from enginehouse.cli.main import main
from enginehouse.engines.environment import Scored
from enginehouse.engines.model import ModelSpec
from enginehouse.engines.transcript import Transcript
from enginehouse.errors import ModelError
from enginehouse.weights.form import ModelForm
from enginehouse_rl.data.rendering import load_tokenizer


def weights(spec: ModelSpec) -> object:
    from enginehouse_torch.modeling.loading import load_model

    return load_model(spec, "cpu")


def sharded(spec: ModelSpec) -> object:
    from enginehouse_fsdp.sharding import build_empty_model

    return build_empty_model(spec)[0]


def stop_strings(spec: ModelSpec) -> object:
    from enginehouse_torch.rollout import _load_tokenizer

    return _load_tokenizer(spec)


LOADS: list[Callable[[ModelSpec], object]] = [
    lambda spec: load_tokenizer(spec.path, spec.trust_remote_code),
    ModelForm.of,
    weights,
    sharded,
    stop_strings,
]


@pytest.mark.parametrize("load", LOADS, ids=["tokenizer", "names of weights", "torch", "fsdp", "stop strings"])
def test_whatever_loads_a_model_runs_its_code_only_if_asked(load: Any, model_with_code: ModelWithCode):  # noqa: F811
    with pytest.raises(ModelError, match="trust_remote_code"):
        load(ModelSpec(str(model_with_code.path)))
    assert not model_with_code.code_ran
    load(ModelSpec(str(model_with_code.path), trust_remote_code=True))
    assert model_with_code.code_ran


@pytest.mark.parametrize("trusts", [False, True])
def test_an_export_of_a_value_head_reads_the_tokenizer_so(
    trusts,
    model_with_code,  # noqa: F811
    tmp_path,
):
    from transformers import Qwen3Config

    from enginehouse_torch.modeling.export import _give_padding

    spec = ModelSpec(str(model_with_code.path), trust_remote_code=trusts, head="value")
    _give_padding(tmp_path, Qwen3Config(), spec)
    assert model_with_code.code_ran == trusts


class Game:
    """One answer, which is worth something by its number."""

    async def run(self, task, policy, context):
        async def play(number, policy):
            said = Transcript(task.prompt_ids)
            said.add_drawn(await policy.generate(said.tokens))
            return said.episode(Scored(float(number)))

        return await context.each(play)


GAME = {"environment": {"name": f"{__name__}:Game"}}
COMMANDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "train": ({"prompt": "1+2="}, {**GAME, "rollout": {"samples_per_prompt": 2, "sampling": {"max_tokens": 3}}}),
    "sft": ({"prompt": "1+2=", "response": "3"}, {}),
    "dpo": ({"prompt": "1+2=", "chosen": "3", "rejected": "4"}, {}),
    "rm": ({"prompt": "1+2=", "chosen": "3", "rejected": "4"}, {}),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_does(
    command,
    model_with_code,  # noqa: F811
    tmp_path,
    monkeypatch,
):
    monkeypatch.chdir(tmp_path)
    row, more = COMMANDS[command]
    Path("rows.jsonl").write_text((json.dumps(row) + "\n") * 4)
    rows_per_step = "prompts_per_step" if command == "train" else "rows_per_step"
    config = {
        "model": {"path": str(model_with_code.path)},
        "data": {"train": "rows.jsonl"},
        "train": {"steps": 1, rows_per_step: 2},
        "cluster": {"launcher": "inline", "device": "cpu"},
        **more,
    }
    Path("run.yaml").write_text(yaml.safe_dump(config))
    refused = CliRunner().invoke(main, [command, "run.yaml"])
    assert refused.exit_code == 2, refused.output
    assert "trust_remote_code" in refused.output + refused.stderr
    assert not model_with_code.code_ran
    done = CliRunner().invoke(main, [command, "run.yaml", "model.trust_remote_code=true"])
    assert done.exit_code == 0, done.output
    assert model_with_code.code_ran
    (model,) = Path("runs").glob("*/model")
    exported = ModelSpec(str(model), trust_remote_code=True)
    assert load_tokenizer(exported.path, True).decode([3]) == "0"
    assert command == "rm" or weights(exported)
