"""Groups that tests of the controller share: starting processes is what costs."""

import pytest
from controller_workers import Trouble

from enginehouse.controller import ResourcePool, WorkerGroup, WorkerSpec


class Launcher:
    """Launches groups, each on a pool of its own, and ends them."""

    def __init__(self) -> None:
        self._launched: list[tuple[WorkerGroup, ResourcePool]] = []

    def __call__(self, cls, *args, processes=2, env=None, variables=None, distributed=False, **options) -> WorkerGroup:
        pool = ResourcePool([processes], cpus_per_process=0.05)  # groups that stand leave room for pools of many CPUs
        spec = WorkerSpec(cls, *args).options(distributed=distributed, env=env, variables=variables)
        try:
            group = WorkerGroup(pool, spec, **options)
        except BaseException:
            pool.shutdown()
            raise
        self._launched.append((group, pool))
        return group

    def end(self) -> None:
        for group, pool in self._launched:
            group.shutdown()
            pool.shutdown()


@pytest.fixture
def launch(ray_cluster):
    """Launch a group for one test."""
    launcher = Launcher()
    yield launcher
    launcher.end()


@pytest.fixture(scope="session")
def standing(ray_cluster):
    """Launch a group, or take the one that an earlier test launched alike and left whole."""
    launcher = Launcher()
    groups: dict[tuple, WorkerGroup] = {}

    def launch(cls, *args, processes=2, **options) -> WorkerGroup:
        key = (cls, args, processes, *options.items())
        if key not in groups or groups[key].broken:
            groups[key] = launcher(cls, *args, processes=processes, **options)
        return groups[key]

    yield launch
    launcher.end()


@pytest.fixture
def trouble(standing):
    """Two ranks that fail in every way."""
    return standing(Trouble, name="trouble", timeout=30)
