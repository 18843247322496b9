"""What a plugin does where it is loaded costs nobody else anything; what ends the process is named."""

import os
import signal
import subprocess
import sys
import threading
import time
from importlib.machinery import EXTENSION_SUFFIXES

import pytest

from enginehouse.plugin import guard, load_plugins
from enginehouse.plugin.discovery import read_switches
from enginehouse.runtimes.readiness import plugin_states


@pytest.fixture
def load(distributions):
    """Load plugins beside one that is sound, which must be usable whatever the others do."""
    distributions.backend("sound", backend="sound")

    def load(*names):
        manager = load_plugins(enabled=[*names, "sound"])
        assert manager.get("train", "sound")
        return {plugin.name: plugin for plugin in manager.plugins}

    return load


@pytest.mark.fault(
    area="plugins",
    what="the module of an installed plugin exits, or raises KeyboardInterrupt or anything else",
    happens="it is listed as broken, with its traceback. Everything else works",
    exit_code="0",
    kept="everything",
    noticed="when it is loaded",
)
@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise RuntimeError('no luck today')", "RuntimeError: no luck today"),
        ("class Odd(BaseException): ...\nraise Odd('odd')", "Odd: odd"),
        ("@hookimpl\ndef enginehouse_register_losses(register):\n    exit(0)", "SystemExit: 0"),
    ],
    ids=["exits", "interrupts", "raises", "raises no Exception", "exits in a hook"],
)
def test_a_plugin_that_cannot_be_loaded_costs_nobody_else_anything(distributions, load, source, said):
    distributions.add("hostile", source)
    hostile = load("hostile")["hostile"]
    assert (hostile.status, hostile.problem) == ("broken", said)
    assert "Traceback" in hostile.traceback


@pytest.mark.fault(
    area="plugins",
    what="the module of an installed plugin hangs",
    happens="it is listed as broken, with the place where it hung. Everything else works",
    exit_code="0",
    kept="everything",
    noticed="after 30 s, by each command until it is kept out",
)
def test_a_plugin_that_hangs_is_left_after_a_deadline(distributions, load, monkeypatch):
    module = distributions.add("endless", "import time\nwhile True: time.sleep(1)")
    monkeypatch.setattr(guard, "SECONDS", 0.2)
    endless = load("endless")["endless"]
    assert endless.problem.startswith("it was not loaded within 0.2 s")
    assert "ENGINEHOUSE_BLOCK_PLUGINS=endless keeps it out" in endless.problem
    assert f"{module}.py" in endless.traceback


def test_a_hanging_plugin_cannot_swallow_the_end_of_its_time(distributions, load, monkeypatch):
    distributions.add("endless", "import time\nwhile True:\n    try: time.sleep(1)\n    except Exception: pass")
    monkeypatch.setattr(guard, "SECONDS", 0.2)
    assert load("endless")["endless"].status == "broken"


def test_a_clock_that_runs_goes_on_and_its_handler_is_put_back(distributions, load):
    rung = []
    former = signal.signal(signal.SIGALRM, lambda number, frame: rung.append(number))
    signal.setitimer(signal.ITIMER_REAL, 600)
    try:
        load()
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 600
        signal.raise_signal(signal.SIGALRM)
        assert rung
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


def test_ctrl_c_is_for_the_command_and_no_fault_of_the_plugin_that_is_loaded(distributions, load):
    distributions.add("slow", "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)")
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        load("slow")
    assert time.monotonic() - began < 5
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_thread_that_is_not_the_main_one_loads_plugins_without_a_clock(distributions, load):
    distributions.add("leaver", "import sys; sys.exit(3)")
    found = []
    thread = threading.Thread(target=lambda: found.append(load("leaver")["leaver"].problem))
    thread.start()
    thread.join(60)
    assert found == ["SystemExit: 3"]


@pytest.mark.fault(
    area="plugins",
    what="the module of an installed plugin ends the process at once (`os._exit`), or crashes in native code",
    happens="the command ends, and names the plugin and the variable that keeps it out",
    exit_code="that of the crash",
    kept="everything; no run has begun",
    noticed="when it is loaded",
)
@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("import os; os._exit(7)", 7),
        ("import os; os.kill(os.getpid(), 11)", -11),
        ("@hookimpl\ndef enginehouse_register_losses(register):\n    import os; os._exit(0)", 0),
        ("@hookimpl\ndef enginehouse_commands(cli):\n    import os; os._exit(7)", 7),
    ],
    ids=["exits", "crashes", "exits in a hook", "exits as it adds commands"],
)
def test_a_plugin_that_ends_the_process_is_named(distributions, source, code):
    distributions.add("hostile", source)
    where = {"PYTHONPATH": str(distributions.site), "ENGINEHOUSE_PLUGINS": "hostile"}
    ended = subprocess.run(
        [sys.executable, "-m", "enginehouse.cli.main", "--help"],
        env={**os.environ, **where}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ended.returncode == code
    assert "The process ended while it loaded plugin hostile (hostile" in ended.stderr
    assert "ENGINEHOUSE_BLOCK_PLUGINS=hostile keeps it out" in ended.stderr


def test_nobody_is_told_of_plugins_that_do_no_harm(load, capfd):
    load()
    assert capfd.readouterr() == ("", "")


def test_where_no_shell_can_be_started_plugins_are_loaded_without_a_witness(load, monkeypatch):
    def none(*arguments, **more):
        raise FileNotFoundError

    monkeypatch.setattr(os, "posix_spawn", none)
    assert load()["sound"].status == "ok"


def test_a_plugin_without_python_files_is_guarded_too(distributions, load):
    module = distributions.add("compiled", "")
    (distributions.site / f"{module}.py").unlink()
    (distributions.site / module).mkdir()
    (distributions.site / module / f"__init__{EXTENSION_SUFFIXES[0]}").write_bytes(b"no library")
    assert load("compiled")["compiled"].status == "broken"


def test_workers_keep_out_what_is_broken_here(distributions, load, monkeypatch):
    distributions.add("fragile", "raise RuntimeError('no luck today')")
    manager = load_plugins(enabled=["fragile", "sound"])
    for name, value in manager.environment().items():
        monkeypatch.setenv(name, value)
    in_worker = load_plugins(enabled=["fragile", "sound"], blocked=read_switches().blocked)
    assert plugin_states(in_worker)["fragile"] == "blocked"
    assert plugin_states(in_worker)["sound"] == plugin_states(manager)["sound"]
