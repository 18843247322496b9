"""docs/plugins/environment.md: its environments are planned, its plugin is one; `rl/test_episode_checks.py` plays
them."""

import json
from importlib.metadata import EntryPoint

import pytest
import yaml
from game_environments import block
from projects import Project

from enginehouse.engines.declared import find_faults
from enginehouse.errors import ConfigError
from enginehouse.plugin import Environment, load_plugins


@pytest.fixture
def written(project: Project) -> Project:
    (project.root / "my_games.py").write_text(block("python"))
    project.write_rows("train.jsonl", [json.loads(block("json"))] * 40)
    project.config["reward"] = {}
    return project


def test_the_game_on_the_page_is_planned_and_its_arguments_are_checked(written: Project):
    given = yaml.safe_load(block("yaml"))
    written.config["environment"] = given["environment"]
    written.config["rollout"] |= given["rollout"]
    assert written.planned().environment.arguments == {"second": 0.25}
    with pytest.raises(ConfigError, match=r"environment\.arguments\.second: expected a number"):
        written.planned("environment.arguments.second=much")


def test_the_reader_of_several_rows_on_the_page_is_planned(written: Project):
    (written.root / "my_readers.py").write_text(block("python", 1))
    given = "environment={name: 'my_readers:Reading', arguments: {characters: 5}}"
    assert written.planned(given).environment.arguments == {"characters": 5}


def test_the_plugin_on_the_page_declares_an_environment_that_is_one(written: Project, monkeypatch: pytest.MonkeyPatch):
    (written.root / "guessing_plugin.py").write_text(block("python", 2))
    monkeypatch.syspath_prepend(str(written.root))
    plugins = load_plugins(entry_points=[EntryPoint("guessing", "guessing_plugin", "enginehouse")])
    record = plugins.get(Environment, "guessing")
    assert list(find_faults(record)) == []
