"""The run directory: what it holds, and that models are there whole or not at all."""

import fcntl
import json
import math
import shutil
from pathlib import Path

import numpy
import pytest
from projects import Project

from enginehouse import atomic
from enginehouse.errors import ConfigError, EnginehouseError
from enginehouse_rl.checkpoints import Checkpoint
from enginehouse_rl.config.earlier_run import read_record
from enginehouse_rl.config.load import dump_config, load_config
from enginehouse_rl.runs import RunDirectory, describe_saved
from enginehouse_rl.runs.directory import RunRemoved


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "runs" / "one", "a: 1\n", command=["enginehouse", "train"])


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_model(path: Path, content: str = "weights") -> None:
    path.mkdir()
    (path / "model.safetensors").write_text(content)


def test_metrics_are_on_disk_when_log_returns(run: RunDirectory):
    run.log(1, {"reward/mean": 0.5, "time/step": 0.1})
    run.log(2, {"reward/mean": 0.75, "time/step": 0.1})
    (first, second) = lines(run.path / "metrics.jsonl")
    assert (first["step"], second["step"]) == (1, 2)
    assert second["reward/mean"] == 0.75
    assert run.last_step == 2


def test_a_directory_that_only_looks_writable_is_refused_by_its_key():
    with pytest.raises(ConfigError, match=r"run\.directory: cannot create /proc/a-run"):
        RunDirectory.create("/proc/a-run", "a: 1\n")


def test_numbers_that_json_has_no_word_for_become_null(run: RunDirectory):
    run.log(1, {"loss": math.nan, "norm": math.inf, "n": numpy.float32(0.5), "ok": 1.0})
    (row,) = lines(run.path / "metrics.jsonl")
    assert (row["loss"], row["norm"], row["n"], row["ok"]) == (None, None, 0.5, 1.0)


def test_validations_do_not_mix_with_steps(run: RunDirectory):
    run.log_validation(0, {"validation/reward": 0.1})
    run.log_validation(5, {"validation/reward": 0.2})
    assert [row["step"] for row in lines(run.path / "validation.jsonl")] == [0, 5]
    assert run.last_step == 0


def test_samples_are_rows_in_their_own_file(run: RunDirectory):
    path = run.write_samples(10, [{"prompt": "1+1=", "response": "2\n", "reward": 1.0}])
    assert path == run.path / "samples" / "step-000010.jsonl"
    assert lines(path) == [{"prompt": "1+1=", "response": "2\n", "reward": 1.0}]


def test_half_a_surrogate_pair_ends_nothing(run: RunDirectory):
    """A reward's message may have one: undecodable output of a process, a file's name."""
    text = "caf\udcff"
    run.log(1, {text: 1.0})
    assert text in lines(run.path / "metrics.jsonl")[0]
    assert lines(run.write_samples(1, [{"reward_failure": text}])) == [{"reward_failure": text}]
    run.finish("failed", text, f"Traceback: {text}")
    assert json.loads((run.path / "run.json").read_text())["error"] == text
    assert (run.path / "error.txt").read_text() == "Traceback: caf\\udcff"


def test_a_run_finishes_whatever_fails_in_it(run: RunDirectory, monkeypatch: pytest.MonkeyPatch, caplog):
    def broken(*args):
        raise ValueError("cannot be written")

    monkeypatch.setattr("enginehouse_rl.runs.directory.write_whole", broken)
    run.finish("failed", "an error", "Traceback ...")
    assert "cannot be written" in caplog.text
    with (run.path / "run.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it is given back


def test_a_model_is_in_its_place_only_once_it_is_whole(run: RunDirectory):
    staged = run.models.staging_path(5)
    write_model(staged)
    assert run.models.newest is None
    assert not (run.path / "model").exists()
    place = run.models.keep(5, staged)
    assert place == run.path / "models" / "step-000005"
    assert (run.path / "model" / "model.safetensors").read_text() == "weights"
    assert not staged.exists()


def test_a_later_model_takes_the_link_and_leaves_the_earlier_one(run: RunDirectory):
    for step, content in ((5, "old"), (10, "new")):
        staged = run.models.staging_path(step)
        write_model(staged, content)
        run.models.keep(step, staged)
    assert (run.path / "model" / "model.safetensors").read_text() == "new"
    assert (run.path / "models" / "step-000005" / "model.safetensors").read_text() == "old"


def test_saving_a_step_again_replaces_it_whole(run: RunDirectory):
    for content in ("first", "second"):
        staged = run.models.staging_path(5)
        write_model(staged, content)
        run.models.keep(5, staged)
    assert (run.path / "model" / "model.safetensors").read_text() == "second"
    assert [path.name for path in (run.path / "models").iterdir()] == ["step-000005"]


def test_an_export_that_was_cut_off_is_cleared_away(run: RunDirectory):
    write_model(run.models.staging_path(5))
    assert not run.models.staging_path(5).exists()


def test_a_model_that_is_not_where_it_was_to_be_written_is_an_error(run: RunDirectory):
    with pytest.raises(EnginehouseError, match="share the file system"):
        run.models.keep(5, run.models.staging_path(5))


def test_the_record_says_how_the_run_stands(run: RunDirectory):
    def record() -> dict:
        return json.loads((run.path / "run.json").read_text())

    assert record()["status"] == "running"
    run.record.update(roles={"actor": {"processes": 1}})
    run.log(1, {})
    run.finish("failed", "it broke", "Traceback ...")
    assert record()["status"] == "failed"
    assert record()["error"] == "it broke"
    assert record()["steps"] == 1
    assert record()["command"] == ["enginehouse", "train"]
    assert record()["roles"] == {"actor": {"processes": 1}}
    assert {"enginehouse", "torch", "ray"} <= set(record()["versions"])
    assert (run.path / "error.txt").read_text() == "Traceback ..."
    json.loads((run.path / "timeline.json").read_text())


def test_the_config_in_a_run_directory_loads_equal(project: Project):
    config = load_config(project.save(), ["train.steps=3", "reward.arguments={a: 1e-5, b: 'yes'}"])
    run = RunDirectory.create("runs/x", dump_config(config))
    assert load_config(run.path / "config.yaml") == config


def test_nothing_is_touched_before_it_is_opened(tmp_path: Path):
    path = tmp_path / "one"
    RunDirectory.create(path, "").log(1, {"loss": 2.0})
    run = RunDirectory(path, "", overwrite=True)
    with run.clock.phase("reading"):
        pass
    assert "is unchanged" in describe_saved(run)
    assert len(lines(path / "metrics.jsonl")) == 1
    run.open()
    assert lines(path / "metrics.jsonl") == []
    with run.clock.phase("generate"):
        pass
    run.finish("finished")
    assert [e["name"] for e in json.loads((path / "timeline.json").read_text()) if e["ph"] == "X"] == ["generate"]


def test_overwriting_deletes_an_earlier_run_and_nothing_else(tmp_path: Path):
    path = tmp_path / "one"
    RunDirectory.create(path, "").log(1, {})
    with pytest.raises(ConfigError, match="already contains a run"):
        RunDirectory.create(path, "")
    RunDirectory.create(path, "", overwrite=True)
    assert (path / "metrics.jsonl").read_text() == ""
    other = tmp_path / "precious"
    other.mkdir()
    (other / "thesis.txt").write_text("years")
    with pytest.raises(ConfigError, match="never deleted"):
        RunDirectory.create(other, "", overwrite=True)
    assert (other / "thesis.txt").exists()


@pytest.mark.fault(
    area="files",
    what="the disk is full when a run ends",
    happens="`run.json` is overwritten to say how the run ended, and the final summary is printed",
    exit_code="1",
    kept="what was on the disk before",
    noticed="at once",
)
def test_a_full_disk_takes_no_end_away(run, caplog, monkeypatch):
    monkeypatch.setattr(atomic, "_staging", lambda path: full_file(run.path))
    before = (run.path / "run.json").stat().st_size
    run.finish("failed", "no space left" * 100, "Traceback ...")
    record = json.loads((run.path / "run.json").read_text())
    assert (record["status"], record["steps"]) == ("failed", 0)
    assert (run.path / "run.json").stat().st_size <= before
    assert not (run.path / "error.txt").exists()
    assert "No space left on device" in caplog.text


@pytest.mark.fault(
    area="files",
    what="the run directory is removed during the run",
    happens="the run ends with an error that says so, and writes metrics, config and record again",
    exit_code="1",
    kept="metrics up to there, and checkpoint and model of the last update. Other files of the directory are lost",
    noticed="when the next step's metrics are written",
)
def test_a_run_directory_that_is_removed_is_put_back_with_what_is_known_of_it(run: RunDirectory):
    run.log(1, {"loss": 1.0})
    save(run, 1)
    shutil.rmtree(run.path)
    with pytest.raises(RunRemoved, match="was removed or replaced while the run wrote it"):
        run.log(2, {"loss": 0.5})
    assert run.models.saved_step is None
    run.log(2, {"loss": 0.5})  # as is done of the last step, before the run ends
    save(run, 2)
    run.finish("failed", "it was removed")
    assert [row["step"] for row in lines(run.path / "metrics.jsonl")] == [1, 2]
    assert (run.path / "config.yaml").read_text() == "a: 1\n"
    assert json.loads((run.path / "run.json").read_text())["status"] == "failed"
    assert "metrics of 2 steps, the model of step 2" in describe_saved(run)


def test_a_run_directory_that_is_another_runs_by_now_is_left_to_it(run: RunDirectory):
    run.log(1, {"loss": 1.0})
    shutil.rmtree(run.path)
    run.path.mkdir()
    (run.path / "run.json").write_text(other := json.dumps({"pid": 1, "status": "finished"}))
    with pytest.raises(RunRemoved, match="is the directory of another run now") as caught:
        run.log(2, {"loss": 0.5})
    assert not caught.value.keeps_state
    run.finish("failed", "it was removed")
    assert (run.path / "run.json").read_text() == other
    assert not (run.path / "metrics.jsonl").exists()


def test_a_run_directory_that_is_removed_after_the_last_step_has_its_metrics(run: RunDirectory):
    run.log(1, {"loss": 1.0})
    shutil.rmtree(run.path)
    run.finish("finished")
    assert [row["step"] for row in lines(run.path / "metrics.jsonl")] == [1]


def full_file(directory: Path) -> Path:
    """A file that takes no byte."""
    (full := directory / ".partial").symlink_to("/dev/full")
    return full


def save(run: RunDirectory, step: int, content: str = "weights") -> None:
    staged = run.models.staging_path(step)
    write_model(staged, content)
    run.models.keep(step, staged)


def save_best(run: RunDirectory, step: int, value: float, metric: str = "validation/reward") -> bool:
    """As a loop: whether it was the best."""
    if best := run.models.is_best(metric, value):
        staged = run.models.staging_path(step)
        write_model(staged, f"of step {step}")
        run.models.keep_best(step, staged, metric, value)
    return best


def models(run: RunDirectory) -> list[str]:
    return sorted(path.name for path in (run.path / "models").iterdir())


def best(run: RunDirectory) -> tuple[str, dict]:
    """The content of the best model, and what the record says of it."""
    weights = (run.path / "models" / "best" / "model.safetensors").read_text()
    return weights, json.loads((run.path / "run.json").read_text())["best"]


@pytest.mark.parametrize("kept", [1, 2, None])
def test_the_newest_models_are_kept_and_the_best_besides(tmp_path: Path, kept: int | None):
    run = RunDirectory.create(tmp_path / "one", "", models_kept=kept)
    save_best(run, 2, 0.5)
    for step in (2, 4, 6):
        save(run, step)
    steps = ["step-000002", "step-000004", "step-000006"]
    assert models(run) == ["best", *(steps if kept is None else steps[-kept:])]
    assert (run.path / "model").resolve().name == "step-000006"


def test_the_best_model_is_replaced_by_a_better_one_alone(run: RunDirectory):
    values = {1: 0.25, 2: 0.25, 3: 0.5, 4: float("nan"), 5: 0.125}
    assert [step for step, value in values.items() if save_best(run, step, value)] == [1, 3]
    assert best(run) == ("of step 3", {"metric": "validation/reward", "step": 3, "value": 0.5})
    assert run.models.saved_step is None
    assert save_best(run, 6, -1.0, "validation/another")
    assert best(run)[1] == {"metric": "validation/another", "step": 6, "value": -1.0}


def test_a_value_that_is_none_is_not_the_best(run: RunDirectory):
    assert not save_best(run, 1, float("nan"))


def test_a_resumed_run_keeps_the_best_model_unless_it_makes_a_better_one(run: RunDirectory):
    save_best(run, 4, 0.5)
    for value, expected in ((0.25, "of step 4"), (0.75, "of step 3")):
        run.finish("interrupted")
        checkpoint = Checkpoint(run.path, 2, 0.0, {}, {}, "train", record=read_record(run.path))
        run = RunDirectory.create(run.path, "", resumed=checkpoint)
        save_best(run, 3, value)
        assert best(run)[0] == expected
    assert best(run)[1] == {"metric": "validation/reward", "step": 3, "value": 0.75}


def test_a_killed_process_is_recorded_with_the_seconds_of_its_last_step_once_it_is_gone_on_with(run: RunDirectory):
    resumed_after = None
    for elapsed, expected in (([3.0, 5.0, 9.0], 9.0), ([3.0, 5.0, 6.5], 1.5)):
        run.finish("interrupted")
        left = {
            "status": "running",
            "resumed_after": resumed_after,
            "earlier": read_record(run.path).get("earlier", []),
        }
        (run.path / "run.json").write_text(json.dumps(left))
        rows = [{"step": step, "elapsed_seconds": seconds} for step, seconds in enumerate(elapsed, 1)]
        (run.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        checkpoint = Checkpoint(run.path, 2, 5.0, {}, {}, "train", record=read_record(run.path))
        run = RunDirectory.create(run.path, "", resumed=checkpoint)
        assert run.record.content["earlier"][-1]["seconds"] == expected
        resumed_after = 2


def test_a_resumed_run_does_not_delete_the_model_it_has_just_written_for_one_it_left_behind(tmp_path: Path):
    run = RunDirectory.create(tmp_path / "one", "", models_kept=1)
    save(run, 9)
    run.finish("interrupted")
    checkpoint = Checkpoint(run.path, 2, 0.0, {}, {}, "train", record=read_record(run.path))
    again = RunDirectory.create(run.path, "", resumed=checkpoint, models_kept=1)
    save(again, 3)
    assert models(again) == ["step-000003", "step-000009"]
    save(again, 9, "anew")
    assert models(again) == ["step-000009"]
