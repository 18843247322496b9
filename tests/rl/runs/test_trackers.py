"""The built-in trackers, with the real packages, read back by other means than those that wrote."""

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from enginehouse.plugin import load_plugins
from enginehouse_rl.checkpoints import Checkpoint
from enginehouse_rl.config.document import parse
from enginehouse_rl.config.earlier_run import read_record
from enginehouse_rl.plan.trackers import TrackerPlan
from enginehouse_rl.runs import RunDirectory

CONFIG = """
model: {path: models/tiny}
data: {train: {'some file (1).jsonl': 3}}
train: {steps: 4}
run: {trackers: [{name: one, arguments: {api_key: '${KEY}'}}]}
"""
VALIDATION = "validation/a (b)+c//../reward"
"""As the names of `evaluation.by` may be: any text."""


def take_steps(
    path: Path, name: str, *steps: int, loss: float, after: int | None = None, outcome="finished",
    validated: int | None = None, **given,
):  # fmt: skip
    """A process of a run that logs steps and a validation, of the last if not of another, to the registered tracker of
    this name."""
    tracker = load_plugins(enabled=[]).get("tracker", name)
    former = None if after is None else Checkpoint(path, after, 0.0, {}, {}, "train", record=read_record(path))
    plans = [TrackerPlan(name, tracker.tracker, given)]
    run = RunDirectory.create(path, CONFIG, trackers=plans, resumed=former)
    for step in steps:
        run.log(step, {"loss": loss * step, "reward/mean": 0.5, "norm": math.nan})
    run.log_validation(steps[-1] if validated is None else validated, {VALIDATION: 0.75})
    run.finish(outcome)


def test_tensorboard_shows_scalars_and_config_and_of_steps_taken_twice_the_later(tmp_path: Path, caplog):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    take_steps(tmp_path, "tensorboard", 1, 2, 3, 4, loss=1.0, outcome="failed")
    take_steps(tmp_path, "tensorboard", 3, 4, 5, loss=10.0, after=2)
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(one.step, one.value) for one in read.Scalars("loss")] == [(1, 1), (2, 2), (3, 30), (4, 40), (5, 50)]
    assert [one.step for one in read.Scalars("norm")] == [1, 2, 3, 4, 5]
    assert math.isnan(read.Scalars("norm")[0].value)
    (validation,) = [name for name in read.Tags()["scalars"] if name.startswith("validation/")]
    assert [one.value for one in read.Scalars(validation)] == [0.75]
    (text,) = read.Tensors("config/text_summary")[-1].tensor_proto.string_val
    assert parse(text.decode(), "the text")[0] == parse(CONFIG, "the config")[0]
    assert not [one for one in caplog.records if "raised" in one.getMessage()]


def test_tensorboard_has_the_steps_before_the_checkpoint_that_a_killed_process_had_not_written(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    killed = RunDirectory.create(tmp_path, CONFIG)
    killed.log_validation(0, {VALIDATION: 0.25})
    for step in (1, 2, 3):
        killed.log(step, {"loss": float(step), "norm": math.nan})
    killed.log_validation(3, {VALIDATION: 0.5})
    killed.finish("failed", "killed")
    take_steps(tmp_path, "tensorboard", 3, 4, loss=10.0, after=2)
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(one.step, one.value) for one in read.Scalars("loss")] == [(1, 1), (2, 2), (3, 30), (4, 40)]
    assert [one.step for one in read.Scalars("norm")] == [1, 2, 3, 4]
    (validation,) = [name for name in read.Tags()["scalars"] if name.startswith("validation/")]
    assert [(one.step, one.value) for one in read.Scalars(validation)] == [(0, 0.25), (4, 0.75)]
    assert not {"step", "elapsed_seconds"} & set(read.Tags()["scalars"])


@pytest.fixture(autouse=True)
def _patience(monkeypatch):
    """A busy machine takes its time to import these packages; that is not what is shown here."""
    monkeypatch.setattr("enginehouse_rl.runs.tracking.ENDING_SECONDS", 240.0)


@pytest.fixture
def wandb_service():
    yield
    import wandb

    wandb.teardown()


@pytest.mark.usefixtures("wandb_service")
def test_weights_and_biases_offline_gets_all_and_a_resumed_run_is_the_same_run(tmp_path: Path, monkeypatch, caplog):
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    path = tmp_path / "mine"
    take_steps(path, "wandb", 1, 2, loss=1.0, validated=1, project="sorting", tags=["a", "b"])
    take_steps(path, "wandb", 3, loss=10.0, after=2, outcome="failed")
    wandb.teardown()  # what writes the files is a process of its own, and has not ended by then
    assert not [one for one in caplog.records if "raised" in one.getMessage()]
    first, second = (list(records_of(one)) for one in sorted(path.glob("wandb/offline-run-*/*.wandb")))
    rows = [row for records in (first, second) for row in history_of(records)]
    assert [row["loss"] for row in rows] == [1.0, 2.0, 30.0]
    assert [row["_step"] for row in rows] == [1, 2, 3]
    assert VALIDATION not in rows[0]
    assert (rows[1][VALIDATION], rows[1]["validation/step"]) == (0.75, 1)  # made beside a later step
    (mine,), (again,) = (
        [one.run for one in records if one.WhichOneof("record_type") == "run"] for records in (first, second)
    )
    assert (mine.project, mine.display_name, list(mine.tags)) == ("sorting", "mine", ["a", "b"])
    assert again.run_id == mine.run_id
    config = {one.key: json.loads(one.value_json) for one in mine.config.update}
    assert config["train"] == {"steps": 4}
    codes = [one.exit.exit_code for each in (first, second) for one in each if one.WhichOneof("record_type") == "exit"]
    assert codes == [0, 1]


@pytest.mark.usefixtures("wandb_service")
def test_weights_and_biases_without_a_key_asks_nobody_and_says_what_to_do(tmp_path: Path, monkeypatch, caplog):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "NETRC", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "nobody"))
    take_steps(tmp_path / "mine", "wandb", 1, loss=1.0)
    (said,) = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert "the tracker 'wandb' raised in `start` and is not called again" in said
    assert "set WANDB_API_KEY, or run `wandb login` once" in said


def records_of(path: Path) -> Iterator:
    """The records of an offline run: a LevelDB log after a header of seven bytes, of blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, held = path.read_bytes(), 7, b""
    while place + 7 <= len(content):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = struct.unpack_from("<HB", content, place + 4)
        held += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(held)
            held = b""
            yield record


def history_of(records: list) -> list[dict[str, float]]:
    rows = [one.history for one in records if one.WhichOneof("record_type") == "history"]
    return [{(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in row.item} for row in rows]


@pytest.mark.slow
@pytest.mark.essential
def test_mlflow_gets_all_in_the_run_directory_and_a_resumed_run_is_the_same_run(tmp_path: Path, monkeypatch, caplog):
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    path = tmp_path / "runs" / "mine"
    take_steps(path, "mlflow", 1, 2, loss=1.0, experiment="sorting")
    take_steps(path, "mlflow", 3, loss=10.0, after=2, outcome="failed", experiment="sorting")
    assert not [one for one in caplog.records if "raised" in one.getMessage()]
    client = MlflowClient(tracking_uri=f"sqlite:///{path}/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name("sorting")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("mine", "FAILED")
    assert [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, "loss")] == [
        (1, 1.0),
        (2, 2.0),
        (3, 30.0),
    ]
    (validation,) = [name for name in run.data.metrics if name.startswith("validation/")]
    assert run.data.metrics[validation] == 0.75
    assert math.isnan(run.data.metrics["norm"])
    assert run.data.params["model.path"] == "models/tiny"
    assert run.data.params["data.train.some file _1_.jsonl"] == "3"
    assert run.info.artifact_uri.startswith(f"file://{path}/mlflow/artifacts/")


@pytest.mark.slow
@pytest.mark.essential
def test_mlflow_begins_a_new_run_where_the_server_is_another(tmp_path: Path, monkeypatch, caplog):
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    path, other = tmp_path / "mine", f"sqlite:///{tmp_path}/other.db"
    take_steps(path, "mlflow", 1, 2, loss=1.0)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", other)
    take_steps(path, "mlflow", 3, loss=10.0, after=2)
    take_steps(path, "mlflow", 4, loss=10.0, after=3)
    (said,) = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert "at MLFLOW_TRACKING_URI: a new run begins there, with the steps so far" in said
    client = MlflowClient(tracking_uri=other)
    (run,) = client.search_runs([client.get_experiment_by_name("enginehouse").experiment_id])
    assert [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, "loss")] == [
        (1, 1.0),
        (2, 2.0),
        (3, 30.0),
        (4, 40.0),
    ]
    assert run.data.params["model.path"] == "models/tiny"
