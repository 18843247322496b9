"""`--resume`: what a run may go on with is found and checked before anything starts."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from projects import Project

from enginehouse.config.load import load_config
from enginehouse.config.plan import Plan, plan, plan_sft
from enginehouse.config.resume import Checkpoint
from enginehouse.config.schema import SFTConfig
from enginehouse.errors import ConfigError
from enginehouse.plugin import PluginManager, load_plugins
from enginehouse.runs import RunDirectory

Make = Callable[..., Plan]


@pytest.fixture(scope="module")
def plugins() -> PluginManager:
    return load_plugins(enabled=())


@pytest.fixture
def resume(project: Project, plugins: PluginManager) -> Make:
    def make(*overrides: str) -> Plan:
        path = project.save()
        return plan(load_config(path, overrides), plugins, path, resume=True)

    return make


@pytest.fixture
def run(project: Project) -> RunDirectory:
    """An earlier run that ended after three steps, of ten, with a checkpoint of the second."""
    run = RunDirectory.create("runs/one", "")
    for step in (1, 2, 3):
        run.log(step, {"loss": 1.0})
    leave_checkpoint(run, project, 2)
    run.finish("interrupted")
    return run


def leave_checkpoint(run: RunDirectory, project: Project, step: int, *overrides: str, kind: str = "train") -> Path:
    config = load_config(project.save(), overrides).model_dump(mode="json")
    staged = run.checkpoints.stage(step)
    (staged / "actor").mkdir()
    return run.checkpoints.publish(staged, Checkpoint(staged, step, 1.5, {"version": step}, config, kind))


def refusal(make: Callable[..., Any], *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        make(*overrides)
    return str(caught.value)


def record(run: RunDirectory, **content: Any) -> None:
    path = run.path / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | content))


def test_the_newest_checkpoint_is_gone_on_from(resume: Make, run: RunDirectory, project: Project):
    leave_checkpoint(run, project, 3)
    planned = resume()
    assert planned.resumed is not None
    assert (planned.resumed.step, planned.resumed.elapsed_seconds) == (3, 1.5)
    assert planned.resumed.loop == {"version": 3}
    assert planned.resumed.actor == run.path / "checkpoints" / "step-000003" / "actor"
    assert f"resumes    after step 3, from {planned.resumed.path}" in planned.render()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 1, "step": 3}'])
def test_an_older_checkpoint_stands_in_for_a_damaged_one(
    resume: Make, run: RunDirectory, project: Project, content: str
):
    (leave_checkpoint(run, project, 3) / "loop.json").write_text(content)
    planned = resume()
    assert planned.resumed is not None
    assert planned.resumed.step == 2


def test_a_checkpoint_of_a_later_enginehouse_is_not_misread(resume: Make, run: RunDirectory, project: Project):
    (leave_checkpoint(run, project, 3) / "loop.json").write_text('{"format": 2}')
    assert "written by a later enginehouse (format 2" in refusal(resume)


def test_without_the_flag_an_earlier_run_with_checkpoints_is_refused_and_the_flag_named(
    project: Project, plugins: PluginManager, run: RunDirectory
):
    path = project.save()
    with pytest.raises(ConfigError, match=r"holds an earlier run: go on with it \(--resume\)"):
        plan(load_config(path), plugins, path)
    RunDirectory.create("runs/two", "").finish("failed")
    with pytest.raises(ConfigError, match="holds an earlier run: name another"):  # which has no checkpoint
        plan(load_config(path, ["run.directory=runs/two"]), plugins, path)


def test_there_must_be_a_run_and_a_checkpoint(resume: Make, project: Project):
    assert "there is no run in" in refusal(resume)
    RunDirectory.create("runs/one", "").finish("failed")
    said = refusal(resume)
    assert "left no checkpoint to go on from" in said
    assert "train.checkpoint_every" in said


def test_a_run_that_is_still_under_way_is_left_alone(resume: Make, run: RunDirectory):
    parent, now = os.getppid(), datetime.now(UTC).isoformat(timespec="seconds")
    record(run, status="running", pid=parent, host=socket.gethostname(), started=now)
    assert f"is still under way (process {parent})" in refusal(resume)
    record(run, started="2001-01-01T00:00:00+00:00")  # the number is another process's by now
    resume()
    record(run, started=now, host="elsewhere")  # nothing can be known of it here
    resume()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.path=other", "model.path is 'other', and was 'model' when"),
        ("model.dtype=bfloat16", "model.dtype is 'bfloat16', and was 'float32' when"),
        ("data.train=more.jsonl", "data.train is 'more.jsonl', and was 'train.jsonl' when"),
        ("data.chat_template=false", "data.chat_template is False, and was None when"),
        ("train.seed=1", "train.seed is 1, and was 0 when"),
        ("train.prompts_per_step=4", "train.prompts_per_step is 4, and was 8 when"),
        ("rollout.samples_per_prompt=2", "rollout.samples_per_prompt is 2, and was 4 when"),
    ],
)
def test_what_decides_the_rows_and_the_weights_may_not_change(
    resume: Make, run: RunDirectory, project: Project, override: str, said: str
):
    project.make_model("other")
    project.write_rows("more.jsonl", [{"prompt": f"{n}+1=", "answer": "1"} for n in range(50)])
    assert said in refusal(resume, override)


@pytest.mark.parametrize(
    ("override", "note"),
    [
        ("train.steps=20", "train.steps is 20 from here on, and was 10 up to the checkpoint"),
        ("train.save_every=2", "train.save_every is 2"),
        ("actor.engine.options.lr=1e-4", "actor.engine.options.lr is 0.0001 from here on, and was None"),
        ("algorithm.advantage.name=rloo", "algorithm.advantage.name is 'rloo'"),
    ],
)
def test_what_a_run_may_go_on_with_changed_is_noted(resume: Make, run: RunDirectory, override: str, note: str):
    assert any(one.startswith(note) for one in resume(override).notes)


def test_where_a_run_goes_on_is_nobodys_business(resume: Make, run: RunDirectory):
    planned = resume("cluster.launcher=inline", "run.overwrite=true", "cluster.call_timeout_seconds=60")
    assert not [note for note in planned.notes if "from here on" in note]


def test_a_run_that_has_taken_its_steps_needs_more_of_them(resume: Make, run: RunDirectory):
    assert "has taken 2 steps, and train.steps is 1: raise it" in refusal(resume, "train.steps=1")
    resume("train.steps=2")  # interrupted before its model was saved
    run.last_step = 10
    run.finish("finished")
    assert "has taken 10 steps, and train.steps is 10: raise it" in refusal(resume)
    assert any("steps 3 to 10 are taken once more" in note for note in resume("train.steps=12").notes)


def test_a_run_of_the_other_kind_is_refused(project: Project, plugins: PluginManager, run: RunDirectory):
    path = project.save_sft()
    config = load_config(path, ["run.directory=runs/one"], SFTConfig)
    with pytest.raises(ConfigError, match="is a run of `enginehouse train`, not of `enginehouse sft`"):
        plan_sft(config, plugins, path, resume=True)
