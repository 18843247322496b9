"""Checks that a worker and the driver have compatible versions, before the worker builds any object.

Workers may run in another Python environment than the driver. Worker and driver read each other's data. They therefore
need the same Python minor version, Ray version, wire format and plugin contract.
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
    """Compare the identity of a worker with that of this process.

    Args:
        identity: the worker's identity; None if its version of enginehouse is too old to report an identity.

    Raises:
        ControllerError: the versions differ. The message names the versions of both processes.
    """
    here = read_identity()
    if not isinstance(identity, Identity):
        differences = ["its version of enginehouse is too old to run in a runtime"]
        where = "its interpreter"
    else:
        where = identity.interpreter
        differences = [
            f"{WORDS[field.name]} is {getattr(identity, field.name)} in the worker, but {getattr(here, field.name)} in "
            "the driver"
            for field in fields(Identity)
            if field.name in WORDS and getattr(identity, field.name) != getattr(here, field.name)
        ]
    if differences:
        raise ControllerError(
            f"{group} rank {rank} cannot work with this driver: {'; '.join(differences)} (worker: {where}; driver: "
            f"{here.interpreter}). `enginehouse runtime doctor` shows which runtimes are usable, and how to repair the "
            "others"
        )
