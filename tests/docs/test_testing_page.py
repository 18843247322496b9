"""docs/testing.md names tests there are, in commands that run them."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| (?P<promise>.+) \| (?P<tests>`.+`) \| (?P<commands>`test.*`) \|$", re.M)
PAGE = ROOT.joinpath("docs/testing.md").read_text(encoding="utf-8").partition("## Promises")[2]
ROWS = [(row["promise"], row["tests"].split("; "), row["commands"].split("; ")) for row in ROW.finditer(PAGE)]
APART = {"real", "benchmarks"}
"""Markers of tests that a command of their own runs alone."""
RUNS = {
    "test": lambda marks: ("slow" not in marks or "essential" in marks) and not APART & marks,
    "test-long": lambda marks: "slow" in marks and "essential" not in marks and not APART & marks,
    "test-exhaustive": lambda marks: "exhaustive" in marks,
    "test-real": lambda marks: "real" in marks,
    "test-benchmarks": lambda marks: "benchmarks" in marks,
}
"""Whether a command of make runs something of what has these markers."""


def markers(test: str) -> list[set[str]]:
    """The markers in the source of a test, or of each test or class of a file, those of its parameters among them."""
    file, _, name = test.strip("`").partition("::")
    source = ROOT.joinpath("tests", file).read_text(encoding="utf-8")
    whole = set(re.findall(r"mark\.(\w+)", "".join(re.findall(r"^pytestmark = .*(?:\n .*)*", source, re.M))))
    starts = re.finditer(r"((?:^@[^\n]*\n(?:^[^@d\n][^\n]*\n)*)*)^(?:def|class) (test_\w+|Test\w+)\b", source, re.M)
    found = {start[2]: whole | set(re.findall(r"mark\.(\w+)", start[1])) for start in starts}
    assert found, f"{file} has no tests"
    return [found[name]] if name else list(found.values())


@pytest.mark.parametrize(("promise", "tests", "commands"), ROWS, ids=[promise[:40] for promise, *_ in ROWS])
def test_each_promise_has_a_test_that_its_command_runs(promise: str, tests: list[str], commands: list[str]):
    named = [command.strip("`") for command in commands]
    for test, command in zip(tests, named if len(named) > 1 else named * len(tests), strict=True):
        assert any(RUNS[command](marks) for marks in markers(test)), (test, command)


def test_the_page_is_read():
    assert len(ROWS) > 25
