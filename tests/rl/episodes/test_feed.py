"""What the feed hands out, for tasks that end when a test says so."""

import asyncio
import json
import random
import threading
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginehouse.controller.launchers.event_loop import event_loop
from enginehouse.data import Batch, Ragged
from enginehouse.engines.environment import Episode, Group
from enginehouse.errors import DataError, EnginehouseError
from enginehouse.fleet.router import PoisonousRows
from enginehouse_rewards.program import RowScore
from enginehouse_rl.data.sampler import Sampler
from enginehouse_rl.data.sources import Source
from enginehouse_rl.episodes.failures import MOST_RETRIES, EpisodeFailed
from enginehouse_rl.episodes.feed import MOST_REFUSED, REASONS, Feed, NoGroupKept, RunningTasks
from enginehouse_rl.episodes.runner import EpisodeRunner
from enginehouse_rl.episodes.scored_group import build_batch, make_tasks
from enginehouse_rl.episodes.staleness import StalenessWindow
from enginehouse_rl.episodes.tasks import Tasks
from enginehouse_rl.filters.mixed_rewards import mixed_rewards

ROWS = 7
NOT_TRAINED_ON = {f"feed/{reason}" for reason in REASONS if reason != "left_over"}  # those come again
SECONDS = 5.0
"""Longest time for an episode, on a clock that a test moves."""


class Rows:
    """A data set whose rows say their number."""

    def __len__(self):
        return ROWS

    def rows(self, indices):
        numbers = [int(index) for index in indices]
        return Batch(
            {
                "prompt_ids": Ragged.from_list([[1, number] for number in numbers]),
                "prompt": [f"prompt {number}" for number in numbers],
                "messages": [None] * len(numbers),
                "row": np.array(numbers),
                "columns": [{"answer": number} for number in numbers],
            }
        )


def episode(reward, version=1, tokens=(5, 6), prompt=(1, 2)):
    chosen = [False] * len(prompt) + [True] * len(tokens)
    length = len(chosen)
    return Episode(
        [*prompt, *tokens], chosen, [0.0] * len(prompt) + [-1.0] * len(tokens), [version] * length, RowScore(reward, {})
    )


class Nothing:
    """A policy of which nothing is asked."""

    tokenizer = sampling = None

    def branch(self, name):
        return self


class Stage:
    """Plays tasks that end, with two episodes of given rewards, when `end` is called; `alone`: each by itself."""

    def __init__(
        self, groups, staleness=0, extra=0, keep=None, state=None, on_failure="fail", seconds=None, alone=False
    ):
        self.loops = event_loop()
        self.loop = self.loops.__enter__()
        self.tasks = Tasks(Sampler(Rows(), groups, seed=3))
        if state is not None:
            self.tasks.restore(state)
        self.schedule = StalenessWindow(groups, staleness, extra)
        self.begun, self.cancelled = [], []
        self.endings, self.versions, self.times = {}, {}, {}
        self.changed = threading.Condition()
        self.alone, self.now, self.failures = alone, 0.0, Counter()
        self.loop.call(lambda: setattr(asyncio.get_running_loop(), "time", lambda: self.now))
        self.player = EpisodeRunner(self, lambda task: Nothing(), self.score, 2, on_failure, seconds, keep)
        self.feed = Feed(self.loop, self.tasks, self.player, self.schedule)

    async def score(self, rows):
        return [RowScore(row, {}) for row in rows]

    async def run(self, task, policy, context):
        with self.changed:
            again = self.feed._left_over[task.serial]
            if self.times.get(task.serial, -1) < again:  # else it is made once more as it failed
                self.times[task.serial] = again
                self.begun.append(task.serial)
                self.versions[task.serial] = self.feed.version
        if self.alone:
            return await context.each(lambda index, policy: self.one(task, index))
        scores = await context.score(await self.ending(task.serial, task.serial))
        return [episode(score.reward) for score in scores]

    async def one(self, task, index):
        await self.ending(task.serial, (task.serial, index))
        return episode(float(index))

    async def ending(self, serial, key):
        with self.changed:
            ending = self.endings[key] = asyncio.get_running_loop().create_future()
            self.changed.notify_all()
        try:
            return await ending
        except asyncio.CancelledError:
            self.cancelled.append(serial)
            raise

    def end(self, key, rewards=(0.0, 1.0)):
        """End a task, or an episode, with rewards or an error."""
        with self.changed:
            assert self.changed.wait_for(lambda: key in self.endings, 10)

        def end():
            ending = self.endings[key]
            if not ending.done():  # it may have been given up
                ending.set_exception(rewards) if isinstance(rewards, BaseException) else ending.set_result(rewards)

        self.loop.call(end)

    def open_ones(self):
        """What may be ended."""
        return self.loop.call(self.open_now)

    def open_now(self):
        return [key for key, ending in self.endings.items() if not ending.done()]

    def may_fail(self, keys):
        """Whether these may fail once more without ending the run; they are taken to do so."""
        allowed = self.player.failures.policy != "retry" or all(self.failures[key] < MOST_RETRIES for key in keys)
        self.failures.update(keys if allowed else ())
        return allowed

    def pass_time(self, seconds):
        """Let the loop's clock, which stands still else, go on."""
        self.loop.call(lambda: setattr(self, "now", self.now + seconds))

    def wait_for(self, serials):
        with self.changed:
            assert self.changed.wait_for(lambda: set(serials) <= set(self.begun), 10)

    def wait_for_endings(self, serials):
        with self.changed:
            assert self.changed.wait_for(lambda: set(serials) <= set(self.open_now()), 10)

    def account(self):
        """The state to go on from, how many tasks were drawn, how many of them are under way, and how many were counted
        as not trained on since this was asked for last: all of one moment, as groups go on to end."""
        return self.loop.call(
            lambda: (
                self.tasks.state(self.schedule.open_groups),
                self.tasks.drawn,
                len(self.schedule.open_groups),
                sum(value for name, value in self.feed._take_metrics().items() if name in NOT_TRAINED_ON),
            )
        )

    def step(self, version, left, ends=()):
        """A step for which groups end meanwhile, in this order; returns their serial numbers."""
        ended = threading.Thread(target=lambda: [self.end(serial) for serial in ends])
        ended.start()
        try:
            list(self.feed.draw(version, left))
            self.taken = self.feed.take()
            return [group.task.serial for group in self.taken]
        finally:
            ended.join()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.feed.close()
        self.loops.__exit__(*error)


def test_rewards_of_tokens_make_a_group_mixed():
    def rewarded(by_token):
        return replace(episode(0.0), token_rewards=[0.0, 0.0, 0.0, by_token])

    assert mixed_rewards(Group(None, [rewarded(0.0), rewarded(1.0)]))
    assert not mixed_rewards(Group(None, [rewarded(1.0), rewarded(1.0)]))


def test_with_staleness_0_groups_come_in_the_order_of_their_tasks():
    with Stage(3) as stage:
        assert stage.step(1, 6, ends=[2, 0, 1]) == [0, 1, 2]
        assert stage.begun == [0, 1, 2]  # nothing is drawn while the step trains
        assert stage.step(2, 3, ends=[5, 4, 3]) == [3, 4, 5]


def test_a_step_may_be_begun_before_anyone_waits_for_it():
    with Stage(2) as stage:
        assert stage.step(1, 6, ends=[0, 1]) == [0, 1]
        stage.feed.begin(2, 4)
        stage.wait_for([2, 3])
        assert stage.feed.version == 2
        assert stage.step(2, 4, ends=[2, 3]) == [2, 3]
        assert stage.step(3, 2, ends=[5, 4]) == [4, 5]


def test_with_staleness_1_the_next_groups_are_drawn_while_a_step_trains():
    with Stage(2, staleness=1) as stage:
        assert stage.step(1, 6, ends=[3, 1]) == [1, 3]
        assert stage.begun == [0, 1, 2, 3]
        stage.end(0)
        stage.end(2)
        assert stage.step(2, 4) == [0, 2]
        stage.wait_for([4, 5])
        assert stage.step(3, 2, ends=[4, 5]) == [4, 5]
        assert stage.begun == [0, 1, 2, 3, 4, 5]  # no more than the run trains on
        assert set(stage.feed.metrics().values()) == {0.0}


def test_others_are_drawn_for_groups_that_a_filter_refuses():
    with Stage(2, keep=mixed_rewards) as stage:
        ended = threading.Thread(
            target=lambda: [stage.end(0, (1.0, 1.0)), stage.end(2, (0.0, 0.0)), stage.end(3), stage.end(1)]
        )
        ended.start()
        list(stage.feed.draw(1, 2))
        assert [group.task.serial for group in stage.feed.take()] == [1, 3]
        assert stage.feed.metrics()["feed/refused"] == 2.0
        ended.join()


def test_a_filter_that_keeps_nothing_ends_the_run_and_says_what_was_seen():
    with Stage(1, keep=mixed_rewards) as stage:
        ended = threading.Thread(target=lambda: [stage.end(serial, (0.5, 0.5)) for serial in range(MOST_REFUSED)])
        ended.start()
        with pytest.raises(NoGroupKept, match=r"rejected 10 groups.*In 10 of these groups, all rewards.*0.5 to 0.5"):
            stage.step(1, 5)
        ended.join()


def test_extra_groups_are_left_over_with_staleness_0_and_their_tasks_ended():
    with Stage(2, extra=1) as stage:
        assert stage.step(1, 6, ends=[2, 1]) == [1, 2]
        assert stage.feed.metrics()["feed/left_over"] == 1.0
        assert stage.feed.state()["again"] == [0]
        assert stage.cancelled == [0]
        assert stage.step(2, 4, ends=[4, 3]) == [3, 4]
        assert stage.begun == [0, 1, 2, 0, 3, 4]


def test_tasks_left_over_come_again_until_only_the_longest_of_all_wait():
    lengths, trained, late = [5, 90, 7, 3, 80, 60, 2, 4, 70, 1, 6, 9], [], []
    with Stage(2, extra=2) as stage:
        for step in range(5):
            left = 2 * (5 - step)
            stage.feed.begin(step, left)
            shortest = sorted(stage.schedule.open_groups, key=lengths.__getitem__)[:2]
            stage.wait_for_endings(shortest)
            trained += stage.step(step, left, ends=shortest)
            late += [group.task.serial for group in stage.taken if group.left_over]
    assert sorted(trained) == [0, 2, 3, 5, 6, 7, 8, 9, 10, 11]
    assert late == [2], "it waited while no longer one came"


def test_extra_groups_are_used_by_later_steps_while_they_are_fresh():
    with Stage(1, staleness=1, extra=1) as stage:
        assert stage.step(1, 6, ends=[2]) == [2]
        assert stage.step(2, 5, ends=[1]) == [1]  # 0 and 1 were both begun with version 1
        assert stage.feed.metrics()["feed/left_over"] == 1.0


def test_what_a_task_raises_is_raised_where_its_group_is_waited_for():
    with Stage(2) as stage:
        ended = threading.Thread(target=lambda: [stage.end(0), stage.end(1, ValueError("the game is broken"))])
        ended.start()
        said = r"task 1 \(prompt 'prompt \d'\) failed: ValueError: the game is broken"
        with pytest.raises(EpisodeFailed, match=said) as failed:
            stage.step(1, 2)
        assert isinstance(failed.value.__cause__, ValueError)
        ended.join()


def test_what_was_drawn_and_not_trained_on_is_drawn_again_after_a_resume():
    with Stage(2, staleness=1) as stage:
        assert stage.step(1, 8, ends=[3, 1]) == [1, 3]
        state = stage.feed.state()  # of the update that trains on 1 and 3
    assert state["again"] == [0, 2]
    with Stage(2, staleness=1, state=state) as stage:
        assert stage.step(2, 6, ends=[5, 2]) == [2, 5]  # 0 was begun anew, with the version of now
        assert stage.begun == [0, 2, 4, 5]


def test_a_task_is_the_same_whenever_it_is_drawn():
    tasks = Tasks(Sampler(Rows(), 2, seed=3))
    first = tasks.next(ROWS + 2)
    state = tasks.state([1, ROWS + 1])
    again = Tasks(Sampler(Rows(), 2, seed=8))
    again.restore(state)
    assert again.next(3) == [first[1], first[ROWS + 1], tasks.next(1)[0]]
    assert {task.columns["answer"] for task in first[:ROWS]} == set(range(ROWS))


def test_tasks_of_several_sources_are_drawn_again_and_go_on_as_they_stood():
    def tasks():
        sources = [Source("a", "a.jsonl", 2, 3.0), Source("b", "b.jsonl", ROWS - 2, 1.0)]
        return Tasks(Sampler(Rows(), 2, 3, sources))

    first = tasks()
    handed = first.next(3 * ROWS)
    again = tasks()
    again.restore(json.loads(json.dumps(first.state([4, 1]))))
    assert again.next(3) == [handed[4], handed[1], first.next(1)[0]]
    assert again.metrics() == first.metrics()
    far = first.metrics()
    assert far["data/a/epoch"] * 2 + far["data/b/epoch"] * (ROWS - 2) == 3 * ROWS + 1


def test_a_state_without_tasks_to_draw_again_is_one_of_before():
    tasks = Tasks(Sampler(Rows(), 2, seed=3))
    tasks.restore({"prompts": {"seed": 3, "epoch": 0, "position": 4, "rows": ROWS}})
    assert [task.serial for task in tasks.next(2)] == [4, 5]
    with pytest.raises(DataError, match="damaged"):
        tasks.restore({"prompts": tasks.state([])["prompts"], "again": [99]})


FAILURES = (ValueError("it broke"), PoisonousRows("lost again and again"))
BY_POLICY = st.sampled_from(["fail", "retry", "drop", "drop_group", "mask"])


@settings(deadline=None, max_examples=60)
@given(
    groups=st.integers(1, 3),
    staleness=st.integers(0, 2),
    extra=st.integers(0, 2),
    on_failure=BY_POLICY,
    alone=st.booleans(),
    seed=st.integers(),
)
def test_no_token_is_too_old_and_no_task_is_lost_or_doubled(groups, staleness, extra, on_failure, alone, seed):
    """For any interleaving of ends, refusals, failures, updates and resumes."""
    chance, steps, trained, dropped, state = random.Random(seed), 5, [], 0.0, None
    setting = (groups, staleness, extra, mixed_rewards)
    stage = Stage(*setting, on_failure=on_failure, seconds=SECONDS, alone=alone)
    try:
        for version in range(1, steps + 1):
            if version > 1 and chance.random() < 0.2:  # killed after the update of the step before
                stage.__exit__(None, None, None)  # what it dropped since that update is drawn again
                stage = Stage(*setting, state, on_failure, SECONDS, alone)
            taken, bad_ends, late = [], 3, 1
            left = (steps - version + 1) * groups
            waiting = threading.Thread(target=lambda: taken.extend(stage.step(version, left)))  # noqa: B023
            waiting.start()
            while waiting.is_alive():
                if open_ones := stage.open_ones():
                    bad = bad_ends > 0 and chance.random() < 0.3
                    bad_ends -= bad
                    key = chance.choice(open_ones)
                    failing = bad and on_failure != "fail" and chance.random() < 0.7
                    if failing and stage.may_fail([key]):
                        stage.end(key, chance.choice(FAILURES))
                    elif failing and late and stage.may_fail(open_ones):
                        late -= 1
                        stage.pass_time(SECONDS)
                    else:
                        stage.end(key, (1.0, 1.0) if bad else (0.0, 1.0))
                waiting.join(0.001)
            assert len(taken) == groups
            assert all(version - stage.versions[serial] <= staleness for serial in taken)
            trained += taken
            state, drawn, under_way, dropped_by_now = stage.account()
            dropped += dropped_by_now
            assert not set(state["again"]) & set(taken)
            assert len(set(trained)) == len(trained)
            assert drawn == len(trained) + under_way + dropped
            assert len(set(state["again"])) == len(state["again"]) >= under_way
    finally:
        stage.__exit__(None, None, None)


@pytest.mark.parametrize("on_failure", ["drop", "drop_group", "mask"])
def test_another_task_is_drawn_for_one_that_failed(on_failure):
    with Stage(2, on_failure=on_failure, seconds=SECONDS) as stage:
        ended = threading.Thread(
            target=lambda: [stage.end(0, ValueError("it broke")), stage.end(2), stage.pass_time(SECONDS), stage.end(3)]
        )
        ended.start()
        list(stage.feed.draw(1, 2))
        assert [group.task.serial for group in stage.feed.take()] == [2, 3]
        ended.join()
        metrics = stage.feed.metrics()
        assert {name: value for name, value in metrics.items() if value} == {
            "feed/dropped": 2.0, "feed/failed_error": 2.0, "feed/failed_time": 2.0
        }  # fmt: skip
        assert set(stage.feed.metrics().values()) == {0.0}


def test_a_group_is_trained_on_with_the_episodes_that_are_left():
    with Stage(1, on_failure="drop", alone=True) as stage:
        ended = threading.Thread(target=lambda: [stage.end((0, 1)), stage.end((0, 0), PoisonousRows("lost"))])
        ended.start()
        list(stage.feed.draw(1, 1))
        (group,) = stage.feed.take()
        assert group.rewards == (1.0,)
        assert stage.feed.metrics()["feed/failed_replica"] == 1.0
        ended.join()


def test_tasks_that_all_fail_end_the_run_and_say_what_failed_last():
    with Stage(1, on_failure="drop") as stage:
        broken = [ValueError(f"broken {number}") for number in range(MOST_REFUSED)]
        ended = threading.Thread(target=lambda: [stage.end(serial, error) for serial, error in enumerate(broken)])
        ended.start()
        said = (
            r"^10 groups in a row .*: 10 groups failed and were dropped \(rollout.on_failure\); .*: .*broken 9 \(.*\)$"
        )
        with pytest.raises(NoGroupKept, match=said) as error:
            stage.step(1, 5)
        assert error.value.__cause__ is broken[-1]
        ended.join()


def test_refused_and_failed_groups_count_together_as_drawn_in_vain():
    with Stage(1, keep=mixed_rewards, on_failure="drop") as stage:
        ends = [(0.5, 0.5), ValueError("broken")] * (MOST_REFUSED // 2)
        ended = threading.Thread(target=lambda: [stage.end(serial, how) for serial, how in enumerate(ends)])
        ended.start()
        with pytest.raises(NoGroupKept, match=r"rollout.keep rejected 5 groups.*; 5 groups failed and were dropped"):
            stage.step(1, 5)
        ended.join()


def test_an_environment_that_makes_no_episodes_ends_the_run():
    class Nobody:
        async def run(self, task, policy, context):
            return []

    with Stage(1) as stage:
        player = EpisodeRunner(Nobody(), lambda task: Nothing(), stage.score, 2)
        feed = Feed(stage.loop, stage.tasks, player, stage.schedule)
        list(feed.draw(1, 1))
        with pytest.raises(NoGroupKept, match="the environment returned no episode"):
            feed.take()


def test_all_of_some_tasks_are_played_as_they_end():
    with Stage(1) as stage:
        tasks = make_tasks(Rows().rows(range(3)), range(3))

        playing = RunningTasks(stage.loop, tasks, stage.player.play_group)
        assert not playing.wait(0.0)
        ended = threading.Thread(target=lambda: [stage.end(serial) for serial in (2, 0, 1)])
        ended.start()
        assert [group.task.serial for group in playing] == [2, 0, 1]
        ended.join()
        assert playing.wait(10.0)
        assert list(playing) == []  # who was interrupted at the end, and asks again, is not left waiting


def test_tasks_whose_playing_failed_say_so_to_whoever_asks():
    async def broken(task):
        raise EnginehouseError("it broke")

    with Stage(1) as stage:
        playing = RunningTasks(stage.loop, make_tasks(Rows().rows(range(3)), range(3)), broken)
        for _ in range(2):
            with pytest.raises(EnginehouseError, match="it broke"):
                list(playing)
        assert playing.wait(10.0)


def rows_of(ragged):
    return [ragged[row].tolist() for row in range(len(ragged))]


def test_a_batch_says_of_each_episode_its_oldest_and_newest_version():
    task = make_tasks(Rows().rows([0]), [0])[0]
    mixed = Episode([1, 2, 3, 4], [False, True, False, True], [0, -1, 0, -2], [9, 3, 0, 4], RowScore(1.0, {}), "p", "r")
    nothing = Episode([1], [False], [0], [0], RowScore(0.0, {}, "it broke"), finish="length")
    batch = build_batch([Group(task, [mixed, nothing]), Group(task, [mixed])])
    assert batch["first_version"].tolist() == [3, -1, 3]
    assert batch["weight_version"].tolist() == [4, -1, 4]
    assert batch["group"].tolist() == [0, 0, 1]
    assert rows_of(batch["input_ids"]) == [[1, 2, 3, 4], [1], [1, 2, 3, 4]]
    assert rows_of(batch["loss_mask"]) == [[False, True, False, True], [False], [False, True, False, True]]
    assert rows_of(batch["rollout_logprobs"]) == [[0, -1, 0, -2], [0], [0, -1, 0, -2]]
    assert batch["reward_failure"] == ("", "it broke", "")
    assert batch["finish_reason"] == ("stop", "length", "stop")


def test_who_waits_hears_now_and_then_that_nothing_came(monkeypatch):
    monkeypatch.setattr("enginehouse_rl.episodes.feed.QUIET_SECONDS", 0.01)
    with Stage(groups=1) as stage:
        drawn = stage.feed.draw(1, 1)
        assert [next(drawn), next(drawn)] == [0, 0]
        stage.end(0)
        assert sum(drawn) == 2
