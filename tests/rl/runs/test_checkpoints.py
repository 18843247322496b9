"""Checkpoints are there whole or not at all; a run that is taken up goes on where its checkpoint was taken."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from enginehouse.errors import EnginehouseError
from enginehouse_rl.checkpoints import Checkpoint, find_newest_checkpoint
from enginehouse_rl.config.earlier_run import read_record
from enginehouse_rl.runs import RunDirectory


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "one", "")


def at(step: int, seconds: float = 0.0) -> Checkpoint:
    return Checkpoint(Path(), step, seconds, {"row": step}, {"train": {"steps": 9}}, "train", roles=("actor",))


def write(run: RunDirectory, step: int, content: str = "weights", seconds: float = 0.0) -> Path:
    staged = run.checkpoints.stage(step)
    (staged / "actor").mkdir()
    (staged / "actor" / "weights").write_text(content)
    return run.checkpoints.publish(staged, at(step, seconds))


def names(run: RunDirectory) -> list[str]:
    return sorted(path.name for path in (run.path / "checkpoints").iterdir())


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def spans(run: RunDirectory) -> list[str]:
    return [e["name"] for e in json.loads((run.path / "timeline.json").read_text()) if e["ph"] == "X"]


def resume(run: RunDirectory) -> RunDirectory:
    checkpoint, _ = find_newest_checkpoint(run.path)
    assert checkpoint is not None
    return RunDirectory.create(run.path, "", resumed=replace(checkpoint, record=read_record(run.path)))


def test_a_checkpoint_reads_back_as_it_was_written(run: RunDirectory):
    place = write(run, 5, seconds=1.25)
    assert place == run.path / "checkpoints" / "step-000005"
    read = Checkpoint.read(place)
    assert (read.step, read.elapsed_seconds, read.loop, read.config, read.kind) == (
        5, 1.25, {"row": 5}, {"train": {"steps": 9}}, "train"
    )  # fmt: skip
    assert (read.state_of("actor") / "weights").read_text() == "weights"


def test_what_is_being_written_is_no_checkpoint(run: RunDirectory):
    staged = run.checkpoints.stage(5)
    (staged / "actor").mkdir()
    assert find_newest_checkpoint(run.path) == (None, {})
    run.checkpoints.publish(staged, at(5))
    newest, _ = find_newest_checkpoint(run.path)
    assert newest is not None
    assert newest.step == 5


def test_the_newest_two_are_kept(run: RunDirectory):
    for step in (2, 4, 6):
        write(run, step)
    assert names(run) == ["step-000004", "step-000006"]
    assert run.checkpoints.newest_step == 6


@pytest.mark.parametrize("kept", [1, 3])
def test_as_many_are_kept_as_is_asked_for(tmp_path: Path, kept: int):
    run = RunDirectory.create(tmp_path / "one", "", checkpoints_kept=kept)
    for step in range(1, 6):
        write(run, step)
    assert names(run) == [f"step-00000{step}" for step in range(6 - kept, 6)]


def test_the_older_ones_stay_until_the_new_one_is_whole(run: RunDirectory):
    write(run, 2)
    write(run, 4)
    staged = run.checkpoints.stage(6)
    with pytest.raises(EnginehouseError, match="share the file system"):  # the actor wrote nothing
        run.checkpoints.publish(staged, at(6))
    assert {"step-000002", "step-000004"} <= set(names(run))
    assert run.checkpoints.newest_step == 4


def test_a_step_written_again_replaces_its_checkpoint(run: RunDirectory):
    write(run, 4, "old")
    assert (write(run, 4, "new") / "actor" / "weights").read_text() == "new"
    assert names(run) == ["step-000004"]


def test_a_run_taken_up_is_cut_where_the_checkpoint_was_taken(run: RunDirectory):
    for step in range(1, 6):
        run.log(step, {"loss": float(step)})
        run.log_validation(step, {"validation/reward": 0.1 * step})
        run.write_samples(step, [{"response": str(step)}])
        run.write_samples(step, [{"response": str(step)}], "validation")
        if step == 3:
            run.timeline.span("step 3", time.monotonic(), time.monotonic())
            write(run, 3, seconds=run.elapsed_seconds)
    run.checkpoints.stage(6)
    run.timeline.span("step 5", time.monotonic(), time.monotonic())
    run.finish("failed", "it broke", "Traceback")
    (run.path / "report.html").write_text("of the process that failed")
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # killed while it wrote

    again = resume(run)
    assert (again.last_step, again.validated_step, again.checkpoints.newest_step) == (3, 3, 3)
    again.log(4, {"loss": 4.5})
    again.timeline.span("step 4", time.monotonic(), time.monotonic())
    again.finish("finished")
    rows = lines(again.path / "metrics.jsonl")
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.5)]
    elapsed = [row["elapsed_seconds"] for row in rows]
    assert elapsed == sorted(elapsed)
    assert [row["step"] for row in lines(again.path / "validation.jsonl")] == [1, 2, 3]
    kept = [f"{kind}-00000{n}" for kind in ("step", "validation") for n in (1, 2, 3)]
    assert sorted(path.stem for path in (again.path / "samples").iterdir()) == kept
    assert spans(again) == ["step 3", "step 4"]
    assert names(again) == ["step-000003"]
    assert not (again.path / "error.txt").exists()
    assert not (again.path / "report.html").exists()


def test_the_record_remembers_the_processes_before(run: RunDirectory):
    write(run, 3)
    resume(run).finish("interrupted")
    resume(run).finish("finished")
    record = json.loads((run.path / "run.json").read_text())
    assert record["resumed_after"] == 3
    assert [one["status"] for one in record["earlier"]] == ["killed", "interrupted"]
    assert "earlier" not in record["earlier"][1]


def test_models_of_a_run_taken_up_stay(run: RunDirectory):
    for step in (2, 4):
        staged = run.models.staging_path(step)
        staged.mkdir()
        run.models.keep(step, staged)
    write(run, 3)
    again = resume(run)
    assert again.models.saved_step == 2  # the model of step 4 is to be made anew
    assert (again.path / "models" / "step-000004").is_dir()


def test_a_model_whose_replacement_was_cut_off_is_back_when_the_run_is_taken_up(run: RunDirectory):
    staged = run.models.staging_path(5)
    staged.mkdir()
    place = run.models.keep(5, staged)
    write(run, 5)
    run.finish("failed")
    place.rename(place.with_name(f".{place.name}.replaced"))
    run.models.staging_path(5).mkdir()
    resumed = resume(run)
    assert resumed.models.newest == place
    assert [path.name for path in place.parent.iterdir()] == [place.name]
    assert (run.path / "model").is_dir()


def test_a_trace_that_was_cut_off_within_a_line_is_gone_on_with(run: RunDirectory):
    run.timeline.span("step 1", time.monotonic(), time.monotonic(), track="a")
    run.timeline.flush()
    write(run, 1, seconds=1000.0)
    path = run.path / "timeline.json"
    path.write_bytes(path.read_bytes().removesuffix(b"\n]\n") + b',\n{"name": "step 2", "ph"')
    again = resume(run)
    again.timeline.span("step 2", time.monotonic(), time.monotonic(), track="b")
    again.timeline.span("step 3", time.monotonic(), time.monotonic(), track="a")
    again.finish("finished")
    events = [e for e in json.loads(path.read_text()) if e["ph"] == "X"]
    assert [e["name"] for e in events] == ["step 1", "step 2", "step 3"]
    assert events[0]["tid"] == events[2]["tid"] != events[1]["tid"]
    assert events[0]["ts"] < 1000e6 < events[1]["ts"]


# By role


def test_each_role_has_a_folder_of_its_name(run: RunDirectory):
    staged = run.checkpoints.stage(5)
    checkpoint = replace(at(5), roles=("actor", "critic"))
    (staged / "actor").mkdir()
    with pytest.raises(EnginehouseError, match="the critic did not write its state of step 5 to"):
        run.checkpoints.publish(staged, checkpoint)
    (staged / "critic").mkdir()
    place = run.checkpoints.publish(staged, checkpoint)
    read = Checkpoint.read(place)
    assert read.roles == ("actor", "critic")
    assert read.state_of("critic") == place / "critic"
    (place / "critic").rmdir()
    with pytest.raises(ValueError, match="critic/ is missing"):
        Checkpoint.read(place).check_files()


BEFORE = """\
{
  "format": 2,
  "step": 5,
  "elapsed_seconds": 1.5,
  "loop": {
    "row": 5
  },
  "kind": "train",
  "config": {
    "train": {
      "steps": 9
    }
  },
  "data": {},
  "files": {
    "actor/weights": [
      7,
      "bdbda1eb6e05adc4800d98e5524fefbc"
    ]
  },
  "digest": "98f069036d9ae5e872f16e608755c3d2"
}
"""
"""`loop.json` as it was written before it named the roles."""


def test_a_checkpoint_that_names_no_roles_is_read_by_its_folders(run: RunDirectory):
    place = run.path / "checkpoints" / "step-000005"
    (place / "actor").mkdir(parents=True)
    (place / "actor" / "weights").write_text("weights")
    (place / "loop.json").write_text(BEFORE)
    newest, damaged = find_newest_checkpoint(run.path)
    assert damaged == {}
    assert newest is not None
    assert newest.roles == ("actor",)
    assert (newest.state_of("actor") / "weights").read_text() == "weights"
    (place / "actor" / "weights").unlink()
    (place / "actor").rmdir()
    assert find_newest_checkpoint(run.path) == (None, {place: "it contains no folder of a role"})
