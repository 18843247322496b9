"""The guessing game, and games of gymnasium, by a policy that says what it is told to."""

import asyncio
import multiprocessing
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from chat_fleets import ChatFleet, play

from enginehouse.controller.launchers.event_loop import event_loop
from enginehouse.engines.environment import Episode, Scored, Task
from enginehouse.errors import ConfigError, DataError
from enginehouse_environments import game_processes
from enginehouse_environments.game_processes import GameLost, GameProcesses
from enginehouse_environments.games import GuessingGame
from enginehouse_environments.gym import Gym, GymGame, Rules, strip_terminal_codes
from enginehouse_recipes import chat
from enginehouse_rl.episodes.failures import EpisodeFailed

FRESH = {"render_mode": "ansi", "is_slippery": False}
LAKE = FRESH | {"desc": list(chat.LAKE)}
MOVES = list(chat.MOVES)
TOKENIZER = chat.make_tokenizer()


Says = Callable[[str], str]


def played(
    environment: Any, says: Says, columns: Mapping[str, Any], prompt: str = "Go", samples: int = 1, **player: Any
):
    """The episodes of a task as a run plays them, and all that was said before each answer."""
    messages = [{"role": "user", "content": prompt}]
    text = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    fleet = ChatFleet(TOKENIZER, says)
    episodes = play(environment, fleet, Task(3, TOKENIZER.encode(text), text, messages, columns), samples, **player)
    return episodes, [TOKENIZER.decode(request.prompt_ids) for request in fleet.requests]


def one(environment: Any, says: Says, columns: Mapping[str, Any], prompt: str = "Go") -> tuple[Episode, list[str]]:
    (episode,), asked = played(environment, says, columns, prompt)
    return episode, asked


def last_line(text: str) -> str:
    return text.removesuffix("<|im_end|>\n<|im_start|>assistant\n").rpartition("\n")[2]


def answers(*said: str) -> Says:
    remaining = list(said)
    return lambda text: remaining.pop(0)


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
    episode, asked = one(GuessingGame(later=0.5), answers(*guesses), {"secret": 41})
    assert episode.score == Scored(reward, {"turns": turns})
    assert [last_line(text) for text in asked[1:]] == ([] if hint is None else [hint])
    assert sum(episode.mask) == sum(len(TOKENIZER.encode(guess)) + 1 for guess in guesses)


def test_a_row_without_a_secret_is_named():
    with pytest.raises(DataError, match="'secret'"):
        played(GuessingGame(), answers(), {"answer": "41"})


# Gymnasium


def test_a_walk_over_a_frozen_lake_is_seen_and_rewarded():
    episode, asked = one(Gym("FrozenLake-v1", FRESH, actions=MOVES), walker, {}, "Walk.")
    assert asked[0].startswith("<|im_start|>user\nWalk.\n[S]FFF\nFHFH\nFFFH\nHFFG<|im_end|>")
    assert last_line(asked[1]) == "HFFG"
    assert "(Down)\nSFFF\n[F]HFH\nFFFH\nHFFG<|im_end|>" in asked[1]
    assert (episode.score, episode.finish) == (Scored(1.0, {"return": 1.0, "turns": 6}), "stop")
    assert episode.response.startswith("down<|im_end|>\n<|im_start|>user\n(Down)\n")
    assert sum(episode.mask) == 2 * 6


def test_the_recipe_shows_the_lake_as_the_adapter_does():
    """Its demonstrations are made without gymnasium."""
    for seed in range(12):
        game = GymGame(Rules("FrozenLake-v1", LAKE, None, MOVES), seed)
        board = game.text.split("\n")
        (place,) = [(row, line.index("[")) for row, line in enumerate(board) if "[" in line]
        assert game.text == chat.lake_text(place)
        for move in MOVES:
            step = game.step(move)
            place = chat.step(place, move)
            assert step.text == chat.lake_text(place, move)
            assert step.is_over == (chat.tile(place) != "S")
            assert step.reward == float(chat.tile(place) == "G")
            if step.is_over:
                break


def test_all_episodes_of_a_task_begin_alike_and_tasks_by_their_seeds():
    def first(columns: Mapping[str, Any], **arguments: Any) -> list[str]:
        environment = Gym("FrozenLake-v1", LAKE, actions=MOVES, max_turns=1, **arguments)
        return played(environment, lambda text: "left", columns, samples=3)[1]

    alike = [first({"start": seed}, seed="start") for seed in range(8)]
    assert all(len(set(asked)) == 1 for asked in alike)
    assert len({asked[0] for asked in alike}) > 1
    assert first({}) == first({"start": 3}, seed="start")  # the task's serial number is 3
    with pytest.raises(DataError, match="'start'"):
        first({}, seed="start")


def test_an_answer_without_an_action_ends_the_episode_or_costs():
    ended, _ = one(Gym("FrozenLake-v1", FRESH, actions=MOVES), answers("hm"), {})
    assert (ended.score.reward, ended.finish) == (0.0, "unparsed")
    said = answers("hm", "DOWN, not upward", "9 or so")
    cost, asked = one(Gym("FrozenLake-v1", FRESH, actions=MOVES, unparsed=-0.25, max_turns=3), said, {})
    assert (cost.score, cost.finish) == (Scored(-0.5, {"return": -0.5, "turns": 3}), "turns")
    assert last_line(asked[1]) == "no action: one of left, down, right, up"
    assert "(Down)" in asked[2]


def test_a_first_observation_that_leaves_no_room_for_an_answer_fails_by_the_policy():
    task = Task(3, [1], "Go", None, {})
    with pytest.raises(EpisodeFailed, match=r"the first observation .* tokens, but the models .* read only 20"):
        play(Gym("FrozenLake-v1", FRESH), ChatFleet(TOKENIZER, []), task, most_tokens=20)


def test_the_last_action_that_an_answer_names_is_meant():
    episode, asked = one(Gym("FrozenLake-v1", FRESH), answers("7 is too many: 1", "1", "77"), {})
    assert "(Down)" in asked[1]
    assert (len(asked), episode.finish) == (3, "unparsed")


def shown(observation: Any) -> str:
    return f"hand of {observation[0]}"


def stick_or_hit(answer: str) -> int | None:
    return {"hit": 1, "stick": 0}.get(answer)


def test_observations_and_actions_may_be_functions_and_steps_be_rewarded():
    here = __name__
    environment = Gym("Blackjack-v1", observation=f"{here}:shown", actions=f"{here}:stick_or_hit", token_rewards=True)
    episode, asked = one(environment, answers("hit", "stick"), {})
    assert last_line(asked[0]).startswith("hand of ")
    assert episode.score.reward == 0.0
    assert sum(episode.token_rewards) == episode.score.figures["return"] != 0.0
    (at,) = [place for place, reward in enumerate(episode.token_rewards) if reward]
    assert at == len(episode.tokens) - 1


@pytest.mark.parametrize("processes", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_what_no_game_takes_is_named_with_what_it_takes(processes: int):
    environment = Gym("Blackjack-v1", actions=["stick", "hit", "split"], processes=processes)
    said = r"Blackjack-v1 takes Discrete\(2\), but environment.arguments.actions gave 2 for the answer 'split'"
    with pytest.raises(EpisodeFailed, match=said):
        one(environment, answers("split"), {})


def test_a_column_of_seeds_that_there_is_not_is_named():
    with pytest.raises(DataError, match=r"no column 'seeds'\. Did you mean 'seed'"):
        one(Gym("Blackjack-v1", seed="seeds"), answers("1"), {"seed": 1})


def test_what_cannot_be_made_is_refused_before_a_run():
    with pytest.raises(ConfigError, match=r"gymnasium has no environment 'FrozenLak-v1'.*FrozenLake"):
        Gym.check({"id": "FrozenLak-v1"}, None)
    with pytest.raises(ConfigError, match=r"observation: module .* has no 'show'"):
        Gym.check({"id": "FrozenLake-v1", "observation": f"{__name__}:show"}, None)
    Gym.check({"id": "FrozenLake-v1", "observation": f"{__name__}:shown"}, None)


def test_a_terminals_colours_become_brackets():
    assert strip_terminal_codes("\n  \x1b[1mup\x1b[0m\n\x1b[41mS\x1b[0mFFF\x1b[0m") == "[up]\n[S]FFF"


# In processes of their own


def die(answer: str) -> int:
    if answer == "up":
        os._exit(3)
    if answer == "left":
        threading.Event().wait()
    return MOVES.index(answer)


@pytest.mark.slow
def test_games_in_processes_end_as_here_and_one_that_dies_takes_its_own_along():
    apart = Gym("FrozenLake-v1", FRESH, actions=f"{__name__}:die", processes=2)
    episodes, _ = played(apart, walker, {}, samples=3)
    here, _ = one(Gym("FrozenLake-v1", FRESH, actions=MOVES), walker, {})
    assert [episode.tokens for episode in episodes] == [here.tokens] * 3
    first = iter(["up"])
    left, _ = played(apart, lambda text: next(first, "") or walker(text), {}, samples=2, on_failure="drop")
    assert [episode.score.reward for episode in left] == [1.0]
    assert one(apart, walker, {})[0].score.reward == 1.0  # another has taken its place
    with pytest.raises(EpisodeFailed, match="the process that held the game died"):
        one(apart, lambda text: "up", {})


class Leaving:
    """Raises what it is told to, other than an `Exception`."""

    text = "Go"

    def __init__(self, seed: int):
        pass

    def step(self, answer: str) -> str:
        if answer in (raises := {"exit": SystemExit(2), "next": StopIteration(3), "cancel": asyncio.CancelledError()}):
            raise raises[answer]
        return answer

    def end(self) -> None:
        pass


class SlowlyImported:
    """Stands for a class whose module waits for something when a new process imports it."""

    def __reduce__(self):
        return time.sleep, (600,)


@pytest.mark.slow
async def test_whatever_a_game_raises_is_raised_where_it_is_played_and_is_no_other_games():
    games = GameProcesses(Leaving, 1, step_seconds=300.0)

    async def outcome(name: int, answer: str) -> str:
        try:
            return await games.step(name, answer)
        except BaseException as error:
            return repr(error)

    answers = ["exit", "next", "cancel", "stay"]
    for name, _ in enumerate(answers):
        await games.begin(name, 0)
    async with asyncio.timeout(300):
        first = await asyncio.gather(*map(outcome, range(4), answers))
        exited, ended, *others = [*first, await games.step(0, "on")]
    assert (exited, others) == ("SystemExit(2)", ["CancelledError()", "stay", "on"])
    assert "StopIteration(3)" in ended


@pytest.mark.slow
async def test_a_process_that_does_not_start_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(game_processes, "START_SECONDS", 0.5)
    others = {*multiprocessing.active_children()}
    with pytest.raises(GameLost, match=r"did not start within 0\.5 s: does a module .* wait"):
        await asyncio.wait_for(GameProcesses(SlowlyImported(), 1, step_seconds=300.0).begin(0, 0), 300)
    for process in {*multiprocessing.active_children()} - others:
        process.join(10)
        assert not process.is_alive()


def test_nobody_waits_for_what_is_given_up_in_a_way_nobody_foresaw(monkeypatch: pytest.MonkeyPatch):
    async def broken(process: Any, calls: Any) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr(game_processes._GameProcess, "_run", broken)

    async def begun():
        await asyncio.wait_for(GameProcesses(Leaving, 1, step_seconds=60.0).begin(0, 0), 10)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(begun())


@pytest.mark.slow
def test_a_step_that_hangs_ends_its_process():
    apart = Gym("FrozenLake-v1", FRESH, actions=f"{__name__}:die", processes=1, step_seconds=15.0)
    with pytest.raises(EpisodeFailed, match="took longer than step_seconds=15 for a step"):
        one(apart, lambda text: "left", {})
    assert one(apart, walker, {})[0].score.reward == 1.0


@pytest.mark.slow
def test_a_step_that_hangs_does_not_hold_up_the_end_of_a_run():
    stepping, others = threading.Event(), {*multiprocessing.active_children()}
    games = Gym("FrozenLake-v1", FRESH, actions=f"{__name__}:die", processes=1)._games

    async def hang():
        await games.begin(0, 3)
        stepping.set()
        await games.step(0, "left")

    with event_loop() as loop:
        loop.submit(hang())
        assert stepping.wait(60)
        (process,) = {*multiprocessing.active_children()} - others
    process.join(10)
    assert not process.is_alive()


class Stepping:
    """Stands for the module of textarena: a game of two steps, as its ids that end in `-raw` play."""

    def reset(self, num_players: int, seed: int | None = None) -> None:
        self.said, self.left = [(-1, f"{num_players} {seed}", SimpleNamespace(name="PROMPT"))], 2

    def get_observation(self) -> tuple[int, list[Any]]:
        said, self.said = self.said, []
        return 0, said

    def step(self, action: str) -> tuple[bool, dict[str, Any]]:
        self.left -= 1
        self.said = [(0, action, SimpleNamespace(name="PLAYER_ACTION")), (-1, "so be it", SimpleNamespace(name="GAME"))]
        return self.left == 0, {}

    def close(self) -> tuple[dict[int, float], dict[str, Any]]:
        return {0: 0.75}, {}


def test_a_game_of_textarena_is_one_of_gymnasium(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "textarena", SimpleNamespace(make=lambda game: Stepping()))
    arguments = {"id": "enginehouse_environments.textarena:TextArena-v0", "make": {"game": "any"}}
    Gym.check(arguments, None)
    episode, asked = one(Gym(**arguments), answers("a", "b"), {})
    assert [last_line(text) for text in asked] == ["1 3", "so be it"]
    assert episode.score == Scored(0.75, {"return": 0.75, "turns": 2})
    assert "so be it" in asked[1]
    assert "\na\n" not in asked[1]


def test_the_example_of_the_page_plays():
    page = (Path(__file__).parents[2] / "docs/environments/games.md").read_text(encoding="utf-8")
    example = yaml.safe_load(re.findall(r"^```yaml\n(.*?)^```", page[page.index("## Gym") :], re.S | re.M)[0])
    assert example["environment"]["name"] == "gym"
    assert one(Gym(**example["environment"]["arguments"]), walker, {})[0].score.reward == 1.0
