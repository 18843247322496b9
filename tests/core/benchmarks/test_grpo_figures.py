"""How the GRPO benchmark gets its figures from runs. The runs here are made up; the arithmetic is not."""

import json
from pathlib import Path

import pytest
from benchmarks.grpo import AHEAD, figures, measure
from benchmarks.runs import execute, rotated
from benchmarks.sides import WARM_UP_STEPS, Outcome, Side, read_enginehouse, row


def side(program: str, *step_seconds: float, engine_share: float = 0.8) -> Side:
    """A side with one round for each figure; the first steps and the last take a second and must not count."""
    made = Side(program, lambda directory, seed: [], lambda directory: Outcome([], directory))
    for seconds in step_seconds:
        steps = [1.0] * WARM_UP_STEPS + [seconds] * 10 + [1.0]
        made.outcomes.append(Outcome(steps, Path(), [step * engine_share for step in steps]))
        made.busy.append(0.0)
    return made


def test_each_program_counts_by_its_best_side_and_its_median_round():
    sides = {
        "ours": side("enginehouse", 0.06, 0.05, 0.09),
        "ahead": side(AHEAD, 0.04, 0.03, 0.05),
        "TRL, 2 threads": side("TRL", 0.12, 0.11, 0.30),
        "TRL, 1 thread": side("TRL", 0.15, 0.14, 0.16),
        "by hand": side("hand-written loop", 0.05),
    }
    rewards = {
        "ours": [0.97, 0.95, 0.96],
        "ahead": [0.5, 0.6, 0.4],
        "TRL, 2 threads": [0.9, 0.93, 0.92],
        "TRL, 1 thread": [0.1, 0.1, 0.1],
    }
    metrics = figures(sides, rewards)
    assert metrics["steps_per_second_vs_trl"] == pytest.approx(0.12 / 0.06)
    assert metrics["steps_per_second_vs_trl_staleness_1"] == pytest.approx(0.12 / 0.04)
    assert metrics["steps_per_second/trl"] == pytest.approx(1 / 0.12)
    assert metrics["step_vs_handwritten"] == pytest.approx(0.06 / 0.05)
    assert metrics["controller_share"] == pytest.approx(0.2)
    assert (metrics["final_reward/enginehouse"], metrics["final_reward/trl"]) == (0.96, 0.92)


def test_a_size_without_a_reward_to_judge_has_speeds_alone():
    sides = {"ours": side("enginehouse", 0.05), "TRL": side("TRL", 0.1)}
    metrics = figures(sides, {})
    assert metrics["steps_per_second_vs_trl"] == pytest.approx(2.0)
    assert not any(name.startswith("final_reward") for name in metrics)
    assert "final_reward" not in row(sides["ours"], ())


def test_an_unknown_size_is_refused():
    with pytest.raises(ValueError, match=r"size=large: one of small, medium"):
        measure(size="large")


def test_a_row_shows_the_spread_of_the_rounds():
    shown = row(side("TRL", 0.12, 0.11, 0.30), [0.9, 0.93, 0.92])
    assert (shown["ms_a_step"], shown["fastest_round"], shown["slowest_round"]) == pytest.approx((120, 110, 300))


def test_a_step_of_ours_lasts_from_line_to_line_of_the_metrics(tmp_path):
    lines = [
        {"step": step, "elapsed_seconds": 2.0 + 0.1 * step, "busy/generate": 0.03, "busy/update": 0.05}
        for step in range(5)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    outcome = read_enginehouse(tmp_path)
    assert outcome.step_seconds == pytest.approx([0.1] * 4)
    assert outcome.engine_seconds == pytest.approx([0.08] * 4)


def test_every_round_starts_with_another_side_and_has_them_all():
    sides = {name: side("x") for name in "abc"}
    orders = ["".join(name for name, _ in rotated(sides, number)) for number in range(4)]
    assert orders == ["abc", "bca", "cab", "abc"]


def test_a_command_that_fails_shows_its_last_lines(tmp_path):
    with pytest.raises(RuntimeError, match=r"exit code 3(.|\n)*the reason"):
        execute(["sh", "-c", "echo the reason >&2; exit 3"], tmp_path / "log")
