"""Which rollout replica draws which rows: bookkeeping alone, without processes, clocks or threads.

A batch is cut into pieces of consecutive rows. Each piece is drawn once: what a replica held when it was lost waits
again, and an answer that comes after all from a replica that was taken for lost does not count.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

FEWEST_PIECES = 4
"""Into how many pieces a replica's share is cut at least, where there are rows enough: a slower one then gets fewer."""
MOST_PIECES = 16
"""And at most: a worker takes twice as many calls at once."""
TOKENS_A_PIECE = 16
"""Between them there is a piece for so many tokens of the longest completion. A piece costs a millisecond or two, and
so many tokens take longer; the more pieces, the sooner the first samples are there."""

PREFIX_TOKENS = (1024, 512, 256, 128, 64, 32)
"""Lengths at which the beginning of a prompt is remembered: engines keep caches of whole prefixes."""

REMEMBERED_PREFIXES = 8192


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive rows that are drawn together.

    Attributes:
        number: its place among the pieces.
        begin: its first row.
        end: the row after its last.
        samples: completions it asks for.
        prefixes: what stands for its first prompt and the prompt's beginnings, longest first.
    """

    number: int
    begin: int
    end: int
    samples: int
    prefixes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Attempt:
    """A piece given to a replica; another try is another attempt."""

    number: int
    replica: int
    piece: Piece


def pieces_each(max_tokens: int, fewest: int = FEWEST_PIECES) -> int:
    """Into how many pieces a replica's share is cut, where completions have at most so many tokens."""
    return min(max(max_tokens // TOKENS_A_PIECE, fewest), MOST_PIECES)


def cut(
    prompts: Sequence[np.ndarray], samples_each: int, replicas: int, limit: int, pieces: int = FEWEST_PIECES
) -> list[Piece]:
    """Cut rows into pieces, of one size but for the last.

    Args:
        prompts: each row's token ids.
        samples_each: completions a row.
        replicas: how many there are to draw them.
        limit: most completions a replica is given at once: several pieces, where they have more than a row.
        pieces: how many a replica's share is, and how many it may hold, where there are rows enough; `pieces_each`.
    """
    rows = len(prompts)
    size = max(1, min(-(-rows // (pieces * replicas)), limit // (pieces * max(samples_each, 1))))
    starts = range(0, rows, size)
    return [
        Piece(number, begin, min(begin + size, rows), (min(begin + size, rows) - begin) * samples_each,
              prefixes(prompts[begin]))
        for number, begin in enumerate(starts)
    ]  # fmt: skip


def prefixes(tokens: np.ndarray) -> tuple[int, ...]:
    """Hashes of a prompt and of its beginnings, longest first."""
    lengths = [len(tokens), *(length for length in PREFIX_TOKENS if length < len(tokens))]
    return tuple(hash(tokens[:length].tobytes()) for length in lengths)


class PrefixMemory:
    """Which replica saw a prefix last."""

    def __init__(self) -> None:
        self._seen: OrderedDict[int, int] = OrderedDict()
        self._lock = threading.Lock()  # caches are dropped in another thread than rows are drawn in

    def replica(self, piece: Piece) -> int | None:
        """The replica that saw the longest of the piece's prefixes; None if there is none."""
        with self._lock:
            return next((self._seen[prefix] for prefix in piece.prefixes if prefix in self._seen), None)

    def remember(self, piece: Piece, replica: int) -> None:
        """The piece goes to `replica`."""
        with self._lock:
            for prefix in reversed(piece.prefixes):
                self._seen[prefix] = replica
                self._seen.move_to_end(prefix)
            while len(self._seen) > REMEMBERED_PREFIXES:
                self._seen.popitem(last=False)

    def forget(self, replica: int | None = None) -> None:
        """A replica's caches are gone; None: those of all, as after an update of weights."""
        with self._lock:
            kept = [] if replica is None else [(key, who) for key, who in self._seen.items() if who != replica]
            self._seen = OrderedDict(kept)


class Scheduler:
    """Assigns pieces to replicas that come and go.

    Args:
        pieces: what is to be drawn.
        limit: most completions a replica is given at once; one that has nothing is given a piece of any size.
        memory: which replica saw which prefix.
    """

    def __init__(self, pieces: Iterable[Piece], limit: int, memory: PrefixMemory | None = None):
        self._waiting = deque(pieces)
        self._limit = limit
        self._memory = memory or PrefixMemory()
        self._running: dict[int, dict[int, Attempt]] = {}  # by replica and attempt
        self._tries: dict[int, int] = {piece.number: 0 for piece in self._waiting}
        self._attempts = 0
        self._unfinished = len(self._waiting)
        self.retries = 0

    @property
    def done(self) -> bool:
        """Whether every piece was drawn."""
        return self._unfinished == 0

    @property
    def waiting(self) -> int:
        """Pieces no replica has."""
        return len(self._waiting)

    @property
    def waiting_samples(self) -> int:
        """Completions no replica has been asked for."""
        return sum(piece.samples for piece in self._waiting)

    @property
    def replicas(self) -> tuple[int, ...]:
        """Who takes pieces."""
        return tuple(self._running)

    def tries(self, piece: Piece) -> int:
        """How often a piece was given to a replica."""
        return self._tries[piece.number]

    def join(self, replica: int) -> None:
        """A replica takes pieces from now on."""
        self._running.setdefault(replica, {})

    def leave(self, replica: int) -> list[Piece]:
        """A replica is lost; what it held waits again, before the rest, and is returned."""
        held = [attempt.piece for attempt in self._running.pop(replica, {}).values()]
        self._waiting.extendleft(reversed(held))
        self._memory.forget(replica)
        self.retries += len(held)
        return held

    def assign(self) -> list[Attempt]:
        """Give what waits to those that have room; returns what was given."""
        attempts = []
        while self._waiting and (replica := self._choose(self._waiting[0])) is not None:
            piece = self._waiting.popleft()
            attempt = Attempt(self._attempts, replica, piece)
            self._attempts += 1
            self._tries[piece.number] += 1
            self._running[replica][attempt.number] = attempt
            self._memory.remember(piece, replica)
            attempts.append(attempt)
        return attempts

    def finish(self, attempt: Attempt) -> bool:
        """A replica answered. False if that no longer counts: it was taken for lost before."""
        if self._running.get(attempt.replica, {}).pop(attempt.number, None) is None:
            return False
        self._unfinished -= 1
        return True

    def load(self, replica: int) -> int:
        """Completions a replica has been given and not answered."""
        return sum(attempt.piece.samples for attempt in self._running[replica].values())

    def _choose(self, piece: Piece) -> int | None:
        """The replica that saw the piece's prefix, if that is not busier than the others by more than a piece."""
        loads = {replica: self.load(replica) for replica in self._running}
        free = [r for r, load in loads.items() if not load or load + piece.samples <= self._limit]
        if not free:
            return None
        least = min(free, key=loads.__getitem__)
        seen_by = self._memory.replica(piece)
        if seen_by in free and loads[seen_by] <= loads[least] + piece.samples:
            return seen_by
        return least
