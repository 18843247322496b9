"""Plain `torch.distributed` in workers."""

import os

import psutil
import pytest
from controller_workers import Reducer

from enginehouse.controller.launchers.rendezvous import open_store


@pytest.mark.slow
def test_init_process_group_works_without_arguments_in_two_groups_at_once(launch):
    first = launch(Reducer, distributed=True)
    second = launch(Reducer, distributed=True)
    assert first.sum_of_ranks() == [3, 3]
    assert second.sum_of_ranks() == [3, 3]


def test_the_meeting_point_waits_at_the_address_asked_for_and_nowhere_else():
    store, port = open_store("127.0.0.1", 10)
    waiting = [one.laddr for one in psutil.Process(os.getpid()).net_connections("tcp") if one.status == "LISTEN"]
    assert [address.ip for address in waiting if address.port == port] == ["127.0.0.1"]
    store.set("key", "value")
    assert store.get("key") == b"value"
