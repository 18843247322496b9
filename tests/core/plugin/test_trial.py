"""What a plugin does to the process that loads it, it does to another process first, and once."""

import json
import os
import signal
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES

import pytest

from enginehouse.plugin import load_plugins, trial
from enginehouse.plugin.discovery import from_environment
from enginehouse.runtimes.readiness import plugin_states


@pytest.fixture
def tried(distributions, tmp_path, monkeypatch):
    """Load plugins with each tried first, what is found remembered in a folder of the test; counts the processes."""
    monkeypatch.delenv(trial.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    distributions.backend("sound", backend="sound")
    started = []
    in_one_process = trial._in_one_process

    def counted(*arguments):
        started.append(arguments)
        return in_one_process(*arguments)

    monkeypatch.setattr(trial, "_in_one_process", counted)

    def load(*names):
        for module in distributions.modules:
            sys.modules.pop(module, None)
        manager = load_plugins(enabled=[*names, "sound"])
        return {plugin.name: plugin for plugin in manager.plugins}, manager

    load.started = started
    return load


@pytest.mark.fault(
    area="plugins",
    what="the module of an installed plugin ends its process, crashes, or raises KeyboardInterrupt",
    happens="it is tried in another process first, and is then listed as broken; all else works",
    exit_code="0",
    kept="everything; what was found is remembered for an hour, or until the plugin changes",
    noticed="when it is first loaded",
)
@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import os; os._exit(7)", "it ends the process that loads it, with exit code 7"),
        ("import os; os.kill(os.getpid(), 11)", "it ends the process that loads it, by signal 11"),
        ("import os; os.kill(os.getpid(), 14)", "it was not loaded within 30 s"),  # as its own clock does
        ("raise KeyboardInterrupt", "it raises KeyboardInterrupt where it is loaded"),
        (
            "@hookimpl\ndef enginehouse_register_losses(register):\n    import os; os._exit(0)",
            "it ends the process that loads it, with exit code 0",
        ),
    ],
    ids=["exits", "is killed", "is overdue", "interrupts", "exits in a hook"],
)
def test_a_plugin_that_cannot_be_loaded_costs_nobody_else_anything(distributions, tried, source, said):
    module = distributions.add("hostile", source)
    plugins, manager = tried("hostile")
    assert plugins["hostile"].status == "broken"
    assert plugins["hostile"].problem.startswith(said)
    assert "ENGINEHOUSE_BLOCK_PLUGINS=hostile keeps it out" in plugins["hostile"].problem
    assert module not in sys.modules
    assert manager.get("train", "sound")


@pytest.mark.fault(
    area="plugins",
    what="the module of an installed plugin hangs",
    happens="it is tried in another process first, and is then listed as broken; all else works",
    exit_code="0",
    kept="everything",
    noticed="after 30 s, once an hour",
)
def test_a_plugin_that_hangs_is_left_after_a_deadline(distributions, tried, monkeypatch):
    tried()
    distributions.add("endless", "import time\nwhile True: time.sleep(1)")
    monkeypatch.setattr(trial, "SECONDS", 0.2)
    # the sound one is known; only a process that has come as far as the endless one is judged by the deadline
    monkeypatch.setattr(trial, "START_SECONDS", 60.0)
    plugins, manager = tried("endless")
    assert plugins["endless"].problem.startswith("it was not loaded within 0.2 s")
    assert manager.get("train", "sound")


def test_what_was_found_is_remembered_until_the_plugin_changes(distributions, tried):
    module = distributions.add("hostile", "import os; os._exit(7)")
    assert tried("hostile")[0]["hostile"].status == "broken"
    tried.started.clear()
    assert tried("hostile")[0]["hostile"].status == "broken"
    assert not tried.started
    (distributions.site / f"{module}.py").write_text("enginehouse_protocol = '1.0'  # mended")
    assert tried("hostile")[0]["hostile"].status == "ok"
    assert len(tried.started) == 1


def test_a_plugin_is_tried_again_when_what_it_imports_changes(distributions, tried):
    """An upgrade of another distribution may be what makes it exit."""
    module = f"needed_by_{os.getpid()}"
    needed = distributions.site / f"{module}.py"
    needed.write_text("")
    distributions.add("leaning", f"import {module}")
    distributions.modules.append(module)
    assert tried("leaning")[0]["leaning"].status == "ok"
    tried.started.clear()
    assert tried("leaning")[0]["leaning"].status == "ok"
    assert not tried.started
    needed.write_text("import os; os._exit(7)")
    assert tried("leaning")[0]["leaning"].problem.startswith("it ends the process that loads it, with exit code 7")


def test_a_plugin_without_python_files_is_tried_too(distributions, tried):
    module = distributions.add("compiled", "")
    (distributions.site / f"{module}.py").unlink()
    (distributions.site / module).mkdir()
    (distributions.site / module / f"__init__{EXTENSION_SUFFIXES[0]}").write_bytes(b"no library")
    tried()
    tried.started.clear()
    assert tried("compiled")[0]["compiled"].status == "broken"
    assert len(tried.started) == 1


def test_a_bad_finding_is_looked_at_again_after_a_while(distributions, tried, monkeypatch):
    distributions.add("hostile", "import os; os._exit(7)")
    tried("hostile")
    tried.started.clear()
    monkeypatch.setattr(trial, "REMEMBERED_SECONDS", -1.0)
    assert tried("hostile")[0]["hostile"].status == "broken"
    assert len(tried.started) == 1


def test_one_process_tries_all_that_do_it_no_harm(distributions, tried):
    for name in ("apple", "banana"):
        distributions.add(name, "")
    assert tried("apple", "banana")[0]["banana"].status == "ok"
    assert len(tried.started) == 1


def test_an_error_of_a_plugin_is_its_own_and_keeps_its_traceback(distributions, tried):
    distributions.add("fragile", "raise RuntimeError('no luck today')")
    plugins, _ = tried("fragile")
    assert plugins["fragile"].problem == "RuntimeError: no luck today"
    assert "Traceback" in plugins["fragile"].traceback


def test_a_plugin_in_a_namespace_package_is_tried_anew_when_it_changes_and_not_when_another_does(distributions, tried):
    module = distributions.add("shared", "")
    space = distributions.site / "space_of_many"
    for package in ("mine", "theirs"):
        (space / package).mkdir(parents=True)
        (space / package / "__init__.py").write_text("")
    (distributions.site / f"{module}.py").rename(space / "mine" / "plugin.py")
    (points,) = distributions.site.glob("shared-*.dist-info/entry_points.txt")
    points.write_text("[enginehouse]\nshared = space_of_many.mine.plugin\n")
    distributions.modules.append("space_of_many.mine.plugin")
    assert tried("shared")[0]["shared"].status == "ok"
    tried.started.clear()
    (space / "theirs" / "more.py").write_text("")
    tried("shared")
    assert not tried.started
    (space / "mine" / "more.py").write_text("")
    tried("shared")
    assert len(tried.started) == 1


def test_where_no_process_can_be_started_plugins_are_loaded_as_they_are(tried, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert tried()[0]["sound"].status == "ok"


def test_findings_that_cannot_be_written_are_made_again(tried, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert tried()[0]["sound"].status == "ok"
    assert tried()[0]["sound"].status == "ok"
    assert len(tried.started) == 2


def test_a_user_without_a_home_has_nothing_remembered(tried, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("pathlib.Path.home", homeless)
    assert tried()[0]["sound"].status == "ok"
    assert tried()[0]["sound"].status == "ok"
    assert len(tried.started) == 2


def test_workers_try_nothing_and_load_what_did_no_harm(distributions, tried, monkeypatch):
    distributions.add("hostile", "import os; os._exit(7)")
    distributions.add("fragile", "raise RuntimeError('no luck today')")
    _, manager = tried("hostile", "fragile")
    tried.started.clear()
    for name, value in manager.environment().items():
        monkeypatch.setenv(name, value)
    in_worker = load_plugins(enabled=["hostile", "fragile", "sound"], blocked=from_environment().blocked)
    assert not tried.started
    assert plugin_states(in_worker)["hostile"] == "blocked"
    assert (plugin_states(in_worker)["fragile"], plugin_states(in_worker)["sound"]) == (
        "broken",
        plugin_states(manager)["sound"],
    )


def test_a_plugin_that_loads_plugins_itself_starts_no_further_trials(distributions, tried):
    distributions.add("curious", "from enginehouse.plugin import load_plugins\nload_plugins(enabled=['sound'])")
    assert tried("curious")[0]["curious"].status == "ok"
    assert len(tried.started) == 1


def test_a_trial_whose_parent_was_killed_ends_by_itself(distributions):
    module = distributions.add("endless", "import time\nwhile True: time.sleep(1)")
    asked = {
        "path": sys.path,
        "plugins": [["endless", "endless", module]],
        "seconds": 0.05,
        "examiner": "",
        "examiner_seconds": 0,
    }
    reading, writing = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-P", "-c", trial._PROGRAM, str(writing), json.dumps(asked)], pass_fds=(writing,)
    ) as process:
        assert process.wait(60) == -signal.SIGALRM
    os.close(reading)
    os.close(writing)
