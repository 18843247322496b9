"""The guessing game, and games of gymnasium, by a policy that says what it is told to."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from enginehouse.engines.environment import Episode, Scored, Task
from enginehouse.engines.rollout import Completion, SamplingParams
from enginehouse.errors import ConfigError, DataError
from enginehouse.recipes import chat
from enginehouse_environments.game_processes import GameLost
from enginehouse_environments.games import GuessingGame
from enginehouse_environments.gym import Game, Gym, Rules, plain

FRESH = {"render_mode": "ansi", "is_slippery": False}
LAKE = FRESH | {"desc": list(chat.LAKE)}
MOVES = list(chat.MOVES)
TOKENIZER = chat.make_tokenizer()


class Told:
    """A policy that says what `says` makes of the text so far; implements `Policy`."""

    tokenizer = TOKENIZER
    sampling = SamplingParams(max_tokens=8)

    def __init__(self, says: Callable[[str], str]):
        self.says, self.asked = says, []

    async def generate(self, tokens: Sequence[int], sampling: SamplingParams | None = None) -> Completion:
        self.asked.append(TOKENIZER.decode(tokens))
        drawn = [*TOKENIZER.encode(self.says(self.asked[-1])), TOKENIZER.eos_token_id]
        return Completion(drawn, [-0.5] * len(drawn), "stop", 1, 1)


@dataclass
class Each:
    """Plays episodes one by one, and keeps what they raise; implements `EpisodeContext`."""

    policy: Told
    samples: int = 1
    most_tokens: int | None = None

    async def each(self, play: Callable[[int, Any], Any]) -> Sequence[Any]:
        playing = (play(number, self.policy) for number in range(self.samples))
        return await asyncio.gather(*playing, return_exceptions=True)


def played(environment: Any, policy: Told, columns: Mapping[str, Any], prompt: str = "Go", samples: int = 1) -> Any:
    """The episodes of a task."""
    messages = [{"role": "user", "content": prompt}]
    text = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    task = Task(3, TOKENIZER.encode(text), text, messages, columns)
    return asyncio.run(environment.run(task, policy, Each(policy, samples)))


def one(*given: Any, **named: Any) -> Episode:
    (episode,) = played(*given, **named)
    if isinstance(episode, Exception):
        raise episode
    return episode


def last_line(text: str) -> str:
    return text.removesuffix("<|im_end|>\n<|im_start|>assistant\n").rpartition("\n")[2]


def answers(*said: str) -> Told:
    remaining = list(said)
    return Told(lambda text: remaining.pop(0))


def walker(text: str) -> str:
    """Walks to the goal by what is shown of the lake."""
    board = [line for line in text.replace("<|im_end|>", "").split("\n") if set(line) <= set("SFHG[]") and line][-4:]
    (place,) = [(row, line.index("[")) for row, line in enumerate(board) if "[" in line]
    return chat.best_moves()[place][0]


# The guessing game


@pytest.mark.parametrize(
    ("guesses", "reward", "turns", "hint"),
    [(["41"], 1.0, 1, None), (["17", "41"], 0.5, 2, "higher"), (["80", "41"], 0.5, 2, "lower"),
     (["17", "80"], 0.0, 2, "higher"), (["right"], 0.0, 1, None)],
)  # fmt: skip
def test_a_guess_is_hinted_at_and_rewarded_by_its_turn(guesses: list[str], reward: float, turns: int, hint: str | None):
    policy = answers(*guesses)
    episode = one(GuessingGame(later=0.5), policy, {"secret": 41})
    assert episode.score == Scored(reward, {"turns": turns})
    assert [last_line(text) for text in policy.asked[1:]] == ([] if hint is None else [hint])
    assert sum(episode.mask) == sum(len(TOKENIZER.encode(guess)) + 1 for guess in guesses)


def test_a_row_without_a_secret_is_named():
    with pytest.raises(DataError, match="'secret'"):
        played(GuessingGame(), answers(), {"answer": "41"})


# Gymnasium


def test_a_walk_over_a_frozen_lake_is_seen_and_rewarded():
    policy = Told(walker)
    episode = one(Gym("FrozenLake-v1", FRESH, actions=MOVES), policy, {}, prompt="Walk.")
    assert policy.asked[0].startswith("<|im_start|>user\nWalk.\n[S]FFF\nFHFH\nFFFH\nHFFG<|im_end|>")
    assert last_line(policy.asked[1]) == "HFFG"
    assert "(Down)\nSFFF\n[F]HFH\nFFFH\nHFFG<|im_end|>" in policy.asked[1]
    assert (episode.score, episode.finish) == (Scored(1.0, {"return": 1.0, "turns": 6}), "stop")
    assert episode.response.startswith("down<|im_end|>\n<|im_start|>user\n(Down)\n")
    assert sum(episode.mask) == 2 * 6


def test_the_recipe_shows_the_lake_as_the_adapter_does():
    """Its demonstrations are made without gymnasium."""
    for seed in range(12):
        game = Game(Rules("FrozenLake-v1", LAKE, None, MOVES), seed)
        board = game.text.split("\n")
        (place,) = [(row, line.index("[")) for row, line in enumerate(board) if "[" in line]
        assert game.text == chat.lake_text(place)
        for move in MOVES:
            step = game.step(move)
            place = chat.moved(place, move)
            assert step.text == chat.lake_text(place, move)
            assert step.is_over == (chat.tile(place) != "S")
            assert step.reward == float(chat.tile(place) == "G")
            if step.is_over:
                break


def test_all_episodes_of_a_task_begin_alike_and_tasks_by_their_seeds():
    def first(columns: Mapping[str, Any], **arguments: Any) -> list[str]:
        policy = Told(lambda text: "left")
        played(Gym("FrozenLake-v1", LAKE, actions=MOVES, max_turns=1, **arguments), policy, columns, samples=3)
        return policy.asked

    alike = [first({"start": seed}, seed="start") for seed in range(8)]
    assert all(len(set(asked)) == 1 for asked in alike)
    assert len({asked[0] for asked in alike}) > 1
    assert first({}) == first({"start": 3}, seed="start")  # the task's serial number is 3
    assert isinstance(played(Gym("FrozenLake-v1", LAKE), Told(str), {}, samples=0), list)
    with pytest.raises(DataError, match="'start'"):
        first({}, seed="start")


def test_an_answer_without_an_action_ends_the_episode_or_costs():
    ended = one(Gym("FrozenLake-v1", FRESH, actions=MOVES), answers("hm"), {})
    assert (ended.score.reward, ended.finish) == (0.0, "unparsed")
    policy = answers("hm", "DOWN, not upward", "9 or so")
    cost = one(Gym("FrozenLake-v1", FRESH, actions=MOVES, unparsed=-0.25, max_turns=3), policy, {})
    assert (cost.score, cost.finish) == (Scored(-0.5, {"return": -0.5, "turns": 3}), "turns")
    assert last_line(policy.asked[1]) == "no action: one of left, down, right, up"
    assert "(Down)" in policy.asked[2]


def test_the_last_action_that_an_answer_names_is_meant():
    policy = answers("7 is too many: 1", "1", "77")
    episode = one(Gym("FrozenLake-v1", FRESH), policy, {})
    assert "(Down)" in policy.asked[1]
    assert (len(policy.asked), episode.finish) == (3, "unparsed")


def shown(observation: Any) -> str:
    return f"hand of {observation[0]}"


def stick_or_hit(answer: str) -> int | None:
    return {"hit": 1, "stick": 0}.get(answer)


def test_observations_and_actions_may_be_functions_and_steps_be_rewarded():
    policy = answers("hit", "stick")
    here = __name__
    environment = Gym("Blackjack-v1", observation=f"{here}:shown", actions=f"{here}:stick_or_hit", token_rewards=True)
    episode = one(environment, policy, {})
    assert last_line(policy.asked[0]).startswith("hand of ")
    assert episode.score.reward == 0.0
    assert sum(episode.token_rewards) == episode.score.figures["return"] != 0.0
    (at,) = [place for place, reward in enumerate(episode.token_rewards) if reward]
    assert at == len(episode.tokens) - 1


def test_what_cannot_be_made_is_refused_before_a_run():
    with pytest.raises(ConfigError, match=r"gymnasium has no environment 'FrozenLak-v1'.*FrozenLake"):
        Gym.check({"id": "FrozenLak-v1"}, None)
    with pytest.raises(ConfigError, match=r"observation: module .* has no 'show'"):
        Gym.check({"id": "FrozenLake-v1", "observation": f"{__name__}:show"}, None)
    Gym.check({"id": "FrozenLake-v1", "observation": f"{__name__}:shown"}, None)


def test_a_terminals_colours_become_brackets():
    assert plain("\n  \x1b[1mup\x1b[0m\n\x1b[41mS\x1b[0mFFF\x1b[0m") == "[up]\n[S]FFF"


# In processes of their own


def die(answer: str) -> int:
    if answer == "up":
        os._exit(3)
    return MOVES.index(answer)


@pytest.mark.slow
def test_games_in_processes_end_as_here_and_one_that_dies_takes_its_own_along():
    apart = Gym("FrozenLake-v1", FRESH, actions=f"{__name__}:die", processes=2)
    episodes = played(apart, Told(walker), {}, samples=3)
    here = one(Gym("FrozenLake-v1", FRESH, actions=MOVES), Told(walker), {})
    assert [episode.tokens for episode in episodes] == [here.tokens] * 3

    first = iter(["up"])
    ended = played(apart, Told(lambda text: next(first, "") or walker(text)), {}, samples=2)
    (died,) = [one for one in ended if isinstance(one, Exception)]
    assert isinstance(died, GameLost)
    assert "died" in str(died)
    assert [one.score.reward for one in ended if one is not died] == [1.0]
    assert one(apart, Told(walker), {}).score.reward == 1.0  # another has taken its place
