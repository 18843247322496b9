"""Several optimizer steps: schedule, clipping, weight decay, figures, and steps that are not taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from enginehouse.engines.train import Mean, NonFiniteWeights, merge_metrics
from enginehouse_testing.check import PROTOCOL, Check, Measured, Seen, outputs_of
from enginehouse_testing.checks.train import reference
from enginehouse_testing.checks.train.reference import STEPS, TRAINING
from enginehouse_testing.comparison import larger, largest_difference, relative, same_bits
from enginehouse_testing.problem import MODELS, NOT_FINITE, POLICY, batch
from enginehouse_testing.rank import Rank, weights_of


def step(engine: Any, shard: Any, loss: Any = POLICY) -> tuple[dict, dict]:
    """One optimizer step; its two kinds of figures."""
    return dict(engine.forward_backward(shard, loss)), dict(engine.optim_step())


def train(rank: Rank, models: Sequence[str] = MODELS) -> dict[str, Any]:
    """Figures of each step, and the weights after the last."""
    found = {}
    for model in models:
        with rank.engine(model, **TRAINING) as engine:
            shard = rank.shard(engine, batch())
            figures = [step(engine, shard) for _ in range(STEPS)]
            found[model] = (figures, weights_of(engine))
    return found


def judge_weights(seen: list[Seen], models: Sequence[str] = MODELS) -> Measured:
    """Against the oracle's."""
    measured = []
    for model in models:
        for rank, one in enumerate(seen):
            found = largest_difference(one.value[model][1], reference.trained(model)[1])
            measured.append(Measured(found.error, f"{found.detail}; {model} model, rank {rank}"))
    return larger(*measured)


def judge_figures(seen: list[Seen], models: Sequence[str] = MODELS) -> Measured:
    """Against the oracle's."""
    measured = []
    model = models[0]
    right = reference.trained(model)[0]
    for number in range(STEPS):
        merged = merge_metrics(value[model][0][number][0] for value in outputs_of(seen))
        loss = merged.get("loss")
        if not isinstance(loss, Mean):
            return Measured(float("inf"), "forward_backward returns no Mean 'loss'")
        measured.append(relative(loss.value, right[number]["loss"], f"loss of step {number}"))
        for one in seen:
            stepped = one.value[model][0][number][1]
            if missing := {"grad_norm", "lr", "skipped"} - stepped.keys():
                return Measured(float("inf"), f"optim_step returns no {sorted(missing)[0]!r}")
            measured += [
                relative(stepped[name], right[number][name], f"{name} of step {number}") for name in ("grad_norm", "lr")
            ]
            if stepped["skipped"] != 0.0:
                return Measured(float("inf"), f"step {number} says it was skipped")
    return larger(*measured)


def _skip(rank: Rank) -> dict[str, Any]:
    with rank.engine("tied", **TRAINING) as engine:
        shard = rank.shard(engine, batch())
        step(engine, shard)
        before = weights_of(engine)
        # On the last shard alone: the others have to learn of it.
        last = engine.mesh.dp_rank == engine.mesh.dp_size - 1
        skipped = step(engine, shard, NOT_FINITE if last else POLICY)[1]
        after = weights_of(engine)
        step(engine, shard)
        return {"before": before, "skipped": skipped, "after": after, "next": weights_of(engine)}


def _judge_skip(seen: list[Seen]) -> Measured:
    measured = []
    for one in seen:
        if one.value["skipped"].get("skipped") != 1.0:
            return Measured(float("inf"), "a step with an infinite gradient does not say skipped=1")
        if (changed := same_bits(one.value["after"], one.value["before"], "after the skipped step")).error:
            return Measured(float("inf"), changed.detail)
        found = largest_difference(one.value["next"], reference.trained("tied", 2)[1])
        measured.append(Measured(found.error, f"{found.detail} after the next step"))
    return larger(*measured)


_GROWING: dict[str, Any] = {"lr": 1e-3, "weight_decay": 3e3, "schedule": "constant"}
"""Options under which a step takes each weight to about minus its double."""


def _lose(rank: Rank) -> dict[str, Any]:
    """A step after which one weight, of one rank where each has a part, is beyond float32."""
    with rank.engine("edge", **_GROWING) as engine:
        engine.forward_backward(rank.shard(engine, batch()), POLICY)
        try:
            engine.optim_step()
        except Exception as error:
            return {"raised": type(error).__name__, "lost": isinstance(error, NonFiniteWeights), "said": str(error)}
        return {"raised": "", "lost": False, "said": ""}


def _judge_lost(seen: list[Seen]) -> Measured:
    for rank, one in enumerate(seen):
        if not one.value["lost"]:
            instead = f"raises {one.value['raised']} ({one.value['said']})" if one.value["raised"] else "raises nothing"
            return Measured(
                float("inf"),
                f"optim_step takes a weight beyond float32 and {instead} on rank {rank}. It has to look at the weights "
                "after each step, and to raise enginehouse.engines.NonFiniteWeights on every rank, whichever rank's "
                "part it is: the error ends the run before such weights are served or saved",
            )
        if "embed_tokens" not in one.value["said"]:
            return Measured(float("inf"), f"NonFiniteWeights does not name the parameter: {one.value['said']}")
    return Measured(0.0, "")


CHECKS = (
    Check(
        name="training",
        capability=PROTOCOL,
        claim=f"Weights after {STEPS} steps with warm-up, schedule, clipping and weight decay are the oracle's",
        tolerance=1e-4,
        acts=(train,),
        judge=judge_weights,
    ),
    Check(
        name="metrics",
        capability=PROTOCOL,
        claim="Loss, gradient norm and learning rate of each step are the oracle's; relative",
        tolerance=1e-4,
        acts=(train,),
        judge=judge_figures,
    ),
    Check(
        name="skips_nonfinite",
        capability=PROTOCOL,
        claim="A step whose gradient is infinite on one rank changes nothing on any, and the next is as if it was not",
        tolerance=1e-4,
        acts=(_skip,),
        judge=_judge_skip,
    ),
    Check(
        name="finite_weights",
        since="1.1",
        capability=PROTOCOL,
        claim="A step that takes one weight beyond float32 raises NonFiniteWeights on every rank, and names it",
        tolerance=0.0,
        acts=(_lose,),
        judge=_judge_lost,
    ),
)
