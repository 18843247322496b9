"""Environment variables that a config gives to the processes of a role (`engine.env`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from enginehouse.plugin.secrets import check_secrets

if TYPE_CHECKING:
    from enginehouse.plugin.findings import Findings
    from enginehouse.roles.role_plan import RolePlan

DECIDED = {
    **dict.fromkeys(
        ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"), "where the role is placed decides it"
    ),
    "CUDA_DEVICE_ORDER": "roles that share GPUs have to count them alike: set it where enginehouse, or Ray, is started",
    "OMP_NUM_THREADS": "cluster.threads_per_process decides it",
    **dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), "the process's rank decides it"),
    **dict.fromkeys(("MASTER_ADDR", "MASTER_PORT"), "the rendezvous of the role's processes decides it"),
}
"""Variables that are set for a process whatever a config says, and what decides them."""
BEFORE = "it is read as a process starts, and these have started by then: set it where enginehouse, or Ray, is started"
DECIDED_BY_PREFIX = {
    "RAY_": "it is Ray's: set it where enginehouse, or Ray, is started",
    "TORCHELASTIC_": "the rendezvous of the role's processes decides it",
    "ENGINEHOUSE_": "it is set for all processes alike: set it where enginehouse is started",
    "LD_": BEFORE,
    "PYTHON": BEFORE,
    "GLIBC_": BEFORE,
    "MALLOC_": BEFORE,
}


def check_variables(findings: Findings, key: str, variables: Mapping[str, str], launcher: str) -> None:
    """Refuse variables that would not hold, and secrets that stand in the config.

    Args:
        key: their config key: `"actor.engine.env"`.
        variables: by name; in their values `${NAME}` stands for one of this process's.
        launcher: `cluster.launcher`.
    """
    for name in variables:
        by_prefix = (why for prefix, why in DECIDED_BY_PREFIX.items() if name.startswith(prefix))
        if why := DECIDED.get(name) or next(by_prefix, ""):
            findings.refuse(f"{key}.{name} cannot be set: {why}")
    if variables and launcher == "inline":
        findings.refuse(
            f"{key}: an inline run has this one process, which has started: set {min(variables)} where enginehouse is "
            "started, or cluster.launcher=ray"
        )
    check_secrets(findings, key, variables)


def check_agreement(findings: Findings, roles: Mapping[str, RolePlan]) -> None:
    """Refuse a variable that roles which share processes want to be different; `roles` are by name."""
    wanted: dict[tuple[str, str], tuple[str, str]] = {}
    for name, role in roles.items():
        host = role.shares or name
        for variable, value in role.env.items():
            other, there = wanted.setdefault((host, variable), (name, value))
            if there != value:
                findings.refuse(
                    f"{name}.engine.env.{variable} is {value!r} and {other}.engine.env.{variable} {there!r}, and the "
                    "two roles share processes: set it in one of them, or to the same value"
                )
