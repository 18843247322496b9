"""Processes that are the other end of a transport."""

from __future__ import annotations

import multiprocessing
from contextlib import contextmanager

fork = multiprocessing.get_context("fork")

ENDING_SECONDS = 60.0
"""Far more than a killed process needs to be gone."""


@contextmanager
def started(run, plan, index=0):
    """A process that runs `run(plan, index, pipe)`, and the pipe to it."""
    ours, theirs = fork.Pipe()
    process = fork.Process(target=run, args=(plan, index, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join(ENDING_SECONDS)
