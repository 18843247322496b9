"""Fixtures every test may use."""

from __future__ import annotations

import os

import pytest

# Several worker processes share few cores: one thread each, in this process as in the workers.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def ray_cluster():
    """One Ray on this machine for the whole test session, with room for 16 processes of one CPU."""
    from enginehouse.controller import start_ray

    with start_ray(num_cpus=16) as cluster:
        yield cluster
