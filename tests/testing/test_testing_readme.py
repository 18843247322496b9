"""The suites of the testing plugin's README are found by pytest, and pass with what core has in the place of "mine"."""

import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import tracker_mutants

import enginehouse_testing
from enginehouse.plugin import Tracker
from enginehouse_testing.running import Certifier, cases

README = Path(__file__).parents[2] / "plugins" / "testing" / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
REAL = {
    "my_loss": "clipped_policy",
    "my_advantage": "grpo",
    "my_reward": "exact_match",
    "my_tracker": Tracker(name="my_tracker", tracker="tracker_mutants:Right"),
    "my_environment": "enginehouse_rl.environments.single_turn:SingleTurn",
}
SUITES = ("Loss", "Advantage", "Reward", "Tracker", "Environment")


def suite_of(block):
    """The class that a block of the page makes, of what core has."""
    name = re.search(r"class (\w+)", block)[1]
    module = types.ModuleType("of_the_page")
    module.my_tracker, module.REAL = tracker_mutants, REAL
    exec(re.sub(r'= "(my_\w+)"', r'= REAL["\1"]', block), vars(module))
    return vars(module)[name]


@pytest.mark.parametrize("kind", SUITES)
def test_its_suites_pass(kind):
    suite = suite_of(next(block for block in BLOCKS if f"import {kind}Suite" in block))
    record, given = suite.record(), suite.given()
    assert [one.name for one in suite.test_conforms.pytestmark] == ["parametrize"]
    with Certifier(record, given=given) as certifier:
        results = [certifier.run(case) for case in cases(record)]
    assert not {one.name: one.detail for one in results if one.outcome == "failed"}
    assert any(one.outcome == "passed" for one in results)


def test_it_shows_every_suite():
    page = README.read_text(encoding="utf-8")
    assert {name for name in enginehouse_testing.__all__ if name.endswith("Suite") and name not in page} == set()


@pytest.mark.slow
def test_a_suite_is_what_pytest_runs(tmp_path):
    block = next(block for block in BLOCKS if "import AdvantageSuite" in block).replace("my_advantage", "rloo")
    (tmp_path / "test_mine.py").write_text(block)
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "test_mine.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "10 passed" in done.stdout, done.stdout
