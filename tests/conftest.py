"""Fixtures every test may use."""

from __future__ import annotations

import faulthandler
import gc
import os
from collections import defaultdict
from typing import TextIO

import psutil
import pytest
from hypothesis import settings

# Several worker processes share few cores: one thread each, in this process as in the workers.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Hypothesis holds a stopwatch to each example unless told not to, and cores are shared.
settings.register_profile("busy machine", deadline=None, max_examples=60)
settings.load_profile("busy machine")


@pytest.fixture(scope="session")
def ray_cluster():
    """One Ray on this machine for the whole test session, with room for 16 processes of one CPU."""
    from enginehouse.controller import start_ray

    with start_ray(num_cpus=16) as cluster:
        yield cluster


def pytest_addoption(parser):
    parser.addoption("--part", default="1/1", metavar="K/N", help="Only the Kth of N parts of the chosen tests.")


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


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item):
    """Once more: pytest lifts the limit where a test fails."""
    if LONGEST in item.stash:
        _limit(item)


def _limit(item):
    faulthandler.dump_traceback_later(item.stash[LONGEST], file=item.config.stash[STDERR], exit=True)


def pytest_runtest_logfinish():
    faulthandler.cancel_dump_traceback_later()


def pytest_enter_pdb():
    faulthandler.cancel_dump_traceback_later()


def pytest_configure(config):
    gc.disable()  # until all is collected: there is little to free, and much to look through
    config.stash[STDERR] = open(os.dup(2), "w")  # noqa: SIM115 - what a test prints is kept from the terminal


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Put modules that may take long first, and leave tests marked `gpu` out where there is no GPU.

    What takes long comes first, so that none is left alone at the end where several run at a time. Tests left out are
    reported as not run, never as passed.
    """
    items[:] = _part(config, items)
    longest = defaultdict(float)
    for item in items:
        if timeout := item.get_closest_marker("timeout"):
            longest[item.path] = max(longest[item.path], timeout.args[0])
    items.sort(key=lambda item: -longest[item.path])

    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    if torch.cuda.is_available():
        return
    left_out = [item for item in items if item.get_closest_marker("gpu")]
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=left_out)
    config.stash[NOT_RUN] = [item.nodeid for item in left_out]


def _part(config, items):
    """The tests of the part that `--part` names: whole classes and modules, whose tests share what they start."""
    number, _, parts = config.getoption("--part").partition("/")
    if not (number.isdigit() and parts.isdigit() and 1 <= int(number) <= int(parts)):
        raise pytest.UsageError(f"--part is K/N, the Kth of N parts, not {config.getoption('--part')!r}")
    scopes = sorted({item.nodeid.rpartition("::")[0] for item in items})
    chosen = set(scopes[int(number) - 1 :: int(parts)])
    kept = [item for item in items if item.nodeid.rpartition("::")[0] in chosen]
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid.rpartition("::")[0] not in chosen])
    return kept


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
    if not os.environ.get("ENGINEHOUSE_TESTS_MUST_RUN"):
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and option.markexpr and not option.keyword:
            session.exitstatus = pytest.ExitCode.OK  # `make test ARGS=FOLDER`, and the folder has no slow tests, say
        return
    reporter = session.config.pluginmanager.getplugin("terminalreporter")
    if reporter and reporter.stats.get("skipped") and exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


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

SECONDS_TO_END = 60
"""So long after its timeout a test may still be there."""

BYTES_PER_TEST = 7 << 30
MOST_TESTS_AT_A_TIME = 4
