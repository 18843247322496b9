"""Logprobs and entropy of given tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from enginehouse.engines.train import Outputs
from enginehouse_testing.check import PROTOCOL, Check, Measured, Seen, outputs_of
from enginehouse_testing.checks.train import reference
from enginehouse_testing.comparison import larger, largest_difference
from enginehouse_testing.problem import MODELS, TEMPERATURE, batch
from enginehouse_testing.rank import Rank


def score(rank: Rank, models: Sequence[str] = MODELS) -> dict[tuple[str, float, bool], dict[str, torch.Tensor]]:
    """Logprobs and entropy of this rank's rows."""
    found = {}
    for model in models:
        with rank.engine(model) as engine:
            shard = rank.shard(engine, batch())
            for temperature in (1.0, TEMPERATURE):
                for masked in (False, True):
                    rows = shard if masked else shard.drop(["loss_mask"])
                    outputs = Outputs(entropy=True, temperature=temperature, entropy_gradient=not masked)
                    scored = engine.forward(rows, outputs)
                    if scored is not None:
                        columns = {name: scored.ragged(name).values.cpu() for name in ("logprobs", "entropy")}
                        found[model, temperature, masked] = columns
    return found


def judge(seen: list[Seen], models: Sequence[str] = MODELS) -> Measured:
    """Against the oracle's."""
    parts = outputs_of(seen)
    mask = batch().ragged("loss_mask").values
    measured = []
    for model in models:
        for temperature in (1.0, TEMPERATURE):
            right = reference.scores(model, temperature)
            for masked in (False, True):
                found = {name: torch.cat([part[model, temperature, masked][name] for part in parts]) for name in right}
                expected = {
                    name: torch.where(mask, values, 0.0) if masked else values for name, values in right.items()
                }
                one = largest_difference(found, expected)
                where = f"{model} model, temperature {temperature:g}, {'loss_mask' if masked else 'all tokens'}"
                measured.append(Measured(one.error, f"{one.detail}; {where}"))
    return larger(*measured)


CHECKS = (
    Check(
        name="logprobs",
        capability=PROTOCOL,
        claim="Logprobs and entropy of each token are the oracle's, at any temperature, with and without a loss mask; "
        "relative to the largest",
        tolerance=1e-5,
        acts=(score,),
        judge=judge,
    ),
)
