"""Starts Ray on this machine or joins a cluster, without Ray's notices, and leaves no process or file behind."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple

import psutil

from enginehouse.controller.errors import ControllerError
from enginehouse.controller.interruption import SIGNALS, defer_interrupt
from enginehouse.controller.ray_access import is_alive, ray_access

log = logging.getLogger(__name__)

LOGICAL_CPUS = 32
"""Minimum number of CPUs that Ray counts, even on a machine with fewer cores. Workers mostly wait, and four ranks must
run on a laptop with few cores."""
OBJECT_STORE_SHARE, AVAILABLE_SHARE, SHARED_MEMORY_SHARE = 0.3, 0.5, 0.8
"""Largest fractions of the machine's memory, of its available memory and of free /dev/shm that Ray's object store may
use. The store takes up memory only as it is written to."""
LEAST_OBJECT_STORE_BYTES = 80 << 20
"""Minimum size of the object store. Ray requires 75 MiB."""
STARTS = 3
"""Maximum number of attempts to start Ray, if its processes do not start within Ray's own limit of 30 s."""
LATE = "timed out during startup"
"""Text of the error that Ray (2.60, `_private/node.py`) raises if its processes do not start in time."""
TOO_LITTLE = "memory on this node available for tasks and actors"
"""Text of the error that Ray (2.60, `_private/resource_and_label_spec.py`) raises if other programs use the machine's
memory."""
TURNED_AWAY = "Failed to connect to Ray cluster", "ray client connection timeout"
"""Texts of the errors that Ray (2.60, `_private/worker.py`, `util/client/worker.py`) raises if this process lacks the
cluster's token."""
KNOCK_SECONDS = 10.0
"""Time limit for a connection to a cluster's head node."""
LONGEST_TEMP_DIR = 40
"""Maximum length of the temporary directory's path in characters. The paths of Ray's Unix sockets are about 60
characters longer, and the path of a socket may have at most 107 characters."""
SHUTDOWN_SECONDS = 10.0
"""Time in seconds that Ray's processes have to end before they are killed."""

SETTINGS = {
    # No usage report, and no console report of errors that enginehouse reports.
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    # No prestarted workers: workers here have their own environment variables, so Ray could not use them.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    # No second Ray, which a call after the shutdown would start.
    "RAY_ENABLE_AUTO_CONNECT": "0",
    # Workers get as much CPU time as any program; with Ray's default of 15 they starve on a busy machine.
    "RAY_worker_niceness": "0",
    # No record of every call: the control service (GCS) keeps 100,000 records, and its memory grows until then.
    "RAY_task_events_report_interval_ms": "0",
    # An invalid port: Ray's monitor would serve its metrics to everybody, on all addresses.
    "AUTOSCALER_METRIC_PORT": "-1",
}
"""Environment variables with which Ray (2.60) starts, unless the user has set them."""

_owned: Cluster | None = None


class Cluster:
    """The Ray cluster that this process uses, as a context manager. `start_ray` returns it.

    Attributes:
        owned: True if `start_ray` started or joined the cluster, so that `shutdown` stops or leaves it.
        control: process of the cluster's control service (GCS), if it runs on this machine.
    """

    def __init__(
        self,
        owned: bool,
        processes: list[psutil.Process] | None = None,
        temp_dir: str | None = None,
        control: psutil.Process | None = None,
    ):
        self.owned = owned
        self.control = control
        self._processes = processes or []
        self._temp_dir = temp_dir
        self._guard = _Guard([process.pid for process in self._processes]) if self._processes else None

    def shutdown(self) -> None:
        """Leave the cluster. If it was started here, stop it and wait for the end of its processes."""
        global _owned
        import ray

        if not self.owned:
            return
        families = [child for process in self._processes for child in _family(process)]
        ray_access.close()
        ended = not ray.is_initialized() or ray_access.end("shut down", ray.shutdown, SHUTDOWN_SECONDS)
        ray_access.abandoned = not ended
        end_processes(families, patience=5.0 if ended else 0.0)
        if self._guard is not None:
            self._guard.end()
        if self._temp_dir:
            shutil.rmtree(self._temp_dir, ignore_errors=True)
        self.owned = False
        if _owned is self:
            _owned = None

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.shutdown()


class _Guard:
    """Kills process groups when this process ends for any reason. A shell does so when the pipe from this process
    closes.

    Without the guard, the kernel ends only the processes that this process started. Ray's agents are children of
    raylet. They would print errors and wait a minute for the control service, which has already ended.
    """

    def __init__(self, leaders: list[int]):
        waited_for, self._alive = os.pipe()
        script = 'read _; kill -s KILL -- "$@" 2>/dev/null'
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", script, "enginehouse-guard", *(f"-{leader}" for leader in leaders)],
            stdin=waited_for, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        os.close(waited_for)

    def end(self) -> None:
        """Kill the process groups and end the shell."""
        self.let_go()
        self._process.wait()

    def let_go(self) -> None:
        alive, self._alive = self._alive, -1
        if alive >= 0:
            os.close(alive)


def start_ray(address: str | None = None, num_cpus: int | None = None) -> Cluster:
    """Start Ray on this machine, or join a running cluster.

    If this process is connected to Ray already, nothing changes, and `shutdown` of the returned cluster does nothing.

    Args:
        address: address of a running cluster (`"auto"`, `"host:6379"`, `"ray://host:10001"`). None starts a cluster
            here; inside a Ray job (`RAY_ADDRESS` is set), None joins the job's cluster.
        num_cpus: number of CPUs that Ray counts in a cluster started here. The default is the number of this machine's
            CPUs, but at least `LOGICAL_CPUS`.

    Raises:
        ControllerError: Ray could not be started or joined.
    """
    global _owned
    for variable, value in SETTINGS.items():  # Ray reads them at its import or start
        os.environ.setdefault(variable, value)
    import ray

    from enginehouse.controller.ray_notices import quiet_notices

    if ray.is_initialized():
        ray_access.open(None)
        return Cluster(owned=False)
    quiet_notices()
    of_variable = "" if address else os.environ.get("RAY_ADDRESS", "")
    address = address or of_variable or None
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        # an interrupted connection crashes the process at its exit
        with defer_interrupt(), _beginning():
            _owned = _join(ray, address, quiet) if address is not None else _start(ray, num_cpus, quiet)
    except Exception as error:
        where = f"join the Ray cluster at {address!r}" if address else "start Ray on this machine"
        if of_variable:
            where += ", which the environment variable RAY_ADDRESS names (unset it to start Ray here)"
        raise ControllerError(
            f"could not {where}: {_too_little_memory() if TOO_LITTLE in str(error) else error}"
        ) from error
    except BaseException:
        stop_ray()
        raise
    ray_access.open(_owned.control)
    return _owned


def _join(ray: Any, address: str, quiet: dict[str, Any]) -> Cluster:
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if colon and port.isdigit():  # Ray would retry for minutes
        socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_SECONDS).close()
    try:
        ray.init(address=address, **quiet)
    except ConnectionError as error:
        if str(error).startswith(TURNED_AWAY):
            raise ConnectionError(f"{error}. {_about_tokens()}") from error
        raise
    return Cluster(owned=True, control=_control_at(ray.get_runtime_context().gcs_address))


def _about_tokens() -> str:
    """Explain why a running cluster may reject this process."""
    if os.environ.get("RAY_AUTH_MODE", "").lower() == "token":
        cure = (
            "a different token: copy the cluster's ~/.ray/auth_token here (RAY_AUTH_TOKEN and RAY_AUTH_TOKEN_PATH take "
            "precedence over this file)"
        )
    else:
        cure = (
            "no token: export RAY_AUTH_MODE=token, with the cluster's token in ~/.ray/auth_token; or start the cluster "
            "with RAY_AUTH_MODE=disabled"
        )
    return f"If it is running, it most likely requires a token (InvalidAuthToken), but this process sends {cure}"


def _control_at(address: str) -> psutil.Process | None:
    """Return the control service that listens at `address`, if it runs on this machine and this user can see it."""
    host, _, port = address.rpartition(":")
    local_addresses = {interface.address for interfaces in psutil.net_if_addrs().values() for interface in interfaces}
    if host.strip("[]") not in local_addresses:
        return None
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            listens = (
                connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == int(port)
            )
            if listens and connection.pid:
                return psutil.Process(connection.pid)
    return None


def _start(ray: Any, num_cpus: int | None, quiet: dict[str, Any]) -> Cluster:
    before = set(psutil.Process().children())

    def started() -> list[psutil.Process]:
        return [process for process in psutil.Process().children() if process not in before and _is_ray(process)]

    temp_dir = _short_temp_dir()
    for attempts_left in reversed(range(STARTS)):
        try:
            ray.init(
                address="local",
                num_cpus=num_cpus or max(os.cpu_count() or 1, LOGICAL_CPUS),
                include_dashboard=False,
                object_store_memory=_object_store_bytes(),
                _temp_dir=temp_dir,
                **quiet,
            )
            break
        except Exception as error:
            ray.shutdown()
            end_processes(started(), 0.0)
            if not attempts_left or LATE not in str(error):
                if temp_dir:
                    shutil.rmtree(temp_dir, ignore_errors=True)
                raise
            log.warning("Ray did not start within its limit of 30 s, because this machine is busy; trying again")
    processes = started()
    control = next((process for process in processes if _program(process) == "gcs_server"), None)
    return Cluster(owned=True, processes=processes, temp_dir=temp_dir, control=control)


@contextmanager
def _beginning() -> Iterator[None]:
    """Start a new session for each process that Ray starts, and keep this program's signal handlers.

    A signal to this program's process group then does not end Ray before the run has saved its state. Ray 2.60 starts
    its processes by `subprocess` with a `preexec_fn`, so that Python runs the hooks for forks. The kernel still ends
    these processes when this process ends.
    """
    global _begun
    handlers: dict[int, Callable[..., object]] = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {number: handler for number in SIGNALS if callable(handler := signal.getsignal(number))}
    _begun = _Beginning(threading.get_ident(), handlers)
    try:
        yield
    finally:
        _begun.take_signals_back()
        _begun = None


class _Beginning(NamedTuple):
    """The thread that starts Ray, and the program's former signal handlers."""

    thread: int
    handlers: dict[int, Callable[..., object]]

    def take_signals_back(self) -> None:
        """Restore the signal handlers. `ray.init` sets a handler for SIGTERM that exits at once, whatever the program
        is doing."""
        for number, handler in self.handlers.items():
            signal.signal(number, handler)


_begun: _Beginning | None = None


def _in_forked_child() -> None:
    if _owned is not None and _owned._guard is not None:
        _owned._guard.let_go()
    if _begun is not None and _begun.thread == threading.get_ident():
        os.setsid()


def _after_fork() -> None:
    if _begun is not None and _begun.thread == threading.get_ident():
        _begun.take_signals_back()


os.register_at_fork(after_in_child=_in_forked_child, after_in_parent=_after_fork)


def stop_ray() -> None:
    """Stop or leave the cluster of `start_ray`, if any."""
    if _owned is not None:
        _owned.shutdown()


def is_owned() -> bool:
    """Return True if `start_ray` started a cluster here, which has one node and does not grow."""
    return _owned is not None and bool(_owned._processes)


def count_cores() -> int:
    """Return the number of cores of this machine that this process may use."""
    # macOS has no affinity
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def end_processes(processes: list[psutil.Process], patience: float) -> None:
    """Wait `patience` seconds for processes to end, then kill the processes that still run."""
    _, alive = psutil.wait_procs(list(filter(is_alive, processes)), timeout=patience)
    for process in alive:
        if is_alive(process):
            log.info("killing process %s, which did not end by itself", process.pid)
            with contextlib.suppress(psutil.Error):
                process.kill()
    psutil.wait_procs(alive, timeout=2.0)


def _is_ray(process: psutil.Process) -> bool:
    try:
        return any(f"{os.sep}ray{os.sep}" in word for word in process.cmdline())
    except psutil.Error:
        return False


def _program(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return ""


def _family(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def _short_temp_dir() -> str | None:
    """Make a directory for Ray's sockets if the temporary directory's path is too long for them; else return None."""
    base = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    return None if len(base) <= LONGEST_TEMP_DIR else tempfile.mkdtemp(prefix="ray-", dir="/tmp")


def _object_store_bytes() -> int:
    memory = psutil.virtual_memory()
    size = int(min(memory.total * OBJECT_STORE_SHARE, memory.available * AVAILABLE_SHARE))
    with contextlib.suppress(OSError):
        size = min(size, int(shutil.disk_usage("/dev/shm").free * SHARED_MEMORY_SHARE))
    return max(size, LEAST_OBJECT_STORE_BYTES)


def _too_little_memory() -> str:
    memory = psutil.virtual_memory()
    available, total = memory.available / 2**30, memory.total / 2**30
    return (
        f"other programs leave {available:.2f} GiB of {total:.1f} GiB of memory, too little for Ray and its object "
        "store. End some of these programs, or use cluster.launcher=inline if one process is enough"
    )
