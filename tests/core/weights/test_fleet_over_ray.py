"""Rollout replicas that die one by one, over Ray: no row is lost or drawn twice, and who comes back is verified.

Where and when a replica dies is told to it by marks (see `mortal`); nothing here depends on how long things take.
"""

import itertools
import logging
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from enginehouse.controller import ControllerError, RemoteError, ResourcePool, WorkerGroup, WorkerSpec, start_ray
from enginehouse.engines.model import ModelSpec
from enginehouse.engines.rollout import SamplingParams
from enginehouse.engines.train import LossSpec
from enginehouse.engines.weights import WeightSyncError
from enginehouse.fleet.fleet import RolloutFleet
from enginehouse.fleet.generation import sort_samples
from enginehouse.roles.workers import TrainWorker
from enginehouse.weights.sync import WeightSync
from enginehouse_testing.models import tiny_model

from .mortal import MARKS, MortalRolloutWorker
from .roles_for_tests import DEMONSTRATIONS, PROBE, PROMPTS, SMALL_BUCKETS

pytestmark = pytest.mark.slow
TESTS = Path(__file__).parents[2]
SAMPLING = SamplingParams(n=2, max_tokens=6)
PATIENCE = 120.0


class Fleet:
    """A trainer and a fleet of two, with the marks that tell replicas what to do."""

    def __init__(self, marks: Path, **options):
        model = ModelSpec(tiny_model())
        env = {"PYTHONPATH": os.pathsep.join(map(str, (TESTS, TESTS / "core"))), MARKS: str(marks)}
        self.marks = marks
        self.pool = ResourcePool([1])
        self.actor = WorkerGroup(self.pool, WorkerSpec(TrainWorker, "torch", model, {"lr": 0.05}), name="actor")
        spec = WorkerSpec(MortalRolloutWorker, "torch", model, {}).options(env=env)
        given = {"timeout": PATIENCE, "start_timeout": PATIENCE, "health_every": 3600.0} | options
        self.fleet = RolloutFleet(spec, 2, **given)
        self.fleet.launch()
        self.sync = WeightSync(
            self.actor, self.fleet, "shared_memory", bucket_bytes=SMALL_BUCKETS, timeout=30.0, probe=PROBE
        )
        self.sync.connect()
        self.fleet.catch_up = self.sync.catch_up
        self.numbers = itertools.count(1)
        self.version = 0

    def tell(self, *marks: str) -> None:
        for mark in marks:
            (self.marks / mark).touch()

    def update(self, train: bool = True, ahead: bool = False):
        """Train, and bring the weights to whoever lives; `ahead`: begun before the training has ended."""
        with self.sync.trainer_in_use():  # a replica may still be caught up that drew nothing any more
            loss = LossSpec("supervised")
            training = self.actor.call("update", DEMONSTRATIONS, loss, blocking=False) if train else None
            self.version = next(self.numbers)
            if ahead:
                self.sync.begin(self.version)
            if training is not None:
                training.result()
            return self.sync.publish(self.version)

    def draw(self, seed: int = 3):
        return sort_samples(self.fleet.generate_each(PROMPTS, SAMPLING, seed=seed))

    def await_that(self, holds: Callable[[list[str]], bool]) -> None:
        """Wait until the replicas' states are such."""
        until = time.monotonic() + PATIENCE
        while not holds(self.fleet.states):
            assert time.monotonic() < until
            time.sleep(0.05)

    def await_restarts(self) -> None:
        self.await_that(lambda states: "lost" not in states)

    def make_whole(self) -> None:
        for mark in self.marks.iterdir():
            mark.unlink()
        self.await_restarts()
        self.update()
        assert self.fleet.states == ["serving", "serving"]
        self.draw()
        self.fleet.metrics()

    def close(self) -> None:
        self.sync.close()
        self.fleet.shutdown()
        self.actor.shutdown()
        self.pool.shutdown()


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with start_ray() as started:
        yield started


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    opened = Fleet(tmp_path_factory.mktemp("marks"), samples_in_flight=2)
    yield opened
    opened.close()


@pytest.fixture
def house(shared):
    """Both replicas serve; a replica holds one prompt at a time."""
    shared.make_whole()
    return shared


def assert_same_samples(drawn, expected):
    for name in ("input_ids", "loss_mask"):
        assert torch.equal(drawn[name].offsets, expected[name].offsets)
        assert torch.equal(drawn[name].values, expected[name].values), name
    logprobs = drawn["rollout_logprobs"].values, expected["rollout_logprobs"].values
    assert torch.allclose(*logprobs, atol=1e-5)  # rows were computed beside others
    assert drawn["finish_reason"] == expected["finish_reason"]
    assert torch.equal(drawn["weight_version"], expected["weight_version"])


def test_samples_are_handed_over_while_others_are_drawn_and_never_again_when_a_replica_dies(house):
    expected = house.draw()
    house.tell("wait-1")  # its answers are held back for good
    pieces = house.fleet.generate_each(PROMPTS, SAMPLING, seed=3)
    given = [next(pieces) for _ in range(len(PROMPTS) - 1)]  # a prompt each, all but one by replica 0
    os.kill(house.fleet.pids[1], signal.SIGKILL)
    given += pieces
    assert sorted(row for rows, _ in given for row in rows) == list(range(len(PROMPTS)))
    assert len(given) == len(PROMPTS)
    assert_same_samples(sort_samples(given), expected)


@pytest.mark.essential
def test_a_replica_killed_in_a_step_loses_no_row_and_returns_within_it_at_the_version_served(house):
    expected = house.draw()
    pid = house.fleet.pids[1]
    house.tell("die-generate-1", "wait-0", "tell-1")  # replica 0 answers once replica 1 has answered again
    assert_same_samples(house.draw(), expected)
    assert house.fleet.pids[1] != pid
    states = house.fleet.weight_state()
    assert states[0] == states[1]
    assert states[1].version == house.version
    figures = house.fleet.metrics()
    assert figures["rollout/restarts"] == 1
    assert figures["rollout/retries"] == 1
    assert figures["rollout/replicas"] == 2
    assert figures["rollout/queued"] > 0
    assert 0 < figures["rollout/utilisation"] <= 1
    assert house.update().version == house.version  # the next one goes to both again
    assert [state.version for state in house.fleet.weight_state()] == [house.version] * 2


def test_a_replica_whose_trainer_has_moved_on_waits_for_the_next_update(house, caplog):
    house.actor.update(DEMONSTRATIONS, LossSpec("supervised"))  # not what is served
    house.tell("die-generate-1", "wait-0")
    catch_up, house.fleet.catch_up = house.fleet.catch_up, lambda members: _then_go(house, catch_up, members)
    try:
        samples = house.draw()
    finally:
        house.fleet.catch_up = catch_up
    assert set(samples["weight_version"].tolist()) == {house.version}
    assert house.fleet.states == ["serving", "returned"]
    assert f"not those of version {house.version} any more" in caplog.text
    house.update(train=False)
    assert house.fleet.states == ["serving", "serving"]


def _then_go(house, catch_up, members):
    try:
        catch_up(members)
    finally:
        house.tell("go")


@pytest.mark.parametrize(("moment", "ahead"), [("receive", False), ("receive", True), ("commit", False)])
def test_a_replica_that_dies_in_an_update_is_left_out_and_the_other_serves_it(house, moment, ahead):
    before = house.version
    house.tell(f"die-{moment}-0")
    assert house.update(ahead=ahead).version == before + 1
    assert house.fleet.states[1] == "serving"
    assert set(house.draw()["weight_version"].tolist()) == {before + 1}
    house.await_restarts()
    house.update()
    assert [state.version for state in house.fleet.weight_state()] == [house.version] * 2


def test_an_engine_that_died_in_a_living_process_is_started_again(house):
    expected = house.draw()
    house.tell("ill-1")
    assert_same_samples(house.draw(), expected)
    assert "the engine is dead" in house.fleet.describe()[1].get("died", "the engine is dead")
    house.await_restarts()
    assert house.fleet.metrics()["rollout/restarts"] == 1
    house.update()
    assert house.fleet.states == ["serving", "serving"]


def test_an_error_of_a_healthy_replica_is_the_callers(house):
    house.tell("angry-1")
    with pytest.raises(RemoteError, match="such rows I do not draw"):
        house.draw()
    assert house.fleet.states == ["serving", "serving"]


def test_an_idle_replica_that_was_killed_is_not_sent_weights(house):
    os.kill(house.fleet.pids[0], signal.SIGKILL)
    house.update()
    assert house.fleet.states[1] == "serving"
    assert house.fleet.weight_state()[-1].version == house.version


def test_all_replicas_lost_at_one_moment_come_back_and_draw_the_same(house):
    expected = house.draw()
    house.tell("die-generate-0", "die-generate-1")
    assert_same_samples(house.draw(), expected)
    assert house.fleet.metrics()["rollout/restarts"] == 2


@pytest.mark.parametrize("stage", ["receive", "commit"])
def test_all_replicas_lost_within_an_update_come_back_and_get_it(house, stage, monkeypatch):
    """Both are known to be gone before it is decided what becomes of the update."""
    abort = house.sync._connection.abort

    def once_both_are_lost(version):
        silent = abort(version)
        until = time.monotonic() + PATIENCE
        while len(house.sync._connection.receivers.lost) < 2 and time.monotonic() < until:
            with suppress(ControllerError):
                house.fleet.call("health")
        return silent

    monkeypatch.setattr(house.sync._connection, "abort", once_both_are_lost)
    house.tell(f"die-{stage}-0", f"die-{stage}-1")
    assert house.update().version == house.version
    house.await_restarts()
    assert house.fleet.metrics()["rollout/restarts"] == 2
    house.update()
    assert house.fleet.states == ["serving", "serving"]
    assert [state.version for state in house.fleet.weight_state()] == [house.version] * 2


def test_all_replicas_lost_before_they_resume_come_back_at_the_version_served(house, caplog):
    house.tell("die-resume-0", "die-resume-1")
    version = house.update().version
    assert set(house.draw()["weight_version"].tolist()) == {version}
    assert "waits for the next weight update" not in caplog.text
    house.await_restarts()


def test_a_replica_that_keeps_failing_to_start_is_left_out_and_the_other_goes_on(tmp_path, caplog):
    """Its death is found by the health checks: nobody calls it."""
    alone = Fleet(tmp_path, restarts=2, health_every=0.1)
    try:
        alone.update()
        expected = alone.draw()
        alone.tell("unfit-1")
        with caplog.at_level(logging.INFO):
            os.kill(alone.fleet.pids[1], signal.SIGKILL)
            alone.await_that(lambda states: states[1] != "serving")
            alone.await_restarts()
        assert alone.fleet.states == ["serving", "out"]
        assert "rollout-1 is left out from now on: it was started again 2 times" in caplog.text
        assert_same_samples(alone.draw(), expected)
        assert alone.update().version == 2
        assert alone.fleet.describe()[1]["state"] == "out"
        assert "the engine does not start" in alone.fleet.describe()[1]["died"]
        alone.tell("unfit-0")
        os.kill(alone.fleet.pids[0], signal.SIGKILL)
        with pytest.raises(WeightSyncError, match=r"(?s)no replica of rollout is left.*replica 0: .*replica 1: "):
            alone.update()
    finally:
        alone.close()


def test_a_replica_started_again_during_the_first_update_waits_until_it_has_weights(cluster, tmp_path):
    opened = Fleet(tmp_path)
    try:
        opened.actor.update(DEMONSTRATIONS, LossSpec("supervised"))  # the model they were started with is not this one
        transfer = opened.sync._connection.begin_transfer
        os.kill(opened.fleet.pids[1], signal.SIGKILL)

        def once_it_is_back(*update):
            opened.await_restarts()
            return transfer(*update)

        opened.sync._connection.begin_transfer = once_it_is_back
        opened.sync.publish(1)
        opened.sync._connection.begin_transfer = transfer
        assert opened.fleet.states == ["serving", "returned"]
        samples = opened.draw()
        assert set(samples["weight_version"].tolist()) == {1}
        opened.sync.publish(2)
        assert [state.version for state in opened.fleet.weight_state()] == [2, 2]
    finally:
        opened.close()


def test_an_idle_death_is_found_when_the_living_are_asked_for(house):
    os.kill(house.fleet.pids[0], signal.SIGKILL)
    assert [member.number for member in house.fleet.members().members] == [1]  # one asked, the other found dead
    house.await_restarts()
    assert [member.number for member in house.fleet.members().members] == [0, 1]
