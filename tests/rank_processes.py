"""Several processes that act as the ranks of a group, kept for many tests: importing torch is what costs."""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

SECONDS = 240
"""Longest any scenario may take."""

MOST = 4
"""Most ranks of a scenario."""

RunRanks = Callable[..., list[Any]]


def _as_rank(port: int, rank: int, world_size: int, scenario: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Run a scenario as one rank of a group, in a worker process."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the store is the test's own
    )
    return scenario(rank, world_size, *arguments)


@contextlib.contextmanager
def rank_processes(*preload: str) -> Iterator[RunRanks]:
    """Gives `run(world_size, scenario, *arguments)`: `scenario(rank, world_size, *arguments)` in that many processes.

    A process has the same rank each time: torch caches what it knows of a device mesh, and not under the rank.

    Args:
        preload: modules that every process is to have imported; with a GPU each imports them itself, because megatron's
            look for one as they are imported, and CUDA does not work in a process forked afterwards.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([] if torch.cuda.device_count() else list(preload))
    pools = [ProcessPoolExecutor(1, mp_context=context) for _ in range(MOST)]

    def run(world_size: int, scenario: Callable[..., Any], *arguments: Any) -> list[Any]:
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ranks = [
            pool.submit(_as_rank, store.port, rank, world_size, scenario, arguments)
            for rank, pool in enumerate(pools[:world_size])
        ]
        try:
            return [future.result(timeout=SECONDS) for future in ranks]
        except BaseException:
            for pool in pools:  # some may wait for the one that failed, and the next scenario would for them
                _kill(pool)
            pools[:] = [ProcessPoolExecutor(1, mp_context=context) for _ in range(MOST)]
            raise

    yield run
    for pool in pools:
        pool.shutdown()


def _kill(pool: ProcessPoolExecutor) -> None:
    for pid in list(pool._processes or ()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    pool.shutdown()
