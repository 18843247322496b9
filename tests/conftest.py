"""Fixtures every test may use, which tests run, in which order, and what is kept of how long they took."""

import asyncio
import faulthandler
import gc
import inspect
import json
import os
import signal
import subprocess
import sys
import zlib
from collections import defaultdict
from pathlib import Path
from typing import TextIO

import psutil
import pytest
from hypothesis import settings

# Several worker processes share few cores: one thread each, in this process as in the workers.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Hypothesis holds a stopwatch to each example unless told not to, and cores are shared.
settings.register_profile("busy machine", deadline=None, max_examples=60)
settings.load_profile("busy machine")

# A shell that starts something in the background has it ignore SIGINT, and tests interrupt themselves.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def ray_cluster():
    """One Ray on this machine for the whole test session, with room for 16 processes of one CPU."""
    from enginehouse.controller import start_ray

    with start_ray(num_cpus=16) as cluster:
        yield cluster


def pytest_addoption(parser):
    parser.addoption("--part", default="1/1", metavar="K/N", help="Only the Kth of N parts of the chosen tests.")
    parser.addoption("--changed-since", metavar="COMMIT", help="Besides the part, what tests files changed since then.")
    parser.addoption("--record-seconds", metavar="FILE", help="Keep in it how long each test took, as SECONDS has it.")


def pytest_xdist_auto_num_workers(config):
    """How many tests `-n auto` runs at a time: what this machine's cores and memory bear, and a few at most.

    A test may start several processes of an engine, which hold some GiB, and mostly wait for each other.
    """
    return max(1, min(os.cpu_count() or 1, psutil.virtual_memory().total // BYTES_PER_TEST, MOST_TESTS_AT_A_TIME))


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item, settings):
    """End the process of a test that its timeout did not end, and say where it is.

    A timeout is raised once, in the main thread: what then waits in a `finally` or as a fixture ends would wait for
    ever. Where several run at a time, xdist names the test.
    """
    item.stash[LONGEST] = settings.timeout + SECONDS_TO_END
    _limit(item)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item, nextitem):
    """Set the limit once more, as pytest lifts it where a test fails; and look at what a module leaves open."""
    if LONGEST in item.stash:
        _limit(item)
    yield
    if nextitem is None or nextitem.path != item.path:
        _check_left_open(item.path.name)


def _check_left_open(module):
    """Fail where a module leaves open what tests of other modules in this process would meet."""
    left = []
    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_initialized():
        distributed.destroy_process_group()
        left.append("a process group of torch")
    inline = sys.modules.get("enginehouse.controller.launchers.inline")
    if inline and (groups := inline._Variables._users):
        inline._Variables._users = 0
        left.append(f"{groups} worker groups of the inline launcher")
    assert not left, f"{module} leaves open {' and '.join(left)}"


def _limit(item):
    faulthandler.dump_traceback_later(item.stash[LONGEST], file=item.config.stash[STDERR], exit=True)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run an `async def` test in an event loop of its own, which closes as that of `asyncio.run` does."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    wanted = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: value for name, value in pyfuncitem.funcargs.items() if name in wanted}))
    return True


def pytest_runtest_logfinish():
    faulthandler.cancel_dump_traceback_later()


def pytest_enter_pdb():
    faulthandler.cancel_dump_traceback_later()


def pytest_configure(config):
    gc.disable()  # until all is collected: there is little to free, and much to look through
    config.stash[STDERR] = open(os.dup(2), "w")  # noqa: SIM115 - what a test prints is kept from the terminal


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Put what takes longest first, leave tests marked `gpu` out where there is no GPU, and tests marked `real` or
    `benchmarks` everywhere but where they are asked for.

    So no long test is left alone at the end where several run at a time. Tests left out are reported as not run, never
    as passed.
    """
    for marker in {"real", "benchmarks"}.difference(config.option.markexpr.split()):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker(marker)])
        items[:] = [item for item in items if not item.get_closest_marker(marker)]
    recorded = json.loads(SECONDS.read_text())["seconds"]
    scopes = defaultdict(list)
    for item in items:
        scopes[_scope(item)].append(item)
    seconds = {
        scope: sum(recorded.get(test.nodeid) or _guess(test) for test in tests) for scope, tests in scopes.items()
    }
    order = sorted(scopes, key=lambda scope: (-seconds[scope], scope))
    chosen = _part(config.getoption("--part"), order, seconds)
    if since := config.getoption("--changed-since"):
        left_out = {scope: tests for scope, tests in scopes.items() if scope not in chosen}
        chosen |= _changed(since, left_out, seconds)
    config.hook.pytest_deselected(items=[item for item in items if _scope(item) not in chosen])
    items[:] = [item for scope in order if scope in chosen for item in scopes[scope]]

    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    if torch.cuda.is_available():
        return
    left_out = [item for item in items if item.get_closest_marker("gpu")]
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=left_out)
    config.stash[NOT_RUN] = [item.nodeid for item in left_out]


def _guess(item):
    """Seconds of a test that the record does not have."""
    return SLOW if item.get_closest_marker("slow") else QUICK


def _scope(item):
    """The class or module of a test: its tests share what they start, and stay together."""
    return item.nodeid.partition("[")[0].rpartition("::")[0]


def _part(named, scopes, seconds):
    """The scopes of the part that `--part` names; the parts take about as long as each other.

    Args:
        named: `K/N`.
        scopes: all there are, the longest first.
        seconds: how long each takes.
    """
    number, _, parts = named.partition("/")
    if not (number.isdigit() and parts.isdigit() and 1 <= int(number) <= int(parts)):
        raise pytest.UsageError(f"--part is K/N, the Kth of N parts, not {named!r}")
    dealt = [(0.0, part, []) for part in range(int(parts))]
    for scope in scopes:
        total, part, members = min(dealt, key=lambda one: one[:2])
        dealt[part] = (total + seconds[scope], part, [*members, scope])
    return set(dealt[int(number) - 1][2])


def _changed(since, scopes, seconds):
    """The scopes of which something changed since a commit: what their marker `sources` names, their own file, or the
    room in core or plugin that they are of.

    Of rooms at most `CHANGED_SECONDS`: where more changed than that bears, the commit decides which are taken.
    """
    git = ["git", "-C", str(ROOT)]
    changed = subprocess.run(
        [*git, "diff", "--name-only", since], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
    chosen, left = set(), CHANGED_SECONDS
    for scope in sorted(scopes, key=lambda scope: zlib.crc32(f"{commit}{scope}".encode())):
        file = scope.partition("::")[0]
        first, *rooms = Path(file).parts[1:-1] or ("",)
        room = "/".join(rooms)
        shown = {source for test in scopes[scope] for marker in test.iter_markers("sources") for source in marker.args}
        source = "core/src/enginehouse" if first == "core" else f"plugins/{first}/src/enginehouse_{first}"
        sources = (file, f"{source}/{room}/" if room else f"{source}/")
        if any(path.startswith(tuple(shown)) for path in changed):
            chosen.add(scope)
        elif seconds[scope] <= left and any(path.startswith(sources) for path in changed):
            chosen.add(scope)
            left -= seconds[scope]
    return chosen


def pytest_runtest_logreport(report):
    TOOK[report.nodeid] += report.duration


def pytest_collection_finish(session):
    """What is there by now stays: no test's garbage is looked for among it."""
    gc.freeze()
    gc.enable()


def pytest_sessionfinish(session, exitstatus):
    """In CI a skipped test is a failed one: what it would have shown was not shown."""
    if hasattr(session.config, "workeroutput"):  # one of several at a time: the process that reports is told
        session.config.workeroutput[NOT_RUN_OF_WORKER] = session.config.stash.get(NOT_RUN, [])
        return
    option = session.config.option
    if option.record_seconds:
        _record(Path(option.record_seconds))
    if not os.environ.get("ENGINEHOUSE_TESTS_MUST_RUN"):
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and option.markexpr and not option.keyword:
            session.exitstatus = pytest.ExitCode.OK  # `make test ARGS=FOLDER`, and the folder has no slow tests, say
        return
    reporter = session.config.pluginmanager.getplugin("terminalreporter")
    if reporter and reporter.stats.get("skipped") and exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _record(path):
    """Write how long tests took into a record; of tests that did not run now, what it has stays."""
    earlier = json.loads(path.read_text())["seconds"] if path.exists() else {}
    kept = {name: seconds for name, seconds in earlier.items() if name not in TOOK}
    new = {name: round(seconds, 1) for name, seconds in TOOK.items() if seconds >= 2 * QUICK}
    git = ["git", "-C", str(ROOT), "log", "-1", "--format=%h of %cs"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    head = {"commit": commit, "cores": os.cpu_count()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**head, "seconds": dict(sorted((kept | new).items()))}, indent=0) + "\n")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """A worker process has ended; every one of them has collected all tests."""
    node.config.stash[NOT_RUN] = node.workeroutput.get(NOT_RUN_OF_WORKER, []) if hasattr(node, "workeroutput") else []


def pytest_terminal_summary(terminalreporter, config):
    not_run = config.stash.get(NOT_RUN, [])
    if not_run:
        terminalreporter.section("not run: no GPU here")
        for name in not_run:
            terminalreporter.write_line(name)
    if os.environ.get("ENGINEHOUSE_TESTS_MUST_RUN") and terminalreporter.stats.get("skipped"):
        terminalreporter.section("failed: tests were skipped, and none may be (ENGINEHOUSE_TESTS_MUST_RUN)")


STDERR = pytest.StashKey[TextIO]()
LONGEST = pytest.StashKey[float]()
NOT_RUN = pytest.StashKey[list[str]]()
NOT_RUN_OF_WORKER = "enginehouse_not_run"

ROOT = Path(__file__).parents[1]
SECONDS = Path(__file__).with_name("seconds.json")
"""How long each test that is not quick took, by its name: setting up and taking down what it shares with others is the
first's and the last's. Made by `make seconds`."""
QUICK, SLOW = 0.25, 6.0
"""About what a test takes that is not slow, or is: seconds."""
CHANGED_SECONDS = 60.0
TOOK = defaultdict(float)
"""Seconds of each test that ran."""

SECONDS_TO_END = 60
"""So long after its timeout a test may still be there."""

BYTES_PER_TEST = 7 << 30
MOST_TESTS_AT_A_TIME = 4
