"""What is said of validations: how the reward went, and that the model became worse, where it did."""

import io

import pytest
from rich.console import Console

from enginehouse_rl.runs import Progress
from enginehouse_rl.runs.validations import SHOWN, Validations, format_figure


def of(*rewards: float, error: float = 0.03, how: str = "greedy", part: str = "validation") -> Validations:
    validations = Validations()
    for number, reward in enumerate(rewards):
        validations.add(20 * number, {f"{part}/reward": reward, f"{part}/reward_stderr": error}, how)
    return validations


def test_the_first_says_what_the_model_could_before():
    assert of(0.775).lines() == ["validation at step 0, greedy: reward 0.775 ± 0.030"]


@pytest.mark.parametrize(
    ("rewards", "words"),
    [
        ((0.775, 0.31), "reward 0.775 -> 0.310 ± 0.030, worse than before training"),
        ((0.775, 0.75), "reward 0.775 -> 0.750 ± 0.030"),
        ((0.164, 0.9, 0.6), "reward 0.164 -> 0.600 ± 0.030, worse than at step 20 (0.900)"),
        ((0.164, 0.65, 0.6), "reward 0.164 -> 0.600 ± 0.030"),
        ((0.164, 0.29), "reward 0.164 -> 0.290 ± 0.030"),
    ],
)
def test_a_validation_is_worse_by_more_than_its_error(rewards, words):
    assert of(*rewards).lines() == [f"validation at step {20 * (len(rewards) - 1)}, greedy: {words}"]


def test_the_last_words_say_it_too():
    assert of(0.775, 0.5, 0.31).facts() == [
        ("validation/reward", "0.775 at step 0 -> 0.310 at step 40, greedy; worse than before training")
    ]


def test_each_file_and_each_value_has_its_line_and_too_many_are_counted():
    validations = Validations()
    for reward in (0.8, 0.2):
        of_values = {f"validation/aime/s{number}/reward": reward for number in range(SHOWN)}
        validations.add(10, {"validation/aime/reward": reward, "validation/aime/truncated": 0.5, **of_values})
    first, second, *_, last = validations.lines()
    assert first == "validation at step 10: aime: reward 0.800 -> 0.200, worse than at step 10  truncated 0.500"
    assert second == "  aime/s0: reward 0.800 -> 0.200, worse than at step 10"
    assert last == "  1 more in validation.jsonl"
    assert len(validations.facts()) == SHOWN


def test_that_the_model_became_worse_stays_on_a_terminal():
    stream = io.StringIO()
    with Progress("run", console=Console(file=stream, force_terminal=True, width=200)) as progress:
        progress.validated(0, {"validation/gsm/reward": 0.9}, "greedy")
        progress.validated(10, {"validation/gsm/reward": 0.95}, "greedy")
        assert "0.900" not in stream.getvalue()
        progress.validated(20, {"validation/gsm/reward": 0.1}, "greedy")
    assert (
        "validation at step 20, greedy: gsm: reward 0.900 -> 0.100, worse than before training\n" in stream.getvalue()
    )


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0.000"), (2e-13, "0.000"), (0.0033, "0.00330"), (-0.000212, "-0.000212"), (0.0781, "0.078"),
        (42.0, "42.000"), (20_816.4, "20,816"),
    ],
)  # fmt: skip
def test_a_metric_has_as_many_digits_as_say_something(value: float, shown: str):
    assert format_figure(value) == shown
