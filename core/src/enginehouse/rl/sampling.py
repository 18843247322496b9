"""A batch drawn in pieces by replicas that may die meanwhile: samples are handed over as they come, each once.

Which rows go where is `enginehouse.rl.scheduler`; who lives, and comes back, is `enginehouse.rl.fleet`.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from enginehouse.controller.errors import ClusterLost, ControllerError
from enginehouse.controller.future import Ends, Future, StillRunning, as_they_end
from enginehouse.data import Batch
from enginehouse.rl.replica import Changed, FleetMetrics, Replica, Watch, nobody_left
from enginehouse.rl.scheduler import Attempt, Piece, PrefixMemory, Scheduler, cut, pieces_each
from enginehouse.weights.members import Member

if TYPE_CHECKING:
    from enginehouse.controller import WorkerGroup
    from enginehouse.engines.rollout import SamplingParams

MOST_TRIES = 3
"""A piece that was lost with so many replicas is taken for their cause."""

Events = Ends[Changed]


class PoisonousRows(ControllerError):
    """Rows that were lost with every replica that tried to draw them."""


class BatchSampling:
    """One call of a fleet's `generate_each`. Iterate over `pieces`, once.

    Args:
        batch: at least one row; see `RolloutWorker.generate`.
        sampling: how to draw.
        seed: as there.
        name: the fleet's, for messages.
        replicas: the fleet's.
        memory: which of them saw which prefix.
        limit: most completions a replica is given at once.
        patience: seconds until a call under way has ended or failed, whatever happens; None: it takes what it takes.
        is_lost: the fleet's.
        catch_up: begins to bring a replica that came back to the version served; False if there is nothing to do.

    Attributes:
        events: what happens to replicas is to be put here.
        metrics: what came of it, up to now.

    Raises:
        ReplicasLost: none of them serves.
    """

    def __init__(
        self,
        batch: Batch,
        sampling: SamplingParams,
        seed: int | None,
        *,
        name: str,
        replicas: Sequence[Replica],
        memory: PrefixMemory,
        limit: int,
        patience: float | None,
        is_lost: Callable[[Member, Exception | None], bool],
        catch_up: Callable[[Events], bool],
    ):
        self._batch, self._sampling, self._seed = batch, sampling, seed
        self._name, self._replicas, self._patience = name, replicas, patience
        self._is_lost, self._catch_up = is_lost, catch_up
        self.events: Events = Ends()
        self._drawing: dict[Future, tuple[Attempt, Member]] = {}
        self.metrics = FleetMetrics()
        self._serving = {replica.number: replica.member for replica in replicas if replica.state == "serving"}
        if not self._serving and not self._somebody_comes_back():
            raise nobody_left(name, replicas)
        prompts = batch.ragged("prompt_ids")
        tokens = prompts.values.numpy()
        rows = [tokens[begin:end] for begin, end in itertools.pairwise(prompts.offsets.tolist())]
        pieces = cut(rows, sampling.n, len(self._serving) or 1, limit, pieces_each(sampling.max_tokens))
        self._scheduler = Scheduler(pieces, limit, memory)
        for number in self._serving:
            self._scheduler.join(number)

    def pieces(self) -> Iterator[tuple[range, Batch]]:
        """Rows that were drawn, as numbers of the batch's rows, and their samples; in the order in which they come.

        Raises:
            ReplicasLost: naming each replica's death.
            PoisonousRows: rows that took several replicas with them.
            WorkerError: a replica that lives failed.
        """
        scheduler, watch, begun = self._scheduler, Watch(), time.perf_counter()
        catching_up = False
        try:
            while not scheduler.done or catching_up:
                for attempt in scheduler.assign():
                    self._draw(attempt)
                watch.set_busy({number for number in scheduler.replicas if scheduler.load(number)})
                self.metrics.queued = max(self.metrics.queued, scheduler.waiting_samples)
                if scheduler.waiting and not catching_up:
                    catching_up = self._catch_up(self.events)
                if not (scheduler.done or scheduler.replicas or catching_up or self._somebody_comes_back()):
                    raise nobody_left(self._name, self._replicas)
                event = self._next()
                lost: Member | None
                if isinstance(event, Future):
                    attempt, lost = self._drawing.pop(event)
                    try:
                        samples = event.result()
                    except ClusterLost:
                        raise
                    except Exception as error:
                        if not self._is_lost(lost, error):
                            raise
                    else:
                        if scheduler.finish(attempt):
                            yield self._finished(attempt, samples, watch)
                        continue
                else:
                    replica = self._replicas[event.number]
                    if event.what == "caught up":
                        catching_up = False
                        if replica.state == "serving":
                            self._serving[event.number] = replica.member
                            scheduler.join(event.number)
                        continue
                    lost = self._serving.get(event.number)
                if lost is not None and self._serving.get(lost.number) is lost and self._is_lost(lost, None):
                    del self._serving[lost.number]
                    self._check_tries(scheduler.leave(lost.number))
        finally:
            watch.set_busy(set())
            self.metrics.retries = scheduler.retries
            self.metrics.busy_seconds = sum(watch.seconds.values())
            self.metrics.seconds = time.perf_counter() - begun

    def _finished(self, attempt: Attempt, samples: Batch, watch: Watch) -> tuple[range, Batch]:
        self._replicas[attempt.replica].restarts = 0
        seconds = torch.full((len(samples),), watch.until_now(attempt.replica))
        return range(attempt.piece.begin, attempt.piece.end), samples.with_columns(seconds=seconds)

    def _draw(self, attempt: Attempt) -> None:
        """Have a replica draw a piece; its end is among the events."""
        member = self._serving[attempt.replica]
        part = self._batch.slice(attempt.piece.begin, attempt.piece.end)
        try:
            call = member.group.call("generate", part, self._sampling, self._seed, blocking=False)
        except Exception as error:
            if not self._is_lost(member, error):
                raise
            self.events.put(Changed(member.number, "lost"))
            return
        self._drawing[call] = attempt, member
        self.events.add(call)

    def _somebody_comes_back(self) -> bool:
        return any(replica.comes_back for replica in self._replicas)

    def _next(self) -> Future | Changed:
        """The next event. Every call under way and every restart has a deadline, so that there is one."""
        while True:
            with contextlib.suppress(StillRunning):
                return self.events.next(self._patience)
            if not self._somebody_comes_back():
                raise ControllerError(f"no replica of {self._name} answered, or failed, within {self._patience:g} s")

    def _check_tries(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            if self._scheduler.tries(piece) >= MOST_TRIES:
                deaths = "\n".join(f"- {replica.death}" for replica in self._replicas if replica.death)
                raise PoisonousRows(
                    f"rows {piece.begin} to {piece.end - 1} were lost with the replica that was to draw them "
                    f"{MOST_TRIES} times; if they are what it dies of, another replica will as well. The last "
                    f"deaths:\n{deaths}"
                )


def drawn_by_group(
    group: WorkerGroup, batch: Batch, sampling: SamplingParams, seed: int | None = None
) -> Iterator[tuple[range, Batch]]:
    """`RolloutFleet.generate_each` with the ranks of a group, which work and break together.

    All of it is asked for at once, so that engines fill their batches as if it were one call; where completions are
    short it is one call. `seconds` is how long a rank took for what it drew of the piece.
    """
    if not len(batch):
        return
    ranks = group.world_size
    size = -(-len(batch) // (pieces_each(sampling.max_tokens, fewest=1) * ranks)) * ranks  # as many rows for each
    waiting = {}
    for begin in range(0, len(batch), size):
        rows = range(begin, min(begin + size, len(batch)))
        part = batch.slice(rows.start, rows.stop)
        waiting[group.call("generate", part, sampling, seed, blocking=False)] = rows
    for call in as_they_end(waiting):
        yield waiting.pop(call), call.result()


def in_order(pieces: Iterable[tuple[range, Batch]]) -> Batch:
    """The samples of at least one piece, as rows of the batch follow each other."""
    return Batch.concat([samples for _, samples in sorted(pieces, key=lambda piece: piece[0].start)])
