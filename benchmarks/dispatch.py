"""Measures a call through a worker group, and the transfer of its data, against bare Ray actors and verl's controller.

    make bench NAME=dispatch ARGS="rounds=9"

Each side is a process with its own Ray, in one run. This process tells one side at a time what to measure. The sides
take turns, so that a machine whose speed drifts drifts for all of them; the other sides, their Ray included, are
stopped meanwhile. All sides measure the same interval. The no-op is one call of an empty method on every worker, with
awaited answers. The round trip begins with the data in the driver's memory and ends with the same data in new memory of
the driver, one array or tensor per column, after workers returned what they got. `in store` is the round trip whose
result stays where it was made. verl always has 16 workers; the no-op calls as many of them as the other sides have.

verl runs in a separate Python environment, see `VERL`. It needs no GPU there, and no engine is installed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import statistics
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.dispatch_side import WAKING_CALLS, Memory, SideProcess
from benchmarks.environments import ROOT, draw, environment, plotting, versions

logger = logging.getLogger(__name__)

OUT = ROOT / "benchmarks" / "out"
LOGS = OUT / "dispatch"
OURS, BARE, VERL_NAME, VERL_NUMPY = "enginehouse", "bare Ray", "verl", "verl, numpy"
MB = 1e6

VERL = (
    ["torch"],
    ["--no-deps", "verl==0.9.1"],
    # imports of its `DataProto` and `single_controller`, in the versions that its metadata asks for
    [f"ray=={metadata.version('ray')}", "numpy>=2", "packaging>=20", "codetiming", "hydra-core"],
    ["tensordict>=0.8,!=0.9.0,<=0.10", "transformers>=5.5.3,!=5.6.0,<5.11"],
)
"""Installs of verl's environment. This benchmark does not import verl's other dependencies (engines, trackers, ...)."""

LARGE_ROW = "large batch"
WATCH_SECONDS = 0.01
"""Seconds between two looks at a side's memory while the side is timed. Looks are rare because they slow the side."""
WATCH_CLOSELY_SECONDS = 0.002
"""Seconds between two looks when memory is measured."""
WARM_UP_ROUNDS = 1
"""First round trips of a size, which do not count: every process touches pages of the store for the first time, and
that takes several times as long as the copy."""


@dataclass(frozen=True, kw_only=True)
class Extent:
    """Sizes and numbers of the measurements.

    Attributes:
        workers: group sizes of the no-op call.
        blocks: turns of each side with the no-op at each size.
        calls: calls in a turn.
        megabytes: sizes of the round trip and of the pass between groups, in million bytes, the largest last.
        rounds: round trips of each size, passes between groups, and large batches.
        round_trip_workers: workers of the round trip.
        makers: workers of the group that makes batches.
        readers: workers of the group that reads them.
        large: the large batch's prompts, samples per prompt and mean tokens per sample.
        starts: starts of a group.
        start_workers: workers of such a group.
    """

    workers: Sequence[int] = (2, 4, 8, 16)
    blocks: int = 25
    calls: int = 20
    megabytes: Sequence[float] = (1, 16, 128, 512)
    rounds: int = 7
    round_trip_workers: int = 4
    makers: int = 4
    readers: int = 2
    large: tuple[int, int, int] = (256, 16, 8192)
    starts: int = 3
    start_workers: int = 4


QUICK = Extent(
    workers=(1, 2), blocks=2, calls=10, megabytes=(0.5, 4), rounds=2, round_trip_workers=2, makers=1, readers=2,
    large=(8, 2, 256), starts=1, start_workers=1,
)  # fmt: skip


def measure(
    quick: bool = False,
    verl: bool = True,
    workers: Sequence[int] = Extent.workers,
    megabytes: Sequence[float] = Extent.megabytes,
    blocks: int = Extent.blocks,
    rounds: int = Extent.rounds,
    starts: int = Extent.starts,
) -> dict[str, Any]:
    """Measure everything; the sides take turns within each measurement.

    Args:
        quick: True for a small run without verl and plot, whatever the other options; it shows that all works.
        verl: True to measure verl too. The first time, its environment is made, which takes minutes.
        workers, megabytes, blocks, rounds, starts: see `Extent`.

    Returns:
        `metrics`, `sides` (a row per measurement, a column per side; medians), `noop_fit`, `versions`.

    Raises:
        ValueError: there is only one size of group, and no line goes through one point.
        RuntimeError: a side failed; the message has the last lines that it printed.
    """
    if len(set(workers)) < 2:
        raise ValueError(f"workers={workers}: a line over the number of workers needs two different ones at least")
    extent = Extent(workers=workers, megabytes=megabytes, blocks=blocks, rounds=rounds, starts=starts)
    if quick:
        verl, extent = False, QUICK
    plot_python = None if quick else plotting()  # first, so that no measurement is lost if it fails
    table = Table()
    with ending_in_order(), contextlib.ExitStack() as running:
        sides = start_sides(running, verl)
        measure_noop(sides, table, extent)
        measure_roundtrips(sides, table, extent)
        if verl:
            sides.pop(VERL_NAME).close()
        measure_startup(sides, table, extent)
        sides[OURS].ask("start_two_groups", makers=extent.makers, readers=extent.readers)
        measure_forward(sides, table, extent)
        measure_large_batch(sides, table, extent)
    fitted = fits(table, extent.workers)
    result: dict[str, Any] = {"metrics": summary(table, extent, fitted), "sides": table.rows, "noop_fit": fitted}
    if plot_python:
        plot(plot_python, table, extent.workers, fitted, OUT / "dispatch_noop.png")
    result["versions"] = {OURS: versions(Path(sys.executable), "torch", "numpy", "ray")}
    if verl:
        result["versions"][VERL_NAME] = versions(
            environment("verl", *VERL), "verl", "torch", "numpy", "ray", "tensordict", "transformers"
        )
    return result


# Sides


@contextlib.contextmanager
def ending_in_order() -> Iterator[None]:
    """Turn a request to terminate into an exception, like Ctrl-C; else paused sides would be left behind."""

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def start_sides(running: contextlib.ExitStack, verl: bool) -> dict[str, SideProcess]:
    """Start the sides' processes, which end with `running`."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_") or name == "RAY_TMPDIR"}
    # the same as `start_ray` sets, so that no side's Ray does more than another's
    env |= {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
    # Each side's Ray sees the memory of all sides, whose stores keep what they once held, and would kill its workers.
    env |= {"RAY_memory_monitor_refresh_ms": "0"}

    def start(name: str, *command: object) -> SideProcess:
        log = LOGS / f"{name.replace(' ', '_')}.log"
        side = running.enter_context(SideProcess(name, command, log, cwd=ROOT, env=env))
        side.ask("stop_group")  # there is none yet; the side answers once its Ray is up
        return side

    python_of_verl = environment("verl", *VERL) if verl else None
    sides = {
        OURS: start(OURS, sys.executable, "-m", "benchmarks.dispatch_enginehouse"),
        BARE: start(BARE, sys.executable, "-m", "benchmarks.dispatch_bare"),
    }
    if python_of_verl:
        same = [f"--{name}={size}" for name, size in sides[BARE].ask("cluster").items()]
        sides[VERL_NAME] = start(VERL_NAME, python_of_verl, "-W", "ignore", "-m", "benchmarks.dispatch_verl", *same)
    return sides


@dataclass(frozen=True)
class Measurement:
    """One command of a side.

    Attributes:
        side: the side.
        do: the command.
        arguments: arguments of the command.
        watch: seconds between two looks at the driver's memory during the command; None: no looks.
        grown: list to which each command adds the growth of the memory.
    """

    side: SideProcess
    do: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    watch: float | None = None
    grown: list[Memory] = field(default_factory=list)

    def take(self) -> Any:
        """Run the command once; return the side's answer."""
        answer = self.side.ask(self.do, watch=self.watch, **self.arguments)
        if self.watch and self.side.memory:
            self.grown.append(self.side.memory)
        return answer


def in_turns(
    sides: Iterable[SideProcess], measurements: Mapping[str, Measurement], rounds: int, warm: Collection[str] = ()
) -> dict[str, list[Any]]:
    """Take each measurement `rounds` times; each round begins with another one. The other sides are paused.

    Args:
        sides: all sides.
        measurements: measurements by name.
        rounds: number of rounds.
        warm: measurements that are done once, untimed, right before they are taken. A virtual machine returns freed
            memory to its host. The next user of memory after a side that freed gigabytes pays for getting it again, and
            the user after that does not.
    """
    found: dict[str, list[Any]] = {name: [] for name in measurements}
    names = list(measurements)
    sides = list(sides)
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            for side in sides:
                if side is not measurements[name].side:
                    side.pause()
            if name in warm:
                measurements[name].take()
            found[name].append(measurements[name].take())
    for side in sides:
        side.resume()
    return found


# Measurements


class Table:
    """Rows of measured figures by side."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, float | str]] = {}

    def add(self, row: str, unit: str, figures: Mapping[str, float]) -> None:
        """Add a row, and its ratio to bare Ray if both sides were measured."""
        self.rows[row] = {"unit": unit, **figures}
        if OURS in figures and figures.get(BARE):
            self.rows[row]["vs bare"] = figures[OURS] / figures[BARE]

    def figure(self, row: str, side: str) -> float:
        """Return one figure; raise KeyError if it was not measured."""
        return float(self.rows[row][side])


def noop_row(workers: int) -> str:
    """Return the name of the row of the no-op call on `workers` workers."""
    return f"no-op, {workers} workers"


def roundtrip_row(megabytes: float) -> str:
    """Return the name of the row of the round trip of `megabytes` million bytes."""
    return f"round trip, {megabytes:g} MB"


def beside_verl_row(megabytes: float) -> str:
    """Return the name of the row that compares this round trip with verl."""
    return f"{roundtrip_row(megabytes)}, beside verl"


def forward_row(megabytes: float) -> str:
    """Return the name of the row of the controller's growth while `megabytes` million bytes pass between groups."""
    return f"group to group, {megabytes:g} MB, driver grows by"


def startup_row(workers: int) -> str:
    """Return the name of the row of the start of `workers` workers."""
    return f"start of {workers} with torch"


def measure_noop(sides: Mapping[str, SideProcess], table: Table, extent: Extent) -> None:
    """Measure a call that does nothing, for each number of workers; the sides take turns of `calls` calls."""
    if VERL_NAME in sides:  # one group for all sizes, because its workers import torch and verl, which takes seconds
        logger.info("starting %d workers of verl", max(extent.workers))
        sides[VERL_NAME].ask("start_group", workers=max(extent.workers), timeout=400)
    for size in extent.workers:
        logger.info("no-op call of %d workers", size)
        for side in sides.values():
            side.ask("start_group", workers=size)
            side.ask("noop", calls=5 * extent.calls)
        measurements = {name: Measurement(side, "noop", {"calls": extent.calls}) for name, side in sides.items()}
        turns = in_turns(sides.values(), measurements, extent.blocks)
        seconds = {name: [one for turn in found for one in turn[WAKING_CALLS:]] for name, found in turns.items()}
        table.add(noop_row(size), "us", {name: 1e6 * statistics.median(found) for name, found in seconds.items()})
        for name in (OURS, BARE):
            sides[name].ask("stop_group")


def measure_roundtrips(sides: Mapping[str, SideProcess], table: Table, extent: Extent) -> None:
    """Measure data from the driver to the workers and back, for each size; verl also with its other serialization."""
    for name, side in sides.items():
        side.ask("start_group", workers=extent.round_trip_workers)
        if name == VERL_NAME:
            side.ask("keep_workers", workers=extent.round_trip_workers)
    for size in extent.megabytes:
        logger.info("round trip of %g MB", size)
        for side in sides.values():
            side.ask("load", megabytes=size)
        there_and_back = {name: Measurement(side, "roundtrip", watch=WATCH_SECONDS) for name, side in sides.items()}
        if VERL_NAME in sides:
            arguments = {"serialization": "numpy"}
            there_and_back[VERL_NUMPY] = Measurement(sides[VERL_NAME], "roundtrip", arguments, WATCH_SECONDS)
        # verl frees gigabytes, and the next side pays for it, so verl has separate rounds, without bare Ray
        beside_verl = {name: one for name, one in there_and_back.items() if name != BARE}
        in_store = {name: Measurement(sides[name], "roundtrip_in_store") for name in (OURS, BARE)}
        for measurements, row in (
            ({name: there_and_back[name] for name in (OURS, BARE)}, roundtrip_row(size)),
            (beside_verl if VERL_NAME in sides else {}, beside_verl_row(size)),
            (in_store, f"{roundtrip_row(size)}, in store"),
        ):
            if not measurements:
                continue
            in_turns(sides.values(), measurements, WARM_UP_ROUNDS)
            seconds = in_turns(sides.values(), measurements, extent.rounds, warm=(OURS, BARE))
            table.add(row, "ms", {name: 1e3 * statistics.median(found) for name, found in seconds.items()})
        # the first round trips count here, because later ones reuse memory that the allocator kept of them
        grown = {name: most(measurement.grown) for name, measurement in there_and_back.items()}
        table.add(f"{roundtrip_row(size)}, driver grows by", "MB", grown)
        for side in sides.values():
            side.ask("load", megabytes=0)
    for side in sides.values():
        side.ask("stop_group")


def measure_startup(sides: Mapping[str, SideProcess], table: Table, extent: Extent) -> None:
    """Measure the start of processes with torch, until their first answer."""
    workers = extent.start_workers
    logger.info("start of %d workers with torch", workers)
    measurements = {name: Measurement(side, "startup", {"workers": workers}) for name, side in sides.items()}
    seconds = in_turns(sides.values(), measurements, extent.starts)
    table.add(startup_row(workers), "s", {name: statistics.median(found) for name, found in seconds.items()})


def measure_forward(sides: Mapping[str, SideProcess], table: Table, extent: Extent) -> None:
    """Measure how much the controller's own memory grows for a batch that one group makes and another reads."""
    logger.info("from group to group")
    for size in extent.megabytes:
        forward = Measurement(sides[OURS], "forward", {"megabytes": size}, WATCH_CLOSELY_SECONDS)
        seconds = in_turns(sides.values(), {OURS: forward}, extent.rounds)[OURS]
        table.add(f"group to group, {size:g} MB", "ms", {OURS: 1e3 * statistics.median(seconds)})
        table.add(forward_row(size), "MB", {OURS: most(forward.grown)})


def measure_large_batch(sides: Mapping[str, SideProcess], table: Table, extent: Extent) -> None:
    """Measure prompts to one group, its responses to another, and a column that the controller adds between them."""
    logger.info("%d x %d x %d tokens", *extent.large)
    arguments = dict(zip(("prompts", "samples", "tokens"), extent.large))
    large = Measurement(sides[OURS], "large_batch", arguments, WATCH_CLOSELY_SECONDS)
    made = in_turns(sides.values(), {OURS: large}, extent.rounds)[OURS]
    table.add(LARGE_ROW, "s", {OURS: statistics.median(one["seconds"] for one in made)})
    table.add(f"{LARGE_ROW}, size", "MB", {OURS: statistics.median(one["megabytes"] for one in made)})
    table.add(f"{LARGE_ROW}, driver grows by", "MB", {OURS: most(large.grown)})
    resident = max(one.resident for one in large.grown) / MB
    table.add(f"{LARGE_ROW}, driver grows by with the store's pages", "MB", {OURS: resident})


def most(grown: Sequence[Memory]) -> float:
    """Return the largest growth of a process's own memory, in million bytes."""
    return max(one.own for one in grown) / MB


# Figures


def summary(table: Table, extent: Extent, fitted: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics, ratios of medians: enginehouse divided by bare Ray, and verl divided by enginehouse."""
    megabytes = extent.megabytes
    metrics = {
        "noop_vs_bare": statistics.median(table.figure(noop_row(size), "vs bare") for size in extent.workers),
        "noop_slope_vs_bare": fitted[OURS]["us_a_worker"] / fitted[BARE]["us_a_worker"],
    }
    for size in megabytes:
        metrics[f"roundtrip_{size:g}mb_vs_bare"] = table.figure(roundtrip_row(size), "vs bare")
    if beside_verl_row(megabytes[-1]) in table.rows:
        for size in megabytes:
            ours, theirs = (table.figure(beside_verl_row(size), side) for side in (OURS, VERL_NAME))
            metrics[f"roundtrip_{size:g}mb_vs_verl"] = theirs / ours
    metrics["forward_controller_growth_mb"] = table.figure(forward_row(megabytes[-1]), OURS)
    metrics["large_batch_seconds"] = table.figure(LARGE_ROW, OURS)
    metrics["large_batch_driver_mb"] = table.figure(f"{LARGE_ROW}, driver grows by", OURS)
    started = extent.start_workers
    metrics[f"startup_{started}_vs_bare_torch"] = table.figure(startup_row(started), "vs bare")
    return metrics


def fits(table: Table, workers: Sequence[int]) -> dict[str, dict[str, float]]:
    """Fit a line to each side's no-op times over the workers; return slope, cost at zero workers, and R2."""
    found = {}
    for side in (OURS, BARE, VERL_NAME):
        if side not in table.rows[noop_row(workers[0])]:
            continue
        times = np.array([table.figure(noop_row(size), side) for size in workers])
        slope, start = np.polyfit(workers, times, 1)
        rest = times - (slope * np.array(workers) + start)
        r2 = 1 - float((rest**2).sum() / ((times - times.mean()) ** 2).sum())
        found[side] = {"us_a_worker": float(slope), "us_at_none": float(start), "r2": r2}
    return found


def plot(
    python: Path, table: Table, workers: Sequence[int], fitted: Mapping[str, Mapping[str, float]], path: Path
) -> None:
    """Draw the no-op times and their lines, with a Python that has matplotlib."""
    lines = {
        side: {"times": [table.figure(noop_row(size), side) for size in workers], **fit} for side, fit in fitted.items()
    }
    draw(python, "benchmarks.dispatch_plot", workers=list(workers), lines=lines, path=str(path))
