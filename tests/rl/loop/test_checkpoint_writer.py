"""Checkpoints are written when they are due, and training goes on meanwhile where the engine can do that."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from projects import Project

from enginehouse.errors import EnginehouseError
from enginehouse_rl.checkpoints import Checkpoint, digest_files
from enginehouse_rl.config.load import load_config
from enginehouse_rl.loop import checkpoint_writer
from enginehouse_rl.loop.checkpoint_writer import CheckpointWriter, LoopState
from enginehouse_rl.runs import RunDirectory
from enginehouse_rl.runs.observer import Observer


class Actor:
    """Stands in for the actor's workers: a background save ends when the test says so, or when it is waited for."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.writing: Path | None = None
        self.fails = self.interrupts = False

    def call(self, method: str, *arguments: Any, timeout: float | None = None) -> None:
        self.calls.append(method)
        if method == "finish_save":
            self.write()
        elif method == "save_in_background":
            self.writing = Path(arguments[0])
        else:
            Path(arguments[0]).mkdir()

    def write(self) -> None:
        if self.interrupts:
            self.interrupts = False
            raise KeyboardInterrupt
        if self.fails:
            raise EnginehouseError("no space left")
        if self.writing is not None:
            self.writing.mkdir()
            (self.writing / "weights").write_text("w")
        self.writing = None


class Published(Observer):
    """Keeps step and path of each checkpoint that a run's observers are told of."""

    def __init__(self, run: RunDirectory):
        self.steps: list[int] = []
        self.paths: list[str] = []
        run.observers.append(self)

    def checkpoint_saved(self, step: int, path: str, what: str) -> None:
        assert what == "state"
        self.steps.append(step)
        self.paths.append(path)


class Setting:
    """A run directory, an actor, and what was published."""

    def __init__(self, project: Project, background: bool):
        self.run, self.actor = RunDirectory.create("runs/one", ""), Actor()
        self.published = Published(self.run).steps
        actor: Any = self.actor
        self.writer = CheckpointWriter(
            {"actor": actor},
            self.run,
            load_config(project.save()),
            "float32",
            background,
            {"train.jsonl": "its digest"},
        )

    @property
    def whole(self) -> list[str]:
        return sorted(path.name for path in (self.run.path / "checkpoints").glob("step-*"))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.chdir(tmp_path)
    return Project(tmp_path)


def state(step: int) -> LoopState:
    return LoopState(step, {"row": step})


def test_an_engine_that_cannot_write_in_the_background_is_waited_for(project: Project):
    setting = Setting(project, background=False)
    setting.writer.begin(state(3))
    assert setting.actor.calls == ["save"]
    assert setting.published == [3]


def test_a_background_checkpoint_is_published_once_the_engine_is_done(project: Project):
    setting = Setting(project, background=True)
    setting.writer.begin(state(3))
    setting.writer.publish_if_written()
    assert setting.actor.calls == ["save_in_background"]  # nothing was waited for
    assert setting.whole == []
    setting.actor.write()
    while not setting.published:
        setting.writer.publish_if_written()
    assert setting.whole == ["step-000003"]
    assert setting.published == [3]
    setting.writer.finish()
    assert setting.actor.calls == ["save_in_background", "finish_save"]


def test_training_goes_on_while_a_background_checkpoint_is_read_for_its_digests(project, monkeypatch):
    begun, go_on = threading.Event(), threading.Event()

    def slow(staged: Path) -> dict[str, tuple[int, str]]:
        begun.set()
        go_on.wait()
        return digest_files(staged)

    monkeypatch.setattr(checkpoint_writer, "digest_files", slow)
    setting = Setting(project, background=True)
    setting.writer.begin(state(3))
    setting.actor.write()
    setting.writer.publish_if_written()
    begun.wait()
    setting.writer.publish_if_written()
    assert setting.whole == []
    go_on.set()
    setting.writer.write_last(state(3), 60.0)
    assert setting.whole == ["step-000003"]
    assert setting.actor.calls == ["save_in_background", "finish_save"]


@pytest.mark.parametrize("background", [True, False])
def test_a_checkpoint_that_is_not_read_in_time_is_kept_and_holds_up_no_end(project, monkeypatch, background):
    readers: list[threading.Thread] = []
    go_on = threading.Event()

    def hangs(staged: Path) -> dict[str, tuple[int, str]]:
        readers.append(threading.current_thread())
        go_on.wait()
        return {}

    monkeypatch.setattr(checkpoint_writer, "digest_files", hangs)
    setting = Setting(project, background)
    if background:
        setting.writer.begin(state(3))
        setting.actor.write()
    setting.writer.write_last(state(3), 0.1)
    go_on.set()
    assert setting.whole == ["step-000003"]
    assert Checkpoint.read(setting.run.path / "checkpoints" / "step-000003").files == {}
    assert [reader.daemon for reader in readers] == [True]


def test_looking_at_a_checkpoint_that_is_read_waits_once(project: Project, monkeypatch: pytest.MonkeyPatch):
    waits: list[float | None] = []

    def wait(digests: list[Any], seconds: float | None) -> Any:
        waits.append(seconds)
        return SimpleNamespace(done=set())

    monkeypatch.setattr(checkpoint_writer, "wait", wait)
    setting = Setting(project, background=True)
    setting.writer.begin(state(3))
    setting.actor.write()
    for _ in range(3):
        setting.writer.publish_if_written()
    assert waits == [checkpoint_writer.HOLD_SECONDS, 0.0, 0.0]


def test_a_checkpoint_has_the_digests_of_its_files_and_of_the_data(project: Project):
    setting = Setting(project, background=True)
    setting.writer.begin(state(3))
    setting.writer.finish()
    read = Checkpoint.read(setting.run.path / "checkpoints" / "step-000003")
    assert read.data == {"train.jsonl": "its digest"}
    assert set(read.files) == {"actor/weights"}
    read.check_files()


def test_the_next_checkpoint_waits_for_the_one_under_way(project: Project):
    setting = Setting(project, background=True)
    setting.writer.begin(state(3))
    setting.writer.begin(state(6))
    assert setting.published == [3]
    setting.writer.finish()
    assert setting.whole == ["step-000003", "step-000006"]


def test_a_background_checkpoint_that_fails_is_an_error_and_leaves_nothing(project: Project):
    setting = Setting(project, background=True)
    setting.writer.begin(state(3))
    setting.actor.fails = True
    with pytest.raises(EnginehouseError, match="no space left"):
        setting.writer.finish()
    assert setting.published == setting.whole == []


def test_a_checkpoint_whose_end_was_not_waited_for_is_published_as_the_run_ends(project: Project):
    setting = Setting(project, background=True)
    setting.writer.begin(state(3))
    setting.actor.interrupts = True
    with pytest.raises(KeyboardInterrupt):
        setting.writer.begin(state(6))
    setting.writer.write_last(state(6), 5.0)
    assert setting.whole == ["step-000003", "step-000006"]


@pytest.mark.parametrize(("last", "whole"), [(3, ["step-000003"]), (4, ["step-000003", "step-000004"])])
def test_the_last_checkpoint_is_written_unless_it_is_under_way(project: Project, last: int, whole: list[str]):
    setting = Setting(project, background=True)
    setting.writer.begin(state(3))
    setting.writer.write_last(state(last), 5.0)
    assert setting.whole == whole
    assert setting.actor.calls.count("save") == len(whole) - 1


@pytest.mark.parametrize("background", [True, False])
def test_each_trained_role_saves_into_a_folder_of_its_name(project: Project, background: bool):
    run = RunDirectory.create("runs/one", "")
    published = Published(run).paths
    trained: Any = {"actor": Actor(), "critic": Actor()}
    config = load_config(project.save())
    writer = CheckpointWriter(trained, run, config, "float32", background)
    writer.begin(state(3))
    if background:
        trained["actor"].write()
        writer.publish_if_written()  # the critic still writes
        assert published == []
        assert trained["actor"].calls == trained["critic"].calls == ["save_in_background"]
    writer.finish()
    (place,) = published
    read = Checkpoint.read(Path(place))
    assert read.roles == ("actor", "critic")
    assert all(read.state_of(role).is_dir() for role in read.roles)
