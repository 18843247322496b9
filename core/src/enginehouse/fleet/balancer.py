"""Decides which rollout replica generates for which request. It only keeps books, without processes, clocks or threads.

Requests may come at any time. Each is answered once: requests of a replica that was lost wait again, and an answer that
comes after all from a replica that was taken for lost does not count.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

FIRST_PREFIXES, PREFIX_EVERY = (32, 64), 128
"""Tokens of the first prefixes of a prompt that are remembered, and how much longer each further one is. Engines cache
whole blocks. So an episode is distinguished from others with the same instructions, and continues where it was."""

REMEMBERED_PREFIXES = 65536


@dataclass(frozen=True, slots=True)
class Entry:
    """A request, as the balancer knows it.

    Attributes:
        number: the request's number.
        samples: completions that it asks for.
        prefixes: hashes of its prompt and of the prompt's prefixes, longest first.
    """

    number: int
    samples: int
    prefixes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Attempt:
    """A request given to a replica; another try is another attempt."""

    number: int
    replica: int
    entry: Entry


def hash_prefixes(tokens: np.ndarray) -> tuple[int, ...]:
    """Return hashes of a prompt and of its prefixes, longest first."""
    ends = [end for end in (*FIRST_PREFIXES, *range(PREFIX_EVERY, len(tokens), PREFIX_EVERY)) if end < len(tokens)]
    hashes, so_far = [], 0
    for begin, end in itertools.pairwise([0, *ends, len(tokens)]):
        so_far = hash((so_far, tokens[begin:end].tobytes()))
        hashes.append(so_far)
    return tuple(reversed(hashes))


class PrefixMemory:
    """Remembers which replica saw a prefix last."""

    def __init__(self) -> None:
        self._seen: OrderedDict[int, int] = OrderedDict()
        self._lock = threading.Lock()  # caches are dropped in another thread than requests are given out in

    def replica(self, entry: Entry) -> int | None:
        """Return the replica that saw the longest of the prompt's prefixes; None if there is none."""
        with self._lock:
            return next((self._seen[prefix] for prefix in entry.prefixes if prefix in self._seen), None)

    def remember(self, entry: Entry, replica: int) -> None:
        """Note that a request goes to `replica`."""
        with self._lock:
            for prefix in reversed(entry.prefixes):
                self._seen[prefix] = replica
                self._seen.move_to_end(prefix)
            while len(self._seen) > REMEMBERED_PREFIXES:
                self._seen.popitem(last=False)

    def forget(self, replica: int | None = None) -> None:
        """Forget a replica, whose caches are lost. None forgets all replicas, as after an update of weights."""
        with self._lock:
            remembered = (
                [] if replica is None else [(key, holder) for key, holder in self._seen.items() if holder != replica]
            )
            self._seen = OrderedDict(remembered)


class ReplicaBalancer:
    """Assigns requests to replicas that come and go.

    Args:
        limit: most completions a replica is given at once; an idle one is given a request of any size.
        memory: remembers which replica saw which prefix.

    Attributes:
        waiting_samples: completions that no replica has been asked for.
    """

    def __init__(self, limit: int, memory: PrefixMemory | None = None):
        self._waiting: OrderedDict[int, Entry] = OrderedDict()
        self._limit = limit
        self._memory = memory or PrefixMemory()
        self._running: dict[int, dict[int, Attempt]] = {}  # by replica and request
        self._loads: dict[int, int] = {}
        self._tries: dict[int, int] = {}
        self._attempts = self.waiting_samples = 0

    @property
    def done(self) -> bool:
        """True if every request was answered."""
        return not self._tries

    @property
    def waiting(self) -> int:
        """Number of requests that no replica has."""
        return len(self._waiting)

    @property
    def replicas(self) -> tuple[int, ...]:
        """Replicas that take requests."""
        return tuple(self._running)

    def add(self, entry: Entry) -> None:
        """Put a request behind those that wait."""
        self._tries[entry.number] = 0
        self._waiting[entry.number] = entry
        self.waiting_samples += entry.samples

    def drop(self, number: int) -> Attempt | None:
        """Forget a request if no replica has it; else return the attempt of the replica that does."""
        for attempts in self._running.values():
            if number in attempts:
                return attempts[number]
        if (entry := self._waiting.pop(number, None)) is not None:
            self.waiting_samples -= entry.samples
        self._tries.pop(number, None)
        return None

    def tries(self, number: int) -> int:
        """Return how often a request was given to a replica."""
        return self._tries[number]

    def join(self, replica: int) -> None:
        """Let a replica take requests from now on."""
        self._running.setdefault(replica, {})
        self._loads.setdefault(replica, 0)

    def leave(self, replica: int) -> list[Entry]:
        """Take a lost replica's requests back, before those that wait, and return them."""
        entries = [attempt.entry for attempt in self._running.pop(replica, {}).values()]
        self.waiting_samples += self._loads.pop(replica, 0)
        for entry in reversed(entries):
            self._waiting[entry.number] = entry
            self._waiting.move_to_end(entry.number, last=False)
        self._memory.forget(replica)
        return entries

    def assign(self) -> list[Attempt]:
        """Give waiting requests to replicas that have room, and return the attempts."""
        attempts = []
        while self._waiting and (replica := self._choose(next(iter(self._waiting.values())))) is not None:
            _, entry = self._waiting.popitem(last=False)
            self.waiting_samples -= entry.samples
            attempt = Attempt(self._attempts, replica, entry)
            self._attempts += 1
            self._tries[entry.number] += 1
            self._running[replica][entry.number] = attempt
            self._loads[replica] += entry.samples
            self._memory.remember(entry, replica)
            attempts.append(attempt)
        return attempts

    def finish(self, attempt: Attempt) -> bool:
        """Note an answer; return False if it does not count, as its replica was taken for lost before."""
        running = self._running.get(attempt.replica, {})
        if running.get(attempt.entry.number) != attempt:
            return False
        del running[attempt.entry.number]
        self._loads[attempt.replica] -= attempt.entry.samples
        del self._tries[attempt.entry.number]
        return True

    def list_attempts(self, replica: int) -> list[Attempt]:
        """Return the attempts that a replica has not answered."""
        return list(self._running.get(replica, {}).values())

    def load(self, replica: int) -> int:
        """Return how many completions a replica was asked for and has not answered."""
        return self._loads[replica]

    def _choose(self, entry: Entry) -> int | None:
        """Return the replica that saw the prompt's prefix, unless it is busier than the least busy by over a request;
        then that one. None if no replica has room."""
        loads = self._loads
        free = [r for r, load in loads.items() if not load or load + entry.samples <= self._limit]
        if not free:
            return None
        least = min(free, key=loads.__getitem__)
        seen_by = self._memory.replica(entry) if len(free) > 1 else None
        if seen_by in free and loads[seen_by] <= loads[least] + entry.samples:
            return seen_by
        return least
