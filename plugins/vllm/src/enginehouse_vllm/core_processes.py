"""The processes in which vLLM runs its engine core, watched from the process that started them."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing.connection
import signal
import threading
from collections.abc import Coroutine, Sequence
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from enginehouse.errors import EnginehouseError
from enginehouse_vllm.last_words import last_words

T = TypeVar("T")

SHUTDOWN_SECONDS = 10.0
"""Time that vLLM's processes have to end before they are killed."""
ENDING_SECONDS = 10.0
"""Time that an ending process may take, because a busy machine frees its memory slowly."""


class VLLMFailed(EnginehouseError):
    """vLLM's engine has died, or was never launched: this replica is lost and must be restarted."""


class CoreProcesses:
    """vLLM's processes; `where` names this replica in messages.

    The future `died` is done once the first process has ended. It is never done if vLLM runs its engine core without a
    separate process.
    """

    def __init__(self, processes: Sequence[BaseProcess], where: str):
        self._processes = processes
        self._where = where
        self.died: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if processes:
            threading.Thread(target=self._watch, name="enginehouse-vllm-life", daemon=True).start()

    def _watch(self) -> None:
        """Wait for the first process to end, and set `died` in its event loop."""

        def report() -> None:
            if not self.died.done():
                self.died.set_result(None)

        multiprocessing.connection.wait([process.sentinel for process in self._processes])
        for process in self._processes:
            process.join(0.1)  # so that its exit code is known
        with contextlib.suppress(RuntimeError):  # the event loop may be closed
            self.died.get_loop().call_soon_threadsafe(report)

    @property
    def pids(self) -> list[int]:
        """Ids of the processes that still run."""
        return [process.pid for process in self._processes if process.pid is not None and process.is_alive()]

    def are_alive(self) -> bool:
        """Return True while all processes run. A process that has begun to end counts as dead: `died` is set first."""
        return not self.died.done() and all(process.is_alive() for process in self._processes)

    async def wait_for(self, call: Coroutine[Any, Any, T]) -> T:
        """Return vLLM's answer to a call.

        Raises:
            VLLMFailed: vLLM is dead, or dies before it answers.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        task = asyncio.ensure_future(call)
        try:
            await asyncio.wait({task, self.died}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():  # vLLM itself waits for ever for the answer of a dead process
                raise VLLMFailed(self.describe_death())
            return task.result()
        except EngineDeadError as error:
            raise VLLMFailed(self.describe_death()) from error
        except Exception as error:  # a call to a process that is just ending raises other errors
            if self.are_alive():
                raise
            raise VLLMFailed(self.describe_death()) from error
        finally:
            task.cancel()

    def describe_death(self) -> str:
        """Return a sentence on how vLLM's processes ended, with the last error of the log."""
        if self.died.done():  # the exit code is known a moment later
            for process in self._processes:
                process.join(ENDING_SECONDS)
        endings = [
            f"process {process.pid} {_describe_exit(process.exitcode)}"
            for process in self._processes
            if process.exitcode is not None
        ]
        causes = f" ({', '.join(endings)})" if endings else ""
        return f"{self._where}: vllm's engine core has died{causes}: {last_words() or 'see its log'}"

    def end(self) -> None:
        """Wait for all processes to end, and kill those that do not."""
        for process in self._processes:
            process.join(SHUTDOWN_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()


def _describe_exit(code: int) -> str:
    return f"was ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
