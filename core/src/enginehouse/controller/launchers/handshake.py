"""Checks, before anything is built in a worker, that it and the driver understand each other.

Workers of one group may run under the interpreter of another Python environment. Each side reads what the other sends,
so both must have the same Python minor, Ray, wire format and plugin contract.
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
    """The versions a process runs on, and the path of its interpreter."""

    python: str
    ray: str
    wire: int
    contract: str
    interpreter: str


def read_identity() -> Identity:
    """Return the identity of this process."""
    return Identity(
        python_of_this_process(), metadata.version("ray"), WIRE_VERSION, ".".join(map(str, CONTRACT)), sys.executable
    )


def check_identity(group: str, rank: int, identity: Any) -> None:
    """Compare a worker's identity (None from an old enginehouse, which reports none) with this process's.

    Raises:
        ControllerError: they cannot work together; the message names the versions of both.
    """
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
