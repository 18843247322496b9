"""docs/plugins/tracker.md: its tracker and its package are planned and run as the page says."""

import csv
from collections.abc import Iterator

import pytest
from distributions import Distributions
from plugin_pages import PagePackage
from projects import Project

from enginehouse.errors import ConfigError
from enginehouse_rl.config.load import dump_config
from enginehouse_rl.plan.plan import Plan
from enginehouse_rl.runs import RunDirectory, tracking

PAGE = PagePackage("tracker")


@pytest.fixture
def package(project: Project, distributions: Distributions) -> Iterator[Project]:
    """The page's package, installed as its `pyproject.toml` says."""
    with PAGE.installed(distributions.site):
        yield project


def planned(project: Project, *overrides: str) -> Plan:
    return project.planned(*overrides, enabled=("torch", "my_trackers"))


def test_the_config_on_the_page_of_trackers_is_planned(project: Project):
    project.config |= PAGE.config()
    assert [one.name for one in planned(project).trackers] == ["tensorboard", "wandb", "mlflow"]


def test_the_package_on_the_page_of_trackers_writes_what_a_run_logs(package: Project):
    package.config["run"] |= PAGE.config(1)["run"]
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
    assert said in PAGE.text
    assert f"For a slow tracker, up to {tracking.MOST_WAITING} rows of metrics wait" in PAGE.text
