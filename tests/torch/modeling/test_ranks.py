"""What ranks say to each other, and where they meet."""

import os
import re
import socket
from collections import namedtuple
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from rank_processes import rank_processes

from enginehouse.engines.model import ProcessContext
from enginehouse_torch.modeling.ranks import Ranks, find_interface

ROOT = Path(__file__).parents[3]


def test_ranks_unpickle_nothing_that_another_sends():
    """torch's collectives of objects do, and what is unpickled may run anything."""
    sources = [path for folder in ("core/src", "plugins") for path in (ROOT / folder).rglob("*.py")]
    assert not [path for path in sources if re.search(r"(dist|distributed)\.\w+_object", path.read_text())]


@pytest.mark.slow
def test_what_ranks_gather_is_whole_and_in_order():
    with rank_processes("enginehouse_torch.modeling.ranks") as run:
        found = run(2, _gathered)
    assert found == [[["naïve", 1.5], {"rank": [1, "y" * 1000]}]] * 2


def _gathered(rank, world_size):
    import torch.distributed as dist

    from enginehouse_torch.modeling.ranks import gather

    dist.init_process_group("gloo")
    value = ["naïve", 1.5] if rank == 0 else {"rank": [1, "y" * 1000]}
    return gather(value)


Address = namedtuple("Address", "family address")


def joined(monkeypatch: pytest.MonkeyPatch, node: str, **variables: str) -> str | None:
    """Return the interface that gloo is told of as a rank of two joins on a node with two networks."""
    addresses = {
        "lo": [Address(socket.AF_INET, "127.0.0.1")],
        "eth0": [Address(socket.AF_INET, "10.0.0.7"), Address(socket.AF_INET6, "fd00::7%eth0")],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # so that what is set here goes with the test
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    told = []
    monkeypatch.setattr(dist, "is_initialized", lambda: False)  # whatever ran here before
    monkeypatch.setattr(dist, "init_process_group", lambda backend: told.append(os.environ.get("GLOO_SOCKET_IFNAME")))
    Ranks.join(ProcessContext(role="actor", rank=0, world_size=2, node=node))
    return told[0]


def test_gloo_listens_at_the_nodes_address_and_not_where_its_name_leads(monkeypatch: pytest.MonkeyPatch):
    assert joined(monkeypatch, "10.0.0.7") == "eth0"
    assert joined(monkeypatch, "fd00::7") == "eth0"


def test_where_the_address_is_of_no_interface_or_somebody_chose_one_gloo_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    assert joined(monkeypatch, "localhost") is None
    assert joined(monkeypatch, "10.0.0.7", GLOO_SOCKET_IFNAME="ib0") == "ib0"


def test_the_interface_of_this_host_is_found():
    assert find_interface("127.0.0.1") in psutil.net_if_addrs()
