"""How the benchmark of algorithms gets its figures from runs. The runs here are made up; the arithmetic is not."""

import pytest
from benchmarks.algorithms import Outcome, curve, figures, row


def outcome(final: float, seconds: float = 10.0) -> Outcome:
    return Outcome(seconds, [0, 10, 20], [0.0, 0.5, final], final, greedy=1.0)


def test_a_curve_is_of_the_steps_that_were_validated():
    lines = [{"step": 9, "loss": 1.0}, {"step": 10, "validation/reward": 0.25}, {"step": 20, "validation/reward": 0.5}]
    assert curve(lines, "validation/reward") == ([10, 20], [0.25, 0.5])


def test_figures_are_means_over_seeds_and_a_reward_model_is_judged_by_its_accuracy():
    metrics = figures({"ppo": [outcome(0.9, 10.0), outcome(0.7, 20.0)], "rm": [outcome(0.5)]})
    assert metrics == pytest.approx({"reward/ppo": 0.8, "accuracy/rm": 0.5, "seconds/ppo": 15.0, "seconds/rm": 10.0})


def test_a_line_of_the_table_has_the_range_of_the_seeds():
    line = row([outcome(0.9), outcome(0.7)])
    assert line == pytest.approx(
        {"steps": 20, "before": 0, "final": 0.8, "lowest": 0.7, "highest": 0.9, "greedy": 1, "seconds": 10, "seeds": 2}
    )
