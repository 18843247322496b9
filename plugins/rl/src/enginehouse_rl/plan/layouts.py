"""Finds a layout that fits into the memory of the GPUs: it plans the run with small changes of its config."""

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
"""The smallest `tokens_per_microbatch` that is tried, because smaller micro-batches leave a GPU idle."""


def find_layout(
    config: AnyConfig, make_plan: Callable[[Sequence[str]], RunPlan], gpus: int
) -> tuple[tuple[str, ...], RunPlan] | None:
    """Return the overrides with which the run can start at the least loss of speed, and the plan with these overrides.
    Return None if the run cannot start with any of the overrides that are tried.

    Args:
        make_plan: makes the plan with further overrides, and raises `UserError` if the run cannot start.
    """
    for saving, place in itertools.product(_list_savings(config), [(), *_list_places(config, gpus)]):
        if overrides := (*place, *saving):
            try:
                return overrides, make_plan(overrides)
            except UserError:
                continue
    return None


def _list_savings(config: AnyConfig) -> list[tuple[str, ...]]:
    """Return overrides that reduce the memory of the actor's engine. Those that cost the least speed come first."""
    engine = config.actor.engine
    options = _read_options(config, TrainBackend, engine.backend) | engine.options
    savings: list[tuple[str, ...]] = [()]
    if options.get("activation_checkpointing", True) in (False, "false"):
        savings.append((f"{ENGINE}.activation_checkpointing=true",))
    if options.get("recompute") == "none":
        savings.append((f"{ENGINE}.recompute=full",))
    recomputing, budget = savings[-1], options.get("tokens_per_microbatch", 0)
    fewest = max(FEWEST_TOKENS, _count_longest(config))  # a row is in one micro-batch
    sizes = [budget >> halvings for halvings in (1, 2, 3, 4) if budget >> halvings >= fewest]
    savings += [(*recomputing, f"{ENGINE}.tokens_per_microbatch={size}") for size in sizes]
    if options.get("cpu_offload") is False:
        savings += [(*saving, f"{ENGINE}.cpu_offload=true") for saving in (recomputing, savings[-1])]
    return savings


def _count_longest(config: AnyConfig) -> int:
    """Return the maximum number of tokens of a row."""
    if isinstance(config, Config):
        return config.data.max_prompt_tokens + config.rollout.sampling.max_tokens
    return config.data.max_tokens


def _list_places(config: AnyConfig, gpus: int) -> Iterator[tuple[str, ...]]:
    """Return overrides that put actor and rollout in the same processes, on the same GPUs in turns, or each on half of
    the GPUs."""
    if not isinstance(config, Config):
        yield (f"actor.processes={gpus}",)
        return
    yield (f"actor.processes={gpus}", f"rollout.replicas={gpus}", "rollout.placement=colocated")
    engine = config.rollout.engine
    options = _read_options(config, RolloutBackend, engine.backend) | engine.options
    splits = "tensor_parallel" in options
    sizes = dict.fromkeys((options.get("tensor_parallel", 1), 1, 2, 4, 8)) if splits else (1,)
    for placement, actor, rollout in (("shared", gpus, gpus), ("separate", gpus - gpus // 2, gpus // 2)):
        for size in sizes:
            if rollout >= size and rollout % size == 0:
                counts = (f"actor.processes={actor}", f"rollout.replicas={rollout // size}")
                split = (f"rollout.engine.options.tensor_parallel={size}",) if splits else ()
                yield (*counts, f"rollout.placement={placement}", *split)


def _read_options(config: AnyConfig, kind: type[TrainBackend] | type[RolloutBackend], backend: str) -> dict[str, Any]:
    """Return the options of a backend, with their defaults."""
    switches = config.plugins
    plugins = configure_plugins(switches.enabled, switches.blocked, switches.strict)
    fields = resolve(plugins.get(kind, backend, elsewhere=True).options).model_fields
    return {name: field.get_default(call_default_factory=True) for name, field in fields.items()}
