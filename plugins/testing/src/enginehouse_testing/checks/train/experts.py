"""Checks of training engines that are repeated with a mixture of experts as the model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from enginehouse.plugin import capabilities
from enginehouse_testing.check import PROTOCOL, Check
from enginehouse_testing.checks.train import checkpoints, endings, gradients, outgoing, scores, training
from enginehouse_testing.problem import EXPERTS


@functools.cache
def _with_experts(function: Callable[..., Any], argument: str) -> Callable[..., Any]:
    """Return an act or a judge that gets the mixture of experts as its model.

    The result is cached: if several checks share `function`, they also share the result, so it runs only once.
    """
    return functools.partial(function, **{argument: EXPERTS if argument == "models" else EXPERTS[0]})


def _of_experts(check: Check, argument: str) -> Check:
    """Return the check for a mixture of experts. `argument` names the parameter of its acts that takes the model."""
    return replace(
        check,
        name=f"experts_{check.name}",
        capability=capabilities.EXPERTS,
        claim=f"For a mixture of experts: {check.claim[0].lower()}{check.claim[1:]}",
        acts=tuple(_with_experts(act, argument) for act in check.acts),
        judge=_with_experts(check.judge, argument) if argument == "models" else check.judge,
        tolerances={},
        also="" if check.capability == PROTOCOL else check.capability,
    )


_MODULES = (scores, gradients, training, outgoing, checkpoints, endings)
_CHECKS = {check.name: check for module in _MODULES for check in module.CHECKS}

CHECKS = (
    *(
        _of_experts(_CHECKS[name], "models")
        for name in ("logprobs", "gradients", "training", "metrics", "weights", "export")
    ),
    *(_of_experts(_CHECKS[name], "model") for name in ("checkpoint", "reshard_checkpoint", "shutdown")),
)
