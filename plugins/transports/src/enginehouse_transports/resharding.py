"""Plans, only from metadata, which rank sends which part of a parameter to which rank.

A target gets each element once, straight from a rank that holds it, so nothing is gathered on the way (HybridFlow,
Sheng et al. 2024, section 5, does the same between two layouts of one group of GPUs). If several ranks hold a part, the
rank that has sent the fewest bytes so far sends it.

Between many ranks there are millions of moves. So what passes between two layouts is computed once for all parameters
of a shape, and a rank lists only its own moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from enginehouse.engines.weights import DTYPE_BYTES, ParamMeta, WeightSyncError
from enginehouse.weights.parts import Layouts, Region, volume


class Move(NamedTuple):
    """A part of a parameter that one rank sends to another.

    Attributes:
        parameter: the parameter's index in the plan.
        region: part of the whole parameter; empty only if the parameter has no elements.
    """

    parameter: int
    source: int
    target: int
    region: Region
    nbytes: int


class Passage(NamedTuple):
    """A part that a rank receives from another layout, of any parameter of one shape.

    Attributes:
        holders: the ranks that hold the part, of which one sends it.
    """

    holders: Sequence[int]
    target: int
    region: Region
    nbytes: int


@dataclass(frozen=True, slots=True)
class Crossing:
    """All passages from one layout to another, of any parameter of one shape and dtype.

    Attributes:
        places: places in `passages` by target.
        bytes_minimum: bytes of the parts of all targets.
        senders: the rank that sends each passage; None if it is to be chosen for each parameter.
        bytes_sent: bytes by rank of `senders`.
    """

    passages: Sequence[Passage]
    places: Mapping[int, Sequence[int]]
    bytes_minimum: int
    senders: Sequence[int] | None
    bytes_sent: Mapping[int, int]

    @classmethod
    def between(
        cls, held: Mapping[Region, Sequence[int]], wanted: Mapping[Region, Sequence[int]], parameter: ParamMeta
    ) -> Crossing:
        """Return what passes from the ranks that hold a parameter's regions to those that want regions."""
        element = DTYPE_BYTES[parameter.dtype]
        passages = [
            Passage(holders, receiver, region, volume(region) * element)
            for target_region, receivers in wanted.items()
            for held_region, holders in held.items()
            if volume(region := overlap(held_region, target_region))
            for receiver in receivers
        ]
        if not parameter.nbytes:  # its arrival is announced all the same
            holders = next(iter(held.values()))
            whole = tuple((0, length) for length in parameter.shape)
            passages = [Passage(holders, receiver, whole, 0) for ranks in wanted.values() for receiver in ranks]
        places: dict[int, list[int]] = {}
        for place, passage in enumerate(passages):
            places.setdefault(passage.target, []).append(place)
        needed = sum(volume(region) * element * len(receivers) for region, receivers in wanted.items())
        if any(len(passage.holders) > 1 for passage in passages):
            return cls(passages, places, needed, None, {})
        sent: dict[int, int] = {}
        for (sender,), _, _, nbytes in passages:
            sent[sender] = sent.get(sender, 0) + nbytes
        return cls(passages, places, needed, [sender for (sender,), *_ in passages], sent)


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """The moves that bring parameters from one layout to another, numbered in the order of the parameters.

    Attributes:
        crossings: for each parameter, its passages and the rank that sends each of them.
        bytes_sent: bytes by source rank; ranks that send none are left out.
        bytes_minimum: bytes of the parts of all targets: the least that targets without shared memory can receive.
    """

    crossings: Sequence[tuple[Crossing, Sequence[int]]]
    bytes_sent: Mapping[int, int]
    bytes_minimum: int

    @property
    def bytes_moved(self) -> int:
        """Bytes of all moves."""
        return sum(self.bytes_sent.values())

    def __len__(self) -> int:
        """Return the number of moves."""
        return sum(len(sources) for _, sources in self.crossings)

    def moves_from(self, rank: int) -> dict[int, Move]:
        """Return the moves of a rank that sends, by number."""
        return self._list_moves(lambda _, senders: [place for place, sender in enumerate(senders) if sender == rank])

    def moves_to(self, rank: int) -> dict[int, Move]:
        """Return the moves to a rank that receives, by number."""
        return self._list_moves(lambda crossing, _: crossing.places.get(rank, ()))

    def _list_moves(self, choose: Callable[[Crossing, Sequence[int]], Iterable[int]]) -> dict[int, Move]:
        moves, first = {}, 0
        for parameter, (crossing, senders) in enumerate(self.crossings):
            for place in choose(crossing, senders):
                _, target, region, nbytes = crossing.passages[place]
                moves[first + place] = Move(parameter, senders[place], target, region, nbytes)
            first += len(senders)
        return moves

    def __str__(self) -> str:
        most = max(self.bytes_sent.values(), default=0)
        return (
            f"{len(self)} moves from {len(self.bytes_sent)} ranks, {self.bytes_moved / 2**20:.1f} MiB "
            f"(at least {self.bytes_minimum / 2**20:.1f} MiB), {most / 2**20:.1f} MiB of them from one rank"
        )


def plan_reshard(
    sources: Sequence[ParamMeta], targets: Sequence[ParamMeta], source_ranks: int, target_ranks: int
) -> ReshardPlan:
    """Plan moves that give every target rank each element of its parts exactly once.

    Args:
        sources: the parameters in the sending side's layout.
        targets: the same parameters, in the same order, in the receiving side's layout.
        source_ranks: number of ranks that may send.
        target_ranks: number of ranks that receive.

    Raises:
        WeightSyncError: the two sides have different parameters, or metadata contradict themselves.
    """
    if len(sources) != len(targets):
        raise WeightSyncError(
            f"both sides must have the same parameters, but the senders have {len(sources)} and the receivers "
            f"{len(targets)}"
        )
    holding, wanting = Layouts(source_ranks), Layouts(target_ranks)
    known: dict[tuple[object, ...], Crossing] = {}
    crossings: list[tuple[Crossing, Sequence[int]]] = []
    sent = [0] * source_ranks
    for index, (source, target) in enumerate(zip(sources, targets, strict=True)):
        if (source.name, source.dtype, source.shape) != (target.name, target.dtype, target.shape):
            raise WeightSyncError(
                f"parameter {index} is {source.name!r} ({source.dtype}, shape {source.shape}) for the senders, but "
                f"{target.name!r} ({target.dtype}, shape {target.shape}) for the receivers",
                [source.name],
            )
        layouts = (source.owners, source.mesh_shape, source.placements, target.owners, target.mesh_shape)
        key = (source.dtype, source.shape, *layouts, target.placements)
        if key not in known:
            known[key] = Crossing.between(holding.holders(source), wanting.holders(target), source)
        crossing = known[key]
        senders = _choose_senders(crossing, sent) if crossing.senders is None else crossing.senders
        for rank, nbytes in crossing.bytes_sent.items():
            sent[rank] += nbytes
        crossings.append((crossing, senders))
    minimum = sum(crossing.bytes_minimum for crossing, _ in crossings)
    return ReshardPlan(crossings, {rank: nbytes for rank, nbytes in enumerate(sent) if nbytes}, minimum)


def _choose_senders(crossing: Crossing, sent: list[int]) -> list[int]:
    """Return the rank that sends each passage, and add to the bytes that ranks have `sent`."""
    senders = []
    for holders, _, _, nbytes in crossing.passages:
        sender = min(holders, key=sent.__getitem__)
        sent[sender] += nbytes
        senders.append(sender)
    return senders


def overlap(first: Region, second: Region) -> Region:
    """Return the intersection of two parts of a tensor, with empty dimensions if there is none."""
    return tuple((max(a, c), max(max(a, c), min(b, d))) for (a, b), (c, d) in zip(first, second, strict=True))


def index_within(region: Region, part: Region) -> tuple[slice, ...]:
    """Return a region of a whole parameter as an index of a tensor that holds only `part` of the parameter."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(region, part, strict=True))
