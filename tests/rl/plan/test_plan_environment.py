"""Planning what makes the samples: named, found, checked against its constructor, and said."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from projects import Project, refusal

from enginehouse.engines.declared import find_faults
from enginehouse.errors import ConfigError, UserError
from enginehouse.plugin import Environment
from enginehouse_rl.episodes.runner import make_environment
from enginehouse_rl.plan.functions import FunctionCall
from enginehouse_rl.plan.parts.playing import SINGLE_TURN
from enginehouse_rl.plan.plan import Plan
from enginehouse_rl.rewards.weighted import WeightedRewards

GAMES = """
from __future__ import annotations

from typing import Annotated

from pydantic import Field

from enginehouse.errors import ConfigError, UserError


class Game:
    def __init__(self, rounds: Annotated[int, Field(gt=0)] = 2, key: str = ""):
        self.rounds, self.key = rounds, key

    async def run(self, task, policy, context): ...


class Picky:
    def __init__(self, mood: str = "bad"):
        raise OSError(f"in a {mood} mood")

    async def run(self, task, policy, context): ...


class Sure:
    async def run(self, task, policy, context): ...


class Careful:
    def __init__(self, pieces: list[str]): ...

    @staticmethod
    def check(arguments, columns):
        if "queen" not in [piece.lower() for piece in arguments["pieces"]]:
            raise ConfigError("there is no queen")

    async def run(self, task, policy, context): ...


class Asking:
    needs_reward = True

    async def run(self, task, policy, context): ...


class Telling:
    needs_reward = False

    async def run(self, task, policy, context): ...


class Depending:
    needs_reward = None

    async def run(self, task, policy, context): ...


class Scoring:
    @staticmethod
    def check(arguments, columns):
        if columns is not None and "clue" not in columns:
            raise ConfigError(f"no column 'clue' in {sorted(columns)}")

    async def run(self, task, policy, context): ...


class Spoken:
    @staticmethod
    def check_tokenizer(arguments, tokenizer):
        raise UserError(f"{type(tokenizer).__name__} writes no calls")

    async def run(self, task, policy, context): ...


class Judging:
    def check(self, guess):
        return guess == self.secret

    async def run(self, task, policy, context): ...


class Mute:
    def talk(self): ...


class Blocking:
    def run(self, task, policy, context): ...


class Small:
    async def run(self, task): ...


async def run(task, policy, context): ...
"""


@pytest.fixture(autouse=True)
def games(project: Project) -> None:
    (project.root / "games.py").write_text(GAMES)


def test_unless_told_otherwise_a_prompt_is_answered_once(make: Callable[..., Plan]):
    planned = make()
    assert planned.environment == FunctionCall(SINGLE_TURN, {})
    assert planned.is_single_turn
    assert "environment" not in dict(planned.facts)
    assert make("environment.name=enginehouse:single_turn").is_single_turn


def test_an_environment_of_ones_own_is_planned_and_said(make: Callable[..., Plan]):
    planned = make("environment={name: 'games:Game', arguments: {rounds: 3}}")
    assert planned.environment == FunctionCall("games:Game", {"rounds": 3})
    facts = dict(planned.facts)
    assert facts["environment"] == "games:Game (rounds=3)"
    assert facts["a step"].endswith("samples, at most 8 new tokens each time that games:Game asks for some")
    apart = make("environment={name: 'games:Game', processes: 2}")
    assert dict(apart.facts)["environment"].startswith("games:Game; in 2 processes, each with")


def test_cores_own_environment_is_known_by_any_of_its_names(make: Callable[..., Plan]):
    for name in ("single_turn", "enginehouse:single_turn", "enginehouse_rl.environments.single_turn:SingleTurn"):
        planned = make(f"environment.name={name}")
        assert planned.is_single_turn
        assert "environment" not in dict(planned.facts)
        assert "new tokens, " in dict(planned.facts)["a step"]


def test_what_a_sample_may_be_is_the_models_to_say(make: Callable[..., Plan], project: Project):
    assert (make().vocabulary, make().most_tokens) == (31, 128)
    shorter = project.make_model("shorter", max_position_embeddings=64)
    critic = ("algorithm.advantage.name=gae", f"critic.path={shorter}")
    assert make(*critic).most_tokens == 64
    assert make("rollout.engine.options.max_model_tokens=50").most_tokens == 50


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("singleturn", "environment.name: unknown environment 'singleturn'. Did you mean 'single_turn'?"),
        ("games.Game", "name your own function as games:Game"),
        ("games:Gme", "environment.name: module 'games'"),
        (
            "games:Mute",
            "environment.name: 'games:Mute' does not implement Environment: it lacks run (docs/plugins/environment.md)",
        ),
        (
            "games:Blocking",
            "'games:Blocking' does not implement Environment: run: it is not async, but must be: its result",
        ),
        (
            "games:Small",
            "'games:Small' does not implement Environment: run: it takes (self, task), but must accept the arguments",
        ),
        ("games:run", "'games:run' must be a class, but is run, a function"),
        (
            "games:Game, arguments: {round: 3}",
            "does not take 'round' (of environment.arguments). Did you mean 'rounds'?",
        ),
        ("games:Game, arguments: {rounds: 0}", "environment.arguments.rounds: expected more than 0, got the number 0"),
        ("games:Careful, arguments: {pieces: [king]}", "environment.arguments: there is no queen"),
        ("games:Careful, arguments: {pieces: [3]}", "environment.arguments.pieces: expected a string"),
        ("games:Careful", "pieces"),
        ("games:Sure, arguments: {rounds: 1}", "To remove arguments of another environment, set"),
        ("single_turn, arguments: {rounds: 1}", "does not take 'rounds' (of environment.arguments)"),
        ("games:Game, arguments: {api_key: x}", "environment.arguments.api_key holds a secret"),
        ("games:Game, arguments: {key: '${NOT_THERE}'}", "there is no environment variable NOT_THERE"),
    ],
)
def test_an_environment_that_could_not_be_made_is_refused(make: Callable[..., Plan], given: str, said: str):
    name, comma, rest = given.partition(",")
    assert said in refusal(make, f"environment={{name: '{name}'{comma}{rest}}}")


def test_an_environment_sees_the_tokenizer_before_anything_starts(make, monkeypatch):
    monkeypatch.setattr("enginehouse_rl.plan.row_lengths.load_tokenizer", lambda *arguments: "a tokenizer")
    with pytest.raises(UserError, match="environment: str writes no calls"):
        make("environment.name=games:Spoken")


def test_a_reward_is_wanted_where_the_environment_may_not_bring_one(make: Callable[..., Plan], project: Project):
    """What it is given is the environment's business, if that is another."""
    project.write_rows("train.jsonl", [{"prompt": f"{n}+1="} for n in range(40)])
    own = "environment.name=games:Game"
    assert make(own).rewards[0].function == "scoring:right"
    with pytest.raises(UserError, match="requires the argument 'answer'"):
        make()
    project.config["reward"] = {}
    assert make(own).rewards == ()
    with pytest.raises(UserError, match=r"set reward\.function"):
        make()


def test_it_is_made_with_the_value_of_a_variable_which_stands_in_no_plan(make: Callable[..., Plan], monkeypatch):
    monkeypatch.setenv("GAME_KEY", "open sesame")
    planned = make("environment={name: 'games:Game', arguments: {rounds: 4, key: '${GAME_KEY}'}}")
    assert "sesame" not in repr(planned)
    made: Any = make_environment(planned)
    assert (made.rounds, made.key) == (4, "open sesame")


def test_what_it_raises_as_it_is_made_is_said(make: Callable[..., Plan]):
    with pytest.raises(ConfigError, match=r"environment\.name: making 'games:Picky' raised OSError: in a bad mood"):
        make_environment(make("environment.name=games:Picky"))


def test_a_reward_that_is_asked_for_and_not_there_is_said(make: Callable[..., Plan], project: Project):
    project.config["reward"] = {}
    rewards = WeightedRewards(make("environment.name=games:Game"))
    with pytest.raises(ConfigError, match=r"requests a reward, but the config has none: set reward\.function"):
        asyncio.run(rewards.scorer(1)([{"response": "x"}]))


def test_an_environment_sees_the_columns_and_says_that_it_needs_the_reward(make: Callable[..., Plan], project: Project):
    project.config["reward"] = {}
    with pytest.raises(UserError, match=r"environment\.arguments: no column 'clue' in \['answer'"):
        make("environment.name=games:Scoring")
    with pytest.raises(UserError, match=r"set reward\.function.*'games:Asking' needs a reward for its answers"):
        make("environment.name=games:Asking")


def test_a_reward_that_nothing_asks_for_is_noted(make: Callable[..., Plan], project: Project):
    def notes(*overrides: str) -> list[str]:
        return [note for note in make(*overrides).notes if "unused" in note]

    assert notes() == notes("environment.name=games:Asking") == notes("environment.name=games:Depending") == []
    assert notes("environment.name=games:Telling") == [
        "the environment 'games:Telling' scores its episodes itself, so reward is unused"
    ]
    (maybe,) = notes("environment.name=games:Sure")
    assert maybe.startswith(
        "the environment 'games:Sure' does not declare whether it uses reward (context.score), so reward"
    )
    project.config["reward"] = {"functions": {"form": {"function": "scoring:right"}}}
    (several,) = notes("environment.name=games:Telling")
    assert several.endswith("so reward.functions is unused")
    project.config["reward"] = {}
    assert notes("environment.name=games:Telling") == notes("environment.name=games:Sure") == []


def test_a_check_that_is_of_instances_is_the_environments_own(make: Callable[..., Plan]):
    assert make("environment.name=games:Judging").environment.reference == "games:Judging"


def test_what_a_plugin_declares_has_to_be_an_environment(project: Project, monkeypatch):
    monkeypatch.syspath_prepend(str(project.root))
    assert list(find_faults(Environment(name="sure", environment="games:Sure"))) == []
    (fault,) = find_faults(Environment(name="mute", environment="games:Mute"))
    assert fault.what == "environment 'mute': environment 'games:Mute' does not implement Environment: it lacks run"
