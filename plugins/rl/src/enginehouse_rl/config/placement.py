"""Where the rollout runs: in the actor's processes, on its devices, or on devices of its own (`rollout.placement`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from enginehouse.plugin.capabilities import COLOCATES, OFFLOAD, SLEEP
from enginehouse.roles.role_plan import own_processes, why_apart
from enginehouse_rl.config.device import gpus_are_known, visible_gpus

if TYPE_CHECKING:
    from enginehouse.plugin import Backend, RolloutBackend, TrainBackend
    from enginehouse.plugin.findings import Findings
    from enginehouse.roles.role_plan import RolePlan
    from enginehouse.runtimes import Interpreter
    from enginehouse_rl.config.schema import Config

Placed = Literal["colocated", "shared", "separate"]


def choose_placement(
    findings: Findings,
    config: Config,
    train: TrainBackend | None,
    rollout: RolloutBackend | None,
    roles: Mapping[str, RolePlan],
    replica: Interpreter,
    device: str,
    gpus: int,
) -> tuple[Placed, str, str]:
    """Where the rollout runs; if not in the actor's processes, why; and, where there are too few GPUs for that, why it
    does not share the actor's.

    Args:
        train: the actor's backend; None after a problem.
        rollout: the rollout's.
        roles: all but the rollout.
        replica: the rollout's interpreter.
        device: torch device type of the run.
        gpus: those of each replica, where the run is on GPUs; 0: it is a server that runs already.
    """
    wanted, actor = config.rollout.placement, roles["actor"].interpreter
    if wanted == "colocated":
        _check_colocated(findings, config, rollout, actor, replica)
        return wanted, "", ""
    if wanted == "shared":
        if why := _not_in_turns(config, train, rollout, gpus):
            findings.refuse(
                f"rollout.placement is shared, where actor and rollout take turns: {why}; set rollout.placement=auto"
            )
        return wanted, "rollout.placement says so", ""
    refused, short = _not_in_turns(config, train, rollout, gpus), ""
    if device == "cuda" and gpus_are_known(config.cluster.address):
        needed, there = sum(gpus_needed(roles).values()) + config.rollout.replicas * gpus, visible_gpus()
        if needed > there:
            short = f"{there} visible GPU{'' if there == 1 else 's'}, and with its own the run would need {needed}"
    if wanted == "separate":
        cure = "with rollout.placement=shared actor and rollout would take turns on the actor's"
        return wanted, "rollout.placement says so", cure if short and not refused else ""
    if not (why := _apart(findings, config, rollout, actor, replica)):
        return "colocated", "", ""
    if short and not refused:
        return "shared", f"{why}; {short}", ""
    return "separate", why, f"actor and rollout cannot take turns on them, as {refused}" if short else ""


def _apart(
    findings: Findings, config: Config, rollout: RolloutBackend | None, actor: Interpreter, replica: Interpreter
) -> str:
    """Why the rollout cannot live in the actor's processes, where the config leaves it open; empty if it can."""
    if config.train.staleness:
        return "train.staleness lets it draw while the actor trains"
    if config.cluster.launcher == "inline":
        return ""
    if why := why_apart(actor, replica, rollout):
        return why
    if config.actor.processes == config.rollout.replicas:
        return ""
    why = f"rollout.replicas is {config.rollout.replicas}, actor.processes {config.actor.processes}"
    findings.note(
        f"{why}: the rollout gets processes of its own beside the actor's (rollout.placement=auto); "
        f"rollout.replicas={config.actor.processes} would put it into the actor's"
    )
    return why


def _check_colocated(
    findings: Findings, config: Config, rollout: RolloutBackend | None, actor: Interpreter, replica: Interpreter
) -> None:
    if actor.python != replica.python:
        findings.refuse(
            "rollout.placement is colocated: actor and rollout share processes, and a process has one interpreter, but "
            f"the actor's runtime is {actor.name!r} and the rollout's {replica.name!r}; set rollout.placement=shared "
            "or separate"
        )
    elif config.train.staleness:
        findings.refuse(
            f"train.staleness is {config.train.staleness}: responses are drawn while the actor trains, and with "
            "rollout.placement=colocated both would be in the same processes; set rollout.placement=separate"
        )
    elif rollout is not None and COLOCATES not in rollout.capabilities:
        findings.refuse(
            f"rollout.placement is colocated, and backend {rollout.name!r} wants a process of its own (it lacks the "
            f"capability {COLOCATES!r}); set rollout.placement=shared or separate"
        )


def _not_in_turns(config: Config, train: TrainBackend | None, rollout: RolloutBackend | None, gpus: int) -> str:
    """Why actor and rollout cannot take turns on the same devices; empty if they can."""
    if config.train.staleness:
        return f"train.staleness is {config.train.staleness}: responses are drawn while the actor trains"
    if config.cluster.launcher == "inline":
        return "an inline run (cluster.launcher) has one process for both"
    if not gpus:
        return "the rollout's servers run already, on devices of their own"
    for record, capability in ((train, OFFLOAD), (rollout, SLEEP)):
        if record is not None and capability not in record.capabilities:
            return _lacks(record, capability)
    return ""


def _lacks(record: Backend, capability: str) -> str:
    return f"backend {record.name!r} cannot give its memory up (it lacks the capability {capability!r})"


def check_turns(
    findings: Findings, wanted: str, roles: Mapping[str, RolePlan], backends: Mapping[str, Backend | None], device: str
) -> None:
    """Check that devices which are shared suffice, and that all that is on them can give its memory up.

    Args:
        wanted: `rollout.placement`.
        roles: by name.
        backends: records of the roles that are no rollouts; None after a problem.
        device: torch device type of the run.
    """
    rollout = roles["rollout"]
    if not (host := rollout.devices_of):
        return
    each, there = rollout.gpus if device == "cuda" else 1, roles[host].processes
    if rollout.processes * each > there:
        fit = there // max(each, 1)
        apart = ", or rollout.placement=separate" if wanted == "shared" else ""  # else there are too few GPUs for it
        cure = f"set rollout.replicas={fit}" if fit else f"split them over fewer, or set {host}.processes={each}"
        findings.refuse(
            f"rollout.placement is shared: {rollout.processes} replicas need the devices of "
            f"{rollout.processes * each} processes of the {host}, which has {there} ({host}.processes); {cure}{apart}"
        )
    for name, record in backends.items():
        if roles[name].shares == host and record is not None and OFFLOAD not in record.capabilities:
            findings.refuse(
                f"rollout.placement is shared, and so are the {name}'s devices: {_lacks(record, OFFLOAD)}; give it "
                f"devices of its own ({name}.processes), or set rollout.placement=separate"
            )


def gpus_needed(roles: Mapping[str, RolePlan]) -> dict[str, int]:
    """GPUs of each role that has devices of its own."""
    apart = own_processes(roles).items()
    return {name: role.processes * role.gpus for name, role in apart if role.devices_of is None}
