"""Thousands of episodes at once on one event loop: none waits for another, and nothing is kept of those that ended.

A fleet in this process, whose engine answers at once. Where one waited for another here, it would wait for ever, until
its deadline fails it.
"""

import asyncio
import gc
import logging
import tracemalloc

import pytest

from enginehouse.controller import WorkerSpec, register
from enginehouse.controller.launchers.event_loop import event_loop
from enginehouse.engines.environment import Scored, Task
from enginehouse.engines.model import ModelSpec
from enginehouse.engines.rollout import Completion, GenerateResult, SamplingParams
from enginehouse.engines.transcript import Transcript
from enginehouse.fleet.fleet import RolloutFleet
from enginehouse.roles.workers import RolloutWorker
from enginehouse_rl.episodes.checks import EpisodeChecks
from enginehouse_rl.episodes.feed import RunningTasks
from enginehouse_rl.episodes.policies import FleetPolicy
from enginehouse_rl.episodes.runner import EpisodeRunner
from enginehouse_testing.models import tiny_model

SAMPLES = 8
SAMPLING = SamplingParams(max_tokens=3, n=SAMPLES)
FOR_EVER_SECONDS = 60.0


class AtOnce(RolloutWorker):
    @register
    async def launch(self):
        name = await super().launch()

        async def answered(request):
            drawn = Completion([request.sampling.seed % 7 + 3] * 3, [-0.5] * 3, "length", 0, 0)
            return GenerateResult(request.id, (drawn,) * request.sampling.n)

        self.engine.generate = answered
        return name


@pytest.fixture(scope="module")
def fleet():
    opened = RolloutFleet(WorkerSpec(AtOnce, "torch", ModelSpec(tiny_model()), {}), 1, launcher="inline")
    opened.launch()
    yield opened
    opened.shutdown()


class UsesTool:
    """Two or more turns; between them `tool` is awaited, with the numbers of task and episode."""

    def __init__(self, tool, turns=2):
        self.tool, self.turns = tool, turns

    async def run(self, task, policy, context):
        async def play(number, policy):
            said = Transcript(task.prompt_ids)
            for turn in range(self.turns):
                if turn:
                    await self.tool(task.serial, number)
                    said.add_given([5, 6])
                said.add_drawn(await policy.generate(said.tokens))
            return said.episode(Scored(0.0))

        return await context.each(play)


def play(loop, fleet, environment, tasks, **how):
    """Numbers of the tasks in the order in which they ended."""
    checks = EpisodeChecks("uses a tool", 64)
    player = EpisodeRunner(
        environment,
        lambda task: FleetPolicy(fleet, None, SAMPLING, f"task-{task.serial}", task.serial),
        None,
        SAMPLES,
        seconds=FOR_EVER_SECONDS,
        checks=checks,
        **how,
    )
    asked = [Task(serial, [1, serial % 50], "", None, {}) for serial in range(tasks)]
    return [group.task.serial for group in RunningTasks(loop, asked, player.play_group)]


@pytest.mark.slow
def test_two_thousand_episodes_are_in_their_tools_at_once(fleet):
    count, waiting = 2000, []

    async def tool(task, number):  # answers nobody before all have asked
        waiting.append(asyncio.get_running_loop().create_future())
        if len(waiting) == count:
            for one in waiting:
                one.set_result(None)
        await waiting[-1]

    with event_loop() as loop:
        assert len(play(loop, fleet, UsesTool(tool), count // SAMPLES)) == count // SAMPLES


def test_slow_tools_hold_up_no_other_episode(fleet):
    tasks, asked, others_are_over = 20, 0, asyncio.Event()

    async def tool(task, number):  # answers every second task's episodes once the others will not ask any more
        nonlocal asked
        if task % 2 == 0:
            await others_are_over.wait()
            return
        asked += 1
        if asked == 2 * (tasks // 2) * SAMPLES:
            others_are_over.set()

    with event_loop() as loop:
        ended = play(loop, fleet, UsesTool(tool, turns=3), tasks)
    assert [task % 2 for task in ended] == [1] * (tasks // 2) + [0] * (tasks // 2)


@pytest.mark.slow
def test_nothing_is_kept_of_episodes_that_ended(fleet, caplog):
    caplog.set_level(logging.ERROR)  # what is logged is kept by the test
    tasks = 12

    async def tool(task, number):
        if (task, number) == (1, 1):
            raise RuntimeError("out of order")

    def kept(loop):
        play(loop, fleet, UsesTool(tool, turns=4), tasks, on_failure="drop")
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    with event_loop() as loop:
        tracemalloc.start()
        try:
            for _ in range(2):
                before = kept(loop)
            after = kept(loop)
        finally:
            tracemalloc.stop()
    assert (after - before) / (tasks * SAMPLES) < 100, "bytes an episode: of each turn at least as many would be left"
