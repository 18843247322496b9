"""What becomes of episodes that fail, under each policy."""

import asyncio
import contextlib
import json
import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
from row_tokenizers import make_tokenizer

from enginehouse.controller.errors import ClusterLost, RemoteError, WorkerDied
from enginehouse.engines.environment import Episode, Task
from enginehouse.engines.rollout import Completion, SamplingParams
from enginehouse.errors import ConfigError, EnginehouseError
from enginehouse.fleet.replica import ReplicasLost
from enginehouse.fleet.router import PoisonousRows
from enginehouse_rewards.batch import RewardError
from enginehouse_rewards.program import RowScore
from enginehouse_rl.episodes.failures import MOST_RETRIES, REASONS, EpisodeFailed
from enginehouse_rl.episodes.policies import FleetPolicy
from enginehouse_rl.episodes.runner import EpisodeRunner

POLICIES = ("fail", "retry", "drop", "drop_group", "mask")
TASK = Task(7, [1, 2], "What is the first word of this prompt, which is longer than a message should be?", None, {})
SHORT = 0.5
"""Less than passes where something takes too long."""


class Fleet:
    """Answers each request with its seed, and remembers their ids."""

    def __init__(self):
        self.requests = []

    async def generate(self, request):
        self.requests.append(request)
        return SimpleNamespace(completions=[Completion([request.sampling.seed], [-0.5], "stop", 3, 3)])

    @property
    def seeds(self):
        return [request.sampling.seed for request in self.requests]


def policy(fleet=None, seed=11):
    return FleetPolicy(fleet or Fleet(), None, SamplingParams(), "task-7", seed)


def made(reward):
    return Episode([1, 2, 5], [False, False, True], [0, 0, -0.5], [0, 0, 3], RowScore(reward, {}))


class Whole:
    """Makes a group together: `play` is called with the number of the try, and `ways` says how each ends."""

    def __init__(self, *ways):
        self.ways, self.tries = ways, 0

    async def run(self, task, policy, context):
        way = self.ways[min(self.tries, len(self.ways) - 1)]
        self.tries += 1
        await policy.generate([1])
        if isinstance(way, BaseException):
            raise way
        if way is not None:
            await way()
        return [made(float(index)) for index in range(context.samples)]


class Each:
    """Makes each episode by itself; `ways` says, by its number, how its tries end."""

    def __init__(self, **ways):
        self.ways, self.tries, self.cancelled, self.left = ways, {}, [], None

    async def run(self, task, policy, context):
        self.left = await context.each(self.one)
        return self.left

    async def one(self, index, policy):
        number = self.tries[index] = self.tries.get(index, -1) + 1
        ways = self.ways.get(f"of_{index}", ())
        await policy.generate([1])
        way = ways[number] if number < len(ways) else None
        if isinstance(way, BaseException):
            raise way
        try:
            if way is not None:
                await way()
        except asyncio.CancelledError:
            self.cancelled.append(index)
            raise
        return made(float(index))


async def forever():
    await asyncio.get_running_loop().create_future()


async def too_long():
    """Does not end, and a second passes, on a clock that stands still else."""
    asyncio.get_running_loop().now += 1.0
    await forever()


def play(environment, on_failure, *, seconds=None, samples=3, fleet=None):
    """What is made of a task, and the metrics."""

    async def played():
        loop = asyncio.get_running_loop()
        loop.now, loop.time = 0.0, lambda: loop.now
        player = EpisodeRunner(environment, lambda task: policy(fleet), None, samples, on_failure, seconds)
        return await player.play(TASK), player.metrics()

    return asyncio.run(played())


def failed(**counts):
    return {f"failed_{reason}": float(counts.get(reason, 0)) for reason in REASONS}


def rewards(episodes):
    return [episode.score.reward for episode in episodes]


# A group that is made together


def test_fail_ends_the_run_and_names_the_task_and_the_cause():
    with pytest.raises(
        EpisodeFailed,
        match=r"^task 7 \(prompt 'What is the first .* \.\.\.'\) failed: KeyError: 'x' \(test_runner\.py:\d+\)",
    ) as e:
        play(Whole(KeyError("x")), "fail")
    assert isinstance(e.value.__cause__, KeyError)
    assert len(str(e.value).splitlines()[0]) < 120


def test_what_a_library_raises_is_put_down_to_the_line_that_called_it():
    class Parses(Whole):
        async def run(self, task, policy, context):
            json.loads("{")

    with pytest.raises(EpisodeFailed, match=r"failed: JSONDecodeError: .* \(test_runner\.py:\d+\)"):
        play(Parses(None), "fail")


@pytest.mark.parametrize("on_failure", ["drop", "drop_group", "mask"])
def test_a_group_that_fails_as_a_whole_is_dropped(on_failure):
    assert play(Whole(KeyError("x")), on_failure) == ([], failed(error=3))


@pytest.mark.parametrize("failures", range(MOST_RETRIES + 1))
def test_retry_makes_a_group_again_with_seeds_of_the_tries_number(failures):
    fleet = Fleet()
    episodes, metrics = play(Whole(*[KeyError("x")] * failures, None), "retry", fleet=fleet)
    assert rewards(episodes) == [0.0, 1.0, 2.0]
    assert metrics == failed(error=3 * failures)
    assert fleet.seeds == [11, *(policy()._mix_seed(f"try-{number}") for number in range(1, failures + 1))]


def test_retry_ends_the_run_once_it_has_been_made_again_often_enough():
    environment = Whole(KeyError("x"))
    with pytest.raises(EpisodeFailed, match=r"task 7 .* failed 3 times, the last time: KeyError: 'x'"):
        play(environment, "retry")
    assert environment.tries == 1 + MOST_RETRIES


class Unscored:
    """Makes a group of which nobody could score some."""

    def __init__(self, *failures):
        self.failures = failures

    async def run(self, task, policy, context):
        made = [replace(one, score=RowScore(-2.0, {})) for one in await Whole(None).run(task, policy, context)]
        return [
            replace(one, score=RowScore(0.0, {}, failure)) if failure else one
            for one, failure in zip(made, self.failures, strict=True)
        ]


@pytest.mark.parametrize(
    ("failures", "left", "dropped"), [(("", "no judge", ""), 2, 1), (("a", "b", "c"), 0, 3), (("", "", ""), 3, 0)]
)
def test_a_row_that_nobody_could_score_is_left_out_of_its_group(failures, left, dropped):
    async def played():
        player = EpisodeRunner(Unscored(*failures), lambda task: policy(), None, 3, leaves_out=True)
        return await player.play_group(TASK), player.metrics(), player.last_error

    group, metrics, last = asyncio.run(played())
    assert group.rewards == (-2.0,) * left
    assert group.kept == bool(left)
    assert metrics == failed(unscored=dropped)
    assert (last is not None) == bool(dropped)


def test_what_ends_a_text_of_the_tokenizer_ends_one_of_any_engine():
    tokenizer = make_tokenizer("bytes, end")
    turn, text = (tokenizer.convert_tokens_to_ids(mark) for mark in ("<|im_end|>", "</s>"))
    for sampling, expected in (
        (SamplingParams(), (turn, text)),
        (SamplingParams(stop_token_ids=(5, text)), (5, text, turn)),
        (SamplingParams(ignore_eos=True), ()),
    ):
        asked = FleetPolicy(Fleet(), tokenizer, sampling, "task", 1).branch("again").branch_greedily()
        assert asked.sampling.stop_token_ids == expected


@pytest.mark.parametrize("on_failure", ["drop", "drop_group", "mask"])
def test_reasons_are_told_apart(on_failure):
    assert play(Whole(too_long), on_failure, seconds=SHORT) == ([], failed(time=3))
    assert play(Whole(PoisonousRows("lost")), on_failure) == ([], failed(replica=3))
    assert play(Whole(TimeoutError("its own")), on_failure) == ([], failed(error=3))
    assert play(Whole(RemoteError("too long")), on_failure) == ([], failed(error=3))


def test_what_takes_too_long_is_said():
    with pytest.raises(EpisodeFailed, match=r"failed: it took more than 0\.5 s \(rollout\.episode_seconds\)"):
        play(Whole(too_long), "fail", seconds=SHORT)


def test_what_takes_too_long_is_held_against_what_took_longest():
    async def some_time():
        asyncio.get_running_loop().now += SHORT / 10

    environment = Each(of_0=[some_time], of_1=[too_long])
    said = "with 0 other episodes in progress; the longest attempt that succeeded so far took "
    with pytest.raises(EpisodeFailed, match=said):
        play(environment, "fail", seconds=SHORT, samples=2)


def test_one_that_resists_being_cancelled_is_not_waited_for():
    async def resist():
        with contextlib.suppress(asyncio.CancelledError):
            await too_long()
        await forever()  # until the test's loop ends

    assert play(Whole(resist), "drop", seconds=SHORT) == ([], failed(time=3))


def cancel_oneself():
    asyncio.current_task().cancel()
    return forever()


async def await_what_is_cancelled():
    gone = asyncio.get_running_loop().create_future()
    gone.cancel()
    await gone


@pytest.mark.parametrize("way", [cancel_oneself, await_what_is_cancelled])
def test_a_cancelling_from_within_is_a_failure_like_any(way):
    assert play(Whole(way), "drop") == ([], failed(error=3))
    episodes, metrics = play(Each(of_1=[way]), "drop")
    assert rewards(episodes) == [0.0, 2.0]
    assert metrics == failed(error=1)


@pytest.mark.parametrize("on_failure", POLICIES)
@pytest.mark.parametrize("environment", [lambda: Whole(SystemExit(0)), lambda: Each(of_1=[SystemExit(0)])])
def test_what_is_no_exception_ends_the_run_and_not_its_event_loop(environment, on_failure):
    with pytest.raises(EpisodeFailed, match=r"task 7.*SystemExit") as ended:
        play(environment(), on_failure)
    assert isinstance(ended.value.__cause__, SystemExit)


BEYOND = [ClusterLost("c"), ReplicasLost("r"), RewardError("w"), ConfigError("u"), WorkerDied("d")]


@pytest.mark.parametrize("on_failure", POLICIES)
@pytest.mark.parametrize("error", BEYOND, ids=lambda error: type(error).__name__)
def test_what_no_other_task_would_mend_ends_the_run_under_any_policy(error, on_failure):
    for environment in (Whole(error), Whole(ExceptionGroup("several", [KeyError("x"), error])), Each(of_2=[error])):
        with pytest.raises(type(error), match=rf"^{error}$"):
            play(environment, on_failure)


# Episodes by themselves


def test_drop_leaves_out_the_episode_alone():
    episodes, metrics = play(Each(of_1=[KeyError("x")]), "drop")
    assert rewards(episodes) == [0.0, 2.0]
    assert metrics == failed(error=1)


def test_drop_group_ends_the_others():
    environment = Each(of_0=[forever], of_1=[KeyError("x")], of_2=[forever])
    assert play(environment, "drop_group") == ([], failed(error=1))
    assert sorted(environment.cancelled) == [0, 2]


def test_mask_keeps_the_place_with_the_prompt_and_a_reward_of_0():
    episodes, metrics = play(Each(of_1=[PoisonousRows("lost")]), "mask")
    assert rewards(episodes) == [0.0, 0.0, 2.0]
    assert metrics == failed(replica=1)
    masked = episodes[1]
    assert (list(masked.tokens), list(masked.mask)) == ([1, 2], [False, False])
    assert (masked.finish, masked.score.failure) == ("failed", "")  # the reward was not asked


@pytest.mark.parametrize("on_failure", ["drop", "mask"])
def test_a_group_without_an_episode_left_is_dropped(on_failure):
    environment = Each(of_0=[KeyError("x")], of_1=[too_long])
    assert play(environment, on_failure, samples=2, seconds=SHORT) == ([], failed(error=1, time=1))
    assert environment.left is None


def test_fail_names_the_episode():
    with pytest.raises(EpisodeFailed, match=r"^episode 1 of task 7 \(prompt .*\) failed: KeyError: 'x'"):
        play(Each(of_1=[KeyError("x")]), "fail")


def test_retry_makes_the_episode_again_and_not_its_siblings():
    fleet, environment = Fleet(), Each(of_1=[KeyError("x"), KeyError("x")])
    episodes, metrics = play(environment, "retry", fleet=fleet)
    assert rewards(episodes) == [0.0, 1.0, 2.0]
    assert environment.tries == {0: 0, 1: 2, 2: 0}
    assert metrics == failed(error=2)
    assert len(set(fleet.seeds)) == len({request.id for request in fleet.requests}) == 5


def test_retry_of_an_episode_ends_the_run_without_making_the_group_again():
    environment = Each(of_1=[KeyError("x")] * 9)
    with pytest.raises(EpisodeFailed, match=r"episode 1 of task 7 .* failed 3 times, the last time: KeyError"):
        play(environment, "retry")
    assert environment.tries[1] == MOST_RETRIES


def test_an_episodes_seeds_depend_on_its_number_and_try_alone():
    """Whoever draws first, and however often."""

    def drawn(order, failing):
        fleet = Fleet()

        class Turns:
            async def run(self, task, policy, context):
                self.turn = [asyncio.Event() for _ in order]
                self.turn[order[0]].set()
                self.tries = [0] * context.samples
                return await context.each(self.one)

            async def one(self, index, policy):
                await self.turn[index].wait()
                self.tries[index] += 1
                await policy.generate([1])
                await policy.generate([1])
                if index in failing and self.tries[index] == 1:
                    raise KeyError("x")
                for other in order[order.index(index) + 1 :][:1]:
                    self.turn[other].set()
                return made(0.0)

        play(Turns(), "retry", fleet=fleet)
        return {request.id: request.sampling.seed for request in fleet.requests}

    calm, other = drawn([0, 1, 2], []), drawn([2, 0, 1], [0])
    assert len(set(calm.values())) == len(calm) == 6
    assert calm.items() <= other.items()
    assert len(set(other.values())) == len(other) == 8


def test_the_time_of_each_episode_is_not_the_groups():
    class Slow(Each):
        async def run(self, task, policy, context):
            left = await super().run(task, policy, context)
            await asyncio.sleep(0)
            return left

    episodes, metrics = play(Slow(of_1=[too_long, too_long]), "retry", seconds=SHORT)
    assert rewards(episodes) == [0.0, 1.0, 2.0]
    assert metrics == failed(time=2)


def test_a_group_is_late_by_what_it_does_beside_its_episodes():
    class Late(Each):
        async def run(self, task, policy, context):
            await super().run(task, policy, context)
            await too_long()

    assert play(Late(), "drop", seconds=SHORT) == ([], failed(time=3))


class Stubborn(Each):
    """Goes on with what it was told to leave alone."""

    async def run(self, task, policy, context):
        try:
            return await super().run(task, policy, context)
        except Exception:
            return [made(9.0)]


def test_an_environment_cannot_overrule_the_policy():
    assert play(Stubborn(of_1=[KeyError("x")]), "drop_group") == ([], failed(error=1))
    with pytest.raises(EpisodeFailed, match="episode 1 of"):
        play(Stubborn(of_1=[KeyError("x")]), "fail")
    with pytest.raises(RewardError, match="no score"):
        play(Stubborn(of_1=[RewardError("no score")]), "drop")


async def test_who_gives_up_a_task_ends_its_episodes():
    environment = Each(of_0=[forever], of_1=[forever], of_2=[forever])
    async with asyncio.timeout(10):
        playing = asyncio.create_task(EpisodeRunner(environment, lambda _: policy(), None, 3, "drop").play(TASK))
        while len(environment.tries) < 3:
            await asyncio.sleep(0)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        while len(environment.cancelled) < 3:
            await asyncio.sleep(0)


async def test_a_reason_is_warned_of_once_a_step_and_traced_once(caplog):
    with caplog.at_level(logging.WARNING):
        player = EpisodeRunner(Whole(KeyError("x")), lambda _: policy(), None, 2, "drop")
        for _ in range(2):
            await player.play(TASK)
            await player.play(TASK)
            assert player.metrics()["failed_error"] == 4.0
    assert [bool(record.exc_info) for record in caplog.records] == [True, False]
    assert "task 7 (prompt 'What is" in caplog.messages[0]
    assert "(rollout.on_failure=drop): KeyError: 'x'" in caplog.messages[0]


def test_an_error_of_ours_is_told_in_its_own_words():
    with pytest.raises(EpisodeFailed, match=r"failed: the prompt is too long\n"):
        play(Whole(EnginehouseError("the prompt is too long")), "fail")


class Rewarded:
    """Gives as many episodes as are asked for, whose reward is the temperature that their tokens were drawn at."""

    def __init__(self, fails_greedy=False):
        self.fails_greedy = fails_greedy

    async def run(self, task, policy, context):
        await policy.samples([1], context.samples)
        temperature = policy._fleet.requests[-1].sampling.temperature
        if temperature == 0.0 and self.fails_greedy:
            raise ValueError("greedy")
        return [made(temperature + 0.25)] * context.samples


@pytest.mark.parametrize("fails", [False, True])
def test_a_baseline_is_played_greedily_beside_the_group_and_is_not_one_of_it(fails):
    fleet = Fleet()

    async def scorer(rows):
        raise AssertionError("the environment scores")

    baseline = EpisodeRunner(Rewarded(fails), lambda _: policy(fleet).branch_greedily(), scorer, 1, "drop")
    player = EpisodeRunner(Rewarded(), lambda _: policy(fleet), scorer, 4, "drop", baseline=baseline)
    played = asyncio.run(player.play_group(TASK))
    if fails:
        assert (played.kept, played.rewards) == (False, ())
        assert player.metrics()["failed_error"] == 1
        return
    assert (played.kept, played.rewards, played.group.baseline) == (True, (1.25,) * 4, 0.25)
    assert sorted((one.sampling.temperature, one.sampling.n) for one in fleet.requests) == [(0.0, 1), (1.0, 4)]
    assert len({one.id for one in fleet.requests}) == 2


def test_a_baseline_of_episodes_that_are_played_by_themselves_is_greedy_too():
    fleet = Fleet()

    class Apart:
        async def run(self, task, policy, context):
            async def one(index, policy):
                await policy.generate([1])
                return made(0.0)

            return await context.each(one)

    baseline = EpisodeRunner(Apart(), lambda _: policy(fleet).branch_greedily(), None, 1)
    asyncio.run(EpisodeRunner(Apart(), lambda _: policy(fleet), None, 2, baseline=baseline).play_group(TASK))
    assert sorted(one.sampling.temperature for one in fleet.requests) == [0.0, 1.0, 1.0]


async def test_episodes_are_said_to_be_drawn_once_the_last_of_them_is_about_to_be_scored():
    drawn, said = [], []

    class Scoring:
        async def run(self, task, policy, context):
            async def one(index, policy):
                for _ in range(index):
                    await asyncio.sleep(0)
                drawn.append(index)
                await context.score([{}])
                return made(1.0)

            return await context.each(one)

    async def score(rows):
        return [RowScore(1.0, {})] * len(rows)

    player = EpisodeRunner(Scoring(), lambda task: policy(), score, 3)
    await player.play(TASK, lambda: said.append(list(drawn)))
    assert said == [[0, 1, 2]]
