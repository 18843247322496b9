"""What the oracle makes of what a replica drew."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from enginehouse_testing.check import Measured, Seen, wrong
from enginehouse_testing.comparison import larger
from enginehouse_testing.oracle import Oracle
from enginehouse_testing.prompts import rollout_model
from enginehouse_testing.replica import Drawn

LOGPROB_TOLERANCE = 2e-4
"""Nats by which a logprob may differ from the oracle's, both in float32."""


def of_one(judge: Callable[[Any], Measured]) -> Callable[[list[Seen]], Measured]:
    """A judge of what the one replica saw."""

    @functools.wraps(judge)
    def judged(seen: list[Seen]) -> Measured:
        return judge(seen[0].value)

    return judged


@functools.cache
def oracle(model: str) -> Oracle:
    """The oracle of one of the tiny models."""
    return Oracle(rollout_model(model))


def drawn_logprobs(model: str, one: Drawn, temperature: float = 1.0) -> torch.Tensor:
    """The oracle's distribution before each drawn token, `(tokens, vocabulary)`."""
    whole = oracle(model).distributions([*one.prompt, *one.tokens], temperature)
    return whole[len(one.prompt) - 1 : -1]


def logprob_error(model: str, drawn: Iterable[Drawn], temperature: float = 1.0) -> Measured:
    """The largest difference of a drawn token's logprob from the oracle's, in nats."""
    worst = Measured(0.0)
    for one in drawn:
        if len(one.logprobs) != len(one.tokens):
            return wrong(f"{len(one.tokens)} tokens came with {len(one.logprobs)} logprobs")
        if not one.tokens:
            continue
        right = drawn_logprobs(model, one, temperature).gather(1, torch.tensor(one.tokens)[:, None])[:, 0]
        apart = (torch.tensor(one.logprobs) - right).abs()
        at = int(apart.argmax())
        said = f"token {at} after {len(one.prompt)} of the prompt has {one.logprobs[at]:.6g}, not {right[at]:.6g}"
        worst = larger(worst, Measured(float(apart.max()), said))
    return worst


def greedy_error(model: str, drawn: Iterable[Drawn]) -> Measured:
    """How far the likeliest token was above one drawn greedily, in nats, where that is most; ties count nothing."""
    worst = Measured(0.0)
    for one in drawn:
        if not one.tokens:
            return wrong("nothing was drawn")
        distribution = drawn_logprobs(model, one)
        chosen = distribution.gather(1, torch.tensor(one.tokens)[:, None])[:, 0]
        gap = distribution.max(dim=1).values - chosen
        at = int(gap.argmax())
        right = int(distribution[at].argmax())
        said = f"token {at} after {len(one.prompt)} of the prompt is {one.tokens[at]}, not {right}"
        worst = larger(worst, Measured(float(gap.max()), said))
    return worst


def serves(model: str, drawn: Sequence[Drawn], version: int | None = None) -> Measured:
    """Whether greedy completions are those of a model: tokens, logprobs and, if given, the version they say."""
    for one in drawn:
        if version is not None and (one.first, one.last) != (version, version):
            return wrong(f"a completion is said to be of versions {one.first} to {one.last}, not {version}")
    return larger(greedy_error(model, drawn), logprob_error(model, drawn))


def named(what: str, measured: Measured) -> Measured:
    """A finding with where it was made."""
    return Measured(measured.error, f"{what}: {measured.detail}") if measured.detail else measured
