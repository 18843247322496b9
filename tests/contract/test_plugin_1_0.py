"""A plugin that was built as a wheel while the contract was 1.0 goes on working, today and on the next minor.

The wheel is in `wheels/`. It imports what plugins import, and has one of each sort.
"""

import importlib
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
import torch
from click.testing import CliRunner
from projects import Project

from enginehouse.data import Batch
from enginehouse.engines import TokenView
from enginehouse.engines.declared import find_faults
from enginehouse.plugin import CONTRACT, PluginManager, hookspecs, load_plugins, manager
from enginehouse.runtimes.readiness import plugin_states
from enginehouse_rl.config.load import load_config
from enginehouse_rl.plan.plan import plan

WHEEL = Path(__file__).parent / "wheels" / "plugin_1_0-1.0-py3-none-any.whl"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The wheel, unpacked as pip unpacks one of Python alone."""
    folder = tmp_path / "site"
    zipfile.ZipFile(WHEEL).extractall(folder)
    return folder


@pytest.fixture(params=["today", "the next minor"])
def offered(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The contract that is offered: today's, and the one after it."""
    if request.param == "the next minor":
        monkeypatch.setattr(hookspecs, "CONTRACT", (CONTRACT[0], CONTRACT[1] + 1))
        monkeypatch.setattr(manager, "OFFERED", f"{CONTRACT[0]}.{CONTRACT[1] + 1}")
    return manager.OFFERED


@pytest.fixture
def loaded(site: Path, offered: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[PluginManager]:
    monkeypatch.syspath_prepend(str(site))
    importlib.invalidate_caches()
    yield load_plugins(enabled=["plugin-1-0", "torch"], strict=True)
    for name in [name for name in sys.modules if name.partition(".")[0] == "plugin_1_0"]:
        del sys.modules[name]


def test_it_is_loaded_and_all_that_it_names_is_there(loaded: PluginManager):
    assert plugin_states(loaded)["plugin_1_0"] == "ok"
    (plugin,) = [one for one in loaded.plugins if one.name == "plugin_1_0"]
    assert (plugin.protocol, plugin.note) == ("1.0", "")
    assert {record.kind for record in plugin.records} >= {"train", "rollout", "loss", "advantage", "reward", "filter"}
    for record in plugin.records:
        assert list(find_faults(record)) == []


def test_its_algorithm_is_planned_and_computes_what_it_did(loaded: PluginManager, project: Project):
    project.config |= {
        "algorithm": {"advantage": {"name": "elder"}, "loss": {"name": "elder", "arguments": {"scale": 2.0}}},
        "reward": {"function": "elder"},
    }
    path = project.save()
    planned = plan(load_config(path, ("rollout.keep={name: elder}", "actor.engine.backend=elder")), loaded, path)
    assert planned.advantage_needs == ("reward", "group")
    batch = Batch({"reward": torch.tensor([1.0, 0.0, 0.5]), "group": torch.tensor([7, 7, 9])})
    assert loaded.function("advantage", "elder")(batch)["advantages"].tolist() == [0.5, -0.5, 0.0]
    columns = {"loss_mask": torch.tensor([False, True]), "advantages": torch.tensor([0.0, 3.0])}
    view = TokenView({"logprobs": torch.tensor([0.0, -1.0])}, columns, torch.tensor([0, 0]), 1)
    value = loaded.function("loss", "elder")(view, scale=2.0)
    assert (float(value.total), value.weight, value.metrics["logprob"].value) == (6.0, 1.0, -1.0)
    assert loaded.function("reward", "elder")("1+1=", "2", answer="2") == {"reward": 1.1, "long": 0.0}


def test_it_observes_and_wraps_a_run(loaded: PluginManager, tmp_path: Path):
    run = SimpleNamespace(
        run_directory=SimpleNamespace(path=tmp_path), run_step=lambda step: {"reward/mean": 0.5 + step}
    )
    loaded.observe("run_started", run=run)
    metrics = loaded.run_step(run, 1)
    loaded.observe("step_finished", run=run, step=1, metrics=metrics)
    loaded.observe("validated", run=run, step=1, metrics=metrics)
    loaded.observe("weights_updated", run=run, version=1, seconds=0.1)
    loaded.observe("checkpoint_saved", run=run, step=1, path="here", what="state")
    loaded.observe("run_finished", run=run, outcome="finished")
    assert metrics == {"reward/mean": 1.5, "elder/steps": 1.0}
    said = ["started", "step 1 1.500", "validated 1", "version 1", "saved state 1", "finished"]
    assert (tmp_path / "elder.txt").read_text().splitlines() == said


def test_its_command_is_there(loaded: PluginManager):
    cli = click.Group()
    loaded.add_commands(cli)
    assert CliRunner().invoke(cli, ["elder"]).output == "contract 1.0\n"
