"""The machine of a first run, and its engines."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from enginehouse.errors import ConfigError

if TYPE_CHECKING:
    from enginehouse.plugin import Backend

LAPTOP = "laptop"
"""The answer for a machine without a GPU."""


class Machine(NamedTuple):
    gpus: int = 0  # 0: the CPU
    address: str = ""  # of a Ray cluster; empty: this machine


_MACHINE = re.compile(r"(?P<gpus>\d+)(?: ?gpus?)?(?:@(?P<address>auto|\S+:\d+))?", re.IGNORECASE)
_WORDS = {LAPTOP: "0", "cpu": "0", "gpu": "1", "one gpu": "1"}


def describe_machine() -> str:
    """Return the answer that describes this machine."""
    from enginehouse_rl.plan.device import torch_has_cuda, visible_gpus

    return str(visible_gpus()) if visible_gpus() and torch_has_cuda() else LAPTOP


def read_machine(answer: str) -> Machine:
    """Read an answer: `"laptop"`, a number of GPUs, or `"8@ADDRESS"` for GPUs of a Ray cluster.

    Raises:
        ConfigError: it is none of these, or this machine has fewer GPUs.
    """
    from enginehouse_rl.plan.device import visible_gpus

    text = answer.strip().lower()
    match = _MACHINE.fullmatch(_WORDS.get(text, text))
    if match is None or (not int(match["gpus"]) and text not in _WORDS):
        raise ConfigError(
            f"the machine must be {LAPTOP}, a number of GPUs such as 1 or 8, or GPUs and the address of a Ray cluster "
            f"such as 8@auto or 16@10.0.0.1:6379, not {answer!r}"
        )
    machine = Machine(int(match["gpus"]), match["address"] or "")
    if not machine.address and 0 < (here := visible_gpus()) < machine.gpus:
        raise ConfigError(f"this machine must have {machine.gpus} GPUs, but has {here}: choose {here}, or {LAPTOP}")
    return machine


class Engines(NamedTuple):
    """The backends that train and generate."""

    train: str = "torch"
    rollout: str = "torch"
    others: str = ""  # a text about other installed backends
    better: Sequence[str] = ()  # lines about better backends and how to install them


def choose_engines(machine: Machine) -> Engines:
    """Choose from the installed engines. On GPUs, choose a training engine that shards and a rollout engine that
    serves.

    Each engine must be able to release its memory for the other.
    """
    from enginehouse.plugin import RolloutBackend, TrainBackend, plugins
    from enginehouse.plugin.capabilities import OFFLOAD, SLEEP
    from enginehouse.plugin.first_party import find_not_installed, pip_line

    if not machine.gpus:
        return Engines()
    better = [f"not installed: {name} ({pip_line(name)})" for name in find_not_installed(plugins().plugins)]
    trainers = _list_ready_engines(plugins().all(TrainBackend), OFFLOAD, machine, better)
    servers = _list_ready_engines(plugins().all(RolloutBackend), SLEEP, machine, better)
    train = trainers[0] if trainers and machine.gpus > 1 else "torch"
    rollout = servers[0] if servers else "torch"
    others = ", ".join(dict.fromkeys([*trainers, *servers]))
    return Engines(train, rollout, f"Installed for GPUs: {others or 'none but torch'}", better)


def _list_ready_engines(records: Sequence[Backend], capability: str, machine: Machine, better: list[str]) -> list[str]:
    """Return the names of the engines that can run, except the default engine. If an engine cannot run before a runtime
    is created, append the reason to `better`."""
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
