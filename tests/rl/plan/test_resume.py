"""`--resume`: what a run may go on with is found and checked before anything starts."""

import json
import os
import shutil
import socket
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import projects
import pytest
from projects import Project
from safetensors.numpy import save_file

from enginehouse.errors import ConfigError
from enginehouse.plugin import PluginManager
from enginehouse_rl.checkpoints import Checkpoint
from enginehouse_rl.config.load import load_config
from enginehouse_rl.config.schema import SFTConfig
from enginehouse_rl.data.digests import data_digests, model_digest
from enginehouse_rl.plan.plan import Plan, plan, plan_sft
from enginehouse_rl.plan.resume import record_config
from enginehouse_rl.plan.roles import list_model_paths
from enginehouse_rl.runs import RunDirectory

Make = Callable[..., Plan]
refusal = partial(projects.refusal, kind=ConfigError)


@pytest.fixture
def resume(project: Project, plugins: PluginManager) -> Make:
    return partial(project.planned, plugins=plugins, resume=True)


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
    config = record_config(load_config(project.save(), overrides), "float32")
    staged = run.checkpoints.stage(step)
    (staged / "actor").mkdir()
    (staged / "actor" / ".metadata").write_bytes(b"where what is")
    (staged / "actor" / "__0_0.distcp").write_bytes(bytes(range(256)))
    data = data_digests(config["data"]["train"])
    models = {path: model_digest(path) for path in list_model_paths(load_config(project.save(), overrides))}
    return run.checkpoints.publish(
        staged, Checkpoint(staged, step, 1.5, {"version": step}, config, kind, data, models, roles=("actor",))
    )


def record(run: RunDirectory, **content: Any) -> None:
    path = run.path / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | content))


def test_the_newest_checkpoint_is_gone_on_from(resume: Make, run: RunDirectory, project: Project):
    leave_checkpoint(run, project, 3)
    planned = resume()
    assert planned.resumed is not None
    assert (planned.resumed.step, planned.resumed.elapsed_seconds) == (3, 1.5)
    assert planned.resumed.loop == {"version": 3}
    assert planned.resumed.state_of("actor") == run.path / "checkpoints" / "step-000003" / "actor"
    assert f"resumes    after step 3, from {planned.resumed.path}" in planned.render()


def cut(checkpoint: Path) -> None:
    os.truncate(checkpoint / "actor" / "__0_0.distcp", 100)


def zero(checkpoint: Path) -> None:
    (checkpoint / "actor" / "__0_0.distcp").write_bytes(bytes(256))


def flip(checkpoint: Path) -> None:
    file = checkpoint / "actor" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[128] ^= 1
    file.write_bytes(content)


def edit_loop(old: str, new: str) -> Callable[[Path], None]:
    def edit(checkpoint: Path) -> None:
        content = (checkpoint / "loop.json").read_text()
        assert old in content
        (checkpoint / "loop.json").write_text(content.replace(old, new, 1))

    return edit


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut": (cut, "actor/__0_0.distcp has 100 bytes, but 256 were written"),
    "zeroed": (zero, "the content of actor/__0_0.distcp has changed since it was written"),
    "a bit flipped": (flip, "the content of actor/__0_0.distcp has changed since it was written"),
    "a file missing": (lambda place: (place / "actor" / "__0_0.distcp").unlink(), "actor/__0_0.distcp is missing"),
    "no .metadata": (lambda place: (place / "actor" / ".metadata").unlink(), "actor/.metadata is missing"),
    "no actor": (lambda place: shutil.rmtree(place / "actor"), "actor/ is missing"),
    "no loop.json": (lambda place: (place / "loop.json").unlink(), "loop.json is missing"),
    "loop.json empty": (lambda place: (place / "loop.json").write_text(""), "loop.json is not valid JSON: Expecting"),
    "loop.json nested": (lambda place: (place / "loop.json").write_text("[" * 50_000), "loop.json is not valid JSON: "),
    "loop.json no mapping": (lambda place: (place / "loop.json").write_text("[]"), "loop.json must hold a JSON object"),
    "loop.json cut": (lambda place: os.truncate(place / "loop.json", 50), "loop.json is not valid JSON: "),
    "a digit": (edit_loop('"version": 3', '"version": 8'), "loop.json has changed since it was written"),
    "a type": (edit_loop('"step": 3', '"step": "3"'), "loop.json has changed since it was written"),
    "a key": (edit_loop('"step"', '"stop"'), "loop.json has changed since it was written"),
    "the format": (edit_loop('"format": 2', '"format": 1'), "loop.json has changed since it was written"),
    "no digest": (edit_loop('"digest"', '"digits"'), "loop.json lacks its digest"),
}


@pytest.mark.fault(
    area="files",
    what="the newest checkpoint is damaged: a file cut, zeroed, missing, a bit flipped; `loop.json` in any way",
    happens=(
        "the run sets the damaged checkpoint aside and resumes from the previous one. `plan` reports which "
        "checkpoint was skipped and why"
    ),
    exit_code="0",
    kept="everything up to the step of the intact checkpoint",
    noticed="before a process starts",
)
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_and_named(resume: Make, run: RunDirectory, project: Project, kind: str):
    damage, why = DAMAGE[kind]
    place = leave_checkpoint(run, project, 3)
    damage(place)
    planned = resume()
    assert planned.resumed is not None
    assert (planned.resumed.step, planned.resumed.passed_over) == (2, (place,))
    (note,) = [note for note in planned.notes if note.startswith("damaged checkpoints are skipped")]
    assert f"(step-000003: {why}" in note
    assert place.is_dir()  # a plan writes nothing
    RunDirectory.create(run.path, "", resumed=planned.resumed).finish("interrupted")
    assert {path.name for path in place.parent.iterdir()} == {"step-000002", "damaged-step-000003"}


@pytest.mark.fault(
    area="files",
    what="every checkpoint is damaged",
    happens="`--resume` is rejected and says what is wrong with each",
    exit_code="2",
    kept="everything, unchanged",
    noticed="before a process starts",
)
def test_without_a_whole_checkpoint_nothing_is_gone_on_with(resume: Make, run: RunDirectory, project: Project):
    cut(run.path / "checkpoints" / "step-000002")
    flip(leave_checkpoint(run, project, 3))
    said = refusal(resume)
    assert f"no checkpoint of the run in {run.path} is intact (step-000003: the content of actor/__0_0.distcp" in said
    assert "step-000002: actor/__0_0.distcp has 100 bytes, but 256 were written)" in said
    assert "in another directory" in said


def test_a_checkpoint_from_before_there_were_digests_is_gone_on_from_with_a_note(resume, run, project):
    place = leave_checkpoint(run, project, 3)
    content = json.loads((place / "loop.json").read_text())
    for name in ("digest", "files", "data"):
        del content[name]
    config = content["config"]  # as it was then, without keys that are new
    del config["data"]["overlong_prompts"], config["reward"]["concurrency"], config["evaluation"]
    (place / "loop.json").write_text(json.dumps(content | {"format": 1}))
    planned = resume()
    assert planned.resumed is not None
    assert planned.resumed.step == 3
    assert any("has no digests of its files" in note for note in planned.notes)
    assert not [note for note in planned.notes if "up to the checkpoint" in note]
    assert "data.overlong_prompts is 'drop', but was 'error' when" in refusal(resume, "data.overlong_prompts=drop")
    planned = resume("reward.concurrency=3")
    assert any(note.startswith("reward.concurrency is 3 from here on, and was") for note in planned.notes)


@pytest.mark.fault(
    area="data",
    what="the training data are replaced before a `--resume`, under the same name and with as many rows",
    happens="`--resume` is rejected and names the file",
    exit_code="2",
    kept="everything, unchanged",
    noticed="before a process starts",
)
def test_other_rows_under_the_same_name_are_refused(resume: Make, run: RunDirectory, project: Project):
    lines = Path("train.jsonl").read_text().splitlines(keepends=True)
    Path("train.jsonl").write_text("".join(reversed(lines)))
    assert "--resume: data.train: train.jsonl has changed since" in refusal(resume)
    Path("train.jsonl").write_text("".join(lines))
    resume()


@pytest.mark.fault(
    area="data",
    what="a model that a role begins from is replaced before a `--resume`, under the same name and as large",
    happens="`--resume` is rejected and names the directory",
    exit_code="2",
    kept="everything, unchanged",
    noticed="before a process starts",
)
@pytest.mark.parametrize("role", ["model", "reference"])
def test_other_weights_under_the_same_name_are_refused(resume, run, project, tmp_path, role):
    other = shutil.copytree(load_config(project.save()).model.path, tmp_path / "other")
    weights = numpy.arange(2_000_000, dtype=numpy.float32)  # more than is read of a file
    save_file({"weights": weights}, other / "more.safetensors")
    given = f"{role}.path={other}", "algorithm.kl.coefficient=0.1"
    leave_checkpoint(run, project, 3, *given)
    resume(*given)
    save_file({"weights": numpy.float32(1.2) * weights}, other / "more.safetensors")
    assert f"--resume: the files of the model in {other} have changed since" in refusal(resume, *given)


def test_a_checkpoint_of_a_later_enginehouse_is_not_misread(resume: Make, run: RunDirectory, project: Project):
    (leave_checkpoint(run, project, 3) / "loop.json").write_text('{"format": 3}')
    assert "written by a later enginehouse: it has format 3" in refusal(resume)


def test_without_the_flag_an_earlier_run_with_checkpoints_is_refused_and_the_flag_named(project, plugins, run):
    path = project.save()
    with pytest.raises(
        ConfigError, match=r"already contains a run\. .*, continue that run with --resume, or delete it"
    ):
        plan(load_config(path), plugins, path)
    RunDirectory.create("runs/two", "").finish("failed")
    with pytest.raises(
        ConfigError, match=r"Choose another directory \(run\.directory=\.\.\.\), or delete it"
    ):  # which has no checkpoint
        plan(load_config(path, ["run.directory=runs/two"]), plugins, path)


def test_there_must_be_a_run_and_a_checkpoint(resume: Make, project: Project):
    assert "there is no run in" in refusal(resume)
    RunDirectory.create("runs/one", "").finish("failed")
    said = refusal(resume)
    assert "left no checkpoint to resume from" in said
    assert "when a run is interrupted or fails" in said
    assert "train.checkpoint_every" in said


def test_a_run_that_is_still_under_way_is_left_alone(resume: Make, run: RunDirectory):
    (run.path / "run.lock").unlink()  # as where a file system has no locks, or an older enginehouse runs there
    parent, now = os.getppid(), datetime.now(UTC).isoformat(timespec="seconds")
    record(run, status="running", pid=parent, host=socket.gethostname(), started=now)
    assert f"is still running (process {parent} on {socket.gethostname()})" in refusal(resume)
    record(run, started="2001-01-01T00:00:00+00:00")  # the number is another process's by now
    resume()
    record(run, started=now, host="elsewhere")  # nothing can be known of it here
    resume()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.path=other", "model.path is 'other', but was 'model' when"),
        ("model.dtype=bfloat16", "model.dtype is 'bfloat16', but was 'float32' when"),
        ("data.train=more.jsonl", "data.train is 'more.jsonl', but was 'train.jsonl' when"),
        ("data.chat_template=false", "data.chat_template is false, but was unset when"),
        ("train.seed=1", "train.seed is 1, but was 0 when"),
        ("train.prompts_per_step=4", "train.prompts_per_step is 4, but was 8 when"),
        ("rollout.samples_per_prompt=2", "rollout.samples_per_prompt is 2, but was 4 when"),
    ],
)
def test_what_decides_the_rows_and_the_weights_may_not_change(resume, run, project, override, said):
    project.make_model("other", vocab_size=32)
    project.write_rows("more.jsonl", [{"prompt": f"{n}+1=", "answer": "1"} for n in range(50)])
    assert said in refusal(resume, override)


@pytest.mark.parametrize("form", ["{}", "[{}]", "{{{}: 2.0}}"])
def test_data_and_a_model_that_moved_with_the_same_content_go_on(resume, run, project, form):
    leave_checkpoint(run, project, 3, "data.train=" + form.format("train.jsonl"))
    shutil.copy("train.jsonl", "moved.jsonl")
    shutil.copytree("model", "elsewhere")
    notes = resume("data.train=" + form.format("moved.jsonl"), "model.path=elsewhere").notes
    assert "data.train is moved.jsonl from here on, with the content that train.jsonl had" in notes
    assert "model.path is elsewhere from here on, with the content that model had" in notes


def test_a_weight_is_none_of_what_moves(resume, run, project):
    leave_checkpoint(run, project, 3, "data.train={train.jsonl: 2.0}")
    shutil.copy("train.jsonl", "moved.jsonl")
    assert "data.train" in refusal(resume, "data.train={moved.jsonl: 3.0}")


def test_a_dtype_may_be_said_anew_but_not_changed_by_the_device(resume: Make, run: RunDirectory):
    assert not [note for note in resume("model.dtype=float32").notes if "dtype" in note]  # it was auto on a CPU
    said = refusal(resume, "cluster.device=cuda", "cluster.address=elsewhere")
    assert "model.dtype is 'bfloat16', but was 'float32' when" in said


@pytest.mark.parametrize(
    ("override", "note"),
    [
        ("train.steps=20", "train.steps is 20 from here on, and was 10 up to the checkpoint"),
        ("train.save_every=2", "train.save_every is 2"),
        ("actor.engine.options.lr=1e-4", "actor.engine.options.lr is 0.0001 from here on, and was unset"),
        ("algorithm.advantage.name=rloo", "algorithm.advantage.name is 'rloo'"),
    ],
)
def test_what_a_run_may_go_on_with_changed_is_noted(resume: Make, run: RunDirectory, override: str, note: str):
    assert any(one.startswith(note) for one in resume(override).notes)


def test_where_a_run_goes_on_is_nobodys_business(resume: Make, run: RunDirectory):
    planned = resume("cluster.launcher=inline", "run.overwrite=true", "cluster.call_timeout_seconds=60")
    assert not [note for note in planned.notes if "from here on" in note]


def test_a_run_that_has_taken_its_steps_needs_more_of_them(resume: Make, run: RunDirectory):
    assert "has taken 2 steps, but train.steps is 1: raise train.steps" in refusal(resume, "train.steps=1")
    resume("train.steps=2")  # interrupted before its model was saved
    run.last_step = 10
    run.finish("finished")
    assert "has taken 10 steps, but train.steps is 10: raise train.steps" in refusal(resume)
    assert any("steps 3 to 10 are repeated" in note for note in resume("train.steps=12").notes)


def test_a_run_of_the_other_kind_is_refused(project: Project, plugins: PluginManager, run: RunDirectory):
    path = project.save_sft()
    config = load_config(path, ["run.directory=runs/one"], SFTConfig)
    with pytest.raises(ConfigError, match="is a run of `enginehouse train`, not of `enginehouse sft`"):
        plan_sft(config, plugins, path, resume=True)


def test_a_damaged_record_is_no_obstacle(resume: Make, run: RunDirectory, caplog: pytest.LogCaptureFixture):
    for content in ("", "{", "[]", "[" * 50_000):
        (run.path / "run.json").write_text(content)
        again = RunDirectory.create(run.path, "", resumed=resume().resumed)
        assert f"{run.path / 'run.json'} is damaged" in caplog.messages[-1]
        again.finish("interrupted")
        record = json.loads((run.path / "run.json").read_text())
        assert (record["status"], record["resumed_after"], record["earlier"]) == ("interrupted", 2, [{}])


def test_alarms_after_the_checkpoint_are_cut_away_as_metrics_are(resume: Make, run: RunDirectory):
    for step in (1, 3):
        run.log_alarm(step, f"alarm-{step}", "it is so", "try that")
    again = RunDirectory.create(run.path, "", resumed=resume().resumed)
    kept = [{"step": 1, "alarm": "alarm-1", "said": "it is so", "advice": "try that"}]
    assert again.alarms == kept
    again.finish("finished")
    assert [json.loads(line) for line in (run.path / "alarms.jsonl").read_text().splitlines()] == kept


def test_damaged_metrics_cost_their_own_lines(resume: Make, run: RunDirectory):
    rows = (run.path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run.path / "metrics.jsonl").write_text(rows[0] + '{"step": \n' + '{"step": "x"}\n{"loss": 1.0}\n' + rows[1])
    (run.path / "validation.jsonl").write_text('null\n{"step": 1, "validation/reward": 0.5}\n')
    (run.path / "timeline.json").write_text('[\n{"name": "thread_name", "ph": "M"},\n{"ts": "x"},\n7,\n{"ph": 1}\n]\n')
    again = RunDirectory.create(run.path, "", resumed=resume().resumed)
    assert again.validated_step == 1
    again.finish("finished")
    assert [json.loads(line)["step"] for line in (run.path / "metrics.jsonl").read_text().splitlines()] == [1, 2]
    json.loads((run.path / "timeline.json").read_text())


def test_a_run_that_cannot_be_taken_up_does_not_say_it_runs(resume, run, monkeypatch):
    planned = resume()

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("enginehouse_rl.runs.directory.Timeline", full)
    with pytest.raises(OSError, match="No space left"):
        RunDirectory.create(run.path, "", resumed=planned.resumed)
    assert json.loads((run.path / "run.json").read_text())["status"] == "failed"


def overwriting(plugins: PluginManager, path: Path, *overrides: str) -> Plan:
    return plan(load_config(path, overrides), plugins, path, overrides=overrides)


@pytest.mark.fault(
    area="files",
    what="a config with `run.overwrite: true` is started on an unfinished run with checkpoints",
    happens="the start is rejected. Only `run.overwrite=true` on the command line deletes such a run",
    exit_code="2",
    kept="everything, unchanged",
    noticed="before a process starts",
)
def test_only_the_command_line_deletes_an_unfinished_run_with_checkpoints(project, plugins, run):
    project.config["run"]["overwrite"] = True
    path = project.save()
    ended = "interrupted after 3 steps, 1 checkpoint, the newest of step 2"
    with pytest.raises(ConfigError) as caught:
        overwriting(plugins, path)
    assert f"contains an unfinished run ({ended})" in str(caught.value)
    assert "Choose another directory (run.directory=...), continue that run with --resume, or" in str(caught.value)
    asked = overwriting(plugins, path, "run.overwrite=true")
    assert f"deletes    the run in {run.path}: {ended}\n" in asked.render()
    with pytest.raises(ConfigError, match="unfinished run"):  # planned before there was one
        RunDirectory.create(run.path, "", overwrite=True, spare_unfinished=True)
    assert (run.path / "checkpoints" / "step-000002").is_dir()
    run.finish("finished")
    assert f"the run in {run.path}: finished after 3 steps" in overwriting(plugins, path).render()
    RunDirectory.create(run.path, "", overwrite=True, spare_unfinished=True).finish("finished")
    assert not (run.path / "checkpoints").exists()


def test_a_deletion_that_is_cut_off_can_be_repeated(run: RunDirectory, monkeypatch: pytest.MonkeyPatch):
    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        RunDirectory.create(run.path, "", overwrite=True)
    monkeypatch.undo()
    assert (run.path / "run.json").exists()
    RunDirectory.create(run.path, "", overwrite=True)
