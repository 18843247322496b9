"""Checks the environment variables that a config sets for the processes of a role (`engine.env`)."""

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
"""Variables that a config cannot set, each with the reason."""
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
    """Reject variables that cannot be set, and secrets that are written in the config.

    Args:
        key: the config key of the variables: `"actor.engine.env"`.
        variables: the values by name. `${NAME}` in a value stands for a variable of this process.
    """
    for name in variables:
        by_prefix = (reason for prefix, reason in DECIDED_BY_PREFIX.items() if name.startswith(prefix))
        if reason := DECIDED.get(name) or next(by_prefix, ""):
            findings.refuse(f"{key}.{name} cannot be set: {reason}")
    if variables and launcher == "inline":
        findings.refuse(
            f"{key}: an inline run has this one process, which has started: set {min(variables)} where enginehouse is "
            "started, or cluster.launcher=ray"
        )
    check_secrets(findings, key, variables)


def check_agreement(findings: Findings, roles: Mapping[str, RolePlan]) -> None:
    """Reject a variable that two roles in the same processes set to different values."""
    settings: dict[tuple[str, str], tuple[str, str]] = {}
    for name, role in roles.items():
        host = role.shares or name
        for variable, value in role.env.items():
            first, first_value = settings.setdefault((host, variable), (name, value))
            if first_value != value:
                findings.refuse(
                    f"{name}.engine.env.{variable} is {value!r} and {first}.engine.env.{variable} {first_value!r}, and "
                    "the two roles share processes: set it in one of them, or to the same value"
                )
