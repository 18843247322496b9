"""Observers hear what happens; one that fails stops neither the others nor the run."""

import logging
import sys

import pytest

from enginehouse.plugin import PluginError, load_plugins
from enginehouse.plugin.observers import EVENTS

FACTS = {
    "run_started": {"run": "run"},
    "step_finished": {"run": "run", "step": 3, "metrics": {"loss": 0.5}},
    "validated": {"run": "run", "step": 0, "metrics": {"validation/reward": 0.5}},
    "weights_updated": {"run": "run", "version": 4, "seconds": 0.1},
    "checkpoint_saved": {"run": "run", "step": 3, "path": "/nowhere", "what": "model"},
    "run_finished": {"run": "run", "outcome": "finished"},
    "run_recorded": {"directory": "/nowhere", "outcome": "failed"},
    "call_dispatched": {"group": "actor", "method": "forward", "call": 7},
    "call_collected": {"group": "actor", "method": "forward", "call": 7, "seconds": 0.2},
}

LISTENER = """
heard = []

@hookimpl
def enginehouse_run_started(run):
    heard.append(("run_started", run))

@hookimpl
def enginehouse_step_finished(run, step, metrics):
    heard.append(("step_finished", run, step, metrics))

@hookimpl
def enginehouse_validated(run, step, metrics):
    heard.append(("validated", run, step, metrics))

@hookimpl
def enginehouse_weights_updated(run, version, seconds):
    heard.append(("weights_updated", run, version, seconds))

@hookimpl
def enginehouse_checkpoint_saved(run, step, path, what):
    heard.append(("checkpoint_saved", run, step, path, what))

@hookimpl
def enginehouse_run_finished(run, outcome):
    heard.append(("run_finished", run, outcome))

@hookimpl
def enginehouse_run_recorded(directory, outcome):
    heard.append(("run_recorded", directory, outcome))

@hookimpl
def enginehouse_call_dispatched(group, method, call):
    heard.append(("call_dispatched", group, method, call))

@hookimpl
def enginehouse_call_collected(group, method, call, seconds):
    heard.append(("call_collected", group, method, call, seconds))
"""

FAILING = """
calls = []

@hookimpl
def enginehouse_step_finished(step):
    calls.append(step)
    raise RuntimeError("ears full")
"""


def test_every_event_reaches_its_observers_with_its_facts(distributions):
    module = distributions.add("listener", LISTENER)
    manager = load_plugins(enabled=["listener"])
    for event, facts in FACTS.items():
        assert manager.observes(event)
        manager.observe(event, **facts)
    assert sys.modules[module].heard == [(event, *facts.values()) for event, facts in FACTS.items()]
    assert set(FACTS) == EVENTS


def test_an_observer_takes_only_the_arguments_it_wants(distributions):
    module = distributions.add(
        "listener", "heard = []\n@hookimpl\ndef enginehouse_step_finished(step): heard.append(step)"
    )
    load_plugins(enabled=["listener"]).observe("step_finished", **FACTS["step_finished"])
    assert sys.modules[module].heard == [3]


def test_nobody_observes_when_no_plugin_does():
    manager = load_plugins(enabled=[])
    assert not any(manager.observes(event) for event in EVENTS)
    manager.observe("step_finished", run=None, step=0, metrics={})


def test_an_event_there_is_not_is_a_mistake_of_the_caller():
    with pytest.raises(KeyError):
        load_plugins(enabled=[]).observe("step_begun")


def test_a_failing_observer_is_logged_with_its_name_and_dropped_and_the_others_hear(distributions, caplog):
    failing = distributions.add("deaf", FAILING)
    before = distributions.add("aa-listener", LISTENER)
    after = distributions.add("zz-listener", LISTENER)
    manager = load_plugins(enabled=["deaf", "aa-listener", "zz-listener"])
    with caplog.at_level(logging.WARNING, logger="enginehouse"):
        for _ in range(3):
            manager.observe("step_finished", **FACTS["step_finished"])
    assert sys.modules[failing].calls == [3]
    assert len(sys.modules[before].heard) == len(sys.modules[after].heard) == 3
    (said,) = caplog.records
    assert "deaf" in said.getMessage()
    assert "step_finished" in said.getMessage()
    assert "ears full" in said.getMessage()
    assert said.exc_info


def test_an_observer_that_meets_a_full_disk_is_one_line(distributions, caplog):
    distributions.add("full", FAILING.replace('RuntimeError("ears full")', 'OSError(28, "No space left on device")'))
    with caplog.at_level(logging.WARNING, logger="enginehouse"):
        load_plugins(enabled=["full"]).observe("step_finished", **FACTS["step_finished"])
    (said,) = caplog.records
    assert "No space left on device" in said.getMessage()
    assert not said.exc_info


def test_a_failing_observer_ends_a_strict_run(distributions):
    distributions.add("deaf", FAILING)
    manager = load_plugins(enabled=["deaf"], strict=True)
    with pytest.raises(PluginError, match=r"deaf.*ears full") as caught:
        manager.observe("step_finished", **FACTS["step_finished"])
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_an_interrupt_in_an_observer_is_no_failure_of_it(distributions):
    distributions.add("button", "@hookimpl\ndef enginehouse_step_finished(step): raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        load_plugins(enabled=["button"]).observe("step_finished", **FACTS["step_finished"])


def test_observers_are_called_in_pluggys_order(distributions):
    source = (
        "import builtins\n@hookimpl{how}\ndef enginehouse_run_finished(run): run.append(__name__.rpartition('_')[0])"
    )
    distributions.add("aa", source.format(how="(trylast=True)"))
    distributions.add("bb", source.format(how=""))
    distributions.add("cc", source.format(how="(tryfirst=True)"))
    heard: list[str] = []
    load_plugins(enabled=["aa", "bb", "cc"]).observe("run_finished", run=heard, outcome="finished")
    assert heard == ["cc", "bb", "aa"]
