"""Computes the parts of parameters that ranks hold, with the rule that `ParamMeta` describes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from enginehouse.engines.weights import DTYPE_BYTES, ParamMeta, WeightSyncError

Region = tuple[tuple[int, int], ...]
"""A part of a tensor: for each dimension, the first index and the index after the last."""


def check_layout(parameter: ParamMeta, ranks: int) -> None:
    """Check that metadata describe a layout over `ranks` ranks.

    Raises:
        WeightSyncError: an owner is not a rank, an owner is named twice, the mesh size differs from the number of
            owners, the number of placements differs from the number of mesh axes, or a placement is neither `"R"` nor
            `"S"` with a dimension of the parameter.
    """
    owners, mesh, placements = parameter.owners, parameter.mesh_shape, parameter.placements
    dimensions = {"R", *(f"S{dimension}" for dimension in range(len(parameter.shape)))}
    if not set(owners) <= set(range(ranks)) or len(set(owners)) < len(owners):
        problem = f"owners {owners} must be distinct ranks below {ranks}"
    elif mesh and math.prod(mesh) != len(owners):
        problem = f"a mesh of {mesh} must have {math.prod(mesh)} owners, not {len(owners)}"
    elif len(placements) != len(mesh) or not set(placements) <= dimensions:
        problem = f"placements {placements} do not fit the mesh {mesh} and the parameter's shape {parameter.shape}"
    else:
        return
    raise WeightSyncError(f"the metadata of {parameter.name!r} contradict themselves: {problem}", [parameter.name])


def held_by(parameter: ParamMeta, rank: int) -> Region | None:
    """Return the part of a parameter that a rank holds; None if the rank is no owner. See `ParamMeta` for the rule."""
    bounds = [(0, length) for length in parameter.shape]
    if not parameter.owners:
        return tuple(bounds)
    if rank not in parameter.owners:
        return None
    place, width = parameter.owners.index(rank), len(parameter.owners)
    for size, placement in zip(parameter.mesh_shape, parameter.placements, strict=True):
        width //= size
        at, place = divmod(place, width)
        if placement != "R":
            dimension = int(placement[1:])
            begin, end = bounds[dimension]
            most = -(-(end - begin) // size)
            bounds[dimension] = min(begin + at * most, end), min(begin + (at + 1) * most, end)
    return tuple(bounds)


def shape_of(region: Region) -> tuple[int, ...]:
    return tuple(end - begin for begin, end in region)


def as_slices(region: Region) -> tuple[slice, ...]:
    """Return a part as an index into the whole tensor."""
    return tuple(slice(begin, end) for begin, end in region)


def parts_of(parameters: Iterable[ParamMeta], rank: int) -> list[tuple[ParamMeta, Region]]:
    """Return the parameters that a rank owns, in order, each with its part."""
    parts = ((parameter, held_by(parameter, rank)) for parameter in parameters)
    return [(parameter, region) for parameter, region in parts if region is not None]


def volume(region: Region) -> int:
    """Return the number of elements of a part."""
    return math.prod(shape_of(region))


def part_name(parameter: ParamMeta, region: Region) -> str:
    """Return a part's name for checksums: the parameter's name, with the part's indices unless the part is whole."""
    if shape_of(region) == parameter.shape:
        return parameter.name
    return f"{parameter.name}[{', '.join(f'{begin}:{end}' for begin, end in region)}]"


class Layouts:
    """Finds the ranks that hold a region, once for all parameters of one shape and placement."""

    def __init__(self, ranks: int):
        self._ranks = ranks
        self._layouts: dict[tuple[object, ...], dict[Region, list[int]]] = {}

    def holders(self, parameter: ParamMeta) -> Mapping[Region, Sequence[int]]:
        """Return the ranks that hold each region of a parameter. Raises `WeightSyncError`; see `check_layout`."""
        key = (parameter.shape, parameter.owners, parameter.mesh_shape, parameter.placements)
        if key not in self._layouts:
            check_layout(parameter, self._ranks)
            layout: dict[Region, list[int]] = {}
            for rank in parameter.owners or range(self._ranks):
                region = held_by(parameter, rank)
                assert region is not None  # an owner
                layout.setdefault(region, []).append(rank)
            self._layouts[key] = layout
        return self._layouts[key]


def share_parts(parameters: Iterable[ParamMeta], ranks: int) -> list[dict[Region, int]]:
    """Return, for each parameter, the rank that sends each region. If several ranks hold a region, the rank that sends
    the fewest bytes so far sends it. Raises `WeightSyncError`; see `check_layout`."""
    layouts, sent = Layouts(ranks), [0] * ranks
    shares = []
    for parameter in parameters:
        share = {}
        for region, holders in layouts.holders(parameter).items():
            share[region] = sender = min(holders, key=sent.__getitem__)
            sent[sender] += volume(region) * DTYPE_BYTES[parameter.dtype]
        shares.append(share)
    return shares
