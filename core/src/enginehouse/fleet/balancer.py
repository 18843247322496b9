"""Decides which rollout replica gets which request. It is pure bookkeeping, without processes, clocks or threads.

Requests may come at any time, and each is answered once. Requests of a lost replica wait again. A late answer from a
replica that counts as lost is ignored.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

FIRST_PREFIXES, PREFIX_EVERY = (32, 64), 128
"""The remembered prefixes of a prompt: lengths in tokens of the first two, and the step between further lengths.
Engines cache whole blocks. Longer prefixes distinguish episodes with the same instructions, so that each episode stays
on its replica."""

REMEMBERED_PREFIXES = 65536


@dataclass(frozen=True, slots=True)
class Entry:
    """A request, as the balancer knows it.

    Attributes:
        samples: number of completions of the request.
        prefixes: hashes of the prompt and of its prefixes, longest first.
    """

    number: int
    samples: int
    prefixes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Attempt:
    """A request at a replica. Every retry is a new attempt."""

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
    """Stores which replica last got a prefix."""

    def __init__(self) -> None:
        self._seen: OrderedDict[int, int] = OrderedDict()
        self._lock = threading.Lock()  # `forget` runs in another thread than `assign`

    def replica(self, entry: Entry) -> int | None:
        """Return the replica that was sent the longest prefix of this prompt; None if no replica was sent any."""
        with self._lock:
            return next((self._seen[prefix] for prefix in entry.prefixes if prefix in self._seen), None)

    def remember(self, entry: Entry, replica: int) -> None:
        with self._lock:
            for prefix in reversed(entry.prefixes):
                self._seen[prefix] = replica
                self._seen.move_to_end(prefix)
            while len(self._seen) > REMEMBERED_PREFIXES:
                self._seen.popitem(last=False)

    def forget(self, replica: int | None = None) -> None:
        """Forget a replica whose caches are lost. None forgets all replicas, for example after a weight update."""
        with self._lock:
            remembered = (
                [] if replica is None else [(key, holder) for key, holder in self._seen.items() if holder != replica]
            )
            self._seen = OrderedDict(remembered)


class ReplicaBalancer:
    """Assigns requests to replicas that join and leave.

    Args:
        limit: maximum number of completions of a replica at once. An idle replica takes a request of any size.

    Attributes:
        waiting_samples: number of completions in waiting requests.
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
        """Number of requests that wait for a replica."""
        return len(self._waiting)

    @property
    def replicas(self) -> tuple[int, ...]:
        return tuple(self._running)

    def add(self, entry: Entry) -> None:
        """Put a request at the end of the queue."""
        self._tries[entry.number] = 0
        self._waiting[entry.number] = entry
        self.waiting_samples += entry.samples

    def drop(self, number: int) -> Attempt | None:
        """Remove a waiting request, and return None. If a replica has the request, only return the attempt."""
        for attempts in self._running.values():
            if number in attempts:
                return attempts[number]
        if (entry := self._waiting.pop(number, None)) is not None:
            self.waiting_samples -= entry.samples
        self._tries.pop(number, None)
        return None

    def tries(self, number: int) -> int:
        return self._tries[number]

    def join(self, replica: int) -> None:
        self._running.setdefault(replica, {})
        self._loads.setdefault(replica, 0)

    def leave(self, replica: int) -> list[Entry]:
        """Put the requests of a lost replica at the front of the queue, and return them."""
        entries = [attempt.entry for attempt in self._running.pop(replica, {}).values()]
        self.waiting_samples += self._loads.pop(replica, 0)
        for entry in reversed(entries):
            self._waiting[entry.number] = entry
            self._waiting.move_to_end(entry.number, last=False)
        self._memory.forget(replica)
        return entries

    def assign(self) -> list[Attempt]:
        """Give waiting requests to replicas with free capacity, and return the attempts."""
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
        """Record an answer. Return False if the answer does not count, because its replica was lost before."""
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
        """Return the number of completions that a replica has to generate."""
        return self._loads[replica]

    def _choose(self, entry: Entry) -> int | None:
        """Return the replica that last got the prompt's prefix. If that replica is so busy that the least busy replica
        would have fewer completions even with this request, return the least busy replica instead. Return None if no
        replica has capacity."""
        loads = self._loads
        free = [r for r, load in loads.items() if not load or load + entry.samples <= self._limit]
        if not free:
            return None
        least = min(free, key=loads.__getitem__)
        seen_by = self._memory.replica(entry) if len(free) > 1 else None
        if seen_by in free and loads[seen_by] <= loads[least] + entry.samples:
            return seen_by
        return least
