"""Interrupts that are put off come when the moment is over, and their handlers at once."""

import signal
import threading
from collections.abc import Callable

import pytest

from enginehouse.controller.interruption import defer_interrupt


@pytest.fixture
def handled():
    """What a handler of SIGINT that also raises was called with, in order."""
    calls: list[int] = []

    def handler(number, frame):
        calls.append(number)
        raise KeyboardInterrupt

    former = signal.signal(signal.SIGINT, handler)
    yield calls
    signal.signal(signal.SIGINT, former)


def interrupted(*signals: int, then: Callable[[], object] = list) -> None:
    with defer_interrupt():
        for number in signals:
            signal.raise_signal(number)
        then()


def test_the_handler_runs_at_once_and_the_interrupt_comes_at_the_end(handled):
    reached: list[list[int]] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted(signal.SIGINT, then=lambda: reached.append(list(handled)))
    assert reached == [[signal.SIGINT]]


def test_a_second_interrupt_is_not_put_off(handled):
    reached: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted(signal.SIGINT, signal.SIGINT, then=lambda: reached.append("after the second"))
    assert not reached
    assert len(handled) == 2


def test_an_interrupt_comes_before_an_error(handled):
    with pytest.raises(KeyboardInterrupt):
        interrupted(signal.SIGINT, then=lambda: int("no number, because of it"))


def test_handlers_are_as_they_were_unless_someone_took_the_signal_over(handled):
    before = signal.getsignal(signal.SIGINT)
    with defer_interrupt():
        pass
    assert signal.getsignal(signal.SIGINT) is before
    with defer_interrupt():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_another_thread_is_left_alone(handled):
    seen = []

    def work():
        with defer_interrupt():
            seen.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
