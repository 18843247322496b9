"""How a loop ends: what it saves first, and of which failure it saves nothing."""

import gc
import json
import signal
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from projects import Project

from enginehouse.controller import Balanced, interruption
from enginehouse.controller.errors import WorkerDied, WorkerTimeout
from enginehouse.engines.model import ModelSpec
from enginehouse.engines.train import LossSpec
from enginehouse.errors import EnginehouseError, SaveError
from enginehouse.roles.device_turns import DeviceTurns
from enginehouse.roles.file_scores import FileScores
from enginehouse_rl.config.load import load_config
from enginehouse_rl.loop.checkpoint_writer import CheckpointWriter
from enginehouse_rl.loop.export_comparison import ExportDiffers
from enginehouse_rl.loop.final_save import LOST_SECONDS
from enginehouse_rl.loop.loop import Loop
from enginehouse_rl.loop.running_updates import Update
from enginehouse_rl.runs import Progress, RunDirectory
from enginehouse_rl.runs.observer import Observer


class Actor:
    """Stands in for the actor's workers: what it was asked for, and what it fails at."""

    broken: str | None = None
    slow_at: Sequence[str] = ()

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.limits: dict[str, float | None] = {}
        self.fails_at: set[str] = set()
        self.bad_update, self.bad_update_error = 0, EnginehouseError("")

    def call(self, method: str, *arguments: Any, timeout: float | None = None, blocking: bool = True) -> Any:
        self.calls.append(method)
        self.limits[method] = timeout
        if method == "update":
            assert isinstance(arguments[0], Balanced), "shares of an update are of as many tokens, not of as many rows"
            return SimpleNamespace(result=self.updated)
        if method == "finish_save":
            return None
        Path(arguments[0]).mkdir()
        if method in self.slow_at and timeout is not None:
            Path(arguments[0], "part").write_bytes(b"." * 1_500_000)
            self.broken = f"{method} did not end"
            raise WorkerTimeout(f"{method} did not end within {timeout:g} s")
        Path(arguments[0], "whole").write_bytes(b"." * 3_000_000)
        if method in self.fails_at:
            raise EnginehouseError(f"{method}: no space left")
        return None

    def score_files(self, path: str, spec: ModelSpec) -> FileScores:
        return FileScores([], None, "it holds nothing")

    def updated(self, limit: float | None = None) -> dict[str, float]:
        self.limits["update"] = limit
        if self.calls.count("update") == self.bad_update:
            raise self.bad_update_error
        return {"loss": 1.0}


class DeadCritic:
    """Stands in for workers that die in an update."""

    def call(self, *arguments: Any, **named: Any) -> Any:
        def die(limit: float | None = None) -> None:
            raise WorkerDied("the critic died")

        return SimpleNamespace(result=die)


class OneActor(Loop):
    """Three steps, the last of which does what the test says after its update."""

    trouble: BaseException | None = None
    background = False
    actor_slow_at: Sequence[str] = ()
    critic_dies_in = 0
    fails_in = ""
    batch: Any = None
    lacking_from = 0
    """From this step on a role is to be trained too whose update cannot begin."""

    @contextmanager
    def workers(self):
        self.actor = Actor()
        groups = {"actor": self.actor}
        self.roles: Any = SimpleNamespace(
            actor=self.actor,
            groups=groups,
            trained=groups,
            plans={"actor": SimpleNamespace(model=ModelSpec("model"))},
            turns=DeviceTurns({}, None),
            describe=dict,
        )
        yield

    def run_step(self, step: int) -> Mapping[str, float]:
        if step == 3:
            self.actor.bad_update, self.actor.bad_update_error = self.bad_update
            self.actor.slow_at = self.actor_slow_at
        updates = {"actor": Update(self.batch, LossSpec("supervised"))}
        if step == self.critic_dies_in:
            updates["critic"] = updates["actor"]
            self.roles.groups["critic"] = DeadCritic()
        if step == self.lacking_from:
            updates["critic"] = updates["actor"]

        def fail_if(when: str) -> None:
            if step == 3 and self.fails_in == when:
                raise OSError(28, "No space left on device")

        with self.updating(step, updates) as training:
            fail_if("meanwhile")
            training.metrics = {"tokens": 1.0, "reward/mean": 0.0}
            fail_if("then")
        metrics = training.result()
        if step == 3:
            self.actor.fails_at = self.fails_at
            if self.trouble is not None:
                raise self.trouble
        return metrics

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None: ...

    def _saves_in_background(self) -> bool:
        return self.background


class NotFinite(EnginehouseError):
    """As of weights that an update has spoilt."""

    keeps_state = False


@pytest.fixture
def loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OneActor:
    monkeypatch.chdir(tmp_path)
    config = load_config(Project(tmp_path).save())
    config.train.steps = 3
    made: Any = SimpleNamespace(config=config, resumed=None)
    opened = OneActor(made, RunDirectory.create("runs/one", ""), Progress("one", mode="quiet"))
    opened.fails_at, opened.bad_update = set(), (0, EnginehouseError(""))
    return opened


class Keeper(Observer):
    """Keeps each event that it is told, and what the run's files had of it by then."""

    def __init__(self, run: RunDirectory):
        self.run = run
        self.events: list[tuple[Any, ...]] = []

    def tell(self, event: str, **content: Any) -> None:
        rows = [len(path.read_bytes().splitlines()) for path in sorted(self.run.path.glob("*.jsonl"))]
        self.events.append((event, content, rows))


def whole(loop: Loop) -> list[str]:
    kept = [*loop.run_directory.path.glob("checkpoints/*"), *loop.run_directory.path.glob("models/*")]
    return sorted(f"{path.parent.name}/{path.name}" for path in kept)


def test_a_new_observer_is_told_all_of_a_run_in_order_each_event_once_it_is_written(tmp_path, monkeypatch, loop):
    def updated(actor: Actor, limit: float | None = None) -> dict[str, float]:
        return {"loss": 1.0, "skipped": float(actor.calls.count("update") == 1)}

    monkeypatch.setattr(Actor, "updated", updated)
    loop.before_first_step = lambda: loop.run_directory.log_validation(0, {"validation/reward": 0.5}, "greedy")
    loop.steps, loop.save_every = 2, 1
    keeper = Keeper(loop.run_directory)
    loop.run_directory.observers.append(keeper)
    loop.run()
    names, contents, rows = zip(*keeper.events, strict=True)
    assert names == (
        "validated", "run_started", "step_finished", "alarmed", "checkpoint_saved", "step_finished",
        "checkpoint_saved", "run_finished",
    )  # fmt: skip
    assert contents[0] == {"step": 0, "metrics": {"validation/reward": 0.5}, "how": "greedy"}
    assert (contents[2]["step"], contents[2]["metrics"]["skipped"]) == (1, 1.0)
    assert (contents[3]["alarm"]["step"], contents[3]["alarm"]["alarm"]) == (1, "steps_skipped")
    assert contents[4] == {"step": 1, "path": str(loop.run_directory.path / "models/step-000001"), "what": "model"}
    assert contents[-1] == {"outcome": "finished"}
    assert rows[0] == [0, 1]  # metrics.jsonl and validation.jsonl
    assert rows[2:4] == ([1, 1], [1, 1, 1])
    assert [row["reward/mean"] for row in loop.progress.history.last] == [0.0, 0.0]


@pytest.mark.parametrize("trouble", [KeyboardInterrupt(), EnginehouseError("a replica died"), RuntimeError("a bug")])
def test_whatever_ends_a_run_state_and_model_are_saved_in_that_order(loop: OneActor, trouble: BaseException):
    loop.trouble = trouble
    with pytest.raises(type(trouble)):
        loop.run()
    assert loop.actor.calls == ["update"] * 3 + ["save", "export_hf"]
    assert whole(loop) == ["checkpoints/step-000003", "models/step-000003"]
    assert loop.run_directory.last_step == 3


@pytest.mark.fault(
    area="signals",
    what="Ctrl-C while an update or a save takes longer than run.grace_seconds",
    happens="the run says what it waits for, and waits. A second Ctrl-C ends it at once",
    exit_code="130",
    kept="a checkpoint and the model of the last update",
    noticed="at once",
)
def test_ctrl_c_gives_an_update_and_saves_any_time(loop, capsys, monkeypatch):
    loop.trouble, loop.actor_slow_at = KeyboardInterrupt(), ["save", "export_hf"]
    monkeypatch.setattr(interruption, "_came", signal.SIGINT)
    monkeypatch.setattr(DeviceTurns, "is_shared", True)
    loop.progress.mode = "lines"
    with pytest.raises(KeyboardInterrupt):
        loop.run()
    assert whole(loop) == ["checkpoints/step-000003", "models/step-000003"]
    assert loop.actor.limits == {"update": None, "save": None, "export_hf": None}
    said = capsys.readouterr().out
    for waited_for in ("waiting for the update", "saving the checkpoint", "saving the model"):
        assert f"{waited_for} of step 3 ..." in said
    assert "waiting for the rollout to free the devices for saving ..." in said


@pytest.mark.fault(
    area="signals",
    what="SIGTERM or SIGHUP, and saving takes longer than run.grace_seconds",
    happens="the run ends without saving. It says so, how far saving was, and to raise `run.grace_seconds`",
    exit_code="143, 129",
    kept="earlier checkpoints and models",
    noticed="when `run.grace_seconds` are over",
)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_give_no_longer_than_the_grace_and_what_was_saved_is_said(loop, caplog, monkeypatch, number):
    loop.checkpoint_every = 2
    loop.trouble, loop.actor_slow_at = KeyboardInterrupt(), ["save"]
    monkeypatch.setattr(interruption, "_came", number)
    with pytest.raises(KeyboardInterrupt):
        loop.run()
    assert whole(loop) == ["checkpoints/step-000002"]
    assert 0 < (loop.actor.limits["save"] or 0.0) <= loop.final_save._grace
    (told,) = caplog.messages
    assert told.startswith("run.grace_seconds is 25, which is too short; raise it: no checkpoint of step 3 was saved: ")
    assert "1.4 MiB of 2.9 MiB of the checkpoint of step 3 were written" in told
    assert "iB free" not in told


@pytest.mark.parametrize(("minutes", "every", "saved"), [(0.0, 0, []), (1e-9, 0, [1, 2]), (1e-9, 3, [1, 2, 3])])
def test_a_checkpoint_is_due_after_some_minutes_and_not_of_the_last_step(loop, minutes, every, saved):
    loop.config.train.checkpoint_minutes, loop.config.train.checkpoints_kept = minutes, 3
    loop.checkpoint_every = every
    published: list[int] = []
    loop.progress.checkpoint_saved = lambda step, path, what: published.append(step) if what == "state" else None  # type: ignore[method-assign]
    loop.run()
    assert published == saved


def test_a_checkpoint_by_steps_puts_off_the_one_by_minutes(loop: OneActor, monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr("enginehouse_rl.loop.loop.time", SimpleNamespace(monotonic=lambda: now[0]))
    loop.config.train.checkpoint_minutes, loop.checkpoint_every = 1.0, 2
    monkeypatch.setattr(loop, "after_step", lambda step: now.__setitem__(0, 50.0 * step))
    loop.steps = 5
    loop.run()
    assert whole(loop) == ["checkpoints/step-000004", "checkpoints/step-000005", "models/step-000005"]
    assert loop.actor.calls.count("save") == 3


@pytest.mark.fault(
    area="processes",
    what="a process of the critic dies in an update, while the actor lives",
    happens="the run ends with an error that names it",
    exit_code="1",
    kept="the model of the actor's last update, and earlier checkpoints",
    noticed="at once",
)
def test_a_critic_that_dies_in_an_update_leaves_the_actors_model(loop: OneActor, monkeypatch: pytest.MonkeyPatch):
    loop.critic_dies_in = 3
    with pytest.raises(WorkerDied, match="the critic died"):
        loop.run()
    assert whole(loop) == ["models/step-000003"]
    assert loop.run_directory.last_step == 2


@pytest.mark.parametrize(("when", "rows"), [("meanwhile", [1, 2]), ("then", [1, 2, 3])])
def test_a_step_that_fails_beside_its_update_leaves_no_half_row(loop: OneActor, when: str, rows: list[int]):
    loop.fails_in = when
    with pytest.raises(OSError, match="No space"):
        loop.run()
    loop.run_directory.flush()
    written = [json.loads(line) for line in (loop.run_directory.path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in written] == rows
    assert all({"reward/mean", "loss"} <= set(row) for row in written)
    assert whole(loop) == ["checkpoints/step-000003", "models/step-000003"]


@pytest.mark.parametrize("frozen", [False, True])
def test_the_garbage_collector_is_as_it_was_after_a_run(loop: OneActor, frozen: bool):
    gc.unfreeze()
    if frozen:
        gc.freeze()
    thresholds = gc.get_threshold()
    loop.trouble = RuntimeError("a bug")
    with pytest.raises(RuntimeError):
        loop.run()
    assert (gc.get_freeze_count() > 0, gc.get_threshold()) == (frozen, thresholds)
    gc.freeze()


def test_an_error_that_says_the_state_is_at_fault_saves_nothing(loop: OneActor):
    loop.trouble = ValueError("behind it")
    loop.trouble.__cause__ = NotFinite("weights are not finite")
    with pytest.raises(ValueError, match="behind it"):
        loop.run()
    assert loop.actor.calls == ["update"] * 3
    assert whole(loop) == []


@pytest.mark.parametrize("error", [NotFinite("weights are not finite"), EnginehouseError("out of memory")])
def test_an_update_that_fails_keeps_the_checkpoint_under_way(loop, error, monkeypatch):
    monkeypatch.setattr(CheckpointWriter, "publish_if_written", lambda writer: None)  # it has not ended by then
    loop.background, loop.checkpoint_every, loop.bad_update = True, 2, (3, error)
    with pytest.raises(type(error), match=str(error)):
        loop.run()
    assert whole(loop) == ["checkpoints/step-000002"]


def test_where_only_some_roles_begin_an_update_no_state_is_called_an_earlier_steps(loop, monkeypatch):
    monkeypatch.setattr(CheckpointWriter, "publish_if_written", lambda writer: None)
    loop.background, loop.checkpoint_every, loop.lacking_from = True, 2, 3
    with pytest.raises(KeyError, match="critic"):
        loop.run()
    assert loop.actor.calls.count("update") == 3
    assert "save" not in loop.actor.calls
    assert whole(loop) == ["checkpoints/step-000002", "models/step-000003"]


def test_what_is_under_way_beside_the_steps_ends_before_a_later_state_is_saved_and_after_all_else_at_the_end(
    loop, monkeypatch
):
    calls = loop_calls(loop, monkeypatch)
    loop.checkpoint_every = 2
    loop.run()
    assert calls == [*["update"] * 2, ("beside", 2, None), "save", "update", ("beside", 3, None), "save", "export_hf",
                     ("beside", None, None)]  # fmt: skip


def test_a_run_that_is_interrupted_saves_first_and_gives_what_is_beside_it_the_time_that_is_left(
    loop, monkeypatch, caplog
):
    calls = loop_calls(loop, monkeypatch, EnginehouseError("it broke"))
    loop.trouble = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        loop.run()
    (*first, (_, before, seconds)) = calls
    assert first == [*["update"] * 3, "save", "export_hf"]
    assert before == 3
    assert 0 < seconds <= loop.final_save._grace
    assert "work that ran beside the steps is lost: it broke" in caplog.text


def loop_calls(loop: OneActor, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> list[Any]:
    """The list, which grows, of what the actor is asked for and of calls of `finish_beside`, which raise `error`."""
    calls: list[Any] = []
    monkeypatch.setattr(Actor, "call", lambda actor, method, *given, _call=Actor.call, **named: (
        calls.append(method), _call(actor, method, *given, **named))[1])  # fmt: skip

    def finish_beside(before: int | None = None, seconds: float | None = None) -> None:
        calls.append(("beside", before, seconds))
        if error is not None:
            raise error

    monkeypatch.setattr(loop, "finish_beside", finish_beside)
    return calls


@pytest.mark.parametrize("lost", [True, False])
def test_saving_is_hurried_and_unwatched_only_where_ray_is_lost(loop, monkeypatch, lost):
    carried: list[str] = []
    hurries: list[float | None] = []
    access = SimpleNamespace(lost=lost, carry_on=lambda: carried.append("on"))
    monkeypatch.setattr("enginehouse_rl.loop.final_save.ray_access", access)
    monkeypatch.setattr(loop.final_save, "_save_state", lambda seconds, error: hurries.append(seconds))
    monkeypatch.setattr(loop.final_save, "_grace", 600.0)
    loop.trouble = EnginehouseError("a replica died")
    with pytest.raises(EnginehouseError):
        loop.run()
    assert (carried, hurries) == ((["on"], [pytest.approx(LOST_SECONDS, abs=1)]) if lost else ([], [None]))


@pytest.mark.parametrize(
    ("export", "called"),
    [
        ("merged", [("export_hf", "")]),
        ("adapter", [("export_adapter", "")]),
        ("both", [("export_hf", ""), ("export_adapter", "adapter")]),
    ],
)
def test_the_model_the_adapter_or_both_are_exported_and_the_first_of_each_compared(loop, monkeypatch, export, called):
    exports: list[tuple[str, str]] = []
    compared: list[str] = []

    def call(actor: Actor, method: str, *given: Any, _call: Any = Actor.call, **named: Any) -> Any:
        if method.startswith("export"):
            exports.append((method, "" if ".partial-" in Path(given[0]).name else Path(given[0]).name))
        return _call(actor, method, *given, **named)

    monkeypatch.setattr(Actor, "call", call)
    monkeypatch.setattr(
        "enginehouse_rl.loop.exports.compare_export", lambda place, *_: compared.append(place.name) or ""
    )
    loop.config.train.export, loop.save_every = export, 1
    loop.run()
    assert exports == called * 3
    assert len(compared) == len(called)


@pytest.mark.fault(
    area="files",
    what="the first exported model, or adapter, scores otherwise in transformers than in the engine",
    happens="the run ends with an error that shows both scores, and deletes the export",
    exit_code="1",
    kept="checkpoints, including that of the last step",
    noticed="at the export. Models above 4 GiB in float32 are not compared, and the run says so",
)
def test_a_model_that_is_not_what_was_trained_ends_the_run_and_keeps_the_state(loop, monkeypatch):
    def differs(*_: Any) -> str:
        raise ExportDiffers("the exported model differs from the trained model")

    monkeypatch.setattr("enginehouse_rl.loop.exports.compare_export", differs)
    with pytest.raises(ExportDiffers, match="differs from the trained model"):
        loop.run()
    assert whole(loop) == ["checkpoints/step-000003"]


def test_what_cannot_be_saved_does_not_keep_the_rest_from_it(loop: OneActor, caplog: pytest.LogCaptureFixture):
    loop.trouble, loop.fails_at = KeyboardInterrupt(), {"save"}
    with pytest.raises(KeyboardInterrupt):
        loop.run()
    assert whole(loop) == ["models/step-000003"]
    assert "no checkpoint of step 3 was saved: the checkpoint of step 3 could not be written to" in caplog.text


@pytest.mark.fault(
    area="files",
    what="the disk is full when a checkpoint or the model is written",
    happens="the run ends with an error that names the path and its free space, and deletes half-written files",
    exit_code="1",
    kept="earlier checkpoints and models, and of this step what still fits",
    noticed="at once",
)
def test_a_disk_that_does_not_take_the_model_keeps_the_state(loop: OneActor, caplog: pytest.LogCaptureFixture):
    loop.fails_at = {"export_hf"}
    with pytest.raises(
        SaveError, match=r"model of step 3 could not be written to \S+/models, which has [\d,.]+ [MG]iB free"
    ):
        loop.run()
    assert whole(loop) == ["checkpoints/step-000003"]
    assert not caplog.messages
