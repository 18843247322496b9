"""The program that replaces the process of a run which was ended by force. It calls the observers' `run_recorded`.

`python -m enginehouse_rl.cli.forced_end CODE DIRECTORY` exits with CODE as soon as the observers have ended, `SECONDS`
have passed, or a signal arrives.
"""

import contextlib
import os
import signal
import sys

from enginehouse.controller.interruption import SIGNALS
from enginehouse_rl.cli.session import tell_recorded

SECONDS = 10
"""Time limit for observers. A user who ends a run by force does not want to wait for them."""


def main() -> None:
    code, directory = int(sys.argv[1]), sys.argv[2]
    for number in (*SIGNALS, signal.SIGALRM):
        signal.signal(number, lambda *_: os._exit(code))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    signal.alarm(SECONDS)
    with contextlib.suppress(BaseException):
        tell_recorded(directory, "interrupted")
    os._exit(code)


if __name__ == "__main__":
    main()
