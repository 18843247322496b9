"""Fixtures every test may use."""

from __future__ import annotations

import os

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


def pytest_collection_modifyitems(config, items):
    """Leave tests marked `gpu` out where there is no GPU: they are reported as not run, never as passed."""
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    if torch.cuda.is_available():
        return
    left_out = [item for item in items if item.get_closest_marker("gpu")]
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=left_out)
    config.stash[NOT_RUN] = [item.nodeid for item in left_out]


def pytest_sessionfinish(session, exitstatus):
    """In CI a skipped test is a failed one: what it would have shown was not shown."""
    reporter = session.config.pluginmanager.getplugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter else []
    if os.environ.get("ENGINEHOUSE_TESTS_MUST_RUN") and skipped and exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    not_run = config.stash.get(NOT_RUN, [])
    if not_run:
        terminalreporter.section("not run: no GPU here")
        for name in not_run:
            terminalreporter.write_line(name)
    if os.environ.get("ENGINEHOUSE_TESTS_MUST_RUN") and terminalreporter.stats.get("skipped"):
        terminalreporter.section("failed: tests were skipped, and none may be (ENGINEHOUSE_TESTS_MUST_RUN)")


NOT_RUN = pytest.StashKey[list[str]]()
