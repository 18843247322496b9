"""Checks that a worker and the driver have compatible versions, before the worker builds any object.

Workers of one group may run in another Python environment. Both sides read each other's data, so they need the same
Python minor version, Ray version, wire format and plugin contract.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from importlib import metadata
from typing import Any

from enginehouse.controller.errors import ControllerError
from enginehouse.data.wire_version import WIRE_VERSION
from enginehouse.plugin import CONTRACT
from enginehouse.runtimes.ingredients import python_of_this_process

WORDS = {"python": "Python", "ray": "Ray", "wire": "wire format", "contract": "plugin contract"}


@dataclass(frozen=True, slots=True)
class Identity:
    """Versions of a process, and the path of its interpreter."""

    python: str
    ray: str
    wire: int
    contract: str
    interpreter: str


def read_identity() -> Identity:
    return Identity(
        python_of_this_process(), metadata.version("ray"), WIRE_VERSION, ".".join(map(str, CONTRACT)), sys.executable
    )


def check_identity(group: str, rank: int, identity: Any) -> None:
    """Compare a worker's identity with this process's. An enginehouse that is too old to report an identity gives None.
    Raises `ControllerError` if the versions differ; the message names both sides' versions."""
    here = read_identity()
    if not isinstance(identity, Identity):
        differences = ["it runs an enginehouse that is older than runtimes are"]
        where = "its interpreter"
    else:
        where = identity.interpreter
        differences = [
            f"{WORDS[field.name]} is {getattr(identity, field.name)} there and {getattr(here, field.name)} here"
            for field in fields(Identity)
            if field.name in WORDS and getattr(identity, field.name) != getattr(here, field.name)
        ]
    if differences:
        raise ControllerError(
            f"{group} rank {rank} cannot work with this driver: {'; '.join(differences)} (there: {where}; here: "
            f"{here.interpreter}). `enginehouse runtime doctor` says which runtimes fit, and what cures the others"
        )
