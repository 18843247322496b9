"""Plans, only from metadata, which rank sends which part of a parameter to which rank.

A target gets each element once, straight from a rank that holds it, so nothing is gathered on the way (HybridFlow,
Sheng et al. 2024, section 5, does the same between two layouts of one group of GPUs). If several ranks hold a part, the
rank that has sent the fewest bytes so far sends it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from enginehouse.engines.weights import DTYPE_BYTES, ParamMeta, WeightSyncError
from enginehouse.weights.parts import Layouts, Region, volume


@dataclass(frozen=True, slots=True)
class Move:
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


@dataclass(frozen=True)
class ReshardPlan:
    """The moves that bring parameters from one layout to another.

    Attributes:
        moves: the moves, in the order of the parameters.
        bytes_minimum: bytes of the parts of all targets: the least that targets without shared memory can receive.
    """

    moves: tuple[Move, ...]
    bytes_minimum: int

    @cached_property
    def bytes_moved(self) -> int:
        """Bytes of all moves."""
        return sum(move.nbytes for move in self.moves)

    @cached_property
    def bytes_sent(self) -> Mapping[int, int]:
        """Bytes by source rank; ranks that send none are left out."""
        sent: dict[int, int] = {}
        for move in self.moves:
            sent[move.source] = sent.get(move.source, 0) + move.nbytes
        return dict(sorted(sent.items()))

    def __str__(self) -> str:
        most = max(self.bytes_sent.values(), default=0)
        return (
            f"{len(self.moves)} moves from {len(self.bytes_sent)} ranks, {self.bytes_moved / 2**20:.1f} MiB "
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
    moves: list[Move] = []
    needed = 0
    sent = dict.fromkeys(range(source_ranks), 0)
    if len(sources) != len(targets):
        raise WeightSyncError(
            f"both sides must have the same parameters, but the senders have {len(sources)} and the receivers "
            f"{len(targets)}"
        )
    holding, wanting = Layouts(source_ranks), Layouts(target_ranks)
    for index, (source, target) in enumerate(zip(sources, targets, strict=True)):
        if (source.name, source.dtype, source.shape) != (target.name, target.dtype, target.shape):
            raise WeightSyncError(
                f"parameter {index} is {source.name!r} ({source.dtype}, shape {source.shape}) for the senders, but "
                f"{target.name!r} ({target.dtype}, shape {target.shape}) for the receivers",
                [source.name],
            )
        element = DTYPE_BYTES[source.dtype]
        whole = tuple((0, length) for length in source.shape)
        for target_region, receivers in wanting.holders(target).items():
            needed += volume(target_region) * element * len(receivers)
            for held, holders in holding.holders(source).items():
                region = overlap(held, target_region)
                nbytes = volume(region) * element
                for receiver in receivers if nbytes else ():
                    sender = min(holders, key=sent.__getitem__)
                    sent[sender] += nbytes
                    moves.append(Move(index, sender, receiver, region, nbytes))
            if not volume(whole):  # its arrival is announced all the same
                sender = min(next(iter(holding.holders(source).values())), key=sent.__getitem__)
                moves += [Move(index, sender, receiver, whole, 0) for receiver in receivers]
    return ReshardPlan(tuple(moves), needed)


def overlap(first: Region, second: Region) -> Region:
    """Return the intersection of two parts of a tensor, with empty dimensions if there is none."""
    return tuple((max(a, c), max(max(a, c), min(b, d))) for (a, b), (c, d) in zip(first, second, strict=True))


def index_within(region: Region, part: Region) -> tuple[slice, ...]:
    """Return a region of a whole parameter as an index of a tensor that holds only `part` of the parameter."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(region, part, strict=True))
