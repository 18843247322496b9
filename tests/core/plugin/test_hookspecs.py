"""The page of hooks: each says when it is called and since which contract version, and each is tested."""

import re
from pathlib import Path

import pytest

from enginehouse.plugin import CONTRACT, hookspecs
from enginehouse.plugin.declarations import DECLARING
from enginehouse.plugin.observers import EVENTS, PREFIX

HOOKS = {name: spec for name, spec in vars(hookspecs).items() if name.startswith(PREFIX)}
DECIDING = {"enginehouse_pick_transport", "enginehouse_run_step"}


@pytest.mark.parametrize("name", HOOKS)
def test_each_hook_says_when_it_is_called_and_since_when(name):
    text = " ".join((HOOKS[name].__doc__ or "").split())
    assert re.search(r"\bCalled\b", text), f"{name} does not say when it is called"
    since = re.search(r"\bSince (\d+)\.(\d+)\.", text)
    assert since, f"{name} does not say since which contract version it is"
    assert (int(since[1]), int(since[2])) <= CONTRACT


@pytest.mark.parametrize("name", HOOKS)
def test_each_hook_is_implemented_by_a_test(name):
    sources = [path for path in Path(__file__).parents[1].rglob("test_*.py") if path != Path(__file__)]
    assert any(f"def {name}(" in path.read_text() for path in sources), f"no test implements {name}"


def test_each_hook_is_marked_and_of_one_sort():
    assert all(hasattr(spec, "enginehouse_spec") for spec in HOOKS.values())
    sorts = [set(DECLARING), DECIDING, {PREFIX + event for event in EVENTS}, {"enginehouse_commands"}]
    assert set().union(*sorts) == set(HOOKS)
    assert sum(map(len, sorts)) == len(HOOKS)
