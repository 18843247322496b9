"""The door of a transport: who is let in, and what strangers can do to it meanwhile."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from enginehouse.engines.weights import LOOPBACK, TransferPlan
from enginehouse.weights.transports.barrier import Barrier
from enginehouse.weights.transports.rendezvous import STRANGERS, Rendezvous, join, secret

PLAN = TransferPlan("collective", (), (), 0, receivers=2, session="0123456789abcdef")


@pytest.fixture
def rendezvous(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rendezvous]:
    monkeypatch.setattr(
        "enginehouse.weights.transports.rendezvous.GREETING_SECONDS", 600.0
    )  # nobody is sent away by time
    opened = Rendezvous(Barrier(), PLAN, range(2), lambda index, message: None)
    yield opened
    opened.close()


def knock(rendezvous: Rendezvous, *words: bytes) -> socket.socket:
    connection = socket.create_connection((LOOPBACK, rendezvous.port), 10)
    for word in words:
        connection.sendall(word)
    return connection


def is_closed(connection: socket.socket) -> bool:
    """Waits until the other end has closed it."""
    connection.settimeout(20)
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(1) == b""
    return True


def both_join(rendezvous: Rendezvous) -> None:
    plan = PLAN.reached([f"{LOOPBACK}:{rendezvous.port}"])
    channels = [join(plan, index, 0)[0] for index in range(2)]
    assert set(rendezvous.channels) == {0, 1}
    for channel in channels:
        channel.close()


def test_it_waits_at_loopback_unless_the_plan_names_an_address(rendezvous: Rendezvous):
    assert rendezvous._listener.getsockname()[0] == LOOPBACK


@pytest.mark.parametrize(
    "words",
    [
        (b"GET / HTTP/1.1\r\n\r\n" + b"x" * 64,),
        (b"[" * 65536,),
        (secret("another session"), b'{"receiver": 0}\n'),
        (secret(PLAN.session), b"[" * 40000 + b"\n"),
        (secret(PLAN.session), b'{"receiver": [1]}\n'),
        (secret(PLAN.session), b'{"receiver": 7}\n'),
        (secret(PLAN.session), b"17\n"),
    ],
    ids=["http", "brackets", "another's secret", "nesting", "list", "nobody", "number"],
)
def test_who_is_not_of_the_session_is_sent_away_and_harms_nobody(rendezvous: Rendezvous, monkeypatch, words):
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    with knock(rendezvous, *words) as stranger:
        assert is_closed(stranger)
    both_join(rendezvous)
    assert not raised


def test_silent_strangers_are_bounded_and_keep_nobody_out(rendezvous: Rendezvous):
    before = threading.active_count()
    with contextlib.ExitStack() as strangers:
        silent = [strangers.enter_context(knock(rendezvous)) for _ in range(200)]
        assert is_closed(silent[0])
        both_join(rendezvous)
        assert threading.active_count() - before < 4 * STRANGERS
