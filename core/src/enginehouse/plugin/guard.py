"""Guards a command against the plugins that it loads: their modules are other people's code, and run in every command.

A plugin that raises anything, exits or hangs is given up, and the others are loaded. What ends the process at once, as
`os._exit` and a crash in native code do, ends the command: a witness beside it names the plugin.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

SECONDS = 30.0
"""Longest a plugin may take to be loaded; a light one takes a hundredth of a second."""

_WISHES = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_WITNESS = """
while read -r name owner; do [ "$name" ] || exit 0; last=$name; of=$owner; done
[ "$last" ] && echo "The process ended while it loaded plugin $last ($of). ENGINEHOUSE_BLOCK_PLUGINS=$last keeps it \
out; 'enginehouse plugins doctor $last' says more."
"""


class Overdue(BaseException):
    """A plugin took too long; no `Exception`, which the plugin's own code might catch."""


def run_guarded(work: Callable[[], object]) -> BaseException | None:
    """Run code of a plugin's and return what it raised, whatever that is: `Overdue` after `SECONDS`.

    Ctrl-C and other signals that ask for an end are no fault of the plugin: whoever handled them is given them once
    its code was left. Outside the main thread there is no clock, so code that hangs holds its thread up.
    """
    if threading.current_thread() is not threading.main_thread():
        return _raised_by(work)
    wishes: list[int] = []
    running = True

    def stop(number: int, frame: object) -> None:
        if number != signal.SIGALRM:
            wishes.append(number)
        if running:
            raise Overdue(f"it was not loaded within {SECONDS:g} s, and every command waits for that")

    handled = [number for number in _WISHES if callable(signal.getsignal(number))]
    former = {number: signal.signal(number, stop) for number in (int(signal.SIGALRM), *map(int, handled))}
    remaining = signal.setitimer(signal.ITIMER_REAL, SECONDS)
    error = _raised_by(work)
    running = False
    signal.setitimer(signal.ITIMER_REAL, *remaining)
    for number, handler in former.items():
        signal.signal(number, handler)
    for number in wishes:
        former[number](number, None)  # type: ignore[operator,misc]
    return error


def _raised_by(work: Callable[[], object]) -> BaseException | None:
    try:
        work()
    except BaseException as error:
        return error
    return None


@contextlib.contextmanager
def witness() -> Iterator[Callable[[str, str], None]]:
    """Have a shell beside this process say on stderr which plugin was loaded where this process ends meanwhile.

    Yields:
        What tells it the plugin that is loaded next, by its name and its distribution. Without a shell nobody is told.
    """
    shell: int | None = None
    reading, writing = os.pipe()

    def tell(name: str, owner: str) -> None:
        nonlocal shell
        with contextlib.suppress(OSError):
            if shell is None:  # in a process group of its own, so that Ctrl-C leaves it
                streams = [(os.POSIX_SPAWN_DUP2, reading, 0), (os.POSIX_SPAWN_DUP2, 2, 1)]
                shell = os.posix_spawn("/bin/sh", ["sh", "-c", _WITNESS], {}, file_actions=streams, setpgroup=0)
            os.write(writing, f"{name} {owner}\n".encode())

    try:
        yield tell
    finally:
        if shell is not None:
            tell("", "")
            with contextlib.suppress(ChildProcessError):
                os.waitpid(shell, 0)
        os.close(reading)
        os.close(writing)
