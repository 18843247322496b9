"""Groups that several tests of the controller share."""

from __future__ import annotations

import pytest
from controller_workers import Trouble

from enginehouse.controller import ResourcePool, WorkerGroup, WorkerSpec


@pytest.fixture
def launch(ray_cluster):
    """Launch a group on a pool of its own; everything is ended after the test."""
    launched = []

    def launch(cls, *args, processes=2, env=None, distributed=False, **options):
        spec = WorkerSpec(cls, *args).options(distributed=distributed, env=env)
        pool = ResourcePool([processes], cpus_per_process=0.5)
        try:
            group = WorkerGroup(pool, spec, **options)
        except BaseException:
            pool.shutdown()
            raise
        launched.append((group, pool))
        return group

    yield launch
    for group, pool in launched:
        group.shutdown()
        pool.shutdown()


@pytest.fixture
def trouble(launch):
    """Two ranks that fail in every way."""
    return launch(Trouble, name="trouble", timeout=30)
