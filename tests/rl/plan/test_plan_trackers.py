"""Trackers in a config: what is refused before anything starts, in every kind of run."""

from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner
from projects import Project, refusal

from enginehouse.cli.main import main
from enginehouse.errors import ConfigError
from enginehouse.plugin import requirements
from enginehouse_rl.plan.plan import Plan

TRACKERS = """
from __future__ import annotations

from pathlib import Path
from typing import Literal

class Kept:
    def __init__(self, path: Path | str, mode: Literal["all", "some"] = "all", every: int = 1): ...
    def start(self, run): ...
    def log(self, step, metrics, kind): ...
    def finish(self, outcome): ...

class Half:
    def start(self, run): ...
    def logg(self, step, metrics, kind): ...

class Short:
    def start(self, run): ...
    def log(self, step): ...
    def finish(self, outcome): ...

def kept(path): ...
"""


@pytest.fixture(autouse=True)
def _tracking(project: Project):
    (project.root / "tracking.py").write_text(TRACKERS)


@pytest.mark.parametrize(
    ("trackers", "said"),
    [
        ("[{name: tensorbord}]", "run.trackers[0].name: unknown tracker 'tensorbord'. Did you mean 'tensorboard'?"),
        ("[{nam: tensorboard}]", "unknown key 'run.trackers[0].nam'"),
        ("[{nam: tensorboard}]", "Did you mean 'name'?"),
        ("[{arguments: {}}]", "missing key 'run.trackers[0].name'"),
        ("tensorboard", "run.trackers (in the override 'run.trackers=tensorboard'): expected a list"),
        ("[tensorboard]", "run.trackers[0]"),
        ("[{name: wandb, arguments: {projct: a}}]", "run.trackers[0].arguments: tracker 'wandb' does not take"),
        ("[{name: wandb, arguments: {projct: a}}]", "Did you mean 'project'?"),
        ("[{name: wandb, arguments: {tags: 3}}]", "run.trackers[0].arguments.tags"),
        (
            "[{name: 'tracking:Kept'}]",
            "run.trackers[0].arguments: tracker 'tracking:Kept' requires the argument 'path'",
        ),
        ("[{name: 'tracking:Kept', arguments: {path: a, mode: al}}]", "expected one of 'all' or 'some'"),
        ("[{name: 'tracking:Kept', arguments: {path: a, every: often}}]", "expected a whole number"),
        ("[{name: 'tracking:Kep'}]", "Did you mean 'Kept'?"),
        ("[{name: 'tracking:kept', arguments: {path: a}}]", "'tracking:kept' must be a class, but is kept, a function"),
        ("[{name: 'tracking:Half'}]", "'tracking:Half' does not implement Tracker: it lacks log, finish"),
        (
            "[{name: 'tracking:Short'}]",
            "'tracking:Short' does not implement Tracker: log: it takes (self, step), but must accept",
        ),
        ("[{name: wandb}, {name: wandb}]", "run.trackers[1].name: 'wandb' is listed twice"),
        ("[{name: 'tracking:Kept', arguments: {path: a, api_key: abc}}]", "run.trackers[0].arguments.api_key holds a"),
        ("[{name: 'tracking:Kept', arguments: {path: '${NO_SUCH_ONE}'}}]", "no environment variable NO_SUCH_ONE"),
    ],
)
def test_a_tracker_that_cannot_be_is_refused(make: Callable[..., Plan], trackers: str, said: str):
    assert said in refusal(make, f"run.trackers={trackers}")


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_tracker_whose_package_is_not_there_says_what_brings_it(project: Project, monkeypatch, name: str):
    there = requirements.installed_version
    monkeypatch.setattr(
        requirements, "installed_version", lambda one, path=None: None if one.startswith(name) else there(one, path)
    )
    said = refusal(project.planned, f"run.trackers=[{{name: {name}}}]")  # by plugins that have not looked yet
    assert said.startswith(f"run.trackers[0].name: tracker {name!r}")
    assert f'pip install "enginehouse[{name}]"' in said


def test_trackers_are_planned_with_their_arguments_and_their_packages(make: Callable[..., Plan]):
    trackers = (
        "[{name: tensorboard}, {name: wandb, arguments: {tags: [a]}}, {name: 'tracking:Kept', arguments: {path: x}}]"
    )
    planned = make(f"run.trackers={trackers}")
    assert [(one.name, one.tracker, one.arguments) for one in planned.trackers] == [
        ("tensorboard", "enginehouse_rl.runs.trackers.tensorboard:TensorBoard", {}),
        ("wandb", "enginehouse_rl.runs.trackers.wandb:WandB", {"tags": ["a"]}),
        ("tracking:Kept", "tracking:Kept", {"path": "x"}),
    ]
    assert any(text.startswith("wandb") for text in planned.distributions)
    assert ("trackers", "tensorboard, wandb, tracking:Kept") in planned.facts
    assert "trackers" not in dict(make().facts)


@pytest.mark.parametrize("command", ["train", "sft", "dpo", "rm"])
def test_every_kind_of_run_has_trackers(project: Project, command: str):
    saved: dict[str, Any] = {"train": project.save, "sft": project.save_sft}
    path = saved.get(command, project.save_preferences)()
    done = CliRunner().invoke(main, [command, str(path), "run.trackers=[{name: tensorbord}]"])
    assert done.exit_code == 2, done.output
    assert "Did you mean 'tensorboard'?" in done.stderr
    assert not (project.root / "runs").exists()


def test_a_problem_of_a_tracker_hides_no_other(make: Callable[..., Plan]):
    said = refusal(make, "run.trackers=[{name: tensorbord}]", "reward.function=no", kind=ConfigError)
    assert "tensorbord" in said
    assert "reward.function" in said
