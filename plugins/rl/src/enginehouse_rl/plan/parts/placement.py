"""Places roles in processes and on devices, and checks that this machine has enough devices."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Literal

from enginehouse.plugin.capabilities import COLOCATES, OFFLOAD, SLEEP
from enginehouse.roles.role_plan import RolePlan, own_processes, why_apart
from enginehouse.runtimes import CURRENT
from enginehouse_rl.config.counting import count
from enginehouse_rl.config.schema import Config, PreferenceConfig, SFTConfig
from enginehouse_rl.plan.device import gpus_are_assumed, gpus_are_known, visible_gpus
from enginehouse_rl.plan.parts.draft import C, Fact, Part
from enginehouse_rl.plan.parts.engines import RoleEngine
from enginehouse_rl.plan.roles import list_auxiliaries
from enginehouse_rl.plan.variables import check_agreement

Kind = Literal["colocated", "shared", "separate"]


class ProcessesPart(Part[C]):
    """The processes of all roles, and the devices that they need.

    Attributes:
        not_shared: the reason why the rollout does not share the actor's GPUs, or the setting with which it would share
            them. Empty if there are enough GPUs.
    """

    not_shared = ""

    def check_machine(self, largest: int) -> None:
        """Check that the launcher and the devices allow the processes. `largest` is the largest number of processes of
        a role."""
        run, cluster, gpus = self.run, self.config.cluster, count_gpus(self.run.roles)
        check_agreement(self.findings, run.roles)
        if cluster.launcher == "inline" and largest > 1:
            self.refuse(
                "cluster.launcher is inline: every role runs in this one process, so actor.processes and "
                f"rollout.replicas must be 1, not {largest}"
            )
        if cluster.launcher == "inline" and cluster.address:
            self.refuse(
                "cluster.address: an inline run joins no Ray cluster; leave it unset, or set cluster.launcher=ray"
            )
        needed = sum(gpus.values())
        if run.device == "cuda" and gpus_are_known(cluster.address) and needed > (visible := visible_gpus()):
            by_role = ", ".join(f"{role} {number}" for role, number in gpus.items() if number)
            reason = f"; {self.not_shared}" if self.not_shared else ""
            there = f"only {visible} {'is' if visible == 1 else 'are'} visible on this machine" + reason
            if gpus_are_assumed():
                there = f"--gpus plans for {visible}{reason}"
            elif not visible:
                there = (
                    f"none is visible on this machine{reason}. Set cluster.device=cpu, or plan for others with --gpus"
                )
            self.refuse(f"the run needs {count(needed, 'GPU')} ({by_role}), but {there}")
        self._check_cores()

    def check_inline(self) -> None:
        """Check that an inline run needs no processes besides the processes of the actor."""
        config, separate = self.config, own_processes(self.run.roles)
        for name, section in list_auxiliaries(config).items():
            if name in separate and config.cluster.launcher == "inline":
                key, role = "engine" if section.engine else "processes", name.replace("_", " ")
                self.refuse(
                    f"{name}.{key}: the {role} needs its own processes, but an inline run has one process for all "
                    f"roles; leave it unset, set {name}.shares=actor, or cluster.launcher=ray"
                )

    def facts(self) -> Iterable[Fact]:
        runtimes = [
            f"{name} in {role.interpreter.name} ({role.interpreter.reason})"
            for name, role in self.run.roles.items()
            if role.interpreter.name != CURRENT
            if role.kind == "rollout" or not role.shares  # else it has the engine of the role that it shares with
        ]
        if runtimes:
            yield "runtimes", "; ".join(runtimes)

    def _check_cores(self) -> None:
        """Add a note if the engines have more threads than this machine has CPU cores. A run on GPUs gets no note,
        because its engines hardly use the CPU."""
        cluster, processes = self.config.cluster, sum(role.processes for role in own_processes(self.run.roles).values())
        # macOS has no affinity
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        threads = processes * (cluster.threads_per_process or 1)
        shares_cores = self.run.device == "cpu" and not cluster.address and cluster.launcher != "inline"
        if shares_cores and threads > cores:
            self.note(
                f"the engines have {threads} threads in {count(processes, 'process')}, but this machine has {cores} "
                "cores: the threads wait for each other"
            )


class SupervisedPlacementPart(ProcessesPart[SFTConfig | PreferenceConfig]):
    """Places the roles of a run that trains on rows of a file."""

    def settle(self) -> None:
        processes, rows = self.config.actor.processes, self.config.train.rows_per_step
        if processes > rows:
            self.refuse(
                f"a step has {rows} rows (train.rows_per_step), fewer than the {processes} processes of the actor "
                "(actor.processes)"
            )
        self.check_inline()
        self.check_machine(processes)


class EvalPlacementPart(ProcessesPart[Config]):
    """Places the roles of an evaluation outside a run, each in its own processes."""

    def settle(self) -> None:
        self.check_machine(max(role.processes for role in self.run.roles.values()))


class PlacementPart(ProcessesPart[Config]):
    """Places the rollout of a run (`rollout.placement`), and checks that there are enough devices for all roles.

    Attributes:
        kind: `"colocated"`: in the actor's processes; `"shared"`: on the actor's devices, in turns; or `"separate"`.
        apart: the reason why the rollout is not in the actor's processes; empty if it is.
    """

    kind: Kind
    apart: str

    def settle(self) -> None:
        config, roles = self.config, self.run.roles
        actor, replicas, inline = config.actor.processes, config.rollout.replicas, config.cluster.launcher == "inline"
        self.kind, self.apart, self.not_shared = self._choose(roles["rollout"], roles["actor"])
        roles["rollout"] = replace(
            roles["rollout"],
            shares="actor" if self.kind == "colocated" else None,
            devices_of="actor" if self.kind == "shared" else None,
        )
        self.check_inline()
        if self.kind == "colocated" and actor != replicas and not inline:
            self.refuse(
                "rollout.placement is colocated: each replica runs in a process of the actor, so rollout.replicas "
                f"({replicas}) must equal actor.processes ({actor}); or set rollout.placement=separate"
            )
        self.check_machine(max(actor, replicas))
        if self.kind == "shared":
            self._check_turns(roles["rollout"])

    def facts(self) -> Iterable[Fact]:
        rollout, role = self.config.rollout, self.run.roles["rollout"]
        place = f"in separate processes ({self.apart})" if self.apart else "in the actor's processes"
        if role.devices_of:
            place = f"taking turns with the {role.devices_of} on its devices ({self.apart})"
        yield "rollout", f"{self.run.engines['rollout'].words}, {count(rollout.replicas, 'replica')}, {place}"
        yield from super().facts()

    def _choose(self, rollout: RolePlan, actor: RolePlan) -> tuple[Kind, str, str]:
        """Return the rollout's placement, the reason why it is not in the actor's processes, and `not_shared`."""
        config, placement = self.config, self.config.rollout.placement
        if placement == "colocated":
            self._check_colocated(rollout, actor)
            return placement, "", ""
        obstacle, shortage = self._find_obstacle_to_turns(rollout), ""
        if placement == "shared":
            if obstacle:
                self.refuse(
                    f"rollout.placement is shared, but actor and rollout cannot take turns: {obstacle}; set "
                    "rollout.placement=auto"
                )
            return placement, "set by rollout.placement", ""
        if self.run.device == "cuda" and gpus_are_known(config.cluster.address):
            needed, visible = sum(count_gpus(self.run.roles).values()), visible_gpus()
            if needed > visible:
                shortage = f"{count(visible, 'visible GPU')}, but {needed} are needed if the rollout has its own"
        if placement == "separate":
            cure = "with rollout.placement=shared, actor and rollout would take turns on the actor's GPUs"
            return placement, "set by rollout.placement", cure if shortage and not obstacle else ""
        if not (reason := self._explain_apart(rollout, actor)):
            return "colocated", "", ""
        if shortage and not obstacle:
            return "shared", f"{reason}; {shortage}", ""
        unshared = f"actor and rollout cannot take turns on these GPUs, because {obstacle}"
        return "separate", reason, unshared if shortage else ""

    def _explain_apart(self, rollout: RolePlan, actor: RolePlan) -> str:
        """Return the reason why the rollout cannot run in the actor's processes; empty if it can."""
        if self.config.train.staleness:
            return "train.staleness lets it generate while the actor trains"
        if self.config.cluster.launcher == "inline":
            return ""
        record = self.run.engines["rollout"].record
        if reason := why_apart(actor.interpreter, rollout.interpreter, record):
            return reason
        if actor.processes == rollout.processes:
            return ""
        reason = f"rollout.replicas is {rollout.processes}, actor.processes {actor.processes}"
        self.note(
            f"{reason}: the rollout runs in separate processes (rollout.placement=auto); with "
            f"rollout.replicas={actor.processes} it would run in the actor's processes"
        )
        return reason

    def _check_colocated(self, rollout: RolePlan, actor: RolePlan) -> None:
        engine, staleness = self.run.engines["rollout"], self.config.train.staleness
        if actor.interpreter.python != rollout.interpreter.python:
            self.refuse(
                "rollout.placement is colocated: actor and rollout share processes, and a process has one interpreter, "
                f"but the actor's runtime is {actor.interpreter.name!r} and the rollout's "
                f"{rollout.interpreter.name!r}; set rollout.placement=shared or separate"
            )
        elif staleness:
            self.refuse(
                f"train.staleness is {staleness}: responses are generated while the actor trains, and with "
                "rollout.placement=colocated both would be in the same processes; set rollout.placement=separate"
            )
        elif engine.lacks(COLOCATES):
            self.refuse(
                f"rollout.placement is colocated, but engine {engine.name!r} needs its own process (it lacks the "
                f"capability {COLOCATES!r}); set rollout.placement=shared or separate"
            )

    def _find_obstacle_to_turns(self, rollout: RolePlan) -> str:
        """Return the reason why actor and rollout cannot take turns on the same devices; empty if they can."""
        config = self.config
        if config.train.staleness:
            return f"train.staleness is {config.train.staleness}: responses are generated while the actor trains"
        if config.cluster.launcher == "inline":
            return "an inline run (cluster.launcher) has one process for both"
        if not rollout.gpus:
            return "the servers of the rollout already run on other devices"
        for name, capability in (("actor", OFFLOAD), ("rollout", SLEEP)):
            if lack := _explain_lack(self.run.engines[name], capability):
                return lack
        return ""

    def _check_turns(self, rollout: RolePlan) -> None:
        """Check that the actor's devices suffice for the rollout, and that each role on them can release its memory."""
        gpus = rollout.gpus if self.run.device == "cuda" else 1
        needed, processes = rollout.processes * gpus, self.run.roles["actor"].processes
        if needed > processes:
            fit = processes // max(gpus, 1)
            cure = f"set rollout.replicas={fit}" if fit else f"use fewer for a replica, or set actor.processes={gpus}"
            if self.config.rollout.placement == "shared":  # else there are too few GPUs to separate them
                cure += ", or rollout.placement=separate"
            self.refuse(
                f"rollout.placement is shared: {rollout.processes} replicas need the devices of {needed} processes of "
                f"the actor, but the actor has {processes} (actor.processes); {cure}"
            )
        for name, role in self.run.roles.items():
            lack = _explain_lack(self.run.engines[name], OFFLOAD)
            if role.kind == "train" and role.shares == "actor" and lack:
                self.refuse(
                    f"rollout.placement is shared, so the rollout also takes turns with the {name}, but {lack}; give "
                    f"the {name} its own devices ({name}.processes), or set rollout.placement=separate"
                )


def count_gpus(roles: Mapping[str, RolePlan]) -> dict[str, int]:
    """Return the number of GPUs of each role that has its own devices."""
    separate = own_processes(roles).items()
    return {name: role.processes * role.gpus for name, role in separate if role.devices_of is None}


def _explain_lack(engine: RoleEngine, capability: str) -> str:
    """Return a message if an engine lacks the capability to release its memory; otherwise an empty text."""
    if not engine.lacks(capability):
        return ""
    return f"engine {engine.name!r} cannot release its memory (it lacks the capability {capability!r})"
