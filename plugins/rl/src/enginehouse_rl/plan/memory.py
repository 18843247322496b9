"""Adds up the memory that a run needs on each device, from the estimates of its engines.

A *place* is one device, or a group of devices, with all the roles that use it. On a device, each role holds some memory
all the time, and more memory while it computes. Only one role computes at a time. If roles take turns
(`enginehouse.roles.device_turns`), a waiting role sleeps, and holds only the memory that a sleeping engine cannot
release. During a weight update every role holds its weights.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from enginehouse.engines.memory import MARGIN, PROCESS_BYTES
from enginehouse.roles.role_plan import own_processes
from enginehouse_rl.config.counting import count

if TYPE_CHECKING:
    from enginehouse.engines.memory import MemoryUse
    from enginehouse.plugin.findings import Findings
    from enginehouse.roles.role_plan import RolePlan
    from enginehouse_rl.plan.device import Gpu

GIB, MIB = 2**30, 2**20
OF_PROCESS = {
    "cuda": ("CUDA and NCCL", PROCESS_BYTES),
    "cpu": ("libraries and freed memory", 3 * 2**28),
}
"""The memory of a process in addition to its engines, by the device of the run: its use, and its bytes. On CPUs,
libraries took 0.4 to 0.9 GiB. Memory that an update has freed, but that the process keeps, is added."""
SUGGEST = ". `enginehouse plan --suggest` looks for a layout that fits"
"""The last sentence of a message that rejects a run."""


class Amount(NamedTuple):
    """Memory on a device: the role that holds it, its use, and its bytes."""

    role: str
    what: str
    size: int


@dataclass(frozen=True, kw_only=True)
class MemoryPlace:
    """Roles on the same devices.

    Attributes:
        roles: the names of the roles; the first one owns the processes.
        devices: the number of devices, each of which needs the same memory.
        when: the part of a step that needs the most memory: `"the actor computes"`.
        amounts: the memory that is in use in that part of the step.
    """

    roles: tuple[str, ...]
    devices: int
    when: str
    amounts: tuple[Amount, ...]

    @property
    def size(self) -> int:
        """Bytes in use on each device."""
        return sum(amount.size for amount in self.amounts)


@dataclass(frozen=True)
class Needs:
    """The memory that the roles of a run need on its devices.

    Attributes:
        uses: the memory of one rank of each role; None where it is unknown.
        gpu: the GPU of the run; None if unknown.
    """

    roles: Mapping[str, RolePlan]
    uses: Mapping[str, MemoryUse | None]
    device: str
    gpu: Gpu | None = None

    def places(self) -> list[MemoryPlace]:
        """Return the places with their peak memory, except places with a role whose memory is unknown."""
        places, roles = [], self.roles
        for host in own_processes(roles):
            if roles[host].devices_of:
                continue
            names = [name for name, role in roles.items() if host in (name, role.shares, _find_host(role, roles))]
            uses = {name: use for name in names if (use := self.uses[name]) is not None}
            if len(uses) == len(names):
                moments = self._list_moments(uses)
                when, amounts = max(moments, key=lambda moment: sum(amount.size for amount in moment[1]))
                devices = roles[host].processes * (roles[host].gpus if self.device == "cuda" else 1)
                places.append(MemoryPlace(roles=tuple(names), devices=devices, when=when, amounts=tuple(amounts)))
        return places

    def table(self) -> list[str]:
        """Return lines of text: the memory of one rank of each role, then the sum of each place."""
        uses = {name: use for name, use in self.uses.items() if use is not None}
        if not uses:
            return []
        rows = {name: {**use.held, **use.updating, **use.working} for name, use in uses.items()}
        for name, use in uses.items():  # a use may be held, and grow while the role computes
            rows[name] |= {
                purpose: use.held[purpose] + size for purpose, size in use.working.items() if purpose in use.held
            }
        names = list(dict.fromkeys(purpose for row in rows.values() for purpose in row))
        largest = max(size for row in rows.values() for size in row.values())
        unit, divisor = ("GiB", GIB) if largest >= GIB else ("MiB", MIB)
        heading = f"{unit} per rank"
        label = max(len(heading), *map(len, rows))
        lines = [f"{heading:<{label}}  " + "  ".join(names)]
        for name, row in rows.items():
            cells = (f"{row[purpose] / divisor:,.1f}" if purpose in row else "–" for purpose in names)
            row_text = "  ".join(f"{cell:>{len(purpose)}}" for cell, purpose in zip(cells, names, strict=True))
            lines.append(f"{_spell(name):<{label}}  {row_text}")
        for place in self.places():
            lines.append(f"{_name_roles(place)}: {self._describe_sum(place)}")
            if self.device == "cuda" and (host := self._count_host_bytes(place, uses)):
                lines.append(
                    f"{_name_roles(place)}: {host / GIB:.1f} GiB of host memory per GPU, for what is offloaded or "
                    "kept by weight transports"
                )
        lines += [f"{_spell(name)}: {use.note}" for name, use in uses.items() if use.note]
        if guessed := [_spell(name) for name, use in uses.items() if not use.measured]:
            lines.append(f"estimates not checked against measurements: {', '.join(guessed)}")
        purpose, size = OF_PROCESS[self.device]
        guess = f"each sum includes {size / GIB:.1f} GiB per process for {purpose}"
        if self.device == "cuda":
            turns = any(self.roles[name].devices_of for name in uses)
            asleep = max(use.asleep for use in uses.values()) if turns else 0
            sleeping = f" and {asleep / GIB:.1f} GiB for an engine that sleeps" if asleep else ""
            return [*lines, f"{guess}{sleeping} (a guess); {MARGIN:.0%} of each GPU stays free"]
        return [*lines, f"{guess} (a guess)"]

    def describe_total(self) -> str:
        """Return the memory that the run needs, in a few words. Empty if unknown."""
        places = self.places()
        if not places or None in self.uses.values():
            return ""
        if self.device == "cpu":
            return f"about {sum(place.devices * place.size for place in places) / GIB:.1f} GiB of memory"
        limit = f" of {self.gpu.size / GIB:.1f}" if self.gpu is not None else ""
        return f"at most {max(place.size for place in places) / GIB:.1f}{limit} GiB of each GPU"

    def check(self, findings: Findings, exact: bool) -> None:
        """Reject a run that does not fit into the devices.

        Args:
            exact: true if the shapes of the models are known exactly. If they are not, add a note instead of rejecting
                the run.
        """
        gpu, places = self.gpu, self.places()
        if self.device == "cpu":
            needed, host_bytes = sum(place.devices * place.size for place in places), _read_host_bytes()
            if host_bytes is not None and needed > host_bytes:
                findings.note(
                    f"the run may need {needed / GIB:.1f} GiB of memory (see memory), but this machine has "
                    f"{host_bytes / GIB:.1f} GiB"
                )
            return
        if gpu is None:
            return
        report = findings.refuse if exact else findings.note
        for place in places:
            are_limited = all((use := self.uses[name]) is not None and use.limit is not None for name in place.roles)
            fraction = 1.0 if are_limited else 1 - MARGIN  # an engine with a limit does not exceed it
            if place.size > fraction * gpu.size:
                free = MARGIN * gpu.size / GIB
                spare = f", but {free:.1f} GiB of each GPU must stay free" if place.size <= gpu.size else ""
                most = max(place.amounts, key=lambda amount: amount.size)
                report(
                    f"{_name_roles(place)}: {self._describe_sum(place)}{spare}; the largest part: {most.what} of the "
                    f"{_spell(most.role)}, {most.size / GIB:.1f} GiB{SUGGEST}"
                )
        for name, use in self.uses.items():
            if use is not None and use.limit is not None:
                needed = sum((*use.held.values(), *use.working.values()))
                if needed > use.limit:
                    report(
                        f"{name}: its engine may use {use.limit / GIB:.1f} GiB of a GPU, but the model with the KV "
                        f"cache of one row needs {needed / GIB:.1f} GiB{SUGGEST}"
                    )

    def _list_moments(self, uses: Mapping[str, MemoryUse]) -> Iterator[tuple[str, list[Amount]]]:
        """Yield each part of a step, with the memory that is then in use on a device."""
        roles = self.roles
        turns = any(roles[name].devices_of for name in uses)
        processes = 1 + turns
        purpose, size = OF_PROCESS[self.device]
        process = [Amount(next(iter(uses)), purpose, processes * size)]

        def list_asleep(*awake: str) -> list[Amount]:
            sleeping = {name: use.asleep for name, use in uses.items() if turns and name not in awake}
            return [Amount(name, "memory kept while asleep", size) for name, size in sleeping.items() if size]

        for computing, use in uses.items():
            resident = [
                Amount(name, purpose, size)
                for name in uses
                if not turns or bool(roles[name].devices_of) == bool(roles[computing].devices_of)
                for purpose, size in uses[name].held.items()
            ]
            working = [Amount(computing, purpose, size) for purpose, size in use.working.items()]
            yield f"the {_spell(computing)} computes", [*process, *resident, *list_asleep(computing), *working]
        if any(use.updating for use in uses.values()):
            amounts = [
                Amount(name, purpose, size)
                for name, use in uses.items()
                for purpose, size in (*use.held.items(), *use.updating.items())
                if not turns or purpose == "weights" or purpose in use.updating
            ]
            yield "weights are updated", [*process, *amounts, *list_asleep()]

    def _count_host_bytes(self, place: MemoryPlace, uses: Mapping[str, MemoryUse]) -> int:
        """Return the bytes of host memory that are needed for each device.

        An engine or a weight transport may keep some memory on the host. If roles take turns, a waiting training role
        also moves the memory that it holds to the host. It does not move gradients, because these are zero while it
        waits.
        """
        turns = any(self.roles[name].devices_of for name in place.roles)
        moved = [name for name in place.roles if turns and self.roles[name].kind == "train"]
        kept = sum(uses[name].host for name in place.roles)
        return kept + sum(size for name in moved for size in uses[name].held.values())

    def _describe_sum(self, place: MemoryPlace) -> str:
        on_gpus = self.device == "cuda"
        devices = count(place.devices, "GPU" if on_gpus else "process")
        total = f" of {self.gpu.size / GIB:.1f}" if self.gpu is not None and on_gpus else ""
        return f"{place.size / GIB:.1f}{total} GiB on each of {devices}, while {place.when}"


def _find_host(role: RolePlan, roles: Mapping[str, RolePlan]) -> str | None:
    """Return the role that owns the devices which `role` uses in turns; None if `role` takes no turns."""
    host = role.devices_of
    return None if host is None else roles[host].shares or host


def _name_roles(place: MemoryPlace) -> str:
    return " and ".join(map(_spell, place.roles))


def _spell(role: str) -> str:
    return role.replace("_", " ")


def _read_host_bytes() -> int | None:
    """Return the memory of this machine in bytes; None if unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows
        return None
