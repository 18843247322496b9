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
        ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"), "the placement of the role sets it"
    ),
    "CUDA_DEVICE_ORDER": "roles that share GPUs must use the same order: set it where enginehouse or Ray is started",
    "OMP_NUM_THREADS": "cluster.threads_per_process sets it",
    **dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), "the process's rank sets it"),
    **dict.fromkeys(("MASTER_ADDR", "MASTER_PORT"), "the rendezvous of the role's processes sets it"),
}
"""Variables that a config cannot set, each with the reason."""
BEFORE = "a process reads it when it starts, before engine.env is applied: set it where enginehouse or Ray is started"
DECIDED_BY_PREFIX = {
    "RAY_": "Ray reads it: set it where enginehouse or Ray is started",
    "TORCHELASTIC_": "the rendezvous of the role's processes sets it",
    "ENGINEHOUSE_": "it must be the same in all processes: set it where enginehouse is started",
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
            f"{key}: an inline run has only this process, which has already started: set {min(variables)} where "
            "enginehouse is started, or use cluster.launcher=ray"
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
                    f"{name}.engine.env.{variable} is {value!r} and {first}.engine.env.{variable} is {first_value!r}, "
                    "but the two roles share processes: set the variable for one role, or to the same value for both"
                )
