"""Checkpoints and exports appear whole or not at all, and what is loaded goes on as if nothing had happened."""

import json
import os
import shutil

import pytest
import torch
from models import tiny_model
from torch_train_cases import POLICY, SQUARED_ERROR, make_batch, make_engine, weights_of

from enginehouse.backends.torch import checkpoint
from enginehouse.modeling.files import CheckpointError, whole_directory

OPTIONS = {"lr": 1e-2, "schedule": "linear", "total_steps": 10, "warmup_steps": 2}


def _equal(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


def _train(engine, steps, seed, loss=POLICY):
    for step in range(steps):
        engine.forward_backward(make_batch(3, 2, seed=seed + step), loss)
        metrics = engine.optim_step()
    return metrics


@pytest.mark.parametrize("tied", [True, False])
def test_a_loaded_checkpoint_takes_the_same_next_steps(tmp_path, tied):
    path = tiny_model(tied=tied)
    engine = make_engine(path, **OPTIONS)
    _train(engine, 3, seed=0)
    engine.save(str(tmp_path / "step3"))
    draw = torch.rand(3)
    wanted = _train(engine, 2, seed=3)
    resumed = make_engine(path, **OPTIONS)
    _train(resumed, 1, seed=9)  # whatever it was doing before
    resumed.load(str(tmp_path / "step3"))
    assert torch.equal(torch.rand(3), draw)
    assert _train(resumed, 2, seed=3) == wanted
    assert _equal(weights_of(resumed), weights_of(engine))


def test_the_model_alone_can_be_saved_and_loaded(tmp_path):
    engine = make_engine(tiny_model(), **OPTIONS)
    _train(engine, 1, seed=0)
    engine.save(str(tmp_path / "model"), ("model",))
    assert os.listdir(tmp_path / "model") == ["model.safetensors"]
    other = make_engine(tiny_model(), **OPTIONS)
    other.load(str(tmp_path / "model"), ("model",))
    assert _equal(weights_of(other), weights_of(engine))
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors"):
        other.load(str(tmp_path / "model"))


def test_a_half_precision_checkpoint_keeps_what_the_weights_cannot_show(tmp_path):
    from enginehouse.backends.torch.options import TorchTrainOptions
    from enginehouse.backends.torch.train import TorchTrainEngine
    from enginehouse.engines.model import ModelSpec, ProcessContext

    def engine():
        made = TorchTrainEngine()
        made.setup(
            ModelSpec(path=tiny_model(), dtype="bfloat16"), TorchTrainOptions(lr=1e-4), ProcessContext(role="actor")
        )
        return made

    first, second = engine(), engine()
    _train(first, 3, seed=0)
    first.save(str(tmp_path / "c"))
    second.load(str(tmp_path / "c"))
    _train(first, 5, seed=3)
    _train(second, 5, seed=3)
    assert _equal(weights_of(first), weights_of(second))


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    make_engine(tiny_model(hidden=64)).save(str(tmp_path / "wide"), ("model",))
    engine = make_engine(tiny_model())
    before = weights_of(engine)
    with pytest.raises(CheckpointError, match="has shape"):
        engine.load(str(tmp_path / "wide"), ("model",))
    make_engine(tiny_model(layers=1)).save(str(tmp_path / "shallow"), ("model",))
    with pytest.raises(CheckpointError, match=r"lacks 'model\.layers\.1"):
        engine.load(str(tmp_path / "shallow"), ("model",))
    assert _equal(weights_of(engine), before)
    with pytest.raises(CheckpointError, match="no part 'weights'"):
        engine.load(str(tmp_path / "wide"), ("weights",))


def test_a_save_that_fails_leaves_the_checkpoint_before_it(tmp_path, monkeypatch):
    engine = make_engine(tiny_model())
    path = tmp_path / "latest"
    engine.save(str(path))
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    write = checkpoint.write_part

    def disk_full(directory, part, *rest):
        if part == "optimizer":
            raise OSError("no space left on device")
        write(directory, part, *rest)

    monkeypatch.setattr(checkpoint, "write_part", disk_full)
    with pytest.raises(OSError, match="no space"):
        engine.save(str(path))
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    assert os.listdir(tmp_path) == ["latest"]


def test_a_directory_is_replaced_as_a_whole(tmp_path):
    for content in ("old", "new"):
        with whole_directory(tmp_path / "d") as directory:
            (directory / content).touch()
    assert os.listdir(tmp_path) == ["d"]
    assert os.listdir(tmp_path / "d") == ["new"]


@pytest.mark.parametrize(("family", "tied"), [("qwen3", True), ("qwen3", False), ("llama", True)])
def test_an_export_reloads_bit_for_bit_under_the_names_it_came_with(tmp_path, family, tied):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = tiny_model(family, tied)
    engine = make_engine(path, lr=1e-2)
    _train(engine, 2, seed=0)
    exported = tmp_path / "out" / "model"
    engine.export_hf(str(exported))
    stored = load_file(exported / "model.safetensors")
    assert stored.keys() == load_file(f"{path}/model.safetensors").keys()
    assert _equal(stored, weights_of(engine))
    assert _equal(weights_of(make_engine(str(exported))), weights_of(engine))
    model = AutoModelForCausalLM.from_pretrained(exported)
    assert all(torch.equal(model.state_dict()[name], weight) for name, weight in stored.items())
    assert AutoTokenizer.from_pretrained(exported)("12+3")["input_ids"] == [4, 5, 28, 6]
    assert json.loads((exported / "config.json").read_text())["model_type"] == family
    assert os.listdir(tmp_path / "out") == ["model"]


def test_an_export_has_every_file_of_the_tokenizer(tmp_path):
    path = shutil.copytree(tiny_model(), tmp_path / "model")
    names = ["spiece.model", "qwen.tiktoken", "tokenization_own.py", "chat_template.jinja", "special_tokens_map.json"]
    for name in names:
        (path / name).write_text(name)
    make_engine(str(path)).export_hf(str(tmp_path / "exported"))
    assert [(tmp_path / "exported" / name).read_text() for name in names] == names


def test_a_value_head_is_exported_and_found_again(tmp_path):
    engine = make_engine(tiny_model(), head="value", lr=1e-2)
    _train(engine, 2, seed=0, loss=SQUARED_ERROR)
    engine.export_hf(str(tmp_path / "critic"))
    assert _equal(weights_of(make_engine(str(tmp_path / "critic"), head="value")), weights_of(engine))
