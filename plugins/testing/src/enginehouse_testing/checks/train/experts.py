"""A mixture of experts in what it may change: what the router and the experts compute, and where their weights are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from enginehouse.plugin import capabilities
from enginehouse_testing.check import PROTOCOL, Check
from enginehouse_testing.checks.train import checkpoints, endings, gradients, scores, training, weights
from enginehouse_testing.problem import EXPERTS


def _of_experts(check: Check, acts: tuple[Callable[..., Any], ...], judge: Callable[..., Any]) -> Check:
    also = "" if check.capability == PROTOCOL else check.capability
    return replace(
        check,
        name=f"experts_{check.name}",
        capability=capabilities.EXPERTS,
        claim=f"Of a mixture of experts: {check.claim[0].lower()}{check.claim[1:]}",
        acts=acts,
        judge=judge,
        also=also,
    )


def _by_name(checks: tuple[Check, ...], name: str) -> Check:
    return next(check for check in checks if check.name == name)


_TRAIN = partial(training.train, models=EXPERTS)
_SAVE, _LOAD = partial(checkpoints.save, model=EXPERTS[0]), partial(checkpoints.load, model=EXPERTS[0])

CHECKS = (
    _of_experts(
        _by_name(scores.CHECKS, "logprobs"),
        (partial(scores.score, models=EXPERTS),),
        partial(scores.judge, models=EXPERTS),
    ),
    _of_experts(
        _by_name(gradients.CHECKS, "gradients"),
        (partial(gradients.one_step, models=EXPERTS),),
        partial(gradients.judge, models=EXPERTS),
    ),
    _of_experts(_by_name(training.CHECKS, "training"), (_TRAIN,), partial(training.judge_weights, models=EXPERTS)),
    _of_experts(_by_name(training.CHECKS, "metrics"), (_TRAIN,), partial(training.judge_figures, models=EXPERTS)),
    _of_experts(
        _by_name(weights.CHECKS, "weights"),
        (partial(weights.read, models=EXPERTS),),
        partial(weights.judge_weights, models=EXPERTS),
    ),
    _of_experts(
        _by_name(weights.CHECKS, "export"),
        (partial(weights.export, models=EXPERTS),),
        partial(weights.judge_export, models=EXPERTS),
    ),
    _of_experts(_by_name(checkpoints.CHECKS, "checkpoint"), (_SAVE, _LOAD), checkpoints.judge),
    _of_experts(_by_name(checkpoints.CHECKS, "reshard_checkpoint"), (_SAVE, _LOAD), checkpoints.judge_training),
    _of_experts(
        _by_name(endings.CHECKS, "shutdown"), (partial(endings.one_after_the_other, model=EXPERTS[0]),), endings.judge
    ),
)
