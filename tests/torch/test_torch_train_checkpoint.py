"""Checkpoints and exports appear whole or not at all, and what is loaded goes on as if nothing had happened."""

import json
import os
import pickle
import shutil
import signal
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from unittest import mock

import pytest
import torch
from rank_processes import rank_processes
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, BytesStorageMetadata, MetadataIndex
from torch.serialization import _get_layout
from torch_train_cases import POLICY, SQUARED_ERROR, make_batch, make_engine, weights_of

from enginehouse.data import Batch, Ragged
from enginehouse.engines.train import Outputs
from enginehouse.errors import ModelError
from enginehouse_testing.models import tiny_model
from enginehouse_torch.modeling.files import CheckpointError

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
    other = make_engine(tiny_model(), **OPTIONS)
    other.load(str(tmp_path / "model"), ("model",))
    assert _equal(weights_of(other), weights_of(engine))
    with pytest.raises(CheckpointError, match="has no optimizer: it was saved only with model"):
        other.load(str(tmp_path / "model"))


def test_a_half_precision_checkpoint_keeps_what_the_weights_cannot_show(tmp_path):
    from enginehouse.engines.model import ModelSpec, ProcessContext
    from enginehouse_torch.options import TorchTrainOptions
    from enginehouse_torch.train import TorchTrainEngine

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
    with pytest.raises(
        CheckpointError, match=r"lacks 'model\.model\.layers\.1.*nearest name: 'model\.model\.layers\.0"
    ):
        engine.load(str(tmp_path / "shallow"), ("model",))
    assert _equal(weights_of(engine), before)
    with pytest.raises(CheckpointError, match="no part 'weights'"):
        engine.load(str(tmp_path / "wide"), ("weights",))
    make_engine(tiny_model(layers=3)).save(str(tmp_path / "deep"), ("model",))
    with pytest.raises(CheckpointError, match=r"an unknown entry 'model\.model\.layers\.2"):
        engine.load(str(tmp_path / "deep"), ("model",))


def test_a_save_that_fails_leaves_the_checkpoint_before_it(tmp_path, monkeypatch):
    engine = make_engine(tiny_model())
    path = tmp_path / "latest"
    engine.save(str(path))
    before = {file.name: file.read_bytes() for file in path.iterdir()}

    def disk_full(*_, **__):
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", disk_full)  # what torch.distributed.checkpoint writes each tensor with
    with pytest.raises(CheckpointError, match=r"was not written: .*no space"):
        engine.save(str(path))
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    assert os.listdir(tmp_path) == ["latest"]


def test_what_a_killed_save_left_goes_with_the_next(tmp_path):
    (tmp_path / ".latest.partial").mkdir()
    (tmp_path / ".latest.partial" / "__0_0.distcp").touch()
    engine = make_engine(tiny_model())
    engine.save(str(tmp_path / "latest"))
    assert os.listdir(tmp_path) == ["latest"]
    engine.load(str(tmp_path / "latest"))


def _die():
    os.kill(os.getpid(), signal.SIGKILL)


def _die_writing():
    left, save = iter(range(3)), torch.save
    return mock.patch("torch.save", lambda *args, **_: save(*args) if next(left, None) is not None else _die())


def _die_renaming(name):
    rename = os.rename
    return mock.patch("os.rename", lambda path, to: _die() if Path(path).name == name else rename(path, to))


def _die_tidying():
    remove = shutil.rmtree
    return mock.patch("shutil.rmtree", lambda path, **how: _die() if path.exists() else remove(path, **how))


DEATHS = {
    "writing": (_die_writing, (), 1),
    "written": (_die_renaming, ("latest",), 1),
    "between the renames": (_die_renaming, (".latest.partial",), None),
    "renamed": (_die_tidying, (), 2),
}
"""When a process is killed: how, and the step of what can be loaded then, if anything."""


def _save_and_die(rank, world_size, path, latest, when):
    how, arguments, _ = DEATHS[when]
    engine = make_engine(path, **OPTIONS)
    _train(engine, 1, seed=0)
    engine.save(latest)
    _train(engine, 1, seed=1)
    with how(*arguments):
        engine.save(latest)


@pytest.mark.slow
@pytest.mark.parametrize("when", DEATHS)
def test_a_process_killed_in_a_save_leaves_a_whole_checkpoint(tmp_path, when):
    latest, step = tmp_path / "latest", DEATHS[when][-1]
    with rank_processes("enginehouse_torch.train") as run, pytest.raises(BrokenProcessPool):
        run(1, _save_and_die, tiny_model(), str(latest), when)
    engine = make_engine(tiny_model(), **OPTIONS)
    if step is None:
        with pytest.raises(CheckpointError, match=r"rename '.*\.latest\.replaced', which is the earlier one"):
            engine.load(str(latest))
        (tmp_path / ".latest.replaced").rename(latest)
    engine.load(str(latest))
    trained = make_engine(tiny_model(), **OPTIONS)
    for seed in range(step or 1):
        _train(trained, 1, seed=seed)
    assert _equal(weights_of(engine), weights_of(trained))
    engine.save(str(latest))
    assert os.listdir(tmp_path) == ["latest"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "step1"
    engine = make_engine(tiny_model(), **OPTIONS)
    _train(engine, 1, seed=0)
    engine.save(str(path))
    return path


def _truncate(checkpoint):
    file = next(checkpoint.glob("*.distcp"))
    os.truncate(file, file.stat().st_size - 1000)


def _blank(checkpoint):
    file = next(checkpoint.glob("*.distcp"))
    file.write_bytes(bytes(file.stat().st_size))


class _Runs:
    def __reduce__(self):
        return os.mkdir, ("ran",)


def _as_bytes(checkpoint):
    """Say of the step that it is bytes, which torch unpickles without asking what they name."""
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    index = MetadataIndex("optimizer.step")
    torch.save(_Runs(), checkpoint / "bytes")
    metadata.state_dict_metadata["optimizer.step"] = BytesStorageMetadata()
    metadata.storage_data = {key: place for key, place in metadata.storage_data.items() if key.fqn != "optimizer.step"}
    metadata.storage_data[index] = _StorageInfo("bytes", 0, (checkpoint / "bytes").stat().st_size)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


def _no_tensors(checkpoint):
    """Say of every tensor that it is where something else is."""
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    torch.save(_Runs(), checkpoint / "bytes")
    place = _StorageInfo("bytes", 0, (checkpoint / "bytes").stat().st_size)
    metadata.storage_data = dict.fromkeys(metadata.storage_data, place)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


SETS_STATE = {
    "a class": b"cpathlib\nPath\n(N}X\x04\x00\x00\x00evilctorch\nSize\nstb.",
    "a function": b"ctorch.serialization\n_get_layout\n}X\x04\x00\x00\x00evilctorch\nSize\nsb.",
    "what all of the process share": (
        b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n(K\x00tR}X\x04\x00\x00\x00evilctorch\nSize\nsb."
    ),
}


@pytest.mark.parametrize("state", SETS_STATE)
def test_a_metadata_file_changes_nothing_but_what_it_makes(tmp_path, state):
    (tmp_path / ".metadata").write_bytes(b"\x80\x02" + SETS_STATE[state])
    try:
        with pytest.raises(CheckpointError, match=r"damaged \.metadata: it changes the state of"):
            make_engine(tiny_model(), **OPTIONS).load(str(tmp_path))
        assert not [one for one in (Path, _get_layout, _MEM_FORMAT_ENCODING(0)) if hasattr(one, "evil")]
    finally:
        for one in (Path, _get_layout, _MEM_FORMAT_ENCODING(0)):
            if hasattr(one, "evil"):
                delattr(one, "evil")


DAMAGES = {
    r"holds no checkpoint \(no file \.metadata\)": shutil.rmtree,
    "is incomplete": lambda checkpoint: (checkpoint / ".metadata").unlink(),
    r"the file __0_0\.distcp is missing": lambda checkpoint: next(checkpoint.glob("*.distcp")).unlink(),
    "is damaged: __0_0.distcp has": _truncate,
    r"is damaged: (rank 0: )?.*partly old": _blank,
    "a file holds bytes that are not a tensor.*partly old": _no_tensors,
    "has a damaged .metadata": lambda checkpoint: os.truncate(checkpoint / ".metadata", 200),
    "BytesStorageMetadata, which no checkpoint needs": _as_bytes,
    "mkdir, which no checkpoint needs": lambda checkpoint: (checkpoint / ".metadata").write_bytes(
        pickle.dumps(_Runs())
    ),
}


@pytest.mark.parametrize("said", DAMAGES)
def test_a_checkpoint_that_is_not_whole_is_refused_and_runs_nothing(tmp_path, monkeypatch, saved, said):
    monkeypatch.chdir(tmp_path)
    checkpoint = shutil.copytree(saved, tmp_path / "checkpoint")
    DAMAGES[said](checkpoint)
    engine = make_engine(tiny_model(), **OPTIONS)
    before = weights_of(engine)
    with pytest.raises(CheckpointError, match=said):
        engine.load(str(checkpoint))
    assert "partly" in said or _equal(weights_of(engine), before)
    assert not (tmp_path / "ran").exists()


def test_a_model_directory_is_no_checkpoint():
    with pytest.raises(CheckpointError, match="it is a Hugging Face model"):
        make_engine(tiny_model()).load(tiny_model())


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
    assert len({file.stat().st_mode for file in exported.iterdir()}) == 1, "whoever reads the config reads the weights"


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


@pytest.mark.parametrize("tied", [True, False])
def test_a_reward_model_of_transformers_scores_as_there_and_an_export_is_one_again(tmp_path, tied):
    from safetensors.torch import load_file
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(0)
    classifier = AutoModelForSequenceClassification.from_pretrained(tiny_model(tied=tied), num_labels=1)
    classifier.save_pretrained(tmp_path / "reward")
    shutil.copy(f"{tiny_model()}/tokenizer.json", tmp_path / "reward")
    engine = make_engine(str(tmp_path / "reward"), head="value")
    batch = make_batch(2, 2)
    values = engine.forward(batch.drop(["loss_mask"]), Outputs(logprobs=False, values=True))
    engine.export_hf(str(tmp_path / "again"))
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "again")
    assert again.config.num_labels == 1
    assert not (tmp_path / "again" / "generation_config.json").exists()
    for row in range(len(batch)):
        ids = batch.row(row)["input_ids"][None, :-1]
        with torch.no_grad():
            wanted = classifier.eval()(input_ids=ids).logits
            assert torch.equal(again(input_ids=ids).logits, wanted)
        torch.testing.assert_close(values.row(row)["values"][-1:], wanted[0], atol=1e-5, rtol=0)
    first = load_file(tmp_path / "reward" / "model.safetensors")
    assert _equal(load_file(tmp_path / "again" / "model.safetensors"), first)
    assert "lm_head.weight" not in first


PADDINGS = {
    "it ends no text": ({}, "<pad>"),
    "it is the end": ({"pad_token": "<eos>"}, "<unk>"),
    "there is none, and the model's is the end": ({"pad_token": None}, "<unk>"),
    "it ends a turn": ({"chat_template": "{% for m in messages %}{{ m.content }}<pad>\n{% endfor %}"}, "<unk>"),
    "it is the end, and nothing is unknown": ({"pad_token": "<eos>", "unk_token": None, "bos_token": "+"}, "+"),
    "the end is all": ({"pad_token": "<eos>", "unk_token": "<eos>", "bos_token": "<eos>"}, None),
}


@pytest.mark.parametrize("case", PADDINGS)
def test_padding_of_an_exported_reward_model_ends_no_text(tmp_path, case):
    """Transformers reads the score at the last token that is no padding, one text at a time and several padded."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    named, wanted = PADDINGS[case]
    model = Path(shutil.copytree(tiny_model(), tmp_path / "model"))
    if "chat_template" in named:
        (model / "chat_template.jinja").write_text(named["chat_template"])
    changes = [("tokenizer_config.json", named)] if named else []
    for name, settings in [*changes, *([("config.json", {"pad_token_id": 1})] if named else [])]:
        (model / name).write_text(json.dumps(json.loads((model / name).read_text()) | settings))
    if named:  # no token is special but those that are named
        described = json.loads((model / "tokenizer.json").read_text())
        end = [token for token in described["added_tokens"] if token["content"] == "<eos>"]
        (model / "tokenizer.json").write_text(json.dumps({**described, "added_tokens": end}))
    engine = make_engine(str(model), head="value", lr=1e-2)
    _train(engine, 2, seed=0, loss=SQUARED_ERROR)
    engine.export_hf(str(tmp_path / "reward"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "reward")
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward").eval()
    texts = [f"{text}{tokenizer.eos_token}" for text in ("1+1=2", "12+30=42")]
    rows = [tokenizer(text)["input_ids"] for text in texts]
    ids = Ragged.from_list([[*row, row[-1]] for row in rows], dtype=torch.int64)
    values = engine.forward(Batch({"input_ids": ids}), Outputs(logprobs=False, values=True))["values"]
    scores = torch.stack([row[-1] for row in values])
    with torch.no_grad():
        alone = torch.cat([classifier(torch.tensor([row])).logits[0] for row in rows])
        torch.testing.assert_close(alone, scores, atol=1e-5, rtol=0)
        if wanted is None:
            assert classifier.config.pad_token_id is None
            return
        padded = tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
        torch.testing.assert_close(classifier(**padded).logits[:, 0], scores, atol=1e-5, rtol=0)
    assert tokenizer.pad_token == wanted


def test_a_value_head_of_earlier_versions_is_found(tmp_path):
    from safetensors.torch import load_file, save_file

    shutil.copytree(tiny_model(), tmp_path / "critic")
    head = torch.arange(32.0)[None] / 32
    file = tmp_path / "critic" / "model.safetensors"
    save_file(load_file(file) | {"value_head.weight": head}, file, {"format": "pt"})
    assert torch.equal(weights_of(make_engine(str(tmp_path / "critic"), head="value"))["score.weight"], head)


@pytest.mark.parametrize(
    ("head", "says"),
    [
        ({"score.weight": torch.zeros(3, 32)}, r"score.weight has the shape \(3, 32\), one row for each label"),
        ({"score.weight": torch.zeros(1, 32), "score.bias": torch.zeros(1)}, "it has score.bias"),
        ({"classifier.dense.weight": torch.zeros(32, 32)}, "is a Qwen3ForSequenceClassification with classifier.dense"),
        ({}, "with no such weight in its safetensors files"),
    ],
    ids=["labels", "bias", "classifier", "none"],
)
def test_another_head_than_one_scalar_is_refused(tmp_path, head, says):
    from safetensors.torch import load_file, save_file

    shutil.copytree(tiny_model(), tmp_path / "reward")
    file, config = tmp_path / "reward" / "model.safetensors", tmp_path / "reward" / "config.json"
    save_file(load_file(file) | head, file, {"format": "pt"})
    described = json.loads(config.read_text()) | {"architectures": ["Qwen3ForSequenceClassification"]}
    config.write_text(json.dumps(described))
    with pytest.raises(ModelError, match=f"is no value head: .*{says}"):
        make_engine(str(tmp_path / "reward"), head="value")
