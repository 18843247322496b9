"""Whatever an environment does to one task, the groups of the others are what they are without it."""

import asyncio
import functools
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hostile_environments import Hostile

from enginehouse.controller.launchers.event_loop import event_loop
from enginehouse.data.columns import FOR_PEOPLE
from enginehouse.engines.environment import Scored, Task
from enginehouse.engines.rollout import Completion, GenerateResult, SamplingParams
from enginehouse.errors import EnginehouseError
from enginehouse_rl.episodes.checks import EpisodeChecks, MalformedEpisode
from enginehouse_rl.episodes.failures import EpisodeFailed
from enginehouse_rl.episodes.policies import FleetPolicy
from enginehouse_rl.episodes.runner import EpisodeRunner
from enginehouse_rl.episodes.scored_group import collect_rows
from enginehouse_rl.episodes.traces import EpisodeActivity
from enginehouse_rl.episodes.watchdog import LoopWatchdog

SAMPLES, LONGEST, SECONDS = 3, 50, 0.5
HOSTILE = 1
CHECKS = EpisodeChecks("hostile", 100, LONGEST)
POLICIES = ("fail", "retry", "drop", "drop_group", "mask")
FAIL = ["raises", "hangs", "ignores_cancelling", "never_stops_asking", "asks_with_a_huge_result"]
END = [
    ("exits", EpisodeFailed, "SystemExit"),
    ("returns_texts", MalformedEpisode, "its tokens must hold one token id per token"),
    ("returns_a_huge_result", MalformedEpisode, "read at most 50"),
    ("edits_history", MalformedEpisode, "the policy did not generate it"),
    ("returns_no_number", MalformedEpisode, "its reward is nan"),
    ("loses_one", MalformedEpisode, "2 episode.s., but must return 3"),
    ("changes_its_task", MalformedEpisode, "it changed the task"),
    ("adds_to_its_prompt", MalformedEpisode, "it changed the task"),
]
COST_NOTHING = ["leaves_tasks_behind", "leaves_an_exit_behind", "leaves_threads_behind"]


class Fleet:
    """What is drawn depends on the request alone; one that is too long is refused."""

    async def generate(self, request):
        await asyncio.sleep(0)
        if len(request.prompt_ids) > LONGEST:
            raise EnginehouseError(f"the prompt has {len(request.prompt_ids)} tokens, more than {LONGEST}")
        numbers = np.random.default_rng([request.sampling.seed, len(request.prompt_ids)])
        tokens = numbers.integers(3, 90, numbers.integers(1, 4)).tolist()
        return GenerateResult(request.id, (Completion(tokens, [-0.5] * len(tokens), "stop", 7, 7),))


def tasks(hostile):
    columns = [{"hostile": hostile and serial == HOSTILE, "seen": []} for serial in range(4)]
    return [Task(serial, [1, 10 + serial], f"prompt {serial}", None, one) for serial, one in enumerate(columns)]


def play(way, on_failure="fail", hostile=True):
    """What comes of four tasks that are played at once, one of them hostile; and its player."""
    environment, activity = Hostile(way), EpisodeActivity()

    def policy_of(task):
        return FleetPolicy(Fleet(), None, SamplingParams(), f"task-{task.serial}", 100 + task.serial)

    async def played():
        player = EpisodeRunner(
            environment, policy_of, None, SAMPLES, on_failure, SECONDS, checks=CHECKS, activity=activity
        )
        return await asyncio.gather(
            *(player.play_group(task) for task in tasks(hostile)), return_exceptions=True
        ), player

    with event_loop() as loop:
        groups, player = loop.submit(played()).result(30)
        environment.ended.set()
    assert (
        activity == EpisodeActivity(0, 0, 0)
        or isinstance(groups[HOSTILE], BaseException)
        or way == "ignores_cancelling"
    )
    return groups, player


def rows(groups):
    return collect_rows([one for one in groups if one.kept]).fetch().drop(FOR_PEOPLE)


@functools.cache
def calm():
    return play("raises", hostile=False)[0]


def assert_others_are_as_ever(groups):
    others = [[one for serial, one in enumerate(each) if serial != HOSTILE] for each in (groups, calm())]
    assert rows(others[0]).equal(rows(others[1]))


@pytest.mark.parametrize(
    ("way", "on_failure"), [*(("raises", one) for one in POLICIES), *((way, "drop") for way in FAIL[1:])]
)
def test_what_fails_follows_the_policy_and_no_other_task_is_touched(way, on_failure):
    groups, player = play(way, on_failure)
    assert_others_are_as_ever(groups)
    hostile, reason = groups[HOSTILE], "time" if way in FAIL[1:4] else "error"
    if on_failure in ("fail", "retry"):
        assert isinstance(hostile, EpisodeFailed)
        assert "task 1 (prompt 'prompt 1')" in str(hostile)
    else:
        assert (hostile.kept, hostile.rewards) == (False, ())
        failed = player.metrics()
        assert failed[f"failed_{reason}"] > 0
        assert sum(failed.values()) == failed[f"failed_{reason}"]


@pytest.mark.parametrize(("way", "kind", "said"), END)
def test_what_is_malformed_ends_the_run_by_one_error_and_no_other_task_is_touched(way, kind, said):
    groups, _ = play(way, "drop")
    assert_others_are_as_ever(groups)
    with pytest.raises(kind, match=said):
        raise groups[HOSTILE]


@pytest.mark.parametrize("way", COST_NOTHING)
def test_what_it_leaves_behind_changes_nothing(way):
    groups, _ = play(way, "drop")
    assert_others_are_as_ever(groups)
    assert rows(groups).equal(rows(calm()))


@pytest.mark.parametrize("column", [list, torch.tensor])
async def test_an_episode_is_trained_on_as_it_was_checked(column):
    environment, kept = Hostile("changes_what_it_returned"), []

    def edited(episode):
        columns = {name: column(getattr(episode, name)) for name in ("tokens", "mask", "logprobs", "versions")}
        kept.append(replace(episode, score=Scored(1.0, {"turns": 2.0}), **columns))
        return kept[-1]

    environment.edited = edited
    player = EpisodeRunner(
        environment, lambda task: FleetPolicy(Fleet(), None, SamplingParams(), "task", 5), None, 2, checks=CHECKS
    )
    group = await player.play_group(tasks(True)[HOSTILE])
    before = rows([group])
    for episode in kept:
        for place in range(len(episode.tokens)):
            episode.tokens[place], episode.logprobs[place] = 7, float("nan")
        episode.score.figures["turns"] = 3.0
    assert rows([group]).equal(before)
    assert [one.score.figures for one in group.group.episodes] == [{"turns": 2.0}] * 2


def test_what_blocks_the_loop_is_named_once_by_its_line(caplog):
    blocked = threading.Event()

    async def tool():
        blocked.wait(20)

    async def begin():
        return LoopWatchdog(asyncio.get_running_loop(), "mine", look_seconds=0.02)

    with event_loop() as loop:
        watchdog = loop.submit(begin()).result(5)
        blocking = loop.submit(tool())
        until = time.monotonic() + 15
        while not caplog.records and time.monotonic() < until:
            time.sleep(0.01)
        blocked.set()
        blocking.result(5)
        watchdog.close()
    (said,) = caplog.messages
    assert said.startswith("environment 'mine': the event loop has been blocked for")
    assert "test_hostile_environments.py" in said.split(" (Task-")[0]
    assert "tool: blocked.wait(20)" in said
