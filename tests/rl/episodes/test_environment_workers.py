"""Tasks that workers play give what the controller's own player gives, in any order of things."""

import asyncio
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginehouse.controller import DistributedBatch, RemoteError, WorkerGroup, WorkerSpec
from enginehouse.controller.errors import ControllerError, GroupClosed, WorkerDied
from enginehouse.engines.environment import Episode, Segment, Task
from enginehouse.engines.rollout import Completion, GenerateResult, SamplingParams
from enginehouse.fleet.fleet import RESTARTS
from enginehouse.fleet.replica import ReplicasLost
from enginehouse.fleet.request_batches import AnswerBatch
from enginehouse.fleet.router import Flight, PoisonousRows
from enginehouse_rewards.program import RowScore
from enginehouse_rl.episodes import worker_messages
from enginehouse_rl.episodes.environment_worker import EnvironmentWorker
from enginehouse_rl.episodes.failures import MOST_RETRIES, EpisodeFailed
from enginehouse_rl.episodes.policies import FleetPolicy
from enginehouse_rl.episodes.runner import EpisodeRunner, TaskKind
from enginehouse_rl.episodes.samples import sample_rows
from enginehouse_rl.episodes.scored_group import collect_rows
from enginehouse_rl.episodes.worker_messages import EpisodeJob, WorkerOrders
from enginehouse_rl.episodes.worker_pool import EnvironmentWorkerPool, WorkersLost

SAMPLES = 2
KINDS = {"training": TaskKind(SamplingParams(n=SAMPLES), 4, filtered=True)}
TASKS = [Task(serial, [1, 10 + serial], f"prompt {serial} \ud800", None, {}) for serial in range(5)]


def named(task):
    return f"task-{task.serial}", 100 * task.serial


class Turns:
    """Asks twice, one after another; the reward is a sum of what was drawn. Of task 3 nothing is kept. The episodes of
    odd tasks have two rows."""

    async def run(self, task, policy, context):
        first = await policy.samples(task.prompt_ids, SAMPLES)
        second = [await policy.generate([*task.prompt_ids, *one.token_ids]) for one in first]
        rewards = [float(sum(one.token_ids) + sum(two.token_ids)) for one, two in zip(first, second, strict=True)]
        scores = await context.score([{"reward": reward} for reward in rewards])
        return [self.episode(task, *turns) for turns in zip(first, second, scores, strict=True)]

    def episode(self, task, one, two, score):
        drawn = [int(token) for token in (*one.token_ids, *two.token_ids)]
        logprobs = [*one.logprobs, *two.logprobs]
        given, versions = len(task.prompt_ids), [one.first_version] * len(drawn)
        tokens = [*task.prompt_ids, *drawn]
        mask = [False] * given + [True] * len(drawn)
        logprobs, versions = [0.0] * given + logprobs, [0] * given + versions
        earlier = []
        if task.serial % 2:
            end = given + len(one.token_ids)
            earlier = [Segment(tokens[:end], mask[:end], logprobs[:end], versions[:end], task.prompt, "at first")]
            mask[:end], logprobs[:end] = [False] * end, [0.0] * end
        return Episode(tokens, mask, logprobs, versions, score, task.prompt, f"said {drawn}", earlier=earlier)


async def score(rows):
    return [RowScore(row["reward"], {"half": row["reward"] / 2}) for row in rows]


def player(policy_of, **failing):
    return EpisodeRunner(Turns(), policy_of, score, SAMPLES, keep=lambda group: group.task.serial != 3, **failing)


class Closed:
    """Stands for processes of a reward, of which there are none."""

    def close(self):
        pass


class Quick(EnvironmentWorker):
    """A worker without a model's tokenizer and without processes of a reward."""

    def __init__(self, call_seconds=600.0, **failing):
        self._rewards, self._failing = Closed(), failing
        self._begin(KINDS, call_seconds)

    def _make_runner(self, kind):
        return player(partial(self._make_policy, kind), **self._failing)


def completions(request):
    """What is drawn depends on the request alone."""
    numbers = np.random.default_rng([request.sampling.seed, len(request.prompt_ids)])
    lengths = numbers.integers(1, 4, request.sampling.n)
    drawn = [numbers.integers(3, 9, length).tolist() for length in lengths]
    return tuple(Completion(tokens, [-0.5] * len(tokens), "stop", 7, 7) for tokens in drawn)


class Local:
    async def generate(self, request):
        return GenerateResult(request.id, completions(request))


class Fleet:
    """Draws when it is told to; what it drew lies apart."""

    def __init__(self):
        self.flights, self.forgotten, self.names = [], [], []

    def submit(self, request, ended):
        self.flights.append(flight := Flight(len(self.flights), request, ended))
        self.names.append(request.id)
        return flight

    def forget(self, flight):
        self.forgotten.append(flight.request.id)
        self.flights.remove(flight)

    def draw(self, places):
        """Answer these of the requests under way together."""
        flights = [self.flights[place] for place in sorted(places)]
        results = [GenerateResult(str(number), completions(one.request)) for number, one in enumerate(flights)]
        light, rows = AnswerBatch.pack(results, {}).split()
        answer = replace(light, apart=DistributedBatch.of([rows]))
        for place, flight in enumerate(flights):
            self.flights.remove(flight)
            flight.answer = answer, place
            flight.ended(flight)

    def fail(self, error):
        for flight in self.flights:
            flight.error = error
            flight.ended(flight)
        self.flights.clear()


async def until(holds):
    async with asyncio.timeout(10.0):
        while not holds():
            await asyncio.sleep(0.001)


def staged(test, **how):
    """Run a test with a worker in this process."""

    async def run():
        with WorkerGroup(None, WorkerSpec(Quick, **how), name="environment", launcher="inline") as group:
            workers, fleet = EnvironmentWorkerPool([group], KINDS), Fleet()
            await test(workers.make_runner("training", fleet, named), fleet)
            workers.closed = True

    asyncio.run(run())


def expected():
    """What the controller's own player makes of the tasks."""

    async def play():
        local = player(lambda task: FleetPolicy(Local(), None, KINDS["training"].sampling, *named(task)))
        return [await local.play_group(task) for task in TASKS]

    return asyncio.run(play())


@given(st.randoms(use_true_random=False))
@settings(max_examples=15, deadline=None)
def test_whatever_ends_when_the_groups_are_those_of_the_controllers_own_player(random):
    scoring = []

    async def test(player, fleet):
        playing = [
            asyncio.ensure_future(player.play_group(task, partial(scoring.append, task.serial)))
            for task in random.sample(TASKS, len(TASKS))
        ]
        while not all(one.done() for one in playing):
            await until(lambda: fleet.flights or all(one.done() for one in playing))
            if fleet.flights:
                count = random.randint(1, len(fleet.flights))
                fleet.draw(random.sample(range(len(fleet.flights)), count))
        found.extend(sorted((one.result() for one in playing), key=lambda played: played.task.serial))

    found, right = [], expected()
    staged(test)
    assert sorted(scoring) == [task.serial for task in TASKS]
    assert [(one.task, one.rewards, one.kept) for one in found] == [(one.task, one.rewards, one.kept) for one in right]
    kept, wanted = [one for one in found if one.kept], [one for one in right if one.kept]
    assert [one.task.serial for one in kept] == [0, 1, 2, 4]
    rows, own = collect_rows(kept), collect_rows(wanted)
    assert own["episode"].tolist() == [0, 1, 2, 2, 3, 3, 4, 5, 6, 7]
    written, wanted = list(sample_rows(rows)), list(sample_rows(own))
    turns = [[[turn["tokens"] for turn in one.pop("turns", ())] for one in of] for of in (written, wanted)]  # no times
    assert turns[0] == turns[1]
    assert written == wanted
    numbers = [name for name in own.columns if not own.is_objects(name)]
    assert rows.fetch(numbers).equal(own.fetch(numbers))


def test_requests_of_a_task_that_nobody_waits_for_are_forgotten():
    async def test(player, fleet):
        playing = [asyncio.ensure_future(player.play_group(task)) for task in TASKS[:2]]
        await until(lambda: len(fleet.flights) == 2)
        playing[0].cancel()
        await until(lambda: fleet.forgotten)
        assert fleet.forgotten == ["task-0-0"]
        while not playing[1].done():
            await until(lambda: fleet.flights or playing[1].done())
            fleet.draw(range(len(fleet.flights)))
        assert len(playing[1].result().rewards) == SAMPLES

    staged(test)


def test_what_ends_a_run_in_a_worker_ends_it_here_and_says_where():
    async def test(player, fleet):
        playing = asyncio.ensure_future(player.play_group(TASKS[0]))
        await until(lambda: fleet.flights)
        fleet.fail(ReplicasLost("no replica of rollout is left"))
        with pytest.raises(RemoteError, match=r"environment.*no replica of rollout is left"):
            await playing

    staged(test)


def test_a_worker_with_nothing_to_say_says_that_before_its_call_is_late(monkeypatch):
    async def test(player, fleet):
        playing = asyncio.ensure_future(player.play_group(TASKS[0]))
        await until(lambda: fleet.flights)
        calls = []
        monkeypatch.setattr(EnvironmentWorkerPool, "_take_report", lambda *report: calls.append(report))
        await until(lambda: len(calls) > 2)
        playing.cancel()

    staged(test, call_seconds=0.02)


async def test_a_task_given_up_is_not_played_though_that_comes_first():
    worker = Quick()
    plays = [EpisodeJob(0, "training", TASKS[0], *named(TASKS[0]))]
    calls = [
        asyncio.ensure_future(worker.exchange(one))
        for one in (WorkerOrders(1, cancelled=[0]), WorkerOrders(0, plays=plays), WorkerOrders(2))
    ]
    async with asyncio.timeout(5.0):
        reports = [report for report, _ in await asyncio.gather(*calls)]
        reports += [(await worker.exchange(WorkerOrders(3)))[0]]
    assert not any(report.requests for report in reports)
    worker.shutdown()


def test_failures_that_a_run_goes_on_after_are_told_here_once_a_step(caplog):
    async def test(player, fleet):
        for task in (*TASKS[:2], None, TASKS[2]):
            if task is None:
                assert player.metrics()["failed_replica"] == 2 * SAMPLES
                continue
            playing = asyncio.ensure_future(player.play_group(task))
            await until(lambda: fleet.flights)
            fleet.fail(PoisonousRows("its replicas died"))
            assert (await playing).rewards == ()

    staged(test, on_failure="drop")
    told = [record.getMessage() for record in caplog.records if record.name == worker_messages.__name__]
    assert [line.split(" (")[0] for line in told] == ["task 0", "task 2"]
    assert all("its replicas died" in line for line in told)


class Breaking:
    """A group of one worker in this process that a test breaks; a restart makes another, or fails."""

    def __init__(self, name, **how):
        self.name, self.how, self.restarts, self.fails, self.lost = name, how, 0, False, None
        self.group, self.broken, self.ended = self.made(), None, False

    def made(self):
        return WorkerGroup(None, WorkerSpec(Quick, **self.how), name=self.name, launcher="inline")

    def execute_rank_async(self, *call):
        if self.broken:
            raise GroupClosed(self.broken, self.broken)
        self.lost = asyncio.get_running_loop().create_future()
        return self.either(asyncio.ensure_future(self.awaited(self.group.execute_rank_async(*call))), self.lost)

    async def awaited(self, call):
        return await call

    async def either(self, call, lost):
        await asyncio.wait((call, lost), return_when=asyncio.FIRST_COMPLETED)
        return lost.result() if lost.done() else call.result()

    def kill(self):
        self.broken = f"{self.name} rank 0 (node n, pid 7): the process died during 'exchange'"
        self.lost.set_exception(WorkerDied(self.broken))

    def restart(self):
        self.restarts += 1
        if self.fails:
            raise ControllerError("no room")
        self.group.shutdown()
        self.group, self.broken = self.made(), None
        if self.ended:  # meanwhile
            self.group.shutdown()

    def shutdown(self, timeout=None):
        self.ended = True
        self.group.shutdown()


def with_workers(test, on_failure, count=2):
    async def run():
        groups, fleet = [Breaking(f"environment-{number}") for number in range(count)], Fleet()
        workers = EnvironmentWorkerPool(groups, KINDS, on_failure)
        try:
            await test(workers.make_runner("training", fleet, named), fleet, groups)
        finally:
            workers.shutdown()

    asyncio.run(run())


async def drawn_to_the_end(playing, fleet):
    while not all(one.done() for one in playing):
        await until(lambda: fleet.flights or all(one.done() for one in playing))
        if fleet.flights:
            fleet.draw(range(len(fleet.flights)))
    return await asyncio.gather(*playing, return_exceptions=True)


@pytest.mark.parametrize("on_failure", ["fail", "retry", "drop", "drop_group", "mask"])
def test_what_a_lost_worker_had_under_way_follows_the_policy_and_the_others_are_as_ever(on_failure):
    """Tasks 0 and 2 are played by the first worker, 1 and 4 by the second."""
    right = expected()

    async def test(player, fleet, groups):
        playing = [asyncio.ensure_future(player.play_group(TASKS[serial])) for serial in (0, 1, 2, 4)]
        await until(lambda: len(fleet.flights) == 4)
        groups[0].kill()
        await until(lambda: {"task-0-0", "task-2-0"} <= set(fleet.forgotten))
        found = await drawn_to_the_end(playing, fleet)
        alike = (0, 1, 2, 3) if on_failure == "retry" else (1, 3)
        for place in alike:
            mine, own = (collect_rows([one]).fetch() for one in (found[place], right[(0, 1, 2, 4)[place]]))
            assert list(sample_rows(mine)) == list(sample_rows(own))
        metrics = player.metrics()
        assert metrics["failed_worker"] == 2 * SAMPLES
        if on_failure == "fail":
            assert all(isinstance(found[place], EpisodeFailed) for place in (0, 2))
            said = "task 0 .*environment-0 rank 0 .node n, pid 7.: the process died"
            assert re.match(said, str(found[0]), re.DOTALL)
            assert (groups[0].restarts, metrics["worker_restarts"]) == (0, 0)
            return
        if on_failure != "retry":
            assert all((found[place].kept, found[place].rewards) == (False, ()) for place in (0, 2))
            assert "environment-0" in str(player.last_error)
        await until(lambda: groups[0].restarts == 1 and not groups[0].broken)
        assert metrics["worker_restarts"] == 1
        (again,) = await drawn_to_the_end([asyncio.ensure_future(player.play_group(TASKS[0]))], fleet)
        assert again.rewards == right[0].rewards

    with_workers(test, on_failure)


def test_retry_gives_up_a_task_that_every_worker_dies_of():
    async def test(player, fleet, groups):
        playing = asyncio.ensure_future(player.play_group(TASKS[0]))
        for number in range(1 + MOST_RETRIES):
            await until(lambda number=number: len(fleet.names) == number + 1)
            next(one for one in groups if one.lost is not None and not one.lost.done() and not one.broken).kill()
        with pytest.raises(EpisodeFailed, match=r"task 0 .* failed 3 times, the last time: the environment worker"):
            await playing

    with_workers(test, "retry", count=1)


def test_a_worker_that_does_not_come_back_is_left_out_and_without_one_the_run_ends():
    async def test(player, fleet, groups):
        for group in groups:
            group.fails = True
        first = [asyncio.ensure_future(player.play_group(task)) for task in TASKS[:2]]
        await until(lambda: len(fleet.flights) == 2)
        groups[0].kill()
        await until(lambda: groups[0].restarts == RESTARTS)
        second = asyncio.ensure_future(player.play_group(TASKS[2]))
        found = await drawn_to_the_end([*first, second], fleet)
        assert [one.kept for one in found] == [False, True, True]
        third = asyncio.ensure_future(player.play_group(TASKS[4]))
        await until(lambda: fleet.flights)
        groups[1].kill()
        assert not (await third).kept
        with pytest.raises(WorkersLost, match=r"started again 3 times .* at last: its restart failed: no room"):
            await player.play_group(TASKS[0])

    with_workers(test, "drop")


def test_a_worker_that_is_not_started_again_leaves_nobody_waiting():
    """As of a validation beside training, whose failure is heard of only after the next step."""

    async def test(player, fleet, groups):
        first = asyncio.ensure_future(player.play_group(TASKS[0]))
        await until(lambda: fleet.flights)
        groups[0].kill()
        with pytest.raises(EpisodeFailed):
            await first
        async with asyncio.timeout(5.0):
            with pytest.raises(WorkersLost, match=r"(?s)no environment worker is left .*the process died"):
                await player.play_group(TASKS[1])

    with_workers(test, "fail", count=1)
