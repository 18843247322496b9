"""Guards a command against its plugins, because each command imports the modules of all plugins.

If a plugin raises, exits or hangs, it is dropped, and the other plugins are loaded. `os._exit` or a crash in native
code ends the command. Then a separate shell, the witness, names the plugin.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

SECONDS = 30.0
"""Time limit in seconds for loading a plugin. A light plugin takes 0.01 s."""

_END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_WITNESS = """
while read -r name owner; do [ "$name" ] || exit 0; last=$name; of=$owner; done
[ "$last" ] && echo "The process ended while it loaded plugin $last ($of). ENGINEHOUSE_BLOCK_PLUGINS=$last keeps it \
out; 'enginehouse plugins doctor $last' says more."
"""


class Overdue(BaseException):
    """A plugin took too long. This is not an `Exception`, which the plugin's own code might catch."""


def run_guarded(work: Callable[[], object]) -> BaseException | None:
    """Run code of a plugin. Return the exception that it raised, of any type; None if it raised none.

    Code that takes longer than `SECONDS` is interrupted, and the result is `Overdue`. Outside the main thread there is
    no time limit. Ctrl-C and other signals that ask for an end also interrupt the code. Their former handlers run
    afterwards.
    """
    if threading.current_thread() is not threading.main_thread():
        return _catch(work)
    received: list[int] = []
    running = True

    def stop(number: int, frame: object) -> None:
        if number != signal.SIGALRM:
            received.append(number)
        if running:
            raise Overdue(f"it was not loaded within {SECONDS:g} s, and every command waits for that")

    handled = [number for number in _END_SIGNALS if callable(signal.getsignal(number))]
    former = {number: signal.signal(number, stop) for number in (int(signal.SIGALRM), *map(int, handled))}
    remaining = signal.setitimer(signal.ITIMER_REAL, SECONDS)
    error = _catch(work)
    running = False
    signal.setitimer(signal.ITIMER_REAL, *remaining)
    for number, handler in former.items():
        signal.signal(number, handler)
    for number in received:
        former[number](number, None)  # type: ignore[operator,misc]
    return error


def _catch(work: Callable[[], object]) -> BaseException | None:
    try:
        work()
    except BaseException as error:
        return error
    return None


@contextlib.contextmanager
def witness() -> Iterator[Callable[[str, str], None]]:
    """Start a shell beside this process. If this process ends in the block, the shell names the plugin on stderr.

    Yields:
        A function that tells the shell the name and distribution of the next plugin. It does nothing if the shell
            cannot be started.
    """
    shell: int | None = None
    reading, writing = os.pipe()

    def tell(name: str, owner: str) -> None:
        nonlocal shell
        with contextlib.suppress(OSError):
            if shell is None:  # in a separate process group, which Ctrl-C does not reach
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
