"""What README.md tells the author of a plugin to write is a plugin."""

from __future__ import annotations

import re
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from enginehouse.data import Batch
from enginehouse.plugin import load_plugins
from enginehouse.rl.samples import sample_metrics
from enginehouse.runtimes.readiness import plugin_states

SAMPLES = Batch(
    {
        "response_tokens": torch.tensor([1, 1]),
        "reward": torch.tensor([0.0, 1.0]),
        "group": torch.tensor([0, 0]),
        "finish_reason": ["stop"] * 2,
        "first_version": torch.tensor([1, 1]),
        "weight_version": torch.tensor([1, 1]),
        "reward_figures": [{}] * 2,
        "reward_failure": [""] * 2,
    }
)

README = Path(__file__).parents[2] / "README.md"


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module with all of README's Python in it, but for the suite, which looks for the engine at once."""
    module = ModuleType("written_from_readme")
    for block in re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        if "TrainEngineSuite" not in block:
            exec(block, module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_the_plugin_it_shows_is_loaded_and_observes_a_run(written: ModuleType, tmp_path: Path):
    manager = load_plugins(entry_points=[EntryPoint("mine", written.__name__, "enginehouse")])
    assert plugin_states(manager)["mine"] == "ok"
    assert manager.get("train", "mine").summary == "my training engine"
    run = SimpleNamespace(run_directory=SimpleNamespace(path=tmp_path))
    manager.observe("step_finished", run=run, step=7, metrics=sample_metrics(SAMPLES, 1))
    assert (tmp_path / "reward.csv").read_text() == "7,0.5\n"
