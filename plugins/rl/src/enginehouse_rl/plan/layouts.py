"""Looking for a layout that the devices can hold: small changes of a config, tried by `plan` itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from enginehouse.errors import UserError
from enginehouse.plugin import RolloutBackend, TrainBackend, configure_plugins, resolve
from enginehouse_rl.config.schema import Config

if TYPE_CHECKING:
    from enginehouse_rl.config.schema import AnyConfig
    from enginehouse_rl.plan.plan import RunPlan

ENGINE = "actor.engine.options"
FEWEST_TOKENS = 1024
"""Micro-batches of fewer tokens are not tried: they leave a GPU idle."""


def nearest_layout(
    config: AnyConfig, planned: Callable[[Sequence[str]], RunPlan], gpus: int
) -> tuple[tuple[str, ...], RunPlan] | None:
    """The overrides that cost least and let the run start, with its plan; None where none of those tried does.

    Args:
        config: what they change.
        planned: plans the run with further overrides; raises `UserError` where it cannot be.
        gpus: how many there are.
    """
    for less, place in itertools.product(_savings(config), [(), *_places(config, gpus)]):
        if changes := (*place, *less):
            try:
                return changes, planned(changes)
            except UserError:
                continue
    return None


def _savings(config: AnyConfig) -> list[tuple[str, ...]]:
    """Return the options that make the actor's engine take less memory, those that cost least speed first."""
    engine = config.actor.engine
    given = _options(config, TrainBackend, engine.backend) | engine.options
    found: list[tuple[str, ...]] = [()]
    if given.get("activation_checkpointing", True) in (False, "false"):
        found.append((f"{ENGINE}.activation_checkpointing=true",))
    if given.get("recompute") == "none":
        found.append((f"{ENGINE}.recompute=full",))
    recomputed, budget = found[-1], given.get("tokens_per_microbatch", 0)
    fewest = max(FEWEST_TOKENS, _longest(config))  # a row is in one micro-batch
    sizes = [budget >> halvings for halvings in (1, 2, 3, 4) if budget >> halvings >= fewest]
    found += [(*recomputed, f"{ENGINE}.tokens_per_microbatch={size}") for size in sizes]
    if given.get("cpu_offload") is False:
        found += [(*less, f"{ENGINE}.cpu_offload=true") for less in (recomputed, found[-1])]
    return found


def _longest(config: AnyConfig) -> int:
    """Tokens that a row may have."""
    if isinstance(config, Config):
        return config.data.max_prompt_tokens + config.rollout.sampling.max_tokens
    return config.data.max_tokens


def _places(config: AnyConfig, gpus: int) -> Iterator[tuple[str, ...]]:
    """Return the places: actor and rollout in the same processes, on the same GPUs in turns, or on half each."""
    if not isinstance(config, Config):
        yield (f"actor.processes={gpus}",)
        return
    yield (f"actor.processes={gpus}", f"rollout.replicas={gpus}", "rollout.placement=colocated")
    engine = config.rollout.engine
    options = _options(config, RolloutBackend, engine.backend) | engine.options
    splits = "tensor_parallel" in options
    given = options.get("tensor_parallel", 1)
    for placement, actor in (("shared", gpus), ("separate", gpus - gpus // 2)):
        there = gpus if placement == "shared" else gpus // 2
        for split in dict.fromkeys((given, 1, 2, 4, 8)) if splits else (1,):
            if there >= split and there % split == 0:
                said = (f"actor.processes={actor}", f"rollout.replicas={there // split}")
                split_by = (f"rollout.engine.options.tensor_parallel={split}",) if splits else ()
                yield (*said, f"rollout.placement={placement}", *split_by)


def _options(config: AnyConfig, kind: type[TrainBackend] | type[RolloutBackend], backend: str) -> dict[str, Any]:
    """The options that a backend has, with their defaults."""
    switches = config.plugins
    plugins = configure_plugins(switches.enabled, switches.blocked, switches.strict)
    fields = resolve(plugins.get(kind, backend, elsewhere=True).options).model_fields
    return {name: field.get_default(call_default_factory=True) for name, field in fields.items()}
