"""The rendezvous of `torch.distributed`. Rank 0 binds the port itself, so that no other process can take it first.

Every rank, also rank 0, connects to the store as a client (`TORCHELASTIC_USE_AGENT_STORE`). Therefore
`torch.distributed.init_process_group("gloo")` works in a worker without further arguments.
"""

from __future__ import annotations

import datetime
import socket
from typing import Any


def open_store(address: str, timeout: float) -> tuple[Any, int]:
    """Open the store on a free port, and return the store and the port. The caller must keep the store. Imports torch.

    The store has no authentication, and therefore listens only at `address`. By default, torch's store listens at every
    address of the machine.
    """
    from torch.distributed import TCPStore

    family, _, _, _, socket_address = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind(socket_address[:2])
    port: int = listener.getsockname()[1]
    store = TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=max(timeout, 1.0)),
        master_listen_fd=listener.detach(),
    )
    return store, port


def rank_variables(
    rank: int, world_size: int, local_rank: int, local_world_size: int, store: tuple[str, int] | None
) -> dict[str, str]:
    """Return the environment variables of one rank. `store` is the store's address and port, or None."""
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_world_size),
    }
    if store is not None:
        variables |= {
            "MASTER_ADDR": store[0],
            "MASTER_PORT": str(store[1]),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
    return variables
