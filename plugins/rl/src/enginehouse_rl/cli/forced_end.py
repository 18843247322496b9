"""The program that takes the place of a run that was ended at once: it has observers make what they make of a run.

`python -m enginehouse_rl.cli.forced_end CODE DIRECTORY` ends with CODE, at the latest after `SECONDS` or at a signal.
"""

import contextlib
import os
import signal
import sys

from enginehouse.controller.interruption import SIGNALS
from enginehouse_rl.cli.session import tell_recorded

SECONDS = 10
"""How long a report may take of a run whose user wants it to be over."""


def main() -> None:
    """Run the program."""
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
