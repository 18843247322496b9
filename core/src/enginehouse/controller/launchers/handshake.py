"""What driver and workers must have in common, asked of each worker before anything is built in it.

Workers of one group may run under the interpreter of another Python environment. What crosses between the sides is
read by the other side's code, so both must have the same Python minor, Ray, wire format and plugin contract.
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
    """What a process runs on.

    Attributes:
        python: implementation and minor version of the interpreter.
        ray: version of Ray.
        wire: version of the wire format.
        contract: version of the plugin contract.
        interpreter: path of the interpreter.
    """

    python: str
    ray: str
    wire: int
    contract: str
    interpreter: str


def read_identity() -> Identity:
    """What this process runs on."""
    return Identity(
        python_of_this_process(), metadata.version("ray"), WIRE_VERSION, ".".join(map(str, CONTRACT)), sys.executable
    )


def check_identity(group: str, rank: int, there: Any) -> None:
    """Compare a worker with this process.

    Args:
        group: the worker's group.
        rank: its rank.
        there: what it said of itself; None from a version of enginehouse that says nothing.

    Raises:
        ControllerError: they cannot work together; the message names what both have.
    """
    here = read_identity()
    if not isinstance(there, Identity):
        said = ["it runs an enginehouse that is older than runtimes are"]
        where = "its interpreter"
    else:
        where = there.interpreter
        said = [
            f"{WORDS[field.name]} is {getattr(there, field.name)} there and {getattr(here, field.name)} here"
            for field in fields(Identity)
            if field.name in WORDS and getattr(there, field.name) != getattr(here, field.name)
        ]
    if said:
        raise ControllerError(
            f"{group} rank {rank} cannot work with this driver: {'; '.join(said)} (there: {where}; here: "
            f"{here.interpreter}). `enginehouse runtime doctor` says which runtimes fit, and what cures the others"
        )
