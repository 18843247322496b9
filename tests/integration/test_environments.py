"""Runs whose episodes have several turns, and one whose environment breaks them."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from game_environments import block

from enginehouse_recipes.sorting import write_lines

from .conftest import Start
from .test_environment_workers import assert_alike

TESTS = str(Path(__file__).parents[1])
ROUNDING = 1e-4
"""Which turns are drawn together depends on time, and with it the last bit of a logprob."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def game(house: Path) -> tuple[str, ...]:
    """What has a run play the game of docs/plugins/environment.md, without a reward of the config."""
    (house / "my_games.py").write_text(block("python"))
    row = json.loads(block("json"))
    write_lines(house / "secrets.jsonl", ({**row, "secret": str(number)} for number in range(8)))
    return (
        f"environment={json.dumps(yaml.safe_load(block('yaml'))['environment'])}",
        "data.train=secrets.jsonl",
        "data.validation=secrets.jsonl",
        "rollout.sampling.max_tokens=1",
        "reward.function=null",
        "train.samples_every=1",
    )


def test_a_game_of_two_turns_is_trained_on_and_validated_wherever_it_is_played(train: Start, game: tuple[str, ...]):
    given = "train.steps=3", "rollout.samples_per_prompt=16", "train.validate_every=3"
    runs = assert_alike(train, *game, *given, rounding=ROUNDING)
    for run in runs:
        assert all(1.0 <= line["reward/turns"] <= 2.0 for line in run.metrics)
        assert any(line["response/tokens_mean"] == line["reward/turns"] > 1.0 for line in run.metrics)
        validations = [json.loads(line) for line in (run.directory / "validation.jsonl").read_text().splitlines()]
        assert all(1.0 <= line["validation/turns"] <= 2.0 for line in validations)
        assert len(validations) == 2
    inline, apart = ([told(row) for row in run.samples(3)] for run in runs)
    assert apart == inline
    assert any("turns" in row for row in inline)


def told(row: dict[str, Any]) -> dict[str, Any]:
    """A sample without what depends on time."""
    turns = [{name: turn[name] for name in ("tokens", "version")} for turn in row.get("turns", ())]
    return {**row, **({"turns": turns} if turns else {})}


def test_rewards_of_steps_and_a_greedy_episode_reach_remax_from_wherever_it_is_played(train: Start):
    """And a KL term is taken off the same tokens' rewards."""
    runs = assert_alike(
        train, "environment={name: 'game_environments:Counting', arguments: {step: 0.1}}", "train.steps=2",
        "algorithm.advantage.name=remax", "algorithm.kl={coefficient: 0.01, place: reward}",
        "reward.function=rewards:varied", env={"PYTHONPATH": TESTS}, rounding=ROUNDING,
    )  # fmt: skip
    assert len(runs[1].metrics) == 2


def test_episodes_of_two_rows_are_trained_on_and_validated_wherever_they_are_played(train: Start, house: Path):
    """In mini-batches, with a KL term taken off the reward and values of a critic that go on from row to row."""
    (house / "my_readers.py").write_text(block("python", 1))
    write_lines(house / "texts.jsonl", ({"prompt": "s", "text": f"{number}314"} for number in range(8)))
    runs = assert_alike(
        train, "environment={name: 'my_readers:Reading', arguments: {characters: 2}}",
        "reward={function: format, arguments: {pattern: '.*[0-9].*'}}", "data.train=texts.jsonl",
        "data.validation=texts.jsonl", "train.validate_every=2", "train.steps=2", "train.samples_every=1",
        "rollout.sampling.max_tokens=3", "algorithm.minibatches=2", "algorithm.advantage.name=gae",
        "algorithm.kl={coefficient: 0.01, place: reward}", rounding=ROUNDING,
    )  # fmt: skip
    for run in runs:
        assert all(line["response/rows_mean"] == 2.0 and line["grad_norm"] > 0 for line in run.metrics)
    rows, apart = ([told(row) for row in run.samples(2)] for run in runs)
    assert apart == rows
    assert [(row["episode"], row["segment"], "reward" in row) for row in rows] == [
        (episode, segment, segment == 1) for episode in range(16) for segment in range(2)
    ]


def test_an_environment_that_encodes_text_again_ends_the_run_whatever_on_failure_says(train, game):
    run = train(
        *game, "environment={name: 'game_environments:Encoding', processes: 1}", "rollout.on_failure=drop",
        "rollout.sampling.max_tokens=5", env={"PYTHONPATH": TESTS},
    )  # fmt: skip
    ended = run.finish()
    assert ended.code == 1
    assert "environment 'game_environments:Encoding', task " in ended.err
    assert "is marked as chosen, but the policy did not generate it" in ended.err
    assert run.record["status"] == "failed"
