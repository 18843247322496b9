"""What acts of the rollout suite ask of an engine, in this process."""

import asyncio
import dataclasses
from types import SimpleNamespace

import pytest

from enginehouse.engines.model import ProcessContext
from enginehouse.plugin import Layout, RolloutBackend, plugins
from enginehouse.plugin.capabilities import SEED
from enginehouse_testing.replica import ReplicaTrial


@pytest.mark.parametrize("capabilities", [{SEED}, set()], ids=["seeds", "does not"])
def test_an_engine_is_sent_a_seed_where_it_declares_that_it_takes_one(capabilities):
    record = dataclasses.replace(plugins().get(RolloutBackend, "torch"), capabilities=capabilities)
    replica, asked = ReplicaTrial(record, Layout("single"), ProcessContext("rollout"), {}, None), []

    async def generate(request):
        asked.append(request.sampling)

    replica.engine = SimpleNamespace(generate=generate)
    asyncio.run(replica.request([5, 6], seed=11, temperature=1.6))
    assert [(one.seed, one.temperature) for one in asked] == [(11 if capabilities else None, 1.6)]
