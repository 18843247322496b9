"""The plan of a role: which processes to start, and what runs in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from enginehouse.plugin.capabilities import COLOCATES

if TYPE_CHECKING:
    from enginehouse.engines.model import ModelSpec
    from enginehouse.plugin import Backend
    from enginehouse.runtimes import Interpreter


@dataclass(frozen=True, kw_only=True)
class RolePlan:
    """A role: a model, the engine that runs it, and where.

    Attributes:
        kind: `"train"` for an engine that computes logprobs and gradients, `"rollout"` for one that generates.
        backend: name of a backend of that kind.
        options: the backend's options, checked and complete, as plain data.
        model: the model that it loads.
        processes: number of processes; each of a rollout is a replica.
        shares: the role in whose processes it lives; None: it has separate processes.
        devices_of: the role with which it takes turns on that role's devices, from separate processes (see
            `enginehouse.roles.device_turns`); None: it takes no turns.
        gpus: GPUs of each separate process, if the run is on GPUs.
        interpreter: the Python environment of its workers.
        env: environment variables of its processes, as the config has them.
        trained: True if the loop updates it, so that it has state to save.
        transport: name of the weight transport that brings it the actor's weights; None: it keeps its own.
        effect_check_every: weight updates between comparisons of their effect with the actor; 0 for none.
    """

    kind: Literal["train", "rollout"]
    backend: str
    options: dict[str, Any]
    model: ModelSpec
    processes: int
    shares: str | None = None
    devices_of: str | None = None
    gpus: int = 1
    interpreter: Interpreter
    env: Mapping[str, str] = field(default_factory=dict)
    trained: bool = False
    transport: str | None = None
    effect_check_every: int = 0


def own_processes(roles: Mapping[str, RolePlan]) -> dict[str, RolePlan]:
    """Return the roles that have separate processes."""
    return {name: role for name, role in roles.items() if role.shares is None}


def why_apart(actor: Interpreter, rollout: Interpreter, record: Backend | None) -> str:
    """Return why a rollout engine cannot live in the actor's processes, whatever their numbers; empty if it can.

    Args:
        actor: the Python environment of the actor's workers.
        rollout: the Python environment of the rollout's workers.
        record: the rollout's backend; None: it is not known.
    """
    if actor.python != rollout.python:
        return "its environment is not the actor's"
    if record is not None and COLOCATES not in record.capabilities:
        return "the engine needs its own process"
    return ""
