"""Reward functions that behave and that do not: what the processes of a pool import, so nothing heavy is here."""

import asyncio
import builtins
import ctypes
import decimal
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy

from enginehouse.plugin import batched_reward

MEETING = threading.Barrier(12)


def length(prompt, response, *, scale=1.0, **columns):
    return len(response) * scale


def troubled(prompt, response, **columns):
    if response == "hang":
        time.sleep(3600)
    if response == "raise":
        raise ValueError("no digits in it")
    if response == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if response == "numbered":
        return {"reward": 1.0, "answer": 42}
    if response == "text":
        return "1.0"
    if response == "nan":
        return float("nan")
    if response == "infinite":
        return numpy.float32("inf")
    if response == "large":
        return 1e39
    if response.endswith(("Exit", "Interrupt")):
        raise getattr(builtins, response)
    return 1.0


class Peculiar(Exception):
    """Can be pickled, but not read back."""

    def __init__(self, first, second):
        super().__init__(f"{first} {second}")


NUMBERS = {"numpy": numpy.float32(0.5), "int": 1, "bool": True, "decimal": decimal.Decimal("0.25")}


def number(prompt, response, **columns):
    return NUMBERS[response]


def slow(prompt, response, *, seconds, marks, **columns):
    """Leaves a mark a call; sleeps for `seconds` of the row's kind, else not at all."""
    with open(marks, "a") as file:
        file.write(f"{response}\n")
    time.sleep(seconds.get(response.rstrip("0123456789"), 0))
    return 1.0


def peculiar(prompt, response, **columns):
    raise Peculiar("quite", "odd")


def leaves(prompt, response, **columns):
    raise SystemExit(3)


def once(prompt, response, *, marks, number, **columns):
    """Sends its own process a signal, the first time."""
    path = Path(marks, response)
    if not path.exists():
        path.touch()
        os.kill(os.getpid(), number)
    return 1.0


def starts(prompt, response, *, kind, mark, **columns):
    """Starts something that outlives it."""
    command = [sys.executable, "-c", f"import time; open({mark!r}, 'a').write('.'); time.sleep(3600)"]
    if kind == "detached":
        subprocess.Popen(command, start_new_session=True)
    elif kind == "orphaned":
        subprocess.Popen(
            [sys.executable, "-c", f"import subprocess; subprocess.Popen({command!r}, start_new_session=True)"]
        ).wait()
    elif os.fork() == 0:
        subprocess.run(command)
    while not os.path.exists(mark):
        time.sleep(0.01)
    if response == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if response == "hang":
        time.sleep(3600)
    return 1.0


def forks(prompt, response, **columns):
    """Its child comes back too, or exits as Python programs do."""
    if os.fork() == 0 and response == "exit":
        sys.exit(1)
    return 1.0


def prints(prompt, response, **columns):
    print("from Python:", response)
    os.system(f"echo from a shell: {response} >&2")
    if response == "much":
        print("x" * 10**6)
    if response == "raise":
        raise ValueError
    if response == "die":
        ctypes.string_at(0)
    if response == "hang":
        sys.stdout.flush()
        time.sleep(3600)
    return None if response == "none" else 1.0


@batched_reward
def prints_a_batch(prompt, response, **columns):
    return [prints("p", one) for one in response]


async def prints_and_waits(prompt, response, **columns):
    await asyncio.sleep(0)
    return prints(prompt, response)


def figures(prompt, response, **columns):
    return {"reward": 1, "format": numpy.float64(len(response))} if response else {"score": 1, "acc": 1}


def answers(response):
    digits = "".join(filter(str.isdigit, response))
    return {"reward": bool(digits), "answer": digits or None}


def frugal(response, answer=None):
    return len(response) + (answer or 0)


async def meets(prompt, response, *, meeting=[], **columns):  # noqa: B006 - what the calls of a process share
    """Rows that wait for each other."""
    meeting.append(response)
    if response == "hang":
        await asyncio.sleep(3600)
    if response == "block":
        time.sleep(3600)
    if response == "SystemExit":
        raise SystemExit
    while len(meeting) < 3:
        await asyncio.sleep(0.001)
    return 1.0


@batched_reward
def lengths(response, extra, *, scale=1.0, **columns):
    if "short" in response and len(response) > 1:
        return [1.0]
    if "raise" in response:
        raise ValueError("one of them")
    if "hang" in response:
        time.sleep(3600)
    return numpy.array([len(one) * scale for one in response])


twice_lengths = functools.partial(lengths, scale=2.0)


@batched_reward
async def lengths_later(response, **columns):
    await asyncio.sleep(0)
    return [{"reward": len(one), "calls": len(response)} for one in response]


def _waits(response, gates):
    """Leaves a mark a call; what begins with "wait" goes on once there is a file `go`."""
    with open(Path(gates, "marks"), "a") as file:
        file.write(f"{response}\n")
    while response.startswith("wait") and not Path(gates, "go").exists():
        time.sleep(0.001)
    if response.endswith("raise"):
        raise ValueError("no digits in it")
    if response.endswith("die"):
        os.kill(os.getpid(), signal.SIGKILL)
    return {"reward": len(response), "pid": os.getpid()}


def waits(prompt, response, *, gates, **columns):
    return _waits(response, gates)


async def waits_async(prompt, response, *, gates, **columns):
    await asyncio.sleep(0)
    return _waits(response, gates)


async def asks_in_a_thread(prompt, response, **columns):
    """Waits in a thread, for ever or until twelve do at once."""
    await asyncio.to_thread(threading.Event().wait if response == "hang" else MEETING.wait)
    return {"reward": 1.0, "process": os.getpid(), "limit": float(os.environ["ENGINEHOUSE_REWARD_TIMEOUT_SECONDS"])}


@batched_reward
def waits_batched(prompt, response, *, gates, **columns):
    return [{**_waits(one, gates), "calls": len(response)} for one in response]


def long_alone(response):
    """Judges long responses, and leaves others to others."""
    return 1.0 if len(response) > 2 else None
