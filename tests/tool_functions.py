"""Functions that tests have as tools, some of which will not do."""

import asyncio
import threading

WORD = "no function"


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b


async def say(text: str) -> str:
    """Say a text.

    Args:
        text: What to say.
    """
    await asyncio.sleep(0)
    return text


def fail(how: str) -> None:
    """Fail.

    Args:
        how: In which way.
    """
    raise {"key": KeyError("gone"), "exit": SystemExit(3), "cancel": asyncio.CancelledError()}[how]


def promise() -> object:
    """Promise something."""
    return say("so")


def give(what: str) -> object:
    """Give something.

    Args:
        what: That.
    """
    return {
        "dict": {"ä": [1, None]},
        "object": threading,
        "nothing": None,
        "surrogate": "\ud800!",
        "much": "äx" * 10**5,
    }[what]


def start_of(calls: int) -> None:
    """Have `meet` wait for so many calls."""
    global _met
    _met = threading.Barrier(calls)


def hang() -> None:
    """Hang."""
    threading.Event().wait()


async def resist() -> None:
    """Hang, and go on when cancelled."""
    try:
        await asyncio.get_running_loop().create_future()
    except asyncio.CancelledError:
        await asyncio.get_running_loop().create_future()


def meet() -> str:
    """Wait for others."""
    _met.wait(60)
    return "met"


def untyped(a):
    """Do it.

    Args:
        a: One.
    """


def undescribed(a: int) -> int:
    return a


def starred(*a: int) -> int:
    """Do it.

    Args:
        a: Some.
    """
    return len(a)


def make_adder(by: int):
    """Makes `add_some`."""

    def add_some(a: int) -> int:
        """Add some.

        Args:
            a: To this.
        """
        return a + by

    return add_some


async def echo(text: str) -> str:
    """Say a text again.

    Args:
        text: What to say; what begins with e is refused.
    """
    await asyncio.sleep(0)
    if text.startswith("e"):
        raise ValueError(text)
    return text
