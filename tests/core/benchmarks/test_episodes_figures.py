"""How the benchmark of episodes gets its figures from rounds, and that both of its sides play the same."""

import pytest
from benchmarks.episodes import engine_idle, figures, overhead
from benchmarks.episodes_tool import Tool, longest_sleep, prompt

MB = 10**6
TASK = {"sleep": 2.0, "result_tokens": 4, "turns": 3, "episodes": 50}


def turn(seconds, engine=8.0, waited=0.0, tokens=1000):
    return {
        "seconds": seconds,
        "engine_cpu_seconds": engine,
        "engine_waited_seconds": waited,
        "own_cpu_seconds": 1.0,
        "tokens": tokens,
    }


def test_overhead_is_above_the_engine_or_the_longest_sleep_whichever_is_more():
    assert overhead(turn(10.0, engine=8.0), sleeps=5.0) == pytest.approx(0.25)
    assert overhead(turn(10.0, engine=2.0), sleeps=9.0) == pytest.approx(1 / 9)


def test_an_engine_that_waits_for_a_core_is_not_idle():
    assert engine_idle(turn(10.0, engine=6.0, waited=3.0)) == pytest.approx(0.1)


def test_memory_grows_from_after_the_round_that_does_not_count_to_the_end():
    turns = {"bare": [turn(10.0), turn(10.0)], "enginehouse": [turn(20.0), turn(8.0)]}
    memory = [{"controller": size * MB} for size in (100, 150, 106)]
    metrics = figures(turns, {"bare": memory, "enginehouse": memory}, 1.0, 2000)["metrics"]
    assert metrics["growth_mb/controller"] == pytest.approx(1.5)
    assert metrics["vs_bare"] == pytest.approx((0.5 + 1.25) / 2), "round by round"


def test_a_tool_does_the_same_for_both_sides_and_differs_by_episode_and_turn():
    tool, again = Tool(TASK), Tool(TASK)
    asked = [(episode, turn) for episode in range(50) for turn in range(2)]
    assert [tool.answer(*one) for one in asked] == [again.answer(*one) for one in asked]
    assert len({tuple(tool.answer(*one)) for one in asked}) == len({tool.seconds(*one) for one in asked}) == 100
    assert all(0.0 <= tool.seconds(*one) <= 2.0 for one in asked)
    assert longest_sleep(TASK) == max(tool.seconds(episode, 0) + tool.seconds(episode, 1) for episode in range(50))
    assert prompt(3, 6) != prompt(4, 6)
