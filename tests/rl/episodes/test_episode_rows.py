"""Episodes of several rows: one in its group, one reward, and the credit that it would have as one row."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from enginehouse.controller import DistributedBatch
from enginehouse.data import Batch, Ragged
from enginehouse.data.columns import BY_NAME
from enginehouse.engines.environment import Episode, Group, Scored, Segment, Task
from enginehouse.plugin import resolve
from enginehouse.roles.workers import fill_defaults
from enginehouse_rl.config.schema import RewardConfig
from enginehouse_rl.episodes.episode_rows import EpisodeRows
from enginehouse_rl.episodes.samples import sample_metrics, sample_rows
from enginehouse_rl.episodes.scored_group import ScoredGroup, build_batch, collect_rows, sum_rewards
from enginehouse_rl.losses.kl import KL_PENALTY, with_kl_in_reward
from enginehouse_rl.plan.rewards import RewardPlan
from enginehouse_rl.plugin import ADVANTAGES
from enginehouse_rl.rewards.weighted import with_rewards
from enginehouse_rl.steps.advantage import fetch_columns
from enginehouse_rl.steps.reward_model import add_model_scores

TASK = Task(0, [0], "p", None, {})
JUNK = 9.0
"""What stands at tokens that nobody chose: nothing may come of it."""
TABLES = {name: torch.randn(1000, generator=torch.Generator().manual_seed(seed)) for seed, name in enumerate(
    ("logprobs", "values", "reference_logprobs", "token_rewards")
)}  # fmt: skip
"""Numbers of a chosen token, by its id; that of the others is 0."""
for table in TABLES.values():
    table[0] = JUNK


def row(kind, turns, before, **more):
    """A row of turns, lists of chosen tokens, after so many tokens that were given, and with one before each."""
    tokens, mask = [0] * before, [False] * before
    for turn in turns:
        tokens, mask = [*tokens, 0, *turn], [*mask, False, *[True] * len(turn)]
    logprobs, rewards = ([TABLES[name][token].item() * bool(token) for token in tokens]
                         for name in ("logprobs", "token_rewards"))  # fmt: skip
    return kind(tokens, mask, logprobs, [token % 5 for token in tokens], token_rewards=rewards, **more)


def made(episodes, is_cut):
    """Groups of episodes, each with its reward, its turns, and of each whether a new row begins with it, after how many
    tokens that are given: a summary, or all that was said."""
    groups = []
    for number, of_group in enumerate(episodes):
        built = []
        for reward, parts in of_group:
            score = Scored(reward, {"a": reward, "b": reward**2 - 1})
            rows: list[tuple[list[list[int]], int]] = []
            for turn, (begins, before) in parts:
                if not rows or (begins and is_cut):
                    rows.append(([], before))
                rows[-1][0].append(turn)
            *earlier, last = rows
            segments = [row(Segment, turns, before) for turns, before in earlier]
            built.append(row(Episode, *last, score=score, earlier=segments))
        groups.append(Group(TASK, built, baseline=number / 4))
    return build_batch(groups)


@st.composite
def groups(draw):
    token = iter(range(1, 1000))
    turn = st.integers(1, 3).map(lambda count: [next(token) for _ in range(count)])
    parts = st.lists(st.tuples(turn, st.tuples(st.booleans(), st.integers(0, 2))), min_size=1, max_size=5)
    episode = st.tuples(st.sampled_from([0.0, 1.0, 0.5]), parts)
    return draw(st.lists(st.lists(episode, min_size=1, max_size=4), min_size=1, max_size=3))


REWARDS = tuple(
    RewardPlan(name, one.function, {}, one)
    for name, one in RewardConfig(functions={"a": {"function": "x", "normalize": "group"}, "b": {"function": "y"}})
    .list_rewards()
    .items()
)


def samples_of(batch, kl):
    """As a step has them when they are judged; `kl`: the column that it is taken off, or stands in by itself."""
    parts = batch.split(2) if len(batch) > 1 else [batch]
    samples = with_rewards(DistributedBatch.of(parts), REWARDS)
    ids = batch["input_ids"]
    samples = samples.with_columns(
        **{name: ids.like(TABLES[name][ids.values]) for name in ("values", "reference_logprobs")}
    )
    return samples if kl is None else with_kl_in_reward(samples, 0.1, "k1", kl)[0]


def at_chosen(batch, made):
    """Of each column by token its values at the chosen tokens, in their order."""
    whole = fill_defaults(batch.select(["loss_mask"]).with_columns(**made))
    chosen = batch["loss_mask"].values
    assert not any(whole[name].values[~chosen].any() for name in made)
    return {name: whole[name].values[chosen] for name in made}


@given(groups(), st.sampled_from([None, "reward", "token_rewards", KL_PENALTY]))
@settings(max_examples=12, deadline=None)
def test_a_token_of_an_episode_cut_into_rows_has_the_credit_that_it_has_uncut(episodes, kl):
    """By each advantage that core has."""
    whole, cut = (made(episodes, is_cut) for is_cut in (False, True))
    samples, uncut = samples_of(cut, kl), samples_of(whole, kl)
    for name, (_, needs) in ADVANTAGES.items():
        estimate = resolve(f"enginehouse_rl.advantages.{name}:{name}")
        given_whole = fetch_columns(uncut, needs)
        wanted = estimate(given_whole)
        found = EpisodeRows(samples["episode"]).apply(
            estimate, fetch_columns(samples, needs), samples.lengths("input_ids")
        )
        assert set(found) == {name for name in wanted.columns if name not in given_whole}
        right, ours = at_chosen(whole, {name: wanted[name] for name in found}), at_chosen(cut, found)
        for column in right:
            torch.testing.assert_close(ours[column], right[column], rtol=1e-4, atol=1e-4, msg=f"{name}: {column}")


@given(groups())
@settings(max_examples=15, deadline=None)
def test_figures_of_rewards_and_the_end_are_those_of_the_uncut_episodes_and_rows_are_counted(episodes):
    whole, cut = (made(episodes, is_cut) for is_cut in (False, True))
    right, ours = sample_metrics(whole, 9), sample_metrics(cut, 9)
    of_episodes = [name for name in right if name.startswith("reward/") or name == "response/stopped"]
    assert {name: ours[name] for name in of_episodes} == {name: right[name] for name in of_episodes}
    rows_mean = ours.pop("response/rows_mean", 1.0)
    assert set(ours) == set(right)
    assert rows_mean == len(cut) / len(whole)
    assert ours["response/tokens_mean"] * rows_mean == pytest.approx(right["response/tokens_mean"])


@given(groups())
@settings(max_examples=15, deadline=None)
def test_batches_of_whole_groups_made_apart_are_numbered_as_one(episodes):
    """As environment workers make them: each part numbers its own."""
    apart = [made([of_group], True) for of_group in episodes]
    rewards = [tuple(reward for reward, _ in of_group) for of_group in episodes]
    together = DistributedBatch.of([made(episodes, True).drop(["baseline"])])
    parts = [
        ScoredGroup(TASK, one, True, rows=DistributedBatch.of([batch.drop(["group", "baseline"])]))
        for one, batch in zip(rewards, apart, strict=True)
    ]
    rows = collect_rows(parts)
    assert rows["episode"].tolist() == together["episode"].tolist()
    assert rows["group"].tolist() == together["group"].tolist()


def short(tokens, chosen, **more):
    mask = [number >= len(tokens) - chosen for number in range(len(tokens))]
    return partial(Segment, tokens, mask, [0.0] * len(tokens), [7 - len(tokens)] * len(tokens), **more)()


def two_rows():
    """Two episodes of a group; the first has two rows."""
    summary = short([1, 2, 3], 2, prompt="p", response="long")
    first = Episode([5, 6], [False, True], [0.0, -1.0], [0, 6], Scored(2.0, {"turns": 2.0}, answer="x"), "s", "end",
                    "length", earlier=[summary])  # fmt: skip
    second = Episode([1, 7], [False, True], [0.0, -1.0], [0, 3], Scored(1.0, {"turns": 1.0}), "p", "short")
    return [Group(TASK, [first, second]), Group(TASK, [second])]


def test_rows_of_an_episode_are_adjacent_and_what_is_the_episodes_stands_in_the_last():
    batch = build_batch(two_rows())
    assert [ids.tolist() for ids in batch["input_ids"]] == [[1, 2, 3], [5, 6], [1, 7], [1, 7]]
    assert batch["episode"].tolist() == [0, 0, 1, 2]
    assert batch["group"].tolist() == [0, 0, 0, 1]
    assert batch["reward"].tolist() == [0.0, 2.0, 1.0, 1.0]
    assert batch["response_tokens"].tolist() == [2, 1, 1, 1]
    assert batch["weight_version"].tolist() == [4, 6, 3, 3]
    assert batch["finish_reason"] == ("length", "length", "stop", "stop"), "an episode that was cut is so in each row"
    assert batch["answer"] == ("", "x", "", "")
    assert batch["reward_figures"] == ({}, {"turns": 2.0}, {"turns": 1.0}, {"turns": 1.0})
    joined = EpisodeRows(batch["episode"]).join(batch)
    assert joined["input_ids"][0].tolist() == [1, 2, 3, 5, 6]
    assert joined["response_tokens"].tolist() == [3, 1, 1]
    assert (joined["first_version"].tolist(), joined["weight_version"].tolist()) == ([4, 3, 3], [6, 3, 3])
    assert joined["finish_reason"] == ("length", "stop", "stop")


def test_a_column_of_episodes_that_are_one_row_each_is_not_touched():
    batch = build_batch([two_rows()[1]])
    assert EpisodeRows(batch["episode"]).join(batch) is batch


def test_samples_say_which_row_of_which_episode_they_are_where_there_are_several():
    rows = list(sample_rows(build_batch(two_rows())))
    assert [(row["episode"], row["segment"], row["response"]) for row in rows] == [
        (0, 0, "long"), (0, 1, "end"), (1, 0, "short"), (2, 0, "short")
    ]  # fmt: skip
    assert [row.get("reward") for row in rows] == [None, 2.0, 1.0, 1.0]
    assert [row.get("finish_reason") for row in rows] == [None, "length", "stop", "stop"]
    assert not {"episode", "segment"} & set(next(sample_rows(build_batch(two_rows()[1:]))))


def test_the_rows_of_episodes_have_the_columns_that_their_page_says():
    batch = build_batch([Group(TASK, [episode], baseline=1.0) for episode in two_rows()[0].episodes])
    of_samples = {name for name, column in BY_NAME.items() if column.added_by == "samples"}
    assert set(batch.columns) == of_samples - {"rewards", "token_rewards"}  # of `with_rewards`; and of single tokens
    for name in batch.columns:
        held, column = batch[name], BY_NAME[name]
        each = "token" if isinstance(held, Ragged) else "row" if isinstance(held, torch.Tensor) else "object"
        assert each == column.each, name
        if each != "object":
            assert str((held.values if each == "token" else held).dtype) == f"torch.{column.dtype}", name


def test_a_reward_model_scores_an_episode_by_its_last_row():
    class Judge:
        def score_rows(self, dealt):
            first = [float(ids[0]) for ids in dealt.batch["input_ids"]]
            return DistributedBatch.of([Batch({"score": torch.tensor(first)})])

    turns = SimpleNamespace(on_devices=lambda tags: nullcontext())
    roles = SimpleNamespace(groups={"reward_model": Judge()}, turns=turns)
    samples = with_rewards(DistributedBatch.of([build_batch(two_rows())]), REWARDS[:0])
    scored = add_model_scores(samples, roles, 0.5)
    assert scored["reward"].tolist() == [0.0, 2.0 + 2.5, 1.0 + 0.5, 1.0 + 0.5]
    assert scored["rewards"].tolist() == [[0.0], [5.0], [1.0], [1.0]]
    assert [figures.get("model") for figures in scored["reward_figures"]] == [None, 5.0, 1.0, 1.0]


def test_the_reward_of_an_episode_has_those_of_the_tokens_of_all_its_rows():
    first = two_rows()[0].episodes[0]
    by_token = short([1, 2, 3], 2, token_rewards=[0.0, 0.5, 0.25])
    assert sum_rewards(first) == 2.0
    assert sum_rewards(Episode([5], [True], [0.0], [1], Scored(2.0), token_rewards=[1.0], earlier=[by_token])) == 3.75
