"""How the benchmark of scale gets its figures from a run's metrics and from what was seen of its memory."""

import pytest
from benchmarks.scale import growth, row

MB = 10**6


def test_memory_grows_from_before_the_first_step_to_the_end_of_the_last():
    lines = [{"clock/began": 10.0, "clock/ended": 12.0}, {"clock/began": 12.5, "clock/ended": 14.0}]
    before = [(8.0, 900 * MB), (9.9, 100 * MB)]
    during = [(11.0, 150 * MB), (12.2, 180 * MB), (13.0, 170 * MB)]
    after = [(15.0, 800 * MB)]
    assert growth(lines, [*before, *during, *after]) == 80 * MB


def test_what_a_step_takes_but_for_the_actor_is_outside_of_engines():
    phases = dict.fromkeys(("time/generate", "time/reward", "time/advantage", "time/update", "time/sync"), 0.1)
    lines = [
        {
            "elapsed_seconds": ended,
            "clock/began": ended,
            "clock/ended": ended,
            "busy/update": 0.5,
            "cpu/controller": 0.2,
            **phases,
        }
        for ended in (60.0, 62.0, 65.0, 66.0)
    ]
    figures = row(lines, [(0.0, 0), (63.0, 5 * MB)])
    assert figures["seconds_outside_engines"] == pytest.approx(1.5)
    assert figures["controller_growth_mb"] == pytest.approx(5.0)
    assert figures["generate_seconds"] == pytest.approx(0.1)
