"""The built-in dispatch modes, which split a worker group's call over its ranks and collect the results."""

from __future__ import annotations

from enginehouse.plugin import DispatchMode, hookimpl


@hookimpl
def enginehouse_register_dispatch_modes(register):
    dispatch = "enginehouse.controller.dispatch"
    register(
        DispatchMode(
            name="one_to_all",
            summary="The same arguments to every rank; a list of results, one per rank",
            dispatch=f"{dispatch}:one_to_all",
        )
    )
    register(
        DispatchMode(
            name="all_to_all",
            summary="Explicit scatter: each argument holds one entry per rank; a list of results, one per rank",
            dispatch=f"{dispatch}:all_to_all",
            awaits_futures=True,
        )
    )
    register(
        DispatchMode(
            name="rank_zero",
            summary="Only rank 0 is called; its result",
            dispatch=f"{dispatch}:rank_zero",
            collect="first",
        )
    )
    register(
        DispatchMode(
            name="dp",
            summary="Batches split over the data axis; results of the output ranks, in order, kept on the workers",
            dispatch=f"{dispatch}:dp",
            collect="distributed",
            returning=f"{dispatch}:output_ranks",
            awaits_futures=True,
        )
    )
