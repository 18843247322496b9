"""Adds up the memory that a run needs of each device, from what its engines say of themselves.

Roles of one process, or on the same devices, are one *place*. In a place each role holds something all the time and
more while it computes, one after another; where roles take turns (`enginehouse.roles.device_turns`), those whose turn
it is not hold what they keep asleep, and in a weight update all hold their weights beside it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from enginehouse.engines.memory import MARGIN, PROCESS_BYTES
from enginehouse.roles.role_plan import own_processes

if TYPE_CHECKING:
    from enginehouse.engines.memory import MemoryUse
    from enginehouse.plugin.findings import Findings
    from enginehouse.roles.role_plan import RolePlan
    from enginehouse_rl.plan.device import Gpu

GIB = 2**30
OF_PROCESS = {
    "cuda": ("CUDA and NCCL", PROCESS_BYTES),
    "cpu": ("libraries and freed memory that is kept", 3 * 2**28),
}
"""Memory of a process besides its engines', by the device of a run: on a CPU 0.4 to 0.9 GiB were libraries,
and as much freed memory as an update leaves."""
SUGGEST = ". `enginehouse plan --suggest` looks for a layout that fits"
"""The end of a refusal."""


class Amount(NamedTuple):
    """Bytes of a device, and whose and what for they are."""

    role: str
    what: str
    size: int


@dataclass(frozen=True, kw_only=True)
class MemoryPlace:
    """Roles on the same devices.

    Attributes:
        roles: their names, first the one whose processes these are.
        devices: how many there are, each with as much on it.
        when: what is being done when most is there.
        amounts: what is there then.
    """

    roles: tuple[str, ...]
    devices: int
    when: str
    amounts: tuple[Amount, ...]

    @property
    def size(self) -> int:
        """Bytes of each device."""
        return sum(amount.size for amount in self.amounts)


@dataclass(frozen=True)
class Needs:
    """The memory that the roles of a run need of its devices.

    Attributes:
        roles: by name.
        uses: what a rank of each holds; None where that is not known.
        device: torch device type of the run.
        gpu: what the run is on; None where that is not known.
    """

    roles: Mapping[str, RolePlan]
    uses: Mapping[str, MemoryUse | None]
    device: str
    gpu: Gpu | None = None

    def places(self) -> list[MemoryPlace]:
        """Return where the roles are, with what they hold when it is most, but no place of a role that is not known."""
        places, roles = [], self.roles
        for host in own_processes(roles):
            if roles[host].devices_of:
                continue
            names = [name for name, role in roles.items() if host in (name, role.shares, _host_of(role, roles))]
            uses = {name: use for name in names if (use := self.uses[name]) is not None}
            if len(uses) == len(names):
                when, amounts = max(self._moments(uses), key=lambda moment: sum(a.size for a in moment[1]))
                devices = roles[host].processes * (roles[host].gpus if self.device == "cuda" else 1)
                places.append(MemoryPlace(roles=tuple(names), devices=devices, when=when, amounts=tuple(amounts)))
        return places

    def table(self) -> list[str]:
        """Return what a rank of each role needs, and what that is together, as lines of text."""
        uses = {name: use for name, use in self.uses.items() if use is not None}
        if not uses:
            return []
        rows = {name: {**use.held, **use.updating, **use.working} for name, use in uses.items()}
        for name, use in uses.items():  # what is held, and more of the same while it computes
            rows[name] |= {
                purpose: use.held[purpose] + size for purpose, size in use.working.items() if purpose in use.held
            }
        names = list(dict.fromkeys(purpose for row in rows.values() for purpose in row))
        label = max(len("GiB of a rank"), *map(len, rows))
        lines = [f"{'GiB of a rank':<{label}}  " + "  ".join(names)]
        for name, row in rows.items():
            cells = (f"{row[purpose] / GIB:.1f}" if purpose in row else "-" for purpose in names)
            row_text = "  ".join(f"{cell:>{len(purpose)}}" for cell, purpose in zip(cells, names, strict=True))
            lines.append(f"{name.replace('_', ' '):<{label}}  {row_text}")
        for place in self.places():
            lines.append(f"{_whose(place)}: {self._sum(place)}")
            if self.device == "cuda" and (host := self._on_host(place, uses)):
                lines.append(
                    f"{_whose(place)}: {host / GIB:.1f} GiB of a host's memory for each GPU, of what is put away"
                )
        lines += [f"{name.replace('_', ' ')}: {use.note}" for name, use in uses.items() if use.note]
        if guessed := [name.replace("_", " ") for name, use in uses.items() if not use.measured]:
            lines.append(f"not compared with what is really allocated: {', '.join(guessed)}")
        purpose, size = OF_PROCESS[self.device]
        guess = f"in each sum {size / GIB:.1f} GiB a process are for {purpose}"
        if self.device == "cuda":
            asleep = (
                max(use.asleep for use in uses.values()) if any(self.roles[name].devices_of for name in uses) else 0
            )
            sleeping = f", {asleep / GIB:.1f} for an engine that sleeps" if asleep else ""
            return [*lines, f"{guess}{sleeping}, a guess; {MARGIN:.0%} of a GPU stay free"]
        return [*lines, f"{guess}, a guess"]

    def check(self, findings: Findings, exact: bool) -> None:
        """Refuse what the devices cannot hold; note it where the models' shapes are not `exact`."""
        gpu, all_of_it = self.gpu, self.places()
        if self.device == "cpu":
            needed, host_bytes = sum(place.devices * place.size for place in all_of_it), _host_bytes()
            if host_bytes is not None and needed > host_bytes:
                findings.note(
                    f"the run may need {needed / GIB:.1f} GiB of memory (see memory), and this machine has "
                    f"{host_bytes / GIB:.1f}"
                )
            return
        if gpu is None:
            return
        say = findings.refuse if exact else findings.note
        for place in all_of_it:
            are_limited = all((use := self.uses[name]) is not None and use.limit is not None for name in place.roles)
            if (
                place.size > (1.0 if are_limited else 1 - MARGIN) * gpu.size
            ):  # one that is told its share keeps within it
                spare = f", of which {MARGIN * gpu.size / GIB:.1f} stay free" if place.size <= gpu.size else ""
                most = max(place.amounts, key=lambda amount: amount.size)
                say(
                    f"{_whose(place)}: {self._sum(place)}{spare}; most of it: {most.what} of the "
                    f"{most.role.replace('_', ' ')}, {most.size / GIB:.1f}{SUGGEST}"
                )
        for name, use in self.uses.items():
            if use is not None and use.limit is not None:
                needed = sum((*use.held.values(), *use.working.values()))
                if needed > use.limit:
                    say(
                        f"{name}: its engine takes {use.limit / GIB:.1f} GiB of a GPU for itself, and the model with "
                        f"the keys and values of one row needs {needed / GIB:.1f}{SUGGEST}"
                    )

    def _moments(self, uses: Mapping[str, MemoryUse]) -> Iterator[tuple[str, list[Amount]]]:
        """Return what is on a device of a place in each part of a step, and what part that is."""
        roles = self.roles
        turns = any(roles[name].devices_of for name in uses)
        processes = 1 + turns
        purpose, size = OF_PROCESS[self.device]
        process = [Amount(next(iter(uses)), purpose, processes * size)]

        def asleep(*awake: str) -> list[Amount]:
            sleeping = {name: use.asleep for name, use in uses.items() if turns and name not in awake}
            return [Amount(name, "what it keeps asleep", size) for name, size in sleeping.items() if size]

        for computing, use in uses.items():
            amounts = [
                Amount(name, purpose, size)
                for name, other in uses.items()
                if not turns or bool(roles[name].devices_of) == bool(roles[computing].devices_of)
                for purpose, size in other.held.items()
            ]
            yield (
                f"the {computing.replace('_', ' ')} computes",
                [
                    *process,
                    *amounts,
                    *asleep(computing),
                    *(Amount(computing, purpose, size) for purpose, size in use.working.items()),
                ],
            )
        if any(use.updating for use in uses.values()):
            amounts = [
                Amount(name, purpose, size)
                for name, use in uses.items()
                for purpose, size in (*use.held.items(), *use.updating.items())
                if not turns or purpose == "weights" or purpose in use.updating
            ]
            yield "weights are updated", [*process, *amounts, *asleep()]

    def _on_host(self, place: MemoryPlace, uses: Mapping[str, MemoryUse]) -> int:
        """Return the bytes of a host's memory that go with a device.

        They are what an engine keeps there, and, in turns, what training roles hold. Gradients, which are zero then,
        are not written down.
        """
        turns = any(self.roles[name].devices_of for name in place.roles)
        training = [name for name in place.roles if self.roles[name].kind == "train"]
        return sum(uses[name].host + (sum(uses[name].held.values()) if turns else 0) for name in training)

    def _sum(self, place: MemoryPlace) -> str:
        device, gpu = self.device, self.gpu
        noun = "GPU" if device == "cuda" else "process"
        plural = "" if place.devices == 1 else "s" if device == "cuda" else "es"
        of = f" of {gpu.size / GIB:.1f}" if gpu is not None and device == "cuda" else ""
        return f"{place.size / GIB:.1f}{of} GiB on each of {place.devices} {noun}{plural}, while {place.when}"


def _host_of(role: RolePlan, roles: Mapping[str, RolePlan]) -> str | None:
    """Return the role whose processes stand on the devices that a role is a guest on."""
    host = role.devices_of
    return None if host is None else roles[host].shares or host


def _whose(place: MemoryPlace) -> str:
    return " and ".join(name.replace("_", " ") for name in place.roles)


def _host_bytes() -> int | None:
    """Return the bytes of this machine's memory; None where that cannot be told."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows
        return None
