"""The benchmark of learning: its standard error, and what it says of runs."""

import math
import random
import statistics

import pytest
from benchmarks.learning import measure_gain, summarize


def test_the_gain_is_measured_in_its_standard_error():
    # An oracle: many draws of 60 questions, of which 12 were right before and 36 after.
    rng = random.Random(0)
    means, scores = [], []
    for _ in range(400):
        before = [float(rng.random() < 0.2) for _ in range(60)]
        after = [float(rng.random() < 0.6) for _ in range(60)]
        means.append(statistics.mean(after) - statistics.mean(before))
        scores.append(measure_gain(before, [after]))
    error = statistics.stdev(means)
    assert statistics.mean(scores) == pytest.approx(0.4 / error, rel=0.1)


def test_seeds_that_differ_make_a_gain_less_sure_and_more_seeds_do_not_count_their_questions_again():
    before = [0.0, 0.0, 0.0, 1.0]
    one = measure_gain(before, [[1.0, 1.0, 0.0, 1.0]])
    assert one == pytest.approx(math.sqrt(3))
    assert measure_gain(before, [[1.0, 1.0, 0.0, 1.0]] * 3) == pytest.approx(one)
    assert measure_gain(before, [[1.0, 1.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0]]) < one
    assert measure_gain(before, [before]) == 0.0


def test_a_side_is_shown_by_the_mean_and_the_range_of_its_runs():
    run = {"rewards": [0.0, 0.5, 0.5, 0.8], "seconds": 2.0, "cpu_seconds": 3.0, "largest_gib": 1.0, "all_gib": 2.0}
    result = summarize({"TRL": [run | {"right": [1.0, 1.0]}, run | {"right": [1.0, 0.0]}]}, [0.0, 0.0])
    assert result["metrics"]["held_out_before"] == 0.0
    assert result["metrics"]["held_out_after/trl"] == 0.75
    assert result["metrics"]["reward_last/trl"] == pytest.approx(0.6)
    assert (result["sides"]["TRL"]["least"], result["sides"]["TRL"]["most"], result["sides"]["TRL"]["runs"]) == (
        0.5,
        1,
        2,
    )
    assert result["curves"] == {"TRL": [run["rewards"]] * 2}
