"""Who has the devices when something fails. The workers are stand-ins that fail on purpose: in the order of what was
asked of them, is there ever state of both sides that would not fit, and does the run's state come back at its end?"""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from enginehouse.controller import ControllerError
from enginehouse.engines.weights import WeightSyncError
from enginehouse.roles.device_turns import DeviceTurns

ALL = {"params", "grads", "optimizer"}
PARTS = {"weights", "kv_cache"}


class Stage:
    """Both sides, and what of each is on the devices."""

    def __init__(self) -> None:
        self.actor, self.rollout = set(ALL), set[str]()
        self.launches, self.has_living, self.has_serving = True, True, False
        self.fails: dict[str, BaseException] = {}
        self.calls: list[str] = []
        self.limits: list[float | None] = []
        self.name = "rollout"
        self.turns = DeviceTurns({"actor": self}, self)  # type: ignore[dict-item,arg-type]
        self.turns.start()
        self.updates: Any = SimpleNamespace(
            trainer_in_use=nullcontext, catch_up=lambda returned: self.did("catch up"), make_room=None, hand_over=None
        )
        self.turns.take_part(self.updates)
        self.calls.clear()

    def did(self, what: str) -> None:
        self.calls.append(what)
        assert not (self.actor - {"params"} and self.rollout - {"weights"}), f"{what}: {self.actor} and {self.rollout}"
        if error := self.fails.pop(what, None):
            raise error

    # The training role's workers

    def call(self, method: str, tags: tuple[str, ...], timeout: float | None = None) -> list[int | None]:
        self.limits.append(timeout)
        self.did(f"{method} {' '.join(tags)}")
        moved = ALL if "*" in tags else set(tags)
        self.actor = self.actor - moved if method == "offload" else self.actor | moved
        return [None]

    # The fleet

    def launch(self) -> None:
        assert not self.actor
        self.rollout = set(PARTS)

    def sleep(self, tags: tuple[str, ...], timeout: float | None = None) -> list[int | None]:
        self.limits.append(timeout)
        self.did(f"sleep {' '.join(tags)}")
        if self.has_living:
            self.rollout -= PARTS if "*" in tags else set(tags)
        return [None]

    def wake_up(self, tags: tuple[str, ...]) -> None:
        self.did(f"wake_up {' '.join(tags)}")
        if self.has_living:
            self.rollout |= set(tags)

    def abort(self, timeout: float | None = None) -> None:
        self.limits.append(timeout)
        self.did("abort")

    def allow_launches(self, allowed: bool, until: float | None = None, alone: bool = False) -> None:
        self.launches = allowed

    def members(self) -> None:
        """A replica that was started again starts its engine as soon as it may."""
        assert self.launches
        self.launch()
        self.has_living = True

    # A weight update

    def publish(self) -> None:
        self.updates.make_room()
        self.did("send")
        self.updates.hand_over()

    def step(self) -> None:
        self.turns.train()
        self.publish()


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_a_step_goes_from_one_turn_to_the_other_and_back(stage: Stage):
    for _ in range(2):
        stage.publish()
        assert (stage.actor, stage.rollout, stage.launches) == (set(), PARTS, True)
        stage.turns.train()
        assert (stage.actor, stage.rollout, stage.launches) == (ALL, set(), False)


STEP = ["sleep *", "onload *", "offload grads optimizer", "wake_up weights", "send", "offload *", "wake_up kv_cache"]


@pytest.mark.parametrize("fails", STEP)
@pytest.mark.parametrize("error", [ControllerError("it failed"), KeyboardInterrupt()], ids=["fails", "interrupted"])
def test_wherever_a_turn_fails_the_training_state_is_back_at_the_end(stage: Stage, fails: str, error: BaseException):
    stage.publish()
    stage.fails[fails] = error
    with pytest.raises(type(error)):
        stage.step()
    stage.turns.end()
    assert stage.actor == ALL
    assert not stage.rollout
    assert not stage.launches


def test_the_end_has_a_limit_and_can_be_had_again(stage: Stage):
    stage.publish()
    stage.limits.clear()
    stage.fails["abort"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        stage.turns.end(until=0.0)
    stage.turns.end(until=0.0)
    assert len(stage.limits) == 4
    assert all(limit is not None and limit < 1 for limit in stage.limits)
    assert stage.actor == ALL


def test_a_catch_up_that_fails_leaves_the_rollout_its_turn(stage: Stage):
    stage.publish()
    stage.fails["catch up"] = WeightSyncError("it died")
    with pytest.raises(WeightSyncError):
        stage.turns.catch_up(None)  # type: ignore[arg-type]
    assert (stage.actor, stage.rollout, stage.launches) == (set(), PARTS, True)


def test_where_no_replica_is_left_an_engine_starts_on_free_devices(stage: Stage):
    stage.publish()
    stage.turns.train()
    stage.has_living = False
    stage.publish()
    assert (stage.actor, stage.rollout, stage.launches) == (set(), PARTS, True)
