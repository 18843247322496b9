"""What an environment may return: tokens that its policy drew, as they were drawn, and nothing that is malformed."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from game_environments import Counting, Encoding, page_environment
from torch_rollout_driver import launched

from enginehouse.engines.environment import Episode, Scored, Task
from enginehouse.engines.rollout import Completion, SamplingParams
from enginehouse.engines.transcript import Transcript
from enginehouse_recipes.sorting import VOCABULARY, make_model, make_tokenizer
from enginehouse_rewards.program import RowScore
from enginehouse_rl.advantages.process_rewards import process_rewards
from enginehouse_rl.environments.single_turn import SingleTurn
from enginehouse_rl.environments.single_turn import make_episode as single_turn
from enginehouse_rl.episodes.checks import EpisodeChecks, MalformedEpisode
from enginehouse_rl.episodes.policies import FleetPolicy
from enginehouse_rl.episodes.runner import EpisodeRunner, TaskKind, make_runner
from enginehouse_rl.episodes.samples import sample_metrics
from enginehouse_rl.episodes.scored_group import build_batch
from enginehouse_rl.episodes.traces import EpisodeActivity

TASK = Task(7, [3, 4], "a prompt", None, {"secret": "7"})
CHECKS = EpisodeChecks("mine", vocabulary=100, most_tokens=20)
POLICIES = ("fail", "retry", "drop", "drop_group", "mask")


class Fleet:
    """Draws three tokens after any prompt, which depend on its length: 10 more than each of their places."""

    async def generate(self, request):
        await asyncio.sleep(0)
        start = len(request.prompt_ids)
        tokens = [10 + place for place in range(start, start + 3)]
        logprobs = [-0.01 * token for token in tokens]
        drawn = Completion(np.array(tokens, np.int32), np.array(logprobs, np.float32), "stop", 5, 6)
        return SimpleNamespace(completions=[drawn] * request.sampling.n)


class Playing:
    """An environment that is one function."""

    def __init__(self, run):
        self.run = run


def play(run, *, samples=1, on_failure="fail", checks=CHECKS, times=1):
    """What a player makes of a task by an environment's `run`, the last time."""

    async def played():
        sampling = SamplingParams(n=samples, max_tokens=3)
        policy = FleetPolicy(Fleet(), None, sampling, "task-7", 11)
        player = EpisodeRunner(Playing(run), lambda task: policy, None, samples, on_failure, checks=checks)
        return [await player.play(TASK) for _ in range(times)][-1]

    return asyncio.run(played())


def edited(**changes):
    """An environment whose one turn is right but for `changes`: values, or functions of what is right."""

    async def run(task, policy, context):
        said = Transcript(task.prompt_ids)
        said.add_drawn(await policy.generate(task.prompt_ids))
        episode = said.episode(Scored(1.0))
        for name, change in changes.items():
            episode = replace(episode, **{name: change(getattr(episode, name)) if callable(change) else change})
        return [episode]

    return run


class Raising:
    @property
    def reward(self):
        raise ValueError("not yet")


def refusal(run, **how):
    with pytest.raises(MalformedEpisode) as refused:
        play(run, **how)
    said = str(refused.value)
    assert said.startswith("environment 'mine', task 7 (prompt 'a prompt'): "), said
    return said


def at(place, value):
    """Puts `value` at a place of a list."""
    return lambda column: [*column[:place], value, *column[place + 1 :]]


def test_one_turn_as_it_was_drawn_is_taken():
    (episode,) = play(edited())
    assert (episode.tokens, episode.mask) == ([3, 4, 12, 13, 14], [False, False, True, True, True])
    assert episode.versions == [0, 0, 5, 5, 6]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokens": at(3, 50)}, "episode 0 cannot be trained on: its token 3, 50, is marked as chosen, and the policy "
         "did not draw it after the 3 before it: it drew 13 there"),
        ({"tokens": at(1, 9)}, "its token 2, 12, is marked as chosen, and the policy did not draw it after the 2 "
         "before it: it drew nothing after just these tokens"),
        ({"mask": [True] * 5}, "its token 0, 3, is marked as chosen"),
        ({"logprobs": at(4, -0.5)}, "its token 4 has the logprob -0.5, and it was drawn with -0.14"),
        ({"versions": at(4, 7)}, "its token 4 is said to be of weight version 7, and it was drawn from 5 to 6"),
        ({"mask": lambda mask: mask[1:]}, "it has 5 tokens, 4 mask, 5 logprobs, 5 versions: one of each a token"),
        ({"tokens": at(0, 100)}, "its token 0 is 100, and the models of this run know 0 to 99"),
        ({"tokens": at(0, -1)}, "its token 0 is -1"),
        ({"tokens": at(0, 3.0)}, "its tokens are not one token id a token, but float64"),
        ({"tokens": [[1], [2, 3]]}, "its tokens are no row of numbers"),
        ({"mask": [False] * 5}, "none of its tokens is marked as chosen"),
        ({"finish": "failed"}, "it ended as 'failed', and has tokens that are marked as chosen"),
        ({"logprobs": at(0, float("nan"))}, "the logprob of its token 0 is nan"),
        ({"score": 1.0}, "its score is 1.0: one of EpisodeContext.score is wanted, or Scored(1.0)"),
        ({"score": Scored(float("inf"))}, "its reward is inf"),
        ({"score": Scored(1.0, {"mean": 1.0})}, "its score has a figure 'mean'"),
        ({"score": Scored(1.0, {"a": None})}, "the figure 'a' of its score is None"),
        ({"token_rewards": [0.0] * 4}, "its token_rewards are float64 of shape (4,), and it has 5 tokens"),
        ({"token_rewards": [0, 1, 0, 0, 0]}, "the reward of its token 1 is 1, and the policy did not choose it"),
        ({"token_rewards": [0.0] * 4 + [float("inf")]}, "the reward of its token 4 is inf"),
        ({"token_rewards": [[1], 2, 3, 4, 5]}, "its token_rewards are no row of numbers"),
        ({"prompt": None}, "its prompt is None, not text"),
        ({"response": ["7"]}, "its response is ['7'], not text"),
        ({"finish": 3}, "its finish is 3, not text"),
        ({"score": Scored(np.complex64(1))}, "its score is Scored(reward="),
        ({"score": Scored(1.0, figures=None)}, "the figures of its score are None, not numbers by name"),
        ({"score": Scored(1.0, figures=[1])}, "the figures of its score are [1], not numbers by name"),
        ({"score": Scored(1.0, {1: 2.0})}, "the name of a figure of its score is 1, not text"),
        ({"score": Scored(1.0, answer=3)}, "the answer of its score is 3, not text"),
        ({"score": SimpleNamespace(reward=1.0)}, "the figures of its score are None"),
        ({"score": SimpleNamespace(reward=1.0, figures={})}, "the failure of its score is None, not text"),
        ({"score": Raising()}, "looking at it raised ValueError: not yet"),
    ],
)  # fmt: skip
def test_what_is_malformed_is_refused_and_says_where(changes, said):
    assert said in refusal(edited(**changes))


def test_rewards_of_tokens_that_nobody_reads_are_refused_and_rows_without_any_have_zeros():
    unread = replace(CHECKS, token_rewards=False)
    said = refusal(edited(token_rewards=[0, 0, 0, 0, 1.0]), checks=unread)
    assert "it has token_rewards, which the advantage of this run does not read" in said
    assert play(edited(), checks=unread)[0].token_rewards is None
    assert play(edited())[0].token_rewards.tolist() == [0.0] * 5


def test_a_row_that_no_model_reads_is_refused():
    long, fits = replace(CHECKS, most_tokens=4), replace(CHECKS, most_tokens=5)
    assert "it has 5 tokens, and the models of this run read at most 4" in refusal(edited(), checks=long)
    assert len(play(edited(), checks=fits)[0].tokens) == 5


def test_as_many_episodes_as_were_asked_for():
    assert "it returned 1 episode(s), and 3 were asked for" in refusal(edited(), samples=3)

    async def nothing(task, policy, context):
        return None

    async def text(task, policy, context):
        return ["an episode"]

    assert "it returned NoneType, not a list" in refusal(nothing)
    assert "it is str, not an Episode" in refusal(text)


@pytest.mark.parametrize("on_failure", POLICIES)
def test_a_malformed_episode_ends_the_run_under_any_policy(on_failure):
    refusal(edited(tokens=at(3, 50)), on_failure=on_failure)


@pytest.mark.parametrize(("on_failure", "left"), [("drop", 2), ("mask", 3)])
def test_what_was_left_out_or_masked_is_not_missed(on_failure, left):
    async def run(task, policy, context):
        async def one(number, policy):
            if number == 1:
                raise ValueError("gone")
            return (await edited()(task, policy, context))[0]

        return [replace(episode, score=Scored(2.0)) for episode in await context.each(one)]

    assert len(play(run, samples=3, on_failure=on_failure)) == left


def test_a_part_of_a_completion_and_drawn_tokens_that_are_not_chosen_will_do():
    async def run(task, policy, context):
        said = Transcript(task.prompt_ids)
        first = await policy.generate(said.tokens)
        said.add_drawn(replace(first, token_ids=first.token_ids[:2], logprobs=first.logprobs[:2]))
        said.add_drawn(await policy.branch("other").generate(said.tokens))
        episode = said.episode(Scored(0.0))
        return [replace(episode, mask=[False] * 3 + [True] * 4, versions=[0] * 3 + [5] * 4)]

    (episode,) = play(run)
    assert episode.tokens == [3, 4, 12, 13, 14, 15, 16]


@pytest.mark.parametrize("on_failure", POLICIES)
def test_a_score_that_is_none_is_no_bad_luck(on_failure):
    refusal(edited(score=Scored(1.0, figures=None)), on_failure=on_failure)


def hot(temperature, is_chosen=True):
    """An environment whose first turn is drawn at a temperature of its own, and whose second at the run's."""

    async def run(task, policy, context):
        said = Transcript(task.prompt_ids)
        said.add_drawn(await policy.generate(said.tokens, SamplingParams(temperature=temperature)))
        said.add_drawn(await policy.generate(said.tokens))
        return [replace(said.episode(Scored(1.0)), mask=[False] * 2 + [is_chosen] * 3 + [True] * 3)]

    return run


def test_chosen_tokens_of_another_temperature_than_they_are_trained_at_are_refused():
    trained = replace(CHECKS, temperature=0.7)
    said = refusal(hot(0.1), checks=trained)
    assert "its token 2, 12, was drawn at temperature 0.1, and the run trains at 0.7" in said
    assert "leave `sampling` away, or leave it out of Episode.mask" in said
    assert len(play(hot(0.7), checks=trained)) == 1
    assert len(play(hot(0.1, is_chosen=False), checks=trained)) == 1


@pytest.mark.parametrize("filtered", [True, False])
def test_a_run_asks_for_its_own_temperature_in_what_it_trains_on_alone(filtered):
    rollout, environment = SimpleNamespace(on_failure="drop", episode_seconds=None), SimpleNamespace(name="mine")
    plan = SimpleNamespace(
        config=SimpleNamespace(rollout=rollout, environment=environment, reward=SimpleNamespace(on_error="fail")),
        is_single_turn=False, advantage_needs=(), keep=None, vocabulary=100, most_tokens=20,
    )  # fmt: skip
    sampling = SamplingParams(temperature=0.7)

    def policy_of(task):
        return FleetPolicy(Fleet(), None, sampling, "task-7", 11)

    async def played():
        rewards, kind = SimpleNamespace(scorer=lambda rows: None), TaskKind(sampling, 1, filtered)
        return await make_runner(plan, Playing(hot(0.1)), policy_of, rewards, kind, EpisodeActivity()).play(TASK)

    if filtered:
        with pytest.raises(MalformedEpisode, match=r"at temperature 0\.1, and the run trains at 0\.7"):
            asyncio.run(played())
    else:
        assert len(asyncio.run(played())) == 1


def test_what_another_episode_of_the_group_drew_after_the_same_tokens_will_do_and_what_another_play_drew_will_not():
    kept = []

    async def run(task, policy, context):
        if not kept:
            kept.append((await edited()(task, policy, context))[0])
        return kept * context.samples

    assert len(play(run, samples=2)) == 2
    kept.clear()
    assert "its token 2, 12, is marked as chosen" in refusal(run, times=2)


def test_what_was_drawn_is_held_against_the_tokens_that_the_policy_was_given():
    """Whatever the environment does to them meanwhile."""

    async def run(task, policy, context):
        tokens = list(task.prompt_ids)
        drawing = asyncio.create_task(policy.generate(tokens))
        await asyncio.sleep(0)
        tokens[0] = 9
        said = Transcript(tokens)
        said.add_drawn(await drawing)
        return [said.episode(Scored(0.0))]

    assert "it drew nothing after just these tokens" in refusal(run)


def test_the_first_episode_that_is_wrong_is_named():
    async def run(task, policy, context):
        (right,) = await edited()(task, policy, context)
        return [right, replace(right, tokens=at(4, 1)(right.tokens))]

    assert "episode 1 cannot be trained on: its token 4, 1," in refusal(run, samples=2)


# Several rows


def rows(*others, changes=None):
    """An environment whose episodes have a row for each list of tokens in `others`, after which three are drawn; those
    before the last are right but for `changes`."""

    async def run(task, policy, context):
        episodes = []
        for _ in range(context.samples):
            said = [Transcript(one) for one in others]
            for one in said:
                one.add_drawn(await policy.generate(one.tokens))
            *earlier, last = said
            segments = [replace(one.segment("p", "r"), **(changes or {})) for one in earlier]
            episodes.append(last.episode(Scored(1.0), earlier=segments))
        return episodes

    return run


def test_rows_that_are_as_they_were_drawn_are_taken_and_have_the_same_columns():
    episode, other = play(rows([3, 4], [5], changes={"token_rewards": [0, 0, 1.0, 0, 0]}), samples=2)
    assert [list(row.tokens) for row in episode.rows] == [[3, 4, 12, 13, 14], [5, 11, 12, 13]]
    assert [list(row.token_rewards) for row in other.rows] == [[0, 0, 1.0, 0, 0], [0.0] * 4]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokens": [3, 4, 12, 50, 14]}, "its token 3, 50, is marked as chosen, and the policy did not draw it"),
        ({"mask": [False] * 5}, "none of its tokens is marked as chosen"),
        ({"mask": [False] * 4}, "it has 5 tokens, 4 mask, 5 logprobs, 5 versions"),
        ({"token_rewards": [1.0] * 5}, "the reward of its token 0 is 1.0, and the policy did not choose it"),
        ({"response": 3}, "its response is 3, not text"),
    ],
)
def test_each_row_is_checked_and_named(changes, said):
    refused = refusal(rows([3, 4], [5], changes=changes), samples=2)
    assert f"episode 0 cannot be trained on: row 0 of its 2: {said}" in refused


@pytest.mark.parametrize(
    ("earlier", "said"),
    [
        (3, "int"),
        (None, "NoneType"),
        ("rows", "a list that holds str"),
        ([Episode([1], [True], [0.0], [5], Scored(1.0))], "a list that holds Episode"),
    ],
)
def test_earlier_rows_are_segments(earlier, said):
    assert f"its earlier rows are {said}, not a list of Segments" in refusal(edited(earlier=earlier))


def test_an_episode_that_failed_beside_ones_of_several_rows_is_one_row():
    async def run(task, policy, context):
        async def one(number, policy):
            if number == 1:
                raise ValueError("gone")
            return (await rows([3, 4], [5])(task, policy, SimpleNamespace(samples=1)))[0]

        return await context.each(one)

    batch = build_batch([SimpleNamespace(episodes=play(run, samples=3, on_failure="mask"), baseline=None)])
    assert batch["episode"].tolist() == [0, 0, 1, 2, 2]
    assert batch["finish_reason"] == ("stop", "stop", "failed", "stop", "stop")
    assert sample_metrics(batch, 6)["response/rows_mean"] == 2.0


def again(count, chosen=True):
    """An environment whose second rows go on from the first ones, whose tokens were drawn `count` times; `chosen`:
    whether they count in both."""

    async def run(task, policy, context):
        episodes = []
        for _ in range(context.samples):
            said = Transcript(task.prompt_ids)
            for _ in range(count):
                drawn = await policy.generate(task.prompt_ids)
            said.add_drawn(drawn)
            first = said.segment()
            said.add_drawn(await policy.generate(said.tokens))
            episode = said.episode(Scored(1.0), earlier=[first])
            mask = [False] * 2 + [chosen] * 3 + [True] * 3
            episodes.append(replace(episode, mask=mask))
        return episodes

    return run


@pytest.mark.parametrize("samples", [1, 3])
def test_a_token_that_was_drawn_once_is_chosen_in_one_of_the_rows_that_begin_alike(samples):
    """However many episodes of the group have drawn the same."""
    said = refusal(again(1), samples=samples)
    assert "row 1 of its 2: its token 2, 12, is marked as chosen in another row of the episode, too" in said
    assert len(play(again(1, chosen=False), samples=samples)) == samples


def test_branches_may_draw_the_same_and_episodes_may_share_rows():
    assert len(play(again(2), samples=3)) == 3

    async def shared(task, policy, context):
        return (await rows([3, 4], [5])(task, policy, SimpleNamespace(samples=1))) * context.samples

    assert len(play(shared, samples=3)) == 3


# Environments as users write them, on a real engine


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("sorting")
    make_model(path)
    return str(path)


def played_by_an_engine(model, environment, samples=4, **sampling):
    """Episodes of a model of random weights, checked."""
    tokenizer = make_tokenizer()
    task = Task(0, tokenizer.encode("s?="), "s?=", None, {"secret": "7", "text": "31415"})
    checks = EpisodeChecks("mine", len(VOCABULARY), 64)

    async def scored(rows):
        return [RowScore(float(len(row["response"])), {}) for row in rows]

    async def run():
        async with launched(model) as engine:

            def policy_of(task):
                return FleetPolicy(engine, tokenizer, SamplingParams(n=samples, **sampling), "task-0", 3)

            return await EpisodeRunner(environment, policy_of, scored, samples, checks=checks).play(task)

    return asyncio.run(run())


def test_the_game_on_the_page_is_played_in_two_turns(model):
    episodes = played_by_an_engine(model, page_environment()(second=0.25), samples=32, max_tokens=1)
    rewards, turns = [one.score.reward for one in episodes], [one.score.figures["turns"] for one in episodes]
    assert set(rewards) <= {0.0, 0.25, 1.0}
    for episode, reward, count in zip(episodes, rewards, turns, strict=True):
        assert (reward == 1.0) == (count == 1)
        assert list(episode.mask) == [False] * 3 + [True, False, True][: 2 * int(count) - 1]
    assert len({tuple(one.tokens) for one in episodes}) > 8
    batch = build_batch([SimpleNamespace(episodes=episodes, baseline=None)])
    assert batch["response_tokens"].tolist() == turns


def test_the_reader_on_the_page_has_a_row_for_each_part_and_is_given_its_notes_of_those_before(model):
    episodes = played_by_an_engine(model, page_environment("Reading", 1)(characters=2), max_tokens=3)
    for episode in episodes:
        rows = episode.rows
        assert [row.prompt for row in rows] == ["31", rows[0].response + "41", rows[1].response + "5"]
        assert episode.score.reward == len(rows[2].response)
    batch = build_batch([SimpleNamespace(episodes=episodes, baseline=None)])
    assert batch["episode"].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert batch["token_rewards"].values.tolist() == [0.0] * batch["input_ids"].tokens


def test_a_tool_between_two_answers_of_a_group(model):
    episodes = played_by_an_engine(model, Counting(), max_tokens=5)
    assert [one.score.reward for one in episodes] == [len(one.response) for one in episodes]
    assert all(list(one.mask).count(False) == 4 for one in episodes)


def test_the_reward_of_a_step_is_credited_to_the_tokens_before_it(model):
    task = SimpleNamespace(episodes=played_by_an_engine(model, Counting(step=-0.5), samples=8, max_tokens=5))
    batch = build_batch([SimpleNamespace(episodes=task.episodes, baseline=None)])
    for rewards, mask, length in zip(batch["token_rewards"], batch["loss_mask"], batch["response_tokens"], strict=True):
        first = mask.tolist().index(False, 3) - 3
        assert rewards.nonzero().flatten().tolist() == [3 + first - 1]
        assert rewards.sum().item() == -0.5 * first
        assert first < length
    credited = process_rewards(batch)["advantages"]
    assert any(len(set(row[mask].tolist())) == 2 for row, mask in zip(credited, batch["loss_mask"], strict=True))


def test_text_that_is_encoded_again_is_refused(model):
    with pytest.raises(MalformedEpisode, match=r"its token \d+, .* is marked as chosen, and the policy did not"):
        played_by_an_engine(model, Encoding(), samples=16, max_tokens=5)


def test_what_core_plays_unless_told_otherwise_needs_no_check(model):
    """So it is not checked in a run."""
    assert len(played_by_an_engine(model, SingleTurn(), max_tokens=5)) == 4


def test_an_episode_is_a_row_of_the_transcript_as_it_was():
    said = Transcript([1])
    with pytest.raises(ValueError, match="no token was chosen"):
        said.add_reward(1.0)
    first = said.episode(Scored(0.0))
    said.add_drawn(Completion([], [], "abort", 3, 3))
    assert said.add_drawn(Completion([5, 6], [-1.0, -2.0], "stop", 3, 4)) == [5, 6]
    assert first == Episode([1], [False], [0.0], [0], Scored(0.0))
    assert said.episode(Scored(0.0)).versions == [0, 3, 4]
    one = single_turn("", np.array([1]), Completion([5, 6], [-1.0, -2.0], "stop", 3, 4), "", Scored(0.0))
    assert one.versions[1:].tolist() == [3, 4]
