"""Checks logprobs and entropy of given tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from enginehouse.engines.train import Outputs
from enginehouse_testing.check import Checks, Measured, Seen, outputs_of
from enginehouse_testing.checks.train import reference
from enginehouse_testing.comparison import larger, largest_difference, located
from enginehouse_testing.problem import MODELS, TEMPERATURE, batch_of
from enginehouse_testing.rank import Rank

CHECKS = Checks(tolerance=1e-5)

TOLERANCES = {"float32": 1e-5, "bfloat16": 0.1}
"""Largest error for a user's model. A layer rounds about eight times in a row, in random directions. 30 layers then err
by the dtype's rounding times sqrt(240), 2^-9 * 15.5 = 0.03 in bfloat16, and the largest of 200 tokens by three times
that: 0.056 was measured with 30 layers of SmolLM2-135M on a CPU. In float32 it is 3e-6, and sums over a vocabulary of
tens of thousands of tokens add as much."""


def score(rank: Rank, models: Sequence[str] = MODELS) -> dict[tuple[str, float, bool], dict[str, torch.Tensor]]:
    """Return logprobs and entropy of this rank's rows."""
    scores = {}
    for model in models:
        with rank.engine(model) as engine:
            shard = rank.shard(engine, batch_of(model))
            for temperature in (1.0, TEMPERATURE):
                for masked in (False, True):
                    rows = shard if masked else shard.drop(["loss_mask"])
                    outputs = Outputs(entropy=True, temperature=temperature, entropy_gradient=not masked)
                    scored = engine.forward(rows, outputs)
                    if scored is not None:
                        columns = {name: scored.ragged(name).values.cpu() for name in ("logprobs", "entropy")}
                        scores[model, temperature, masked] = columns
    return scores


@CHECKS.judge(score, tolerances=TOLERANCES)
def logprobs(seen: list[Seen], models: Sequence[str] = MODELS) -> Measured:
    """Logprobs and entropy of each token agree with the oracle, at any temperature, with and without a loss mask. The
    error is relative to the largest magnitude."""
    parts = outputs_of(seen)
    measured = []
    for model in models:
        mask = batch_of(model).ragged("loss_mask").values
        for temperature in (1.0, TEMPERATURE):
            right = reference.scores(model, temperature)
            for masked in (False, True):
                scores = {name: torch.cat([part[model, temperature, masked][name] for part in parts]) for name in right}
                expected = {
                    name: torch.where(mask, values, 0.0) if masked else values for name, values in right.items()
                }
                where = f"; {model} model, temperature {temperature:g}, {'loss_mask' if masked else 'all tokens'}"
                measured.append(located(largest_difference(scores, expected), where))
    return larger(*measured)
