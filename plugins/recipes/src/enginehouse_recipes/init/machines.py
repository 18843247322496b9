"""The machine of a first run, and which engines it gets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from enginehouse.errors import ConfigError

if TYPE_CHECKING:
    from enginehouse.plugin import Backend

LAPTOP = "laptop"
"""The machine without a GPU."""


class Machine(NamedTuple):
    """Where the run is.

    Attributes:
        gpus: 0: on the CPU.
        address: of a Ray cluster; empty: on the machine itself.
    """

    gpus: int = 0
    address: str = ""


_MACHINE = re.compile(r"(?P<gpus>\d+)(?: ?gpus?)?(?:@(?P<address>auto|\S+:\d+))?", re.IGNORECASE)
_WORDS = {LAPTOP: "0", "cpu": "0", "gpu": "1", "one gpu": "1"}


def machine_here() -> str:
    """This machine, as an answer."""
    from enginehouse_rl.plan.device import torch_has_cuda, visible_gpus

    return str(visible_gpus()) if visible_gpus() and torch_has_cuda() else LAPTOP


def read_machine(answer: str) -> Machine:
    """The machine of an answer: `"laptop"`, a number of GPUs, or `"8@ADDRESS"` of a Ray cluster.

    Raises:
        ConfigError: it is none, or has not as many.
    """
    from enginehouse_rl.plan.device import visible_gpus

    text = answer.strip().lower()
    found = _MACHINE.fullmatch(_WORDS.get(text, text))
    if found is None or (not int(found["gpus"]) and text not in _WORDS):
        raise ConfigError(
            f"the machine {answer!r} is none of these: {LAPTOP}; a number of GPUs, as 1 or 8; or GPUs of a Ray cluster "
            "and its address, as 8@auto or 16@10.0.0.1:6379"
        )
    machine = Machine(int(found["gpus"]), found["address"] or "")
    if not machine.address and 0 < (here := visible_gpus()) < machine.gpus:
        raise ConfigError(f"{machine.gpus} GPUs are not here, {here} are visible: say {here}, or {LAPTOP}")
    return machine


class Engines(NamedTuple):
    """What trains and what generates.

    Attributes:
        train: a training backend.
        rollout: a rollout backend.
        others: what is installed besides, in words.
        better: what would be better, and the line that brings it.
    """

    train: str = "torch"
    rollout: str = "torch"
    others: str = ""
    better: Sequence[str] = ()


def choose_engines(machine: Machine) -> Engines:
    """Of the installed engines those for a machine: on GPUs one that shards, and one that serves.

    Which they are is told by what they declare: both give their memory up to the other.
    """
    from enginehouse.plugin import RolloutBackend, TrainBackend, plugins
    from enginehouse.plugin.capabilities import OFFLOAD, SLEEP
    from enginehouse.plugin.first_party import find_not_installed, pip_line

    if not machine.gpus:
        return Engines()
    better = [f"not installed: {name} ({pip_line(name)})" for name in find_not_installed(plugins().plugins)]
    trainers = _ready(plugins().all(TrainBackend), OFFLOAD, machine, better)
    servers = _ready(plugins().all(RolloutBackend), SLEEP, machine, better)
    train = trainers[0] if trainers and machine.gpus > 1 else "torch"
    rollout = servers[0] if servers else "torch"
    others = ", ".join(dict.fromkeys([*trainers, *servers]))
    return Engines(train, rollout, f"Installed for GPUs: {others or 'none but torch'}", better)


def _ready(records: Sequence[Backend], capability: str, machine: Machine, better: list[str]) -> list[str]:
    """Names of engines beside the default one that could run there; what others lack goes to `better`."""
    from enginehouse.plugin import plugins
    from enginehouse.runtimes import NoRuntime, choose_runtime
    from enginehouse_rl.plan.device import visible_gpus

    names = []
    for record in records:
        if record.name == "torch" or "cuda" not in record.devices or capability not in record.capabilities:
            continue
        try:
            if visible_gpus() and not machine.address:
                choose_runtime(record, "auto", "cuda")
            names.append(plugins().name_of(record))
        except NoRuntime as error:
            better.append(str(error))
    return names
