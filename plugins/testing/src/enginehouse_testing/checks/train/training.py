"""Checks several optimizer steps: schedule, clipping, weight decay, metrics, and skipped steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from enginehouse.engines.train import Mean, NonFiniteWeights, merge_metrics
from enginehouse_testing.check import EXACT, Checks, Measured, Seen, outputs_of, wrong
from enginehouse_testing.checks.train import reference
from enginehouse_testing.checks.train.reference import STEPS, TRAINING
from enginehouse_testing.comparison import larger, largest_difference, located, relative, same_bits
from enginehouse_testing.problem import MODELS, NOT_FINITE, POLICY, batch
from enginehouse_testing.rank import Rank, weights_of

CHECKS = Checks(tolerance=1e-4)


def step(engine: Any, shard: Any, loss: Any = POLICY) -> tuple[dict, dict]:
    """Take one optimizer step; return the metrics of `forward_backward` and of `optim_step`."""
    return dict(engine.forward_backward(shard, loss)), dict(engine.optim_step())


def train(rank: Rank, models: Sequence[str] = MODELS) -> dict[str, Any]:
    """Return the metrics of each step, and the weights after the last."""
    trained = {}
    for model in models:
        with rank.engine(model, **TRAINING) as engine:
            shard = rank.shard(engine, batch())
            figures = [step(engine, shard) for _ in range(STEPS)]
            trained[model] = (figures, weights_of(engine))
    return trained


@CHECKS.judge(train)
def training(seen: list[Seen], models: Sequence[str] = MODELS) -> Measured:
    """Weights after 5 steps with warm-up, schedule, clipping and weight decay agree with the oracle."""
    return larger(
        *(
            located(
                largest_difference(result.value[model][1], reference.trained(model)[1]), f"; {model} model, rank {rank}"
            )
            for model in models
            for rank, result in enumerate(seen)
        )
    )


@CHECKS.judge(train)
def metrics(seen: list[Seen], models: Sequence[str] = MODELS) -> Measured:
    """Loss, gradient norm and learning rate of each step agree with the oracle. The error is relative."""
    measured = []
    model = models[0]
    right = reference.trained(model)[0]
    for number in range(STEPS):
        merged = merge_metrics(value[model][0][number][0] for value in outputs_of(seen))
        loss = merged.get("loss")
        if not isinstance(loss, Mean):
            return wrong("forward_backward returns no Mean 'loss'")
        measured.append(relative(loss.value, right[number]["loss"], f"loss of step {number}"))
        for result in seen:
            stepped = result.value[model][0][number][1]
            if missing := {"grad_norm", "lr", "skipped"} - stepped.keys():
                return wrong(f"optim_step returns no {sorted(missing)[0]!r}")
            measured += [
                relative(stepped[name], right[number][name], f"{name} of step {number}") for name in ("grad_norm", "lr")
            ]
            if stepped["skipped"] != 0.0:
                return wrong(f"step {number} reports that it was skipped")
    return larger(*measured)


def _skip(rank: Rank) -> dict[str, Any]:
    with rank.engine("tied", **TRAINING) as engine:
        shard = rank.shard(engine, batch())
        step(engine, shard)
        before = weights_of(engine)
        # Only on the last shard, so that the other ranks have to be told.
        last = engine.mesh.dp_rank == engine.mesh.dp_size - 1
        skipped = step(engine, shard, NOT_FINITE if last else POLICY)[1]
        after = weights_of(engine)
        step(engine, shard)
        return {"before": before, "skipped": skipped, "after": after, "next": weights_of(engine)}


@CHECKS.judge(_skip)
def skips_nonfinite(seen: list[Seen]) -> Measured:
    """A step whose gradient is infinite on one rank changes nothing on any rank, and does not affect the next step."""
    measured = []
    for result in seen:
        if result.value["skipped"].get("skipped") != 1.0:
            return wrong("a step with an infinite gradient does not report skipped=1")
        if (changed := same_bits(result.value["after"], result.value["before"], "after the skipped step")).error:
            return wrong(changed.detail)
        difference = largest_difference(result.value["next"], reference.trained("tied", 2)[1])
        measured.append(located(difference, " after the next step"))
    return larger(*measured)


_GROWING: dict[str, Any] = {"lr": 1e-3, "weight_decay": 3e3, "schedule": "constant"}
"""Options under which a step takes each weight to about minus twice its value."""


def _lose_weight(rank: Rank) -> dict[str, Any]:
    """Take a step after which one weight is beyond float32. If weights are sharded, only one rank holds that weight."""
    with rank.engine("edge", **_GROWING) as engine:
        engine.forward_backward(rank.shard(engine, batch()), POLICY)
        try:
            engine.optim_step()
        except Exception as error:
            lost = isinstance(error, NonFiniteWeights)
            return {"raised": type(error).__name__, "lost": lost, "message": str(error)}
        return {"raised": "", "lost": False, "message": ""}


@CHECKS.judge(_lose_weight, since="1.1", tolerance=EXACT)
def finite_weights(seen: list[Seen]) -> Measured:
    """A step that takes one weight beyond the range of float32 raises NonFiniteWeights on every rank, and names the
    weight."""
    for rank, result in enumerate(seen):
        raised, message = result.value["raised"], result.value["message"]
        if not result.value["lost"]:
            instead = f"raises {raised} ({message})" if raised else "raises nothing"
            return wrong(
                f"optim_step takes a weight beyond float32 and {instead} on rank {rank}. It must check the weights "
                "after each step, and raise enginehouse.engines.NonFiniteWeights on every rank, whichever rank holds "
                "the weight. The error ends the run before such weights are served or saved",
            )
        if "embed_tokens" not in message:
            return wrong(f"NonFiniteWeights does not name the parameter: {message}")
    return Measured(0.0)
