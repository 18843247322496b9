"""docs/plugins/tracker.md: its tracker and its package are planned and run as the page says."""

import csv
import importlib
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from distributions import Distributions
from projects import Project

from enginehouse.config.load import dump_config, load_config
from enginehouse.config.plan import Plan, plan
from enginehouse.errors import ConfigError
from enginehouse.plugin import load_plugins
from enginehouse.runs import RunDirectory, tracking

PAGE = (Path(__file__).parents[2] / "docs" / "plugins" / "tracker.md").read_text(encoding="utf-8")


def block(language: str, number: int = 0) -> str:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)[number]


@pytest.fixture
def package(project: Project, distributions: Distributions) -> Iterator[Project]:
    """The page's package, installed as its `pyproject.toml` says."""
    declared = tomllib.loads(block("toml"))["project"]
    ((name, module),) = declared["entry-points"]["enginehouse"].items()
    folder = distributions.site / "my_trackers"
    folder.mkdir()
    (folder / "__init__.py").touch()
    for number in (0, 1):
        code = block("python", number)
        (folder / code.splitlines()[0].removeprefix("# my_trackers/")).write_text(code)
    info = distributions.site / "my_trackers-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {declared['name']}\nVersion: {declared['version']}\n")
    (info / "entry_points.txt").write_text(f"[enginehouse]\n{name} = {module}\n")
    importlib.invalidate_caches()
    yield project
    for loaded in [one for one in sys.modules if one.partition(".")[0] == "my_trackers"]:
        del sys.modules[loaded]


def planned(project: Project, *overrides: str) -> Plan:
    path = project.save()
    return plan(load_config(path, overrides), load_plugins(enabled=("torch", "my_trackers")), path)


def test_the_config_on_the_page_of_trackers_is_planned(project: Project):
    project.config |= yaml.safe_load(block("yaml"))
    assert [one.name for one in planned(project).trackers] == ["tensorboard", "wandb", "mlflow"]


def test_the_package_on_the_page_of_trackers_writes_what_a_run_logs(package: Project):
    package.config["run"] |= yaml.safe_load(block("yaml", 1))["run"]
    checked = planned(package)
    run = RunDirectory.create(checked.run_directory, dump_config(checked.config), trackers=checked.trackers)
    run.log_validation(0, {"validation/reward": 0.25})
    run.log(1, {"loss": 1.0, "norm": 2.0})
    run.log(2, {"loss": 0.5})
    run.finish("finished")
    with (run.path / "csv" / "train.csv").open(newline="") as file:
        assert list(csv.DictReader(file)) == [
            {"step": "1", "loss": "1.0", "norm": "2.0"},
            {"step": "2", "loss": "0.5", "norm": "nan"},
        ]
    assert (run.path / "csv" / "validation.csv").read_text().split() == ["step,validation/reward", "0,0.25"]
    with pytest.raises(ConfigError, match=r"run\.trackers\[0\]\.arguments\.missing"):
        planned(package, "run.trackers=[{name: csv, arguments: {missing: none}}]")


def test_the_tracker_on_the_page_can_be_named_without_a_package(package: Project):
    (checked,) = planned(package, "run.trackers=[{name: 'my_trackers.csv_files:CSVFiles'}]").trackers
    assert checked.tracker == "my_trackers.csv_files:CSVFiles"


def test_the_limits_on_the_page_are_those_of_the_code():
    said = f"waits {tracking.ENDING_SECONDS:.0f} seconds for all trackers together, {tracking.HURRY_SECONDS:.0f} if"
    assert said in PAGE
    assert f"For a slow one {tracking.MOST_WAITING} rows wait" in PAGE
