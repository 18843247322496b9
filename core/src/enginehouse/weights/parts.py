"""Computes the part of a parameter that a rank holds, with the rule that `ParamMeta` describes."""

from __future__ import annotations

import math
from collections.abc import Iterable

from enginehouse.engines.weights import ParamMeta, WeightSyncError

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
