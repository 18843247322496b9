"""The plan of a role: its processes, and the engine in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from enginehouse.plugin.capabilities import COLOCATES
from enginehouse.weights.effect import QUANTIZED_TOLERANCE, TOLERANCES

if TYPE_CHECKING:
    from enginehouse.engines.model import ModelSpec
    from enginehouse.plugin import Backend
    from enginehouse.runtimes import Interpreter


@dataclass(frozen=True, kw_only=True)
class RolePlan:
    """A role: a model, its engine, and its processes.

    Attributes:
        kind: `"train"` for an engine that computes logprobs and gradients, `"rollout"` for an engine that generates.
        options: options of the engine, checked and complete, as plain data.
        processes: number of processes; each process of a rollout is a replica.
        shares: role whose processes it shares; None: it has separate processes.
        devices_of: role with which it takes turns on that role's devices, from separate processes (see
            `enginehouse.roles.device_turns`); None: it takes no turns.
        gpus: number of GPUs of each separate process, in a run on GPUs.
        env: environment variables of its processes, as the config has them.
        trained: True if the loop updates the role, so that it has state to save.
        transport: name of the weight transport from the actor; None: the role keeps its own weights.
        quantizes: True if the engine serves weights in fewer bits than it is sent.
        effect_check_every: number of weight updates from one effect check against the actor to the next; 0: no effect
            checks.
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
    quantizes: bool = False
    effect_check_every: int = 0


def default_tolerance(roles: Mapping[str, RolePlan]) -> float:
    """Return the largest mean difference of logprobs, in nats, that effect checks accept if none is set. It is wider if
    the rollout serves quantized weights."""
    if roles["rollout"].quantizes:
        return QUANTIZED_TOLERANCE
    return TOLERANCES.get(roles["actor"].model.dtype, TOLERANCES["bfloat16"])


def own_processes(roles: Mapping[str, RolePlan]) -> dict[str, RolePlan]:
    """Return the roles that have separate processes."""
    return {name: role for name, role in roles.items() if role.shares is None}


def why_apart(actor: Interpreter, rollout: Interpreter, record: Backend | None) -> str:
    """Return the reason why a rollout engine cannot run in the actor's processes, however many these are. Return an
    empty text if there is no such reason.

    Args:
        record: record of the rollout's engine; None if unknown.
    """
    if actor.python != rollout.python:
        return "it runs in another Python environment than the actor"
    if record is not None and COLOCATES not in record.capabilities:
        return "the engine needs its own process"
    return ""
