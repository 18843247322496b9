"""Rewards that trouble a run. A data row's `trouble` says what its reward does."""

import itertools
import os
import signal
import threading
import time


def troubled(prompt: str, response: str, finish_reason: str, trouble: str = "none", **columns: object) -> float:
    """Never return, raise or take the process down, as the row says; else give a plain number."""
    if trouble == "hang":
        threading.Event().wait()
    if trouble == "raise":
        raise ValueError(f"cannot judge {prompt}")
    if trouble == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return float(len(set(response)))


def constant(prompt: str, response: str, finish_reason: str, **columns: object) -> float:
    """The same for every sample, and not exact in binary."""
    return 3.3


def varied(prompt: str, response: str, finish_reason: str, **columns: object) -> float:
    """A reward that a model of random weights gets a different amount of in each sample."""
    return len(set(response)) / 10


def said(response: str) -> dict[str, object]:
    """Nothing, for what the response begins with."""
    return {"reward": 0, "answer": response[:1]}


def failing(prompt: str, response: str, finish_reason: str, **columns: object) -> float:
    """None, ever."""
    raise ValueError(f"cannot judge {response}")


def slow(response: str) -> float:
    """Takes its time over each response."""
    time.sleep(0.05)
    return len(set(response)) / 10


def nothing(prompt: str, response: str, finish_reason: str, **columns: object) -> float:
    """0, whatever is said."""
    return 0.0


def unrepeated(response: str) -> float:
    """The share of characters that are the first of their kind: length does not pay."""
    return len(set(response)) / max(len(response), 1)


_turns = itertools.count()


def in_turn(response: str) -> float:
    """Another one for each sample, whatever is said."""
    return float(next(_turns) % 3)
