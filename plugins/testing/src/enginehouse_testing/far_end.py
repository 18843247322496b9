"""Receivers of a transport under test, in another process. This process can be kept from everything that processes of
one host share."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import re
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from enginehouse.engines.weights import TransferPlan
from enginehouse.errors import EnginehouseError
from enginehouse.plugin import resolve
from enginehouse.weights.checksums import checksum
from enginehouse.weights.transports.ends import address_of
from enginehouse_testing.link import Link, Weights, announced, receive

START_SECONDS = 120.0
"""Time limit for starting the other process. It is long, because the process imports torch, perhaps on a busy
machine."""

SHARED = re.compile(r"/dev/shm/|/memfd:|/proc/(\d+)/(fd|map_files|mem)\b")
"""Paths that processes of one host share."""

_own_memory: set[int] = set()
"""Inodes of the memory without a name that a process apart from its host has made itself."""


def send_elsewhere(link: Link, weights: Weights, another_host: bool) -> str:
    """Send weights to receivers in another process, and describe what goes wrong; empty if nothing does.

    Args:
        another_host: True if the other process may not open what processes of one host share.
    """
    transport = link.transport()
    plan = transport.prepare(announced(weights), link.receivers, uuid.uuid4().hex, 1024, 1)
    sender = transport.connect(plan, "send", 0)
    reached = plan.reached([address_of(sender, "127.0.0.1")])
    try:
        with _process(link, reached, another_host) as answers, ThreadPoolExecutor(1) as thread:
            if mistake := _answer(answers, START_SECONDS):
                return str(mistake)
            sending = thread.submit(sender.send, 1, iter(weights.items()), link.seconds)
            arrived = _answer(answers, link.seconds)
            if isinstance(arrived, str):
                sender.abort(1)
                return arrived
            sums = sending.result(link.seconds)
    except EnginehouseError as error:
        return f"the sender: {error}"
    finally:
        sender.close()
    differing = [
        f"{name} at receiver {index}"
        for index, checksums in enumerate(arrived)
        for name in sums.keys() | checksums.keys()
        if checksums.get(name) != checksum(weights[name])
    ]
    return f"these parameters arrived changed: {', '.join(differing)}" if differing else ""


def _answer(answers: Connection, seconds: float) -> Any:
    try:
        return answers.recv() if answers.poll(seconds) else f"the other process did not answer within {seconds:g} s"
    except EOFError:
        return "the other process ended"


@contextlib.contextmanager
def _process(link: Link, plan: TransferPlan, another_host: bool) -> Iterator[Connection]:
    """Start the process with the receivers, and yield a connection to it.

    The process first sends whether its receivers are connected, then what they received.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_receive, args=(link, plan, another_host, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.kill()
        process.join()


def _receive(link: Link, plan: TransferPlan, another_host: bool, answers: Connection) -> None:
    if another_host:
        _note_own_memory()
        sys.addaudithook(_refuse_shared)
    try:
        transport = resolve(link.record.transport)()
        sessions = [transport.connect(plan, "recv", index) for index in range(link.receivers)]
        answers.send("")
        with ThreadPoolExecutor(link.receivers) as threads:
            arrived = list(threads.map(lambda session: receive(session, 1, link.seconds), sessions))
        answers.send([{name: checksum(t) for bucket in buckets for name, t in bucket} for buckets in arrived])
        for session in sessions:
            session.close()
    except BaseException as error:
        answers.send(f"the receivers, in another process: {type(error).__name__}: {error}")


def _note_own_memory() -> None:
    """From now on, note which memory without a name this process makes."""
    if sys.platform != "linux":  # no other system has such memory
        return
    create = os.memfd_create

    def create_own(name: str, flags: int = os.MFD_CLOEXEC) -> int:
        descriptor = create(name, flags)
        _own_memory.add(os.fstat(descriptor).st_ino)
        return descriptor

    os.memfd_create = create_own


def _refuse_shared(event: str, arguments: tuple[Any, ...]) -> None:
    """Refuse to open or map what another host cannot see."""
    path = arguments[0] if event == "open" else ""
    if event == "mmap.__new__" and arguments[0] >= 0 and os.fstat(arguments[0]).st_ino not in _own_memory:
        with contextlib.suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{arguments[0]}")
    shared = SHARED.match(path) if isinstance(path, str) else None
    if shared and shared[1] != str(os.getpid()):
        raise OSError(errno.ENOENT, "this path is not there on another host", path)
