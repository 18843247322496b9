"""Two vllm replicas in their runtime, trained by fsdp, and killed with SIGKILL while they have work.

That they have it is no matter of luck: their engine cores are stopped first, so that what was asked is not answered.
"""

import contextlib
import itertools
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from enginehouse.controller import ResourcePool, WorkerGroup, WorkerSpec
from enginehouse.data import Batch, Ragged
from enginehouse.engines.model import ModelSpec
from enginehouse.engines.rollout import SamplingParams
from enginehouse.engines.train import LossSpec
from enginehouse.fleet.fleet import RolloutFleet
from enginehouse.fleet.generation import sort_samples
from enginehouse.fleet.replica import ReplicasLost
from enginehouse.plugin import plugins
from enginehouse.roles.workers import RolloutWorker, TrainWorker
from enginehouse.runtimes import choose_runtime
from enginehouse.weights.sync import WeightSync
from enginehouse_testing.models import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MARK = "ENGINEHOUSE_TEST_FLEET"
"""Variable that every process of a fleet's replicas has, those of vLLM included."""

PATIENCE = 240.0
"""Longest anything may take: far more than it does, so that a hang ends."""

GLANCE_SECONDS = 0.2
"""How often is looked at what does not tell: a closer look would take the cores from what is waited for."""

PROMPTS = Batch(
    {
        "prompt_ids": Ragged.from_list([[3, 4, 5], [6, 7], [8], [9, 10, 11, 12], [13]]),
        "prompt_index": torch.arange(5),
    }
)
DEMONSTRATIONS = Batch(
    {
        "input_ids": Ragged.from_list([[3, 4, 5, 6, 7], [8, 9], [10, 11, 12], [5, 5, 5, 5]]),
        "loss_mask": Ragged.from_list(
            [[False, False, True, True, True], [False, True], [False, True, True], [False] + 3 * [True]]
        ),
    }
)
SAMPLES = 2
DRAWN = SamplingParams(n=SAMPLES, max_tokens=12)
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def await_that(holds: Callable[[], Any]) -> None:
    until = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < until
        time.sleep(GLANCE_SECONDS)


class House:
    """A trainer of two ranks and a fleet of two, of which each replica holds one prompt at a time."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.numbers = itertools.count(1)
        self.fleet: RolloutFleet | None = None

    def open(self) -> None:
        runtime = choose_runtime(
            plugins().get("rollout", "vllm", elsewhere=True), os.environ.get("ENGINEHOUSE_TEST_VLLM_RUNTIME", "auto")
        )
        model = ModelSpec(tiny_model(hidden=128))
        options = {"timeout": PATIENCE, "start_timeout": PATIENCE}
        with contextlib.ExitStack() as stack:
            self.threads = ThreadPoolExecutor(1)
            stack.callback(self.threads.shutdown)
            pool = ResourcePool([2])
            stack.callback(pool.shutdown)
            self.actor = WorkerGroup(
                pool, WorkerSpec(TrainWorker, "fsdp", model, {"lr": 0.01}), name="actor", **options
            )
            stack.callback(self.actor.shutdown)
            replica = WorkerSpec(RolloutWorker, "vllm", model, {"kv_cache_mib": 64}).options(
                python=runtime.python, env={**runtime.env, MARK: str(self.directory)}
            )
            self.fleet = fleet = RolloutFleet(replica, 2, samples_in_flight=SAMPLES, **options)
            stack.callback(fleet.shutdown)
            fleet.launch()
            self.sync = WeightSync(
                self.actor, fleet, "shared_memory", bucket_bytes=1 << 20, timeout=PATIENCE, probe=[[3, 4, 5, 6, 7]]
            )
            self.sync.connect()
            stack.callback(self.sync.close)
            fleet.catch_up = self.sync.catch_up
            self._ends = stack.pop_all()

    def close(self) -> None:
        if self.fleet is not None:
            self.fleet = None
            self._ends.close()

    def train(self) -> None:
        self.actor.update(DEMONSTRATIONS, LossSpec("supervised"))
        self.version = self.sync.publish(next(self.numbers)).version

    def draw(self) -> Batch:
        return sort_samples(self.fleet.generate_each(PROMPTS, DRAWN, seed=3))

    @contextlib.contextmanager
    def drawing(self) -> Iterator[tuple[Future[Batch], Callable[[], None]]]:
        """A batch is being drawn, and both replicas have a part of it that they cannot finish before they are let go.

        Yields:
            What is drawn, and what lets go of the replicas.
        """
        cores = self.engine_cores()
        assert len(cores) == 2
        for core in cores:
            core.suspend()

        def let_go() -> None:
            for core in cores:
                with contextlib.suppress(psutil.NoSuchProcess):
                    core.resume()

        try:
            drawn = self.threads.submit(self.draw)
            await_that(lambda: drawn.done() or all(one.running + one.waiting for one in self.fleet.call("health")))
            assert not drawn.done()
            yield drawn, let_go
        finally:
            let_go()

    def processes(self) -> list[psutil.Process]:
        """All processes of the replicas, also of those that were killed or are being started; none Ray spares."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == str(self.directory) and process.name() != "ray::IDLE":
                    found.append(process)
        return found

    def engine_cores(self) -> list[psutil.Process]:
        """vLLM's processes, of replicas that live."""
        found = self.processes()
        above = {process.pid for process in found}
        cores = []
        for process in found:
            with contextlib.suppress(psutil.Error):
                if process.ppid() in above and not any("resource_tracker" in word for word in process.cmdline()):
                    cores.append(process)
        return cores


@pytest.fixture(scope="module")
def shared(ray_cluster, tmp_path_factory):
    house = House(tmp_path_factory.mktemp("fleet"))
    yield house
    house.close()


@pytest.fixture
def house(shared):
    """Both replicas serve a version that was trained."""
    if shared.fleet is None:
        shared.open()
    await_that(lambda: "lost" not in shared.fleet.states)
    shared.train()
    assert shared.fleet.states == ["serving", "serving"]
    shared.draw()
    shared.fleet.metrics()
    return shared


def assert_same_samples(drawn: Batch, expected: Batch) -> None:
    """Every row once and in its place, of the same version; the sampled tokens too, since each row was drawn alone."""
    for name in ("input_ids", "loss_mask"):
        assert torch.equal(drawn[name].offsets, expected[name].offsets)
        assert torch.equal(drawn[name].values, expected[name].values), name
    assert torch.allclose(drawn["rollout_logprobs"].values, expected["rollout_logprobs"].values, atol=1e-5)
    assert torch.equal(drawn["weight_version"], expected["weight_version"])


def continued(path: str | Path) -> list[list[int]]:
    """The prompts, and how the model at `path` goes on with them, as transformers computes it."""
    model = AutoModelForCausalLM.from_pretrained(path)
    rows = []
    for number in range(len(PROMPTS)):
        tokens = PROMPTS["prompt_ids"][number][None]
        for _ in range(GREEDY.max_tokens):
            with torch.no_grad():
                best = model(tokens).logits[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, best], dim=1)
        rows.append(tokens[0].tolist())
    return rows


@pytest.mark.exhaustive
def test_a_replica_killed_with_work_loses_no_sample_and_returns_at_the_version_served(house, tmp_path):
    fleet, catch_up = house.fleet, house.sync.catch_up
    expected = house.draw()
    assert len(expected) == len(PROMPTS) * SAMPLES
    pids, cores = fleet.pids, house.engine_cores()
    with house.drawing() as (drawn, let_go):

        def then_let_go(members):
            catch_up(members)
            let_go()

        fleet.catch_up = then_let_go  # the other has its row until the killed one is back
        os.kill(pids[1], signal.SIGKILL)
        samples = drawn.result(PATIENCE)
    fleet.catch_up = catch_up
    assert_same_samples(samples, expected)
    assert fleet.states == ["serving", "serving"]
    assert fleet.pids[0] == pids[0]
    assert fleet.pids[1] != pids[1]
    figures = fleet.metrics()
    assert (figures["rollout/restarts"], figures["rollout/retries"]) == (1, 1)
    assert psutil.wait_procs([core for core in cores if core not in house.engine_cores()], PATIENCE)[1] == []

    states = fleet.weight_state()
    assert states[0] == states[1]
    assert states[1].version == house.version
    house.actor.export_hf(str(tmp_path))
    answers = sort_samples(fleet.generate_each(PROMPTS, GREEDY))  # each replica has a row of it from the start
    assert [answers["input_ids"][row].tolist() for row in range(len(PROMPTS))] == continued(tmp_path)
    assert continued(tmp_path) != continued(tiny_model(hidden=128))
    house.train()  # the next version goes to both again
    assert [state.version for state in fleet.weight_state()] == [house.version] * 2


@pytest.mark.exhaustive
def test_both_killed_is_one_error_that_names_both_deaths_and_nothing_is_left_of_them(house):
    fleet, pids, cores = house.fleet, house.fleet.pids, house.engine_cores()
    fleet.catch_up = None  # else one might be back before the other's death is seen
    with house.drawing() as (drawn, _):
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(ReplicasLost) as caught:
            drawn.result(PATIENCE)
    for number, pid in enumerate(pids):
        death = rf"replica {number}: rollout-{number} rank 0 \(node \S+, pid {pid}\): the process died during '\w+'"
        assert re.search(death, str(caught.value)), caught.value
    assert psutil.wait_procs(cores, PATIENCE)[1] == []
    await_that(house.engine_cores)  # they are being started again: the end comes then
    house.close()
    await_that(lambda: not house.processes())
