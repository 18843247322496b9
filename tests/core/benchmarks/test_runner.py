"""The benchmark runner: what it finds, reads, writes and shows."""

import json
import re
import sys
from types import SimpleNamespace

import pytest
from benchmarks import __main__ as runner


@pytest.fixture
def fake_benchmark(monkeypatch, tmp_path):
    """A benchmark called `fake`, which measures nothing, and an output directory of its own."""

    def measure(rounds: int = 3, label: str = "none"):
        return {"metrics": {"ratio": 2.5, "rounds": rounds}, "sides": {"ours": {"ms_a_step": 12.345}, "theirs": {}}}

    monkeypatch.setitem(sys.modules, "benchmarks.fake", SimpleNamespace(measure=measure))
    monkeypatch.setattr(runner, "names", lambda: ["fake"])
    monkeypatch.setattr(runner, "busy_cores", lambda: 0.0)
    monkeypatch.setattr(runner, "OUT", tmp_path / "out")
    return tmp_path / "out" / "fake.json"


def test_modules_with_a_measure_function_are_benchmarks_and_no_others():
    assert "grpo" in runner.names()
    assert not {"machine", "environments", "bare_grpo", "trl_grpo", "__main__"} & set(runner.names())


def test_a_result_is_written_with_its_command_and_machine(fake_benchmark, capsys):
    assert runner.main(["fake", "rounds=1"]) == 0
    written = json.loads(fake_benchmark.read_text())
    assert written["metrics"] == {"ratio": 2.5, "rounds": 1}
    assert written["command"] == "python -m benchmarks fake rounds=1"
    assert {"processor", "cores", "memory_gib", "load_average"} <= set(written["machine"])
    shown = capsys.readouterr().out
    assert "ms a step" in shown
    assert "12.35" in shown or "12.34" in shown


def test_a_result_says_its_commit_and_date_first(fake_benchmark):
    runner.main(["fake"])
    assert re.match(r'{\n  "commit": "[0-9a-f]{40}\+?",\n  "written": "\d{4}-\d\d-\d\dT', fake_benchmark.read_text())


def test_a_second_benchmark_is_refused_while_one_runs(fake_benchmark, monkeypatch, capsys):
    def measure():
        assert runner.main(["fake"]) == 2
        return {"metrics": {"runs": 1}}

    monkeypatch.setitem(sys.modules, "benchmarks.fake", SimpleNamespace(measure=measure))
    assert runner.main(["fake"]) == 0
    assert "another one runs in this checkout" in capsys.readouterr().out
    assert runner.main(["fake"]) == 0


def test_a_busy_machine_is_said_beside_the_figures(fake_benchmark, monkeypatch, capsys):
    monkeypatch.setattr(runner, "busy_cores", lambda: 1.5)
    runner.main(["fake"])
    assert "others kept 1.5 cores busy" in capsys.readouterr().out


def test_an_unknown_benchmark_is_refused_with_those_there_are(fake_benchmark, capsys):
    assert runner.main(["fakee"]) == 2
    assert "benchmarks: fake" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["rounds", "round=3"])
def test_a_word_that_is_no_option_is_refused_with_the_options(fake_benchmark, capsys, word):
    assert runner.main(["fake", word]) == 2
    assert "rounds, label" in capsys.readouterr().out
    assert not fake_benchmark.exists()


def test_options_are_literals_or_strings():
    def measure(rounds: int = 1, label: str = "", quick: bool = False): ...

    options = runner.read_options(measure, ["rounds=3", "label=a b", "quick=True"])
    assert options == {"rounds": 3, "label": "a b", "quick": True}
