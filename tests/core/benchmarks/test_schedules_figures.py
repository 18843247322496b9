"""How the benchmark of schedules gets its figures from runs. The runs here are made up; the arithmetic is not."""

import statistics

import pytest
from benchmarks.heavy_tail import SHORTEST_TOKENS, drawn_tokens
from benchmarks.schedules import EDGE_STEPS, Figures, Side, compare


def lines(step: float, *, generation: float, reward: float = 0.5) -> list[dict[str, float]]:
    """Metrics of a run; the first and last steps take a hundred seconds, in which nothing is drawn."""
    made, elapsed = [], 0.0
    for number in range(4 * EDGE_STEPS):
        edge = number <= EDGE_STEPS or number >= 3 * EDGE_STEPS
        elapsed += 100.0 if edge else step
        cpu = {"cpu/actor": 0.4, "cpu/rollout": 0.0 if edge else generation}
        made.append({"elapsed_seconds": elapsed, "reward/mean": reward, **cpu})
    return made


def side(*steps: float, generation: float = 0.4) -> Side:
    return Side((), [Figures.of(lines(step, generation=generation)) for step in steps], [0.0])


def test_the_ends_of_a_run_do_not_count():
    figures = Figures.of(lines(1.0, generation=0.9))
    assert figures.step == pytest.approx(1.0)
    assert figures.cpu == pytest.approx({"actor": 0.4, "rollout": 0.9})
    assert figures.idle == pytest.approx(0.1)


def test_ratios_are_those_of_a_round():
    even = {"staleness 0": side(1.0, 2.0, 1.0), "staleness 1": side(0.5, 1.0, 0.9), "staleness 4": side(1.0, 1.0, 1.0)}
    tail = {
        "staleness 1, heavy tail": side(1.0, 1.0, 3.0),
        "staleness 4, heavy tail": side(1.0, 0.5, 1.0, generation=0.45),
    }
    metrics = compare(even, tail)
    assert metrics["staleness_1_vs_0"] == pytest.approx(2.0)
    assert metrics["staleness_4_vs_1_heavy_tail"] == pytest.approx(2.0)
    assert metrics["rollout_idle_staleness_4"] == pytest.approx(0.55)
    assert metrics["generation_vs_training"] == pytest.approx(1.0)
    assert metrics["final_reward/staleness_0"] == pytest.approx(0.5)


def test_lengths_have_a_heavy_tail_and_depend_on_the_seed_alone():
    drawn = [drawn_tokens(seed) for seed in range(4000)]
    assert drawn == [drawn_tokens(seed) for seed in range(4000)]
    assert min(drawn) == SHORTEST_TOKENS
    assert statistics.mean(length > 10 * SHORTEST_TOKENS for length in drawn) == pytest.approx(0.1, abs=0.02)
