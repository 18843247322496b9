"""What README.md tells the author of a plugin to write is a plugin."""

import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import pytest
from plugin_pages import blocks

from enginehouse.plugin import load_plugins
from enginehouse.runtimes.readiness import plugin_states

README = Path(__file__).parents[2] / "README.md"


def test_the_plugin_it_shows_is_loaded(monkeypatch: pytest.MonkeyPatch):
    module = ModuleType("written_from_readme")
    for block in blocks(README.read_text(encoding="utf-8"), "python"):
        exec(block, module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    manager = load_plugins(entry_points=[EntryPoint("mine", module.__name__, "enginehouse")])
    assert plugin_states(manager)["mine"] == "ok"
    assert manager.get("loss", "mine").summary == "my loss"
