"""Weight updates and rollouts between real processes, over Ray."""

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from enginehouse.controller import StillRunning, start_ray
from enginehouse.engines.rollout import SamplingParams
from enginehouse.engines.train import LossSpec
from enginehouse.engines.weights import WeightSyncError
from enginehouse.fleet.fleet import RolloutFleet
from enginehouse.fleet.generation import sort_samples
from enginehouse.weights.transports.shared_segment import SharedSegment

from . import faults
from .roles_for_tests import DEMONSTRATIONS, PROMPTS, SECONDS, dealt, logprobs, open_house

pytestmark = pytest.mark.slow
TESTS = Path(__file__).parents[2]
ENV = {"PYTHONPATH": os.pathsep.join(map(str, (TESTS, TESTS / "core"))), "OMP_NUM_THREADS": "1"}
SAMPLING = SamplingParams(n=2, max_tokens=6)


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with start_ray() as started:
        yield started


@pytest.fixture(scope="module")
def separate():
    """One trainer and two replicas, each in a process of its own; replica 1 fails at two updates, in two ways."""
    with open_house(
        f"{faults.__name__}:CorruptingSharedMemory",
        rollout=faults.UnfinishedRolloutWorker,
        launcher="ray",
        processes=1,
        replicas=2,
        env=ENV,
    ) as house:
        yield house


@pytest.fixture
def segments(monkeypatch):
    """The shared memory of the connections that a test makes; other tests may have some at the same time."""
    found = []
    prepare = faults.CorruptingSharedMemory.prepare

    def noted(self, *arguments):
        plan = prepare(self, *arguments)
        found.append(Path("/dev/shm", SharedSegment.name_of(plan.session)))
        return plan

    monkeypatch.setattr(faults.CorruptingSharedMemory, "prepare", noted)
    return found


@pytest.mark.essential
def test_two_replicas_serve_what_was_sent_and_a_corrupted_bucket_at_one_stops_both(separate, segments):
    sync = separate.connect()
    separate.train()
    assert sync.publish(1).effect < 1e-4
    states, answers = separate.rollout.weight_state(), separate.answers()
    assert states[0] == states[1]
    separate.train()
    with pytest.raises(WeightSyncError, match=f"replica 1 .*changed: {faults.PARAMETER}") as caught:
        sync.publish(faults.VERSION)
    assert caught.value.parameters == (faults.PARAMETER,)
    assert separate.rollout.weight_state() == states
    assert separate.answers() == answers
    assert (report := sync.publish(3, "keep")).version == 3
    assert report.interrupted_tokens == 2 * 100
    assert separate.versions() == [3, 3]
    assert len(segments) == 1
    assert not segments[0].exists()


def test_samples_do_not_depend_on_the_number_of_replicas(separate, monkeypatch):
    with open_house("inproc") as one:
        alone = one.rollout.generate(PROMPTS, SAMPLING, seed=3)
    with open_house("inproc", train=faults.DriftingTrainWorker, launcher="ray", processes=2, env=ENV) as two:
        # colocated: each of two trainers sends to the replica in its process
        shared = two.rollout.generate(PROMPTS, SAMPLING, seed=3)
        assert torch.equal(shared["input_ids"].values, alone["input_ids"].values)
        ranks, call = [], two.rollout.execute_rank_async
        monkeypatch.setattr(
            two.rollout, "execute_rank_async", lambda rank, *args: ranks.append(rank) or call(rank, *args)
        )
        fleet = RolloutFleet.from_group(two.rollout)
        drawn = sort_samples(fleet.generate_each(PROMPTS, SAMPLING, seed=3))
        assert torch.equal(drawn["input_ids"].values, alone["input_ids"].values)
        assert set(ranks) == {0, 1}
        fleet.shutdown()
        uneven = DEMONSTRATIONS.slice(0, 3)  # two rows at one rank, one at the other: three minibatches for both
        apart = dealt(3, batch=uneven)
        assert two.actor.update(apart, LossSpec("supervised"), minibatches=3)["optimizer_steps"] == 3
        with open_house("inproc") as one:
            one.actor.update(apart, LossSpec("supervised"), minibatches=3)
            assert torch.allclose(logprobs(two.actor), logprobs(one.actor), atol=1e-5)  # the same mini-batches
        sync = two.connect()
        assert sync.publish(1).effect < 1e-4
        states = two.rollout.weight_state()
        assert states[0] == states[1]
        assert [state.version for state in states] == [1, 1]
        two.actor.drift()
        said = f"training rank 1, whose weights differ from those of a training rank .*{faults.PARAMETER}"
        with pytest.raises(WeightSyncError, match=said):
            sync.publish(2)
        assert two.rollout.weight_state() == states


def test_a_version_that_one_replica_does_not_switch_to_is_answered_with_by_none(separate):
    """The requests are more than a worker runs async calls at once: the update goes through all the same."""
    sync = separate.connect(effect_check_every=0)
    sync.publish(4)
    separate.train()
    with pytest.raises(WeightSyncError, match=r"update 5 failed at rollout rank 1.*cannot switch"):
        sync.publish(faults.UNFINISHED_VERSION)
    requests = [separate.rollout.call("generate", PROMPTS, SAMPLING, blocking=False) for _ in range(40)]
    with pytest.raises(StillRunning):
        requests[0].result(1.0)
    assert [state.version for state in separate.rollout.weight_state()] == [5, 4]
    assert sync.publish(6).version == 6
    for request in requests:
        assert set(request.result()["weight_version"].tolist()) <= {4, 6}


def test_an_update_begun_behind_the_trainers_call_brings_what_comes_of_it(separate):
    """Were it sent before, replicas would compute as before: that is what the effect check is for."""
    sync = separate.connect(effect_check_every=1)
    sync.publish(7)
    for version in (8, 9):
        separate.answers()
        before = separate.rollout.weight_state()
        training = separate.actor.call("update", DEMONSTRATIONS, LossSpec("supervised"), blocking=False)
        sync.begin(version)
        training.result()
        assert sync.publish(version).effect < 1e-4
        assert separate.rollout.weight_state()[0].checksums != before[0].checksums
        assert separate.versions() == [version, version]


def test_an_update_begun_and_given_up_leaves_the_old_version_served_and_the_trainer_free(separate):
    sync = separate.connect()
    sync.publish(10)
    separate.answers()
    states = separate.rollout.weight_state()
    training = separate.actor.call("update", DEMONSTRATIONS, LossSpec("supervised"), blocking=False)
    sync.begin(11)
    sync.give_up()
    training.result()
    separate.train()
    assert separate.rollout.weight_state() == states
    assert len(separate.answers()) == len(PROMPTS)
    assert sync.publish(11).version == 11
    assert separate.versions() == [11, 11]


@pytest.mark.parametrize(("begun", "version"), [(13, 13), (15, 16)], ids=["late", "another version"])
def test_what_was_begun_and_is_of_no_use_is_sent_anew(separate, segments, monkeypatch, begun, version):
    sync = separate.connect()
    sync.publish(begun - 1)
    separate.answers()
    sync.begin(begun)
    if begun == version:
        monkeypatch.setattr("enginehouse.weights.sync.time", SimpleNamespace(
            monotonic=lambda: time.monotonic() + SECONDS / 2, perf_counter=time.perf_counter
        ))  # fmt: skip
    separate.train()
    assert sync.publish(version).version == version
    assert len(segments) == 2  # a connection each
    assert separate.versions() == [version, version]


def test_inproc_between_processes_is_refused_when_it_is_connected(separate):
    separate.transport, transport = "inproc", separate.transport
    try:
        with pytest.raises(WeightSyncError, match=r"needs rollout replica \d and training rank \d in one process"):
            separate.connect()
    finally:
        separate.transport = transport


@pytest.mark.fault(
    area="weights",
    what="the actor's process is stopped (SIGSTOP) during a weight update",
    happens="the run ends and names the actor's rank, node and process",
    exit_code="1",
    kept="as after any failed run",
    noticed="after `cluster.call_timeout_seconds`, a quarter of it (at most 15 s), and some seconds",
)
def test_a_trainer_that_is_stopped_is_the_one_that_a_failed_update_names():
    """It is the replica that fails first: it was told to wait less long than the controller does."""
    with open_house("shared_memory", launcher="ray", processes=1, replicas=1, env=ENV) as house:
        sync = house.connect(timeout=2.0)
        sync.publish(1)
        os.kill(house.actor.pids[0], signal.SIGSTOP)
        with pytest.raises(WeightSyncError, match=r"(?s)update 2 failed at actor rank 0 .*is stopped"):
            sync.publish(2)


def test_a_killed_replica_ends_the_update_with_its_name(separate):
    """Last: it breaks the group."""
    sync = separate.connect()
    os.kill(separate.rollout.pids[1], signal.SIGKILL)
    with pytest.raises(WeightSyncError, match="rollout rank 1"):
        sync.publish(20)
    assert len(separate.actor.weight_metadata()) > 0  # the trainer is still there
